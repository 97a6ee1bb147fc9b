"""Adapter directories: plain `peft` reads the LoRA part, our loader reads all of it and refuses to ignore any."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoTokenizer

from farsight.checkpoints.adapter.config import read_adapter
from farsight.checkpoints.adapter.load import load_adapter
from farsight.checkpoints.adapter.write import write_adapter
from farsight.checkpoints.load import load_model, read_model_config
from farsight.checkpoints.model_dir.api import check_tensors, write_model_dir
from farsight.checkpoints.model_dir.fingerprint import base_entry
from farsight.configs.finetuning import FinetuneTraining, GarfaTraining, Lora
from farsight.configs.schema import Llama3Rope, Position, YarnRope
from farsight.errors import ConfigError
from farsight.evals.perplexity.__main__ import main as perplexity
from farsight.model.adapt.garfa import garfa_of
from farsight.model.adapt.lora import lora_layers
from farsight.training.finetune.model import whole_weights
from tests.finetuned import ARCHITECTURE, adapted_model, finetune_config, precision, tokens, write_base

NO_GARFA, NO_LORA = GarfaTraining(enable=False), Lora(enable=False)
LORAS = {
    "lora": Lora(rank=4, alpha=8.0, dropout=0.1),
    "rslora": Lora(rank=4, alpha=8.0, rslora=True, layers=(0, 3)),
    "dora": Lora(rank=4, alpha=8.0, dora=True, modules=("q_proj", "k_proj", "down_proj"), layers="1:"),
    "patterns": Lora(
        rank=4,
        alpha=8.0,
        rank_pattern={"o_proj": 2, r"layers\.3\..*q_proj": 8},
        alpha_pattern={"gate_proj": 32.0, "mlp.up_proj": 1.0},
    ),
    "expressions": Lora(
        rank=4,
        alpha=8.0,
        layers="1:",
        rank_pattern={"model.layers.3.self_attn.q_proj": 6, "[qv]_proj": 8, r"mlp\.(gate|up)_proj": 2},
        alpha_pattern={"(k|o)_proj": 64.0, "^model.layers.2.mlp.*": 1.0, ".*": 16.0},
    ),
}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Llama-3-scaled models with grouped queries, whose output depends on positions."""
    folder = tmp_path_factory.mktemp("bases")
    tied = type(ARCHITECTURE)(**{**vars(ARCHITECTURE), "tie_embeddings": True})
    for name, architecture in (("untied", ARCHITECTURE), ("tied", tied)):
        write_base(folder / name, Position(rotary=Llama3Rope(original_length=16)), architecture, scale=16)
    return folder


def trained_adapter(out, base, quantization="none", dtype="float32", history=(), **parts):
    """Writes an adapter in which no number is at its initial value, and returns the model it was taken from."""
    config = finetune_config(base, quantization, dtype, **parts)
    model = adapted_model(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "magnitude" in name:
                parameter.mul_(torch.linspace(0.5, 1.5, len(parameter)))
            elif parameter.requires_grad and "lora" not in name and "garfa" not in name:
                parameter.mul_(1.2)
    write_adapter(out, config, whole_weights(model), base_entry(base), history)
    return model.eval(), config


def logits(model, config):
    with torch.no_grad(), precision(config):
        return model(tokens()).float()


def distance(a, b):
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("garfa", [False, True])
@pytest.mark.parametrize(
    ("name", "base"),
    [("lora", "tied"), ("rslora", "untied"), ("dora", "untied"), ("patterns", "tied"), ("expressions", "untied")],
)
def test_plain_peft_gives_our_logits(bases, tmp_path, name, base, garfa):
    """The logits of the LoRA part alone; GARFA, which is left out, changes them."""
    parts = {} if garfa else {"garfa": NO_GARFA}
    model, config = trained_adapter(tmp_path / "adapter", bases / base, lora=LORAS[name], **parts)
    llama = AutoModelForCausalLM.from_pretrained(bases / base, dtype=torch.float32, attn_implementation="eager")
    assert type(llama).__name__ == "LlamaForCausalLM"
    with torch.no_grad():
        plain = llama(tokens()).logits
        theirs = PeftModel.from_pretrained(llama, tmp_path / "adapter").eval()(tokens()).logits
    ours = logits(load_adapter(tmp_path / "adapter", garfa=False)[0], config)
    assert_close(theirs, ours, atol=1e-4, rtol=0)
    assert distance(plain, ours) > 0.05
    assert (distance(logits(model, config), ours) > 0.01) == garfa
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(bases / base)
    assert settings["layers_pattern"] == "layers"
    card = (tmp_path / "adapter" / "README.md").read_text()
    assert ("`peft` loads only a part of this adapter" in card.split("## ")[0]) == garfa
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "adapter")
    assert "<|start_header_id|>" in tokenizer.chat_template  # as in training


@pytest.mark.parametrize(
    ("quantization", "dtype", "parts"),
    [
        ("none", "float32", {}),
        ("nf4", "float32", {"lora": LORAS["dora"]}),
        ("nf4", "bfloat16", {}),
        ("int8", "bfloat16", {}),
        ("none", "bfloat16", {"lora": NO_LORA}),
        ("none", "float32", {"lora": NO_LORA, "garfa": NO_GARFA, "training": FinetuneTraining(layers="-1")}),
    ],
)
def test_what_is_loaded_is_what_was_trained(bases, tmp_path, quantization, dtype, parts):
    model, config = trained_adapter(tmp_path / "adapter", bases / "untied", quantization, dtype, **parts)
    loaded, theirs = load_adapter(tmp_path / "adapter")
    exact, _ = load_model(tmp_path / "adapter")  # in fp32, as evaluations load model directories
    expected = logits(model, config)
    with torch.no_grad():
        found, wide = loaded(tokens()).float(), exact(tokens())
    if dtype == "float32":
        assert torch.equal(found, expected)
        assert torch.equal(wide, expected)
    else:  # training computes LoRA's products in bf16, this in fp32: it is at least as close to the truth
        assert distance(expected, wide) < 0.08
        assert distance(found, wide) < 1.5 * distance(expected, wide)
    assert garfa_of(loaded) == garfa_of(model) == theirs.position.garfa
    assert read_model_config(tmp_path / "adapter") == theirs


def test_evaluations_take_an_adapter(bases, tmp_path):
    model, _ = trained_adapter(tmp_path / "adapter", bases / "untied", lora=LORAS["lora"])
    text = "Turning keys at speeds of their own. " * 20
    (tmp_path / "text.txt").write_text(text)
    options = ["--data", str(tmp_path / "text.txt"), "--lengths", "48", "--windows", "2", "--device", "cpu"]
    perplexity([str(tmp_path / "adapter"), *options, "--json", str(tmp_path / "p.json")])
    rows = torch.tensor(list(text.encode()))[:96].view(2, 48)
    with torch.no_grad():
        nll = torch.nn.functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
    assert json.loads((tmp_path / "p.json").read_text())["lengths"]["48"] == pytest.approx(float(nll.exp()), rel=1e-5)


def test_positions_of_a_longer_context_come_with_it(bases, tmp_path):
    yarn = Position(rotary=YarnRope(factor=4.0, original_length=64))
    training = FinetuneTraining(seq_len=256)
    model, config = trained_adapter(tmp_path / "adapter", bases / "untied", position=yarn, training=training)
    loaded, theirs = load_adapter(tmp_path / "adapter")
    assert theirs.position.rotary == yarn.rotary
    assert theirs.trained_length == 256
    assert torch.equal(logits(loaded, config), logits(model, config))


# ── Refusals ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def adapter(bases, tmp_path):
    trained_adapter(tmp_path / "adapter", bases / "untied")
    return tmp_path / "adapter"


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("garfa.safetensors", r"lacks garfa\.safetensors: without it this is another model"),
        ("adapter_model.safetensors", r"lacks adapter_model\.safetensors"),
        (
            "farsight_adapter.json",
            r"has garfa\.safetensors, adapter_config\.json, but farsight_adapter\.json is missing",
        ),
    ],
)
def test_missing_parts(adapter, file, message):
    (adapter / file).unlink()
    for read in (load_adapter, load_model, read_model_config):
        with pytest.raises(ConfigError, match=message):
            read(adapter)


def test_surplus_parts(adapter):
    save_file({"x": torch.zeros(1)}, adapter / "layers.safetensors")
    with pytest.raises(ConfigError, match=r"layers\.safetensors, which farsight_adapter\.json does not name"):
        load_adapter(adapter)


@pytest.mark.parametrize("file", ["garfa.safetensors", "adapter_model.safetensors"])
def test_other_tensors(adapter, file):
    tensors = load_file(adapter / file)
    first = sorted(tensors)[0]
    for change, message in (
        ({**tensors, "other": torch.zeros(1)}, "holds other"),
        ({name: t for name, t in tensors.items() if name != first}, f"lacks 1 tensors, among them {first}"),
        ({**tensors, first: torch.zeros(7)}, r"has shape \(7,\)"),
    ):
        save_file(change, adapter / file)
        with pytest.raises(ConfigError, match=message):
            load_adapter(adapter)


def test_other_bases(bases, adapter, tmp_path, caplog):
    with pytest.raises(ConfigError, match=r"is not the base of .*: its architecture differs"):
        load_adapter(adapter, base=bases / "tied")
    shutil.copytree(bases / "untied", tmp_path / "copy")
    expected = load_adapter(adapter)[0](tokens())
    assert not caplog.records
    assert torch.equal(load_adapter(adapter, base=tmp_path / "copy")[0](tokens()), expected)
    assert "copy is used instead" in caplog.text
    marker = adapter / "farsight_adapter.json"
    marker.write_text(marker.read_text().replace(str(bases / "untied"), str(tmp_path / "gone")))
    with pytest.raises(ConfigError, match="gone, which is not there"):
        load_adapter(adapter)


def test_other_weights_and_positions_at_the_bases_place(tmp_path, caplog):
    base, position = tmp_path / "base", Position(rotary=Llama3Rope(original_length=16))
    plain = write_base(base, position, scale=16)
    trained_adapter(tmp_path / "adapter", base)
    expected = load_adapter(tmp_path / "adapter")[0](tokens())
    weights, config = {name: p.detach().clone() for name, p in plain.named_parameters()}, read_model_config(base)
    write_model_dir(base, config, dict(reversed(weights.items())), shard_bytes=50_000)  # divided into other files
    assert torch.equal(load_adapter(tmp_path / "adapter")[0](tokens()), expected)

    write_model_dir(base, replace(config, position=Position(rotary=Llama3Rope(original_length=32))), weights)
    with pytest.raises(ConfigError, match="its positions differ"):
        load_adapter(tmp_path / "adapter")
    weights["layers.2.feed_forward.w2.weight"] += 1e-3  # as merging an adapter changes it
    write_model_dir(base, config, weights)
    with pytest.raises(ConfigError, match=r"its weights differ\..* --base .*/base --other-base"):
        load_adapter(tmp_path / "adapter")
    assert not caplog.records
    assert not torch.equal(load_adapter(tmp_path / "adapter", other_base=True)[0](tokens()), expected)
    assert "base has other weights than the base that" in caplog.text


@pytest.mark.parametrize("quantization", ["nf4", "int8"])
def test_what_is_quantised_is_what_was(bases, tmp_path, quantization):
    """A base stored in fp32, with an adapter trained in bf16."""
    model, _ = trained_adapter(tmp_path / "adapter", bases / "untied", quantization, "bfloat16")
    for dtype in (None, torch.float32):
        loaded = load_adapter(tmp_path / "adapter", dtype=dtype)[0]
        for name, layer in lora_layers(model).items():
            ours, theirs = (m.get_base_layer().weight for m in (lora_layers(loaded)[name], layer))
            assert torch.equal(ours, theirs), name
            if quantization == "int8":
                assert torch.equal(ours.SCB, theirs.SCB)
            else:
                assert torch.equal(ours.quant_state.absmax, theirs.quant_state.absmax)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ({"^layers.3.self_attn.q_proj": 8}, r"'\^layers.3.self_attn.q_proj' applies to none of LoRA's layers"),
        ({"layers.0.mlp.up_proj": 8}, r"'layers.0.mlp.up_proj' applies to none of LoRA's layers"),
        ({"q_proj": 8, "layers.3.self_attn.q_proj": 2}, "or an earlier pattern takes precedence"),
        ({"*q_proj": 8}, "is not a valid regular expression"),
    ],
)
def test_patterns_that_decide_nothing(bases, pattern, message):
    for patterns in ({"rank_pattern": pattern}, {"alpha_pattern": pattern}):
        with pytest.raises(ConfigError, match=message):
            finetune_config(bases / "untied", lora=Lora(layers="1:", **patterns))


def test_an_adapter_is_no_base(adapter):
    with pytest.raises(ConfigError, match=r"is an adapter, not a whole model: farsight merge"):
        check_tensors(adapter, read_model_config(adapter))


def test_another_format(adapter):
    marker = adapter / "farsight_adapter.json"
    marker.write_text(marker.read_text().replace('"format": 2', '"format": 9'))
    with pytest.raises(ConfigError, match="format 9"):
        read_adapter(adapter)


def test_directories_that_are_none(tmp_path):
    with pytest.raises(ConfigError, match="is not an adapter directory"):
        read_adapter(tmp_path)
