"""Families of models against transformers' own classes; `python -m benchmarks.families` prints the differences."""

import json
import logging
import re

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText

from farsight.benchmarks.families.cells import CELLS, TOLERANCES, adapted, hf_load, largest, quantized
from farsight.benchmarks.families.models import FAMILIES, LENGTH, VISION, hf_vision_model, tokens, write_hf
from farsight.checkpoints.adapter.load import load_adapter
from farsight.checkpoints.adapter.write import write_adapter
from farsight.checkpoints.convert.from_hf import model_dir_to_checkpoint
from farsight.checkpoints.convert.to_hf import checkpoint_to_model_dir
from farsight.checkpoints.load import load_model, read_model_config
from farsight.checkpoints.merge.build import merge_adapter
from farsight.checkpoints.model_dir.api import write_model_dir
from farsight.checkpoints.model_dir.families.known import FAMILIES as KNOWN
from farsight.checkpoints.model_dir.fingerprint import base_entry
from farsight.checkpoints.model_dir.hf_config import from_hf_config, to_hf_config
from farsight.configs.finetuning import Base, Lora
from farsight.configs.schema import Architecture, LayerRule, NoRotary, Position, Rope, Scope, SlidingWindow
from farsight.errors import ConfigError
from farsight.model.build import ModelConfig
from farsight.training.finetune.model import whole_weights
from tests.checkpoints.elsewhere import OLDEST
from tests.running import ROOT

SLOW = {"from-hf → 2 steps → to-hf", "quantised step", "TP 2"}


@pytest.mark.parametrize("cell", [pytest.param(c, marks=[pytest.mark.slow] if c in SLOW else []) for c in CELLS])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_equals_transformers(tmp_path, name, cell):
    assert CELLS[cell](name, tmp_path) <= TOLERANCES[cell]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2", "phi3", "gemma3"])
def test_a_base_in_8_bits(tmp_path, name):
    """Inputs are rounded to 8 bits too, so a difference in the last digit of fp32 may become a step of that."""
    assert quantized(name, tmp_path, bits=8) < 0.05


# ── config.json ───────────────────────────────────────────────────────────────────────────────────────

FORMER = ("rope_theta", "rope_scaling", "rope_local_base_freq", "sliding_window_pattern", "partial_rotary_factor")
"""Fields of transformers 4; `layer_types` and `rope_parameters` came later."""


@pytest.mark.parametrize("name", FAMILIES)
def test_a_config_is_read_in_the_forms_of_both_versions(tmp_path, name):
    write_hf(name, tmp_path)
    config = read_model_config(tmp_path)
    written = to_hf_config(config, "float32", 1, 2)
    assert from_hf_config(written) == config
    assert from_hf_config({key: value for key, value in written.items() if key not in FORMER}) == config
    former = {key: value for key, value in written.items() if key not in ("rope_parameters", "dtype")}
    assert from_hf_config(former) == config
    # What transformers itself makes of ours is the same model again, in both forms.
    for values in (written, former):
        if values is former and name == "olmo3":
            continue  # transformers 5 loses rope_theta under sliding attention, which in its version 4 was that of all layers
        theirs = AutoConfig.for_model(**json.loads(json.dumps(values))).to_dict()
        assert from_hf_config(theirs) == config


def test_exports_name_the_version_that_has_their_class(tmp_path):
    """In config.json, on the card and in the documentation; the older installed version has the classes of 4.46 and no others."""
    page = (ROOT / "docs" / "inference" / "models.md").read_text("utf-8")
    for model_type, family in KNOWN.items():
        oldest = family.since.removesuffix(".0")
        row = next(line for line in page.splitlines() if f"| `{model_type}` |" in line)
        assert re.search(rf"\| {re.escape(oldest)}(;[^|]*)? \|$", row), row
        if OLDEST.is_dir():
            classes = OLDEST / "transformers" / "models" / model_type.removesuffix("_text")
            assert classes.is_dir() == (oldest == "4.46"), model_type
    for name, needed in {"llama2": "4.46", "qwen2": "4.53", "phi3": "4.50", "gemma3": "4.50"}.items():
        write_hf(name, tmp_path / name)
        model, config = load_model(tmp_path / name)
        write_model_dir(tmp_path / f"{name}-out", config, dict(model.named_parameters()))
        values = json.loads((tmp_path / f"{name}-out" / "config.json").read_text())
        assert values["transformers_version"] == f"{needed}.0"
        assert f"Needs `transformers` {needed} or later, for `" in (tmp_path / f"{name}-out" / "README.md").read_text()


HUB = {
    "mistral": {
        "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 32768, "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096,
        "vocab_size": 32000,
    },
    "qwen2": {
        "hidden_size": 3584, "intermediate_size": 18944, "max_position_embeddings": 131072, "max_window_layers": 21,
        "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0, "sliding_window": 32768, "use_sliding_window": True, "vocab_size": 152064,
    },
    "phi3": {
        "hidden_size": 3072, "intermediate_size": 8192, "max_position_embeddings": 131072, "num_attention_heads": 24,
        "num_hidden_layers": 32, "num_key_value_heads": 8, "original_max_position_embeddings": 4096, "partial_rotary_factor": 0.75,
        "rope_theta": 10000.0, "sliding_window": 262144, "tie_word_embeddings": True, "vocab_size": 200064,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 24 + [9.5] * 24},
    },
    "smollm3": {
        "hidden_size": 2048, "intermediate_size": 11008, "max_position_embeddings": 65536, "no_rope_layer_interval": 4,
        "num_attention_heads": 16, "num_hidden_layers": 36, "num_key_value_heads": 4, "rms_norm_eps": 1e-06,
        "rope_theta": 5000000.0, "use_sliding_window": False, "vocab_size": 128256,
    },
    "olmo3": {
        "hidden_size": 4096, "intermediate_size": 11008, "max_position_embeddings": 65536, "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 32, "rms_norm_eps": 1e-06, "rope_theta": 500000, "sliding_window": 4096,
        "vocab_size": 100278,
        "rope_scaling": {
            "attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0, "factor": 8.0,
            "original_max_position_embeddings": 8192, "rope_type": "yarn",
        },
    },
    "gemma3_text": {
        "hidden_size": 1152, "intermediate_size": 6912, "max_position_embeddings": 32768, "num_attention_heads": 4,
        "num_hidden_layers": 26, "num_key_value_heads": 1, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06,
        "rope_local_base_freq": 10000, "rope_theta": 1000000, "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "sliding_window": 512, "sliding_window_pattern": 6, "vocab_size": 262144,
    },
}  # fmt: skip
"""Configs in the form and with the gaps of those on the hub, which transformers 4 wrote."""


@pytest.mark.parametrize("model_type", HUB)
def test_a_former_config_is_read_as_transformers_reads_it(model_type):
    """Its class fills in the fields that are left out, and writes transformers 5's form."""
    values = {"model_type": model_type, **HUB[model_type]}
    config = from_hf_config(values)
    theirs = AutoConfig.for_model(**json.loads(json.dumps(values))).to_dict()
    assert from_hf_config(theirs) == config
    assert to_hf_config(config, "bfloat16", 1, 2)["model_type"] == model_type


def test_of_two_settings_of_rope_that_one_counts_which_transformers_takes():
    both = {
        "model_type": "mistral", **HUB["mistral"], "rope_scaling": {"rope_type": "linear", "factor": 2.0},
        "rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 5.0},
    }  # fmt: skip
    theirs = AutoConfig.for_model(**json.loads(json.dumps(both))).rope_parameters
    found = from_hf_config(both).position.rotary
    assert (found.factor, found.theta) == (theirs["factor"], theirs["rope_theta"])


def test_what_a_former_config_says():
    olmo = from_hf_config({"model_type": "olmo3", **HUB["olmo3"]})
    windows = [layer.scopes[0] for layer in olmo.layers()]
    assert windows[:8] == [4096, 4096, 4096, 2**31 - 1] * 2
    assert [layer.rotary.kind for layer in olmo.layers()[:4]] == ["rope", "rope", "rope", "yarn"]
    smol = from_hf_config({"model_type": "smollm3", **HUB["smollm3"]})
    assert [layer.rotary.kind for layer in smol.layers()[:8]] == ["rope", "rope", "rope", "none"] * 2
    assert smol.architecture.tie_embeddings
    phi = from_hf_config({"model_type": "phi3", **HUB["phi3"]})
    assert (phi.architecture.rotary_dim, phi.architecture.head_dim, phi.position.rotary.factor) == (96, 128, 32)
    gemma = from_hf_config({"model_type": "gemma3_text", **HUB["gemma3_text"]})
    assert [layer.rotary.theta for layer in gemma.layers()[:6]] == [1e4] * 5 + [1e6]
    assert gemma.architecture.softmax_scale is None
    mistral = {"model_type": "mistral", **HUB["mistral"]}
    assert from_hf_config({**mistral, "sliding_window": None}).layers()[0].scopes[0] == 2**31 - 1
    del mistral["sliding_window"]
    assert from_hf_config(mistral).layers()[0].scopes[0] == 4096  # its class's default
    # A vision model's text_config on the hub leaves out everything that is its class's default.
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "model_type": "gemma3_text"}  # fmt: skip
    inner = from_hf_config({"model_type": "gemma3", "text_config": text, "vision_config": {}})
    theirs = AutoConfig.for_model("gemma3", text_config=dict(text)).to_dict()
    assert from_hf_config({**theirs, "vision_config": {}}) == inner


REFUSED = [
    ("gemma3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0"),
    ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0"),
    ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
    ("gemma3", {"hidden_activation": "gelu"}, "hidden_activation = 'gelu'"),
    ("gemma3", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar = 0"),
    ("llama3", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
    ("llama3", {"attention_bias": "yes"}, "attention_bias = 'yes'"),
    ("phi3", {"resid_pdrop": 0.1}, "resid_pdrop = 0.1"),
    ("phi3", {"embd_pdrop": 0.2}, "embd_pdrop = 0.2"),
    ("phi3", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 2.0}}, "rope_type 'llama3'"),
    ("mistral", {"layer_types": ["full_attention"] * 4}, "layer_types"),
    ("mistral", {"sliding_window": "wide"}, "sliding_window = 'wide'"),
    ("qwen3", {"layer_types": ["chunked_attention"] * 4}, "layer_types"),
    ("qwen3", {"layer_types": ["full_attention"]}, "layer_types"),
    ("qwen3", {"sliding_window": None}, "no sliding_window"),
    ("smollm3", {"no_rope_layers": [1, 2, 1, 1]}, "no_rope_layers"),
    ("olmo2", {"rope_parameters": {"full_attention": {}, "sliding_attention": {}}}, "by layer type"),
    ("llama3", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5"),
    ("ministral3", {"rope_parameters": {"rope_theta": 1e4, "llama_4_scaling_beta": 0.1}}, "llama_4_scaling_beta = 0.1"),
    ("llama2", {"model_type": "mixtral"}, "'mixtral', which this command does not take: .* itself, llama, qwen3, mistral, .* also take types that only"),
    ("llama2", {"model_type": "gemma3"}, "no text_config"),
    *(
        (name, {"use_sliding_window": False, "sliding_window": 8, "layer_types": ["sliding_attention"] * 4}, "use_sliding_window = False")
        for name in ("qwen2", "qwen3", "smollm3")
    ),
]  # fmt: skip


def test_what_we_do_not_have_is_refused_by_name_and_value(tmp_path):
    for name in {name for name, _, _ in REFUSED}:
        write_hf(name, tmp_path / name)
    for name, change, says in REFUSED:
        values = json.loads((tmp_path / name / "config.json").read_text())
        with pytest.raises(ConfigError, match=says):
            pytest.fail(f"{name} {change}: {from_hf_config({**values, **change})}")


def test_a_model_goes_out_as_a_class_that_can_express_it():
    small = Architecture(vocab_size=64, dim=48, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=16, ffn_dim=64)
    local = SlidingWindow(window=8)
    nope = (LayerRule("3", rotary=NoRotary()),)
    for position, family, expected in [
        (Position(), "", "llama"),
        (Position(), "mistral", "mistral"),
        (Position(), "qwen2", "llama"),  # without biases it is no Qwen 2
        (Position(), "phi3", "llama"),  # whose heads have to divide the model
        (Position(heads=local), "llama", "mistral"),
        (Position(rules=nope), "", "smollm3"),
        (Position(heads=local, rules=(LayerRule("3", rotary=NoRotary()),)), "", "smollm3"),
        (Position(rules=(LayerRule("1", heads=local),)), "llama", "farsight"),
        (Position(rules=(LayerRule("1", rotary=Rope(theta=5.0)),)), "", "farsight"),
        (Position(heads=Scope()), "mistral", "farsight"),
        (Position(embedding="sinusoidal"), "", "farsight"),
    ]:
        values = to_hf_config(ModelConfig(small, position, 64, family=family), "float32", 1, 2)
        assert values["model_type"] == expected, (position, family)


# ── Tensors ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", FAMILIES)
def test_tensors_come_back_byte_for_byte(tmp_path, name):
    write_hf(name, tmp_path / "hf", torch.bfloat16)
    model_dir_to_checkpoint(tmp_path / "hf", tmp_path / "checkpoint", torch.bfloat16)
    checkpoint_to_model_dir(tmp_path / "checkpoint", tmp_path / "out", shard_bytes=50_000)
    found = {key: value for path in (tmp_path / "out").glob("*.safetensors") for key, value in load_file(path).items()}
    expected = load_file(tmp_path / "hf" / "model.safetensors")
    assert len([*(tmp_path / "out").glob("*.safetensors")]) > 2
    assert found.keys() == expected.keys() - (
        {"lm_head.weight"} if FAMILIES[name][1].get("tie_word_embeddings") else set()
    )
    assert all(torch.equal(value.view(torch.int16), expected[key].view(torch.int16)) for key, value in found.items())
    assert read_model_config(tmp_path / "out") == read_model_config(tmp_path / "hf")


def test_fused_tensors_that_do_not_fit_are_named(tmp_path):
    write_hf("phi3", tmp_path)
    path, name = tmp_path / "model.safetensors", "model.layers.1.self_attn.qkv_proj.weight"
    tensors = load_file(path)
    save_file({**tensors, name: tensors[name][:-1].contiguous()}, path)
    with pytest.raises(ConfigError, match=r"qkv_proj.weight has shape \(127, 64\), config.json requires \(128, 64\)"):
        load_model(tmp_path)
    save_file({key: value for key, value in tensors.items() if key != name}, path)
    with pytest.raises(ConfigError, match=f"lacks 3 tensors, among them {name}"):
        load_model(tmp_path)
    save_file({**tensors, "model.layers.1.self_attn.q_proj.weight": torch.zeros(64, 64)}, path)
    with pytest.raises(ConfigError, match=r"q_proj\.weight, which a phi3 model does not have"):
        load_model(tmp_path)


@pytest.mark.parametrize("name", VISION)
def test_the_language_model_of_a_directory_with_a_vision_model(tmp_path, caplog, name):
    theirs, rows = hf_vision_model(name), tokens()
    theirs.save_pretrained(tmp_path / "hf")
    caplog.set_level(logging.INFO, "farsight")
    ours, config = load_model(tmp_path / "hf", length=LENGTH)
    assert "tensors of its vision model are left out" in caplog.text
    expected = theirs(rows).logits
    assert largest(ours(rows), expected) < 1e-4
    write_model_dir(tmp_path / "out", config, dict(ours.named_parameters()))
    again = hf_load(tmp_path / "out")
    assert type(again).__name__ in ("Ministral3ForCausalLM", "Gemma3ForCausalLM")
    assert largest(again(rows).logits, expected) < 1e-4
    # The form of transformers 5 in memory, which some tools save.
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    renamed = {
        key.replace("language_model.model.", "model.language_model.").replace(
            "language_model.lm_head", "lm_head"
        ): value
        for key, value in tensors.items()
    }
    save_file(renamed, tmp_path / "hf" / "model.safetensors")
    assert torch.equal(load_model(tmp_path / "hf", length=LENGTH)[0](rows), ours(rows))
    # An adapter is on the language model alone, though the vision model's modules have the same names.
    trained, settings = adapted(
        Base(str(tmp_path / "hf"), "none", dtype="float32"), Lora(rank=4, alpha=8.0, layers=(1, 3))
    )
    write_adapter(tmp_path / "adapter", settings, whole_weights(trained), base_entry(tmp_path / "hf"))
    whole = AutoModelForImageTextToText.from_pretrained(tmp_path / "hf", attn_implementation="eager")
    peft = PeftModel.from_pretrained(whole, tmp_path / "adapter").eval()
    assert not [key for key, _ in peft.named_parameters() if "lora" in key and "vision" in key]
    assert largest(peft(rows).logits, trained(rows)) < 1e-4
    assert largest(trained(rows), expected) > 0.1


# ── Adapters on fused modules ─────────────────────────────────────────────────────────────────────────

LORAS = {
    "some": Lora(rank=4, alpha=8.0, modules=("q_proj", "v_proj", "up_proj", "o_proj"), layers="1:"),
    "rslora": Lora(rank=3, alpha=5.0, rslora=True, modules=("q_proj", "k_proj", "down_proj")),
    "dora": Lora(rank=4, alpha=8.0, dora=True, modules=("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")),
    "patterns": Lora(
        rank=4, alpha=8.0, rank_pattern={r"layers\.2\..*": 2, "down_proj": 6}, alpha_pattern={"[qkv]_proj": 12.0}
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", LORAS)
def test_an_adapter_on_fused_modules_is_lossless(tmp_path, kind):
    theirs = write_hf("phi3", tmp_path / "hf")
    rows, base = tokens(), Base(str(tmp_path / "hf"), "none", dtype="float32")
    ours, config = adapted(base, LORAS[kind])
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            if "magnitude" in name:
                parameter.mul_(torch.linspace(0.5, 1.5, len(parameter)))
    write_adapter(tmp_path / "adapter", config, whole_weights(ours), base_entry(tmp_path / "hf"))
    peft = PeftModel.from_pretrained(hf_load(tmp_path / "hf"), tmp_path / "adapter").eval()
    found, plain = peft(rows).logits, theirs(rows).logits
    assert largest(found, ours(rows)) < 1e-4
    assert largest(found, plain) > 0.1
    again, _ = load_adapter(tmp_path / "adapter", length=LENGTH)
    assert torch.equal(again(rows), ours(rows))
    merge_adapter(tmp_path / "adapter", tmp_path / "merged")
    merged = hf_load(tmp_path / "merged")
    assert type(merged) is type(theirs)
    assert largest(merged(rows).logits, found) < 1e-4
    # An adapter that peft has trained further has numbers between the blocks.
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(path)
    fused = next(key for key in tensors if "qkv_proj.lora_B" in key)
    tensors[fused][0, -1] = 1.0
    save_file(tensors, path)
    with pytest.raises(ConfigError, match=r"qkv_proj\.lora_B.*trained further elsewhere. Merge it there"):
        load_adapter(tmp_path / "adapter")


@pytest.mark.parametrize(
    ("lora", "says"),
    [
        (
            Lora(rank=4, rank_pattern={"q_proj": 8}),
            "q_proj, k_proj, v_proj are one module of this base.*8 and 128, 4 and 128",
        ),
        (Lora(rank=4, alpha_pattern={"up_proj": 2.0}), "gate_proj, up_proj are one module"),
        (Lora(rank=4, dora=True, modules=("q_proj", "v_proj")), "DoRA scales all of its rows"),
    ],
)
def test_settings_that_a_fused_module_can_not_have(tmp_path, lora, says):
    write_hf("phi3", tmp_path)
    with pytest.raises(ConfigError, match=says):
        adapted(Base(str(tmp_path), "none", dtype="float32"), lora)


def test_adapters_of_earlier_versions_are_read(tmp_path):
    """Their record of the base names neither its origin nor its model type: all of them were Llamas and the like."""
    write_hf("llama2", tmp_path / "hf")
    ours, config = adapted(Base(str(tmp_path / "hf"), "none", dtype="float32"), Lora(rank=4))
    write_adapter(tmp_path / "adapter", config, whole_weights(ours), base_entry(tmp_path / "hf"))
    path = tmp_path / "adapter" / "farsight_adapter.json"
    marker = json.loads(path.read_text())
    del marker["base"]["family"], marker["base"]["model_type"]
    path.write_text(json.dumps(marker))
    assert torch.equal(load_adapter(tmp_path / "adapter", length=LENGTH)[0](tokens()), ours(tokens()))
