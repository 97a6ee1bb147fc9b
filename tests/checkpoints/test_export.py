"""Exported models against ours, under the oldest and the newest `transformers`.

Mechanisms that `transformers` lacks are exported in `modeling_farsight.py`. Processes that cannot import our packages compute
everything with `transformers`' own loading and `generate` (`by_transformers.py`), and the results are compared with our
model's here.
"""

import json

import pytest
import torch

from farsight.benchmarks.families.models import FAMILIES, LENGTH, tokens, write_hf
from farsight.checkpoints.load import load_model, read_model_config
from farsight.checkpoints.model_dir import hf_config
from farsight.checkpoints.model_dir.api import write_model_dir
from farsight.checkpoints.model_dir.modeling_farsight import FarsightForCausalLM
from farsight.configs.schema import (
    Alibi,
    DynamicNtkRope,
    Garfa,
    GarfaLayer,
    Lasp,
    LayerRule,
    LongRope,
    NoRotary,
    Position,
    QueryScaling,
    Scope,
    SlidingWindow,
    YarnRope,
)
from farsight.model.build import set_length
from tests.checkpoints.elsewhere import VERSIONS, export, run_elsewhere

MIXED = Position(
    heads=Scope(),
    rules=(
        LayerRule(layers="1", rotary=NoRotary(), bias=Alibi()),
        LayerRule(layers="2", heads=SlidingWindow(window=5)),
        LayerRule(layers="3", rotary=DynamicNtkRope(factor=2.0, original_length=64)),
    ),
)
POSITIONS = {
    "scope_sorted": Position(heads=Scope(layout="sorted"), rotary=NoRotary()),
    "scope_interleaved": Position(heads=Scope(layout="interleaved"), rotary=NoRotary()),
    "scope_group_balanced": Position(heads=Scope(layout="group_balanced"), rotary=NoRotary()),
    "scope_lasp": Position(heads=Scope(), lasp=Lasp(anchor_layers=2)),
    "lasp_yarn": Position(rotary=YarnRope(factor=4.0, original_length=16), lasp=Lasp(anchor_layers=2)),
    "longrope": Position(
        rotary=LongRope(factor=2.0, original_length=50, short_factor=(1.0,) * 4, long_factor=(1.0, 2.0, 3.0, 4.0)),
        heads=Scope(),
    ),
    "garfa": Position(
        heads=Scope(),
        garfa=Garfa(equation=12, queries=True, layers=(GarfaLayer(layer=1, raw=(0.3, -2.0, 0.0, 1.5)),)),
    ),
    "alibi": Position(rotary=NoRotary(), bias=Alibi()),
    "nope": Position(rotary=NoRotary(), rules=(LayerRule(layers="0", bias=Alibi()),)),
    "sinusoidal": Position(rotary=NoRotary(), embedding="sinusoidal"),
    "sliding_windows": Position(heads=SlidingWindow(window=7), rules=(LayerRule("2", heads=SlidingWindow(window=3)),)),
    "mixed": MIXED,
    "growing_scopes": Position(heads=Scope(scope_max="length"), rotary=NoRotary()),
}
SCOPED_AND_SCALED = Position(heads=Scope(), query_scaling=QueryScaling(beta=0.7, original_length=8))
OPTIONS = {  # of the architecture; a position that no class of transformers has makes all of them go out in our modelling file
    "gelu": {"activation": "gelu_tanh"},
    "post_norms": {"norm_placement": "post"},
    "sandwich_norms": {"norm_placement": "sandwich", "zero_centered_norms": True},
    "zero_centered_norms": {"zero_centered_norms": True, "qk_norm": True},
    "qk_norm_of_projections": {"qk_norm": True, "qk_norm_span": "projection"},
    "qkv_biases": {"attention_bias": "qkv"},
    "all_biases": {"attention_bias": "all", "mlp_bias": True},
    "partial_rotation": {"rotary_dim": 4},
    "softmax_scale": {"softmax_scale": 0.9},
    "scaled_embeddings": {"scaled_embeddings": True},
    "query_scaling": {},
}
MODELS = {
    **{name: (position, {}) for name, position in POSITIONS.items()},
    "mixed": (MIXED, {"qk_norm": True}),
    "alibi": (POSITIONS["alibi"], {"tie_embeddings": True}),
    **{name: (POSITIONS["scope_lasp"], options) for name, options in OPTIONS.items()},
    "query_scaling": (SCOPED_AND_SCALED, {}),
}


LONG = {"short_factor": [1.0] * 8, "long_factor": [1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0]}
NATIVE = {
    "llama2": {},
    "llama3": {},
    "mistral": {},
    "mistral-v0.3": {},
    "qwen2": {"use_sliding_window": False},  # whose windows 4.46 puts on all layers alike
    # Its class of 4.46 rotates whole heads.
    "phi3": {"rope_parameters": {"rope_type": "longrope", "rope_theta": 10000.0, **LONG}},
}
"""Families that both versions have, and what both can express of them."""


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Models with all position mechanisms and options, and their configs."""
    parent = tmp_path_factory.mktemp("exported")
    configs = {name: export(parent / name, position, **shape) for name, (position, shape) in MODELS.items()}
    for name, settings in NATIVE.items():
        write_hf(name, parent / f"{name}-first", hidden_size=64, **settings)  # the earlier Qwen2 takes no head_dim
        model, config = load_model(parent / f"{name}-first")
        write_model_dir(parent / name, config, model.state_dict())
    return parent, configs


@pytest.fixture(scope="module", params=VERSIONS)
def loaded(request, exported):
    """The version, and what it computes with each model."""
    parent, _ = exported
    jobs = dict.fromkeys((parent / name for name in MODELS), "load")
    return request.param, run_elsewhere(
        jobs | dict.fromkeys((parent / name for name in NATIVE), "native"), request.param
    )


@pytest.mark.parametrize("name", MODELS)
def test_exported_model_equals_ours(exported, loaded, name):
    parent, configs = exported
    version, results = loaded
    folder, config, result = parent / name, configs[name], results[name]
    values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert values["model_type"] == "farsight"

    model, _ = load_model(folder)
    tokens = torch.randint(96, (2, 60), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        for length in (40, 60):
            set_length(model, config, length)
            torch.testing.assert_close(result[f"logits_{length}"], model(tokens[:, :length]), atol=1e-4, rtol=0)
    torch.testing.assert_close(result["padded_logits"], result["short_logits"], atol=1e-4, rtol=0)
    assert torch.equal(result["cached"], result["uncached"])
    assert torch.equal(result["batched"], result["single"])
    greedy = tokens[:, :30]
    with torch.no_grad():
        for _ in range(12):
            set_length(model, config, greedy.shape[1])
            greedy = torch.cat([greedy, model(greedy)[:, -1].argmax(-1, keepdim=True)], dim=1)
    assert torch.equal(result["cached"], greedy)

    set_length(model, config, 60)
    labels = torch.cat([tokens[:, 1:], torch.full((2, 1), -100)], dim=1)
    loss = model(tokens, labels=labels) / (2 * 59)
    torch.testing.assert_close(result["loss"], loss.detach(), atol=1e-4, rtol=0)
    (grad,) = torch.autograd.grad(loss, model.layers["0"].attention.wq.weight)
    torch.testing.assert_close(result["grad"], grad, atol=1e-5, rtol=1e-3)

    # A model that transformers saved again is still one of ours and keeps its code.
    again = parent / f"{name}-again-{version}"
    assert (again / "modeling_farsight.py").is_file()
    assert read_model_config(again).position == config.position
    with torch.no_grad():
        set_length(reloaded := load_model(again)[0], config, 60)
        assert torch.equal(reloaded(tokens), model(tokens))


@pytest.mark.parametrize("name", NATIVE)
def test_models_that_transformers_has_load_in_both_versions(exported, loaded, name):
    parent, _ = exported
    _, results = loaded
    model, config = load_model(parent / name)
    set_length(model, config, 40)
    with torch.no_grad():
        expected = model(torch.randint(96, (2, 40), generator=torch.Generator().manual_seed(1)))
    torch.testing.assert_close(results[name]["logits"], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_our_modelling_file_computes_what_each_family_s_class_computes(tmp_path, monkeypatch, name):
    """All options of the architecture against `transformers`' own models, and a batch with padding on the left."""
    theirs = write_hf(name, tmp_path / "theirs")
    model, config = load_model(tmp_path / "theirs")
    monkeypatch.setattr(hf_config, "native_family", lambda _: None)
    write_model_dir(tmp_path / "ours", config, model.state_dict())
    ours = FarsightForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="eager").eval()
    rows, mask = tokens(), torch.ones(2, LENGTH).long()
    mask[1, :11] = 0
    asked = {"output_hidden_states": True, "output_attentions": True}
    with torch.no_grad():
        expected, given = theirs(rows, **asked), ours(rows, **asked)
        # Without positions, `transformers`' classes count padding too; ours does not.
        positions = (mask.cumsum(-1) - 1).clamp_min(0)
        expected_padded = theirs(rows, attention_mask=mask, position_ids=positions).logits[1, 11:]
        padded = ours(rows, attention_mask=mask).logits[1, 11:]
    torch.testing.assert_close(given.logits, expected.logits, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(ours(rows).logits, expected.logits, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(padded, expected_padded, atol=1e-4, rtol=1e-4)
    for layer, pair in enumerate(zip(given.attentions, expected.attentions, strict=True)):
        torch.testing.assert_close(*pair, atol=1e-5, rtol=1e-3, msg=f"weights of layer {layer}")
    for layer, pair in enumerate(zip(given.hidden_states, expected.hidden_states, strict=True)):
        torch.testing.assert_close(*pair, atol=1e-4, rtol=1e-4, msg=f"states before layer {layer}")
