"""Merged models equal the adapter's up to rounding of the dtype, and the reported differences are right."""

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from farsight.checkpoints.adapter.load import load_adapter
from farsight.checkpoints.load import load_model, read_model_config
from farsight.checkpoints.merge.__main__ import main
from farsight.checkpoints.merge.build import merge_adapter
from farsight.checkpoints.merge.compare import compare, difference
from farsight.checkpoints.model_dir.modeling_farsight import FarsightForCausalLM
from farsight.configs.finetuning import FinetuneTraining, GarfaTraining
from farsight.configs.schema import Garfa, GarfaLayer, Lasp, Llama3Rope, Position, Scope
from farsight.errors import UserError
from farsight.model.adapt.garfa import garfa_of
from tests.checkpoints.test_adapter import LORAS, NO_GARFA, NO_LORA, distance, logits, trained_adapter
from tests.finetuned import ARCHITECTURE, tokens, write_base

HISTORY = [
    {
        "name": "instructions", "start": "base", "layers": "all", "seq_len": 64, "steps": 5, "tokens": 100,
        "dtype": "float32", "data": [{"source": "rows.jsonl", "passes": 1.0}],
        "optimizer": {
            "name": "AdamW", "lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.0, "warmup_steps": 1,
            "decay": "cosine", "min_lr_factor": 0.0,
        },
        "adapter": {"quantization": "nf4", "dtype": "float32", "garfa": {"layers": [0, 1]}},
    }
]  # fmt: skip

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    directory = tmp_path_factory.mktemp("base") / "model"
    write_base(directory, Position(rotary=Llama3Rope(original_length=16)), shard_bytes=50_000, scale=16)
    assert len(list(directory.glob("*.safetensors"))) > 3
    return directory


@pytest.mark.parametrize("name", LORAS)
@pytest.mark.parametrize("quantization", ["none", "nf4"])
def test_merged_weights_give_the_adapters_logits(base, tmp_path, name, quantization):
    model, config = trained_adapter(tmp_path / "a", base, quantization, lora=LORAS[name], garfa=NO_GARFA)
    merge_adapter(tmp_path / "a", tmp_path / "m")
    expected = logits(model, config)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32)
    assert type(theirs).__name__ == "LlamaForCausalLM"
    with torch.no_grad():
        found = theirs(tokens()).logits
    assert_close(found, expected, atol=1e-4 * float(expected.abs().max()), rtol=0)
    assert distance(found, expected) < 1e-4
    assert distance(logits(load_model(base)[0], config), expected) > 0.05


@pytest.mark.parametrize("kind", ["llama3", "scope_lasp"])
def test_garfa_is_kept(base, tmp_path, kind):
    """Via the modelling file, with bitwise equal results."""
    if kind == "scope_lasp":
        base = tmp_path / "base"
        write_base(base, Position(heads=Scope(), lasp=Lasp(anchor_layers=2, s_max=4.0)), scale=16)
    model, config = trained_adapter(tmp_path / "a", base)
    merge_adapter(tmp_path / "a", tmp_path / "m")
    expected = logits(model, config)
    with torch.no_grad():
        theirs = FarsightForCausalLM.from_pretrained(tmp_path / "m").eval()(tokens()).logits
    assert distance(theirs, expected) < 1e-4
    merged, _ = load_model(tmp_path / "m")
    assert garfa_of(merged) == garfa_of(model)
    assert distance(logits(merged, config), expected) < 1e-5
    assert distance(logits(load_adapter(tmp_path / "a", garfa=False)[0], config), expected) > 0.05


def test_a_tied_head_stays_tied(tmp_path):
    tied = replace(ARCHITECTURE, tie_embeddings=True)
    write_base(tmp_path / "base", Position(rotary=Llama3Rope(original_length=16)), tied, scale=16)
    model, config = trained_adapter(tmp_path / "a", tmp_path / "base", "nf4", lora=LORAS["lora"], garfa=NO_GARFA)
    merge_adapter(tmp_path / "a", tmp_path / "m")
    assert "lm_head.weight" not in load_file(tmp_path / "m" / "model.safetensors")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32)
    with torch.no_grad():
        assert distance(theirs(tokens()).logits, logits(model, config)) < 1e-4


def test_eight_bits_are_merged_as_they_are_kept(base, tmp_path):
    """Compares weights, since an 8-bit layer quantises its inputs too."""
    model, _ = trained_adapter(tmp_path / "a", base, "int8", "bfloat16", lora=LORAS["lora"], garfa=NO_GARFA)
    merge_adapter(tmp_path / "a", tmp_path / "m", dtype=torch.float32)
    merged = load_file(tmp_path / "m" / "model.safetensors")
    for number, block in enumerate(model.layers.values()):
        layer = block.feed_forward.w2
        kept = (layer.base_layer.weight.CB.float() * layer.base_layer.weight.SCB[:, None] / 127).bfloat16()
        added = 8 / 4 * (layer.lora_B["default"].weight @ layer.lora_A["default"].weight).detach()
        found = merged[f"model.layers.{number}.mlp.down_proj.weight"]
        assert_close(found, kept.float() + added, rtol=1e-6, atol=1e-6)
        assert added.abs().max() > 0.01


def test_whole_layers_and_garfa_alone(base, tmp_path):
    whole = {"lora": NO_LORA, "training": FinetuneTraining(layers="-1")}
    for parts in (whole, {"lora": NO_LORA}):
        model, config = trained_adapter(tmp_path / "a", base, **parts)
        merge_adapter(tmp_path / "a", tmp_path / "m")
        assert torch.equal(logits(load_model(tmp_path / "m")[0], config), logits(model, config))


def test_into_what_it_was_trained_beside(base, tmp_path, capsys):
    """LoRA on NF4 in bf16, as in QLoRA, merged into dequantised weights and into the base's own."""
    model, config = trained_adapter(tmp_path / "a", base, "nf4", "bfloat16")
    expected, exact = logits(model, config), load_adapter(tmp_path / "a", dtype=torch.float32)[0]
    rounding, off = distance(expected, logits(exact, config)), {}
    for into in ("dequantized", "original"):
        merge_adapter(tmp_path / "a", tmp_path / into, into=into)
        assert json.loads((tmp_path / into / "config.json").read_text())["dtype"] == "bfloat16"
        off[into] = distance(logits(load_model(tmp_path / into, dtype=torch.bfloat16)[0], config), expected)
    with capsys.disabled():
        print(
            f" relative logit change {off['dequantized']:.3f}, into the original base {off['original']:.3f}, "
            f"of bf16 itself {rounding:.3f} ",
            end="",
        )
    assert off["dequantized"] < 2 * rounding
    assert off["original"] > 5 * rounding


def test_the_figures(tmp_path):
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(9, (3, 12), generator=generator)
    found, expected = torch.randn(2, 3, 12, 9, generator=generator)
    got = difference(found, expected, rows)
    assert got["relative_logit_change"] == pytest.approx(distance(found, expected))
    ours, theirs = (x[:, :-1].flatten(0, 1) for x in (found, expected))
    kl = F.kl_div(ours.log_softmax(-1), theirs.log_softmax(-1), log_target=True, reduction="batchmean")
    assert got["kl"] == pytest.approx(float(kl), rel=1e-5)
    for key, x in (("loss_before", theirs), ("loss_after", ours)):
        assert got[key] == pytest.approx(float(F.cross_entropy(x, rows[:, 1:].flatten())), rel=1e-5)


def test_the_command_says_what_it_changed(base, tmp_path, capsys):
    model, config = trained_adapter(tmp_path / "a", base, history=HISTORY)
    out, figures = tmp_path / "m", tmp_path / "f.json"
    (tmp_path / "text.jsonl").write_text("\n".join(json.dumps({"text": f"{i} turns of a key. " * 9}) for i in range(2)))
    main([
        str(tmp_path / "a"), "--out", str(out), "--drop-garfa", "--json", str(figures), "--device", "cpu",
        "--data", str(tmp_path / "text.jsonl"),
    ])  # fmt: skip
    said, written = capsys.readouterr().out, json.loads(figures.read_text())
    assert written["garfa"] == "dropped"
    assert (written["tokens"], written["length"]) == (2 * 64, 64)  # as long as in training
    assert written["merge"]["relative_logit_change"] < 1e-5
    assert written["drop_garfa"]["relative_logit_change"] > 0.05
    assert written["drop_garfa"]["kl"] > 1e-3
    card = (out / "README.md").read_text()
    for text in (said, card):
        assert "Leaving out GARFA changed logits by" in text
        assert "Merging changed logits by" in text
    assert "GARFA on 0:2; base in nf4; merged into these weights, read back, without GARFA" in card
    assert read_model_config(out).position.garfa is None
    assert json.loads((out / "config.json").read_text())["model_type"] == "llama"
    # With the default text, keeping GARFA.
    with pytest.raises(SystemExit, match="m exists and is not empty; name a new folder"):
        main([str(tmp_path / "a"), "--out", str(out), "--json", str(figures), "--device", "cpu"])
    out = tmp_path / "kept"
    main([str(tmp_path / "a"), "--out", str(out), "--json", str(figures), "--device", "cpu"])
    written = json.loads(figures.read_text())
    assert written["text"] == "standard library"
    assert "drop_garfa" not in written
    assert distance(logits(load_model(out)[0], config), logits(model, config)) < 1e-5


@pytest.mark.parametrize("own", [False, True])
def test_dropping_garfa_drops_the_bases_own_and_is_measured_where_it_was_trained(tmp_path, own):
    base, learned = tmp_path / "base", Garfa(layers=(GarfaLayer(1, (1.5, -3.0)),))
    write_base(base, Position(rotary=Llama3Rope(original_length=16), garfa=learned), length=512, scale=16)
    garfa = GarfaTraining(enable=own, layers=(0,))
    trained_adapter(tmp_path / "a", base, "none", "float32", [HISTORY[0] | {"seq_len": 320}], garfa=garfa)
    merge_adapter(tmp_path / "a", tmp_path / "m", drop_garfa=True)
    assert read_model_config(tmp_path / "m").position.garfa is None
    assert json.loads((tmp_path / "m" / "config.json").read_text())["model_type"] == "llama"
    text = tmp_path / "text.txt"
    text.write_text("Keys that turn the farther, the later they stand. " * 20)
    figures = compare(tmp_path / "a", tmp_path / "m", None, text, drop_garfa=True, device="cpu")
    assert figures["length"] == 320
    assert figures["merge"]["relative_logit_change"] < 1e-4
    with torch.no_grad():
        whole, without = (load_model(tmp_path / x)[0](torch.tensor([[*text.read_bytes()[:320]]])) for x in ("a", "m"))
    assert figures["drop_garfa"]["relative_logit_change"] == pytest.approx(distance(without, whole), rel=1e-3)


def test_a_base_that_it_was_not_trained_beside(base, tmp_path, capsys):
    trained_adapter(tmp_path / "a", base, lora=LORAS["lora"], garfa=NO_GARFA)
    write_base(tmp_path / "other", Position(rotary=Llama3Rope(original_length=16)), scale=15)
    call = [str(tmp_path / "a"), "--base", str(tmp_path / "other"), "--out", str(tmp_path / "m"), "--device", "cpu"]
    with pytest.raises(SystemExit, match="--other-base --out OUT"):
        main(call)
    assert not (tmp_path / "m").exists()
    main([*call, "--other-base", "--into", "original"])
    found, ours = (load_file(tmp_path / x / "model.safetensors")["model.norm.weight"] for x in ("m", "other"))
    assert torch.equal(found, ours)
    assert "Merging changed logits by" in capsys.readouterr().out


def test_what_is_refused(base, tmp_path):
    trained_adapter(tmp_path / "a", base, garfa=NO_GARFA)
    for arguments, message in (
        ({"drop_garfa": True}, "has no GARFA"),
        ({"out": base}, "is the adapter or its base"),
        ({"out": tmp_path / "a"}, "a holds files that Farsight did not write there"),
        ({"base": tmp_path / "none"}, "which is not there"),
    ):
        with pytest.raises(UserError, match=message):
            merge_adapter(**{"directory": tmp_path / "a", "out": tmp_path / "m", **arguments})
    assert not (tmp_path / "m").exists()
    with pytest.raises(SystemExit, match="is not an adapter directory"):
        main([str(base), "--out", str(tmp_path / "m")])
    with pytest.raises(SystemExit):
        main([str(tmp_path / "a"), "--out", str(tmp_path / "m"), "--no-check", "--drop-garfa"])
