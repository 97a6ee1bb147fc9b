"""Conversion of models written by `transformers`, there and back, with and without training in between."""

import json
import os
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.api import CheckpointException
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from farsight.checkpoints.convert.__main__ import main
from farsight.checkpoints.convert.from_hf import model_dir_to_checkpoint
from farsight.checkpoints.convert.to_hf import checkpoint_to_model_dir
from farsight.checkpoints.load import load_model, read_model_config
from farsight.checkpoints.model_dir.safetensors_files import TensorReader
from farsight.configs.load import build_config
from farsight.configs.typed import to_dict, to_toml
from farsight.data.tokenizers.tokenizer import BytesTokenizer, find_tokenizer_dir, load_tokenizer_dir
from farsight.errors import ConfigError
from farsight.new_folder import WRITING
from tests.checkpoints.test_untrusted_checkpoints import sign
from tests.running import train

ROPES = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "dynamic_given": {"rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 32},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16},
    "longrope": {
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [1.0, 2.0, 3.0, 4.0],
    },
    "longrope_phi": {
        "rope_type": "longrope",
        "original_max_position_embeddings": 16,
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [1.0, 2.0, 3.0, 4.0],
    },
    "llama3": {
        "factor": 8.0,
        "original_max_position_embeddings": 32,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
}


def write_with_transformers(folder: Path, kind: str, tied: bool) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        initializer_range=0.15,
        tie_word_embeddings=tied,
        rope_parameters={"rope_type": kind, "rope_theta": 10000.0, **ROPES[kind]},
    )
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return model


def all_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kind", ROPES)
def test_there_and_back(tmp_path, kind, tied):
    source, checkpoint, back = tmp_path / "source", tmp_path / "start" / "step-0", tmp_path / "back"
    theirs = write_with_transformers(source, kind, tied)
    main(["from-hf", str(source), str(checkpoint)])
    main(["to-hf", str(checkpoint), str(back)])

    before, after = all_tensors(source), all_tensors(back)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    tokens = torch.randint(320, (2, 60), generator=torch.Generator().manual_seed(0))
    ours, _ = load_model(source)
    returned = AutoModelForCausalLM.from_pretrained(back).eval()
    with torch.no_grad():
        expected = theirs(tokens).logits
        torch.testing.assert_close(ours(tokens), expected, atol=1e-4, rtol=0)
        torch.testing.assert_close(returned(tokens).logits, expected, atol=1e-5, rtol=0)
        assert torch.equal(ours(tokens).argmax(-1), expected.argmax(-1))

    model = to_dict(read_model_config(checkpoint))
    job = build_config(
        {
            "architecture": model["architecture"],
            "position": model["position"],
            "tokenizer": {"kind": "bytes"},
            "training": {"seq_len": 64, "local_batch_size": 2, "steps": 2, "mixed_precision_param": "float32"},
            "lr_scheduler": {"warmup_steps": 1},
            "checkpoint": {"initial_load_path": str(checkpoint)},
            "validation": {"enable": False},
            "metrics": {"log_freq": 1},
        }
    )
    train(tmp_path / "run", config=to_toml(job))
    main(["to-hf", str(tmp_path / "run/checkpoint/step-2"), str(tmp_path / "trained")])
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "trained").eval()
    changed = all_tensors(tmp_path / "trained")
    assert changed.keys() == before.keys()
    assert not any(torch.equal(before[name], changed[name]) for name in before)
    mine, _ = load_model(tmp_path / "trained")
    with torch.no_grad():
        torch.testing.assert_close(mine(tokens), trained(tokens).logits, atol=1e-4, rtol=0)
        # Two steps from these very weights.
        assert 0 < (trained(tokens).logits - expected).abs().mean() < 0.5 * expected.abs().mean()


def test_dtype_and_shards(tmp_path):
    write_with_transformers(tmp_path / "source", "default", tied=False)
    main(["from-hf", str(tmp_path / "source"), str(tmp_path / "c"), "--dtype", "bfloat16"])
    checkpoint_to_model_dir(tmp_path / "c", tmp_path / "back", torch.float16, shard_bytes=30_000)
    before, after = all_tensors(tmp_path / "source"), all_tensors(tmp_path / "back")
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 2
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor.bfloat16().half())
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "back").dtype == torch.float16


def test_a_conversion_that_fails_leaves_nothing_that_looks_whole(tmp_path, monkeypatch):
    write_with_transformers(tmp_path / "source", "default", tied=False)
    main(["from-hf", str(tmp_path / "source"), str(tmp_path / "good")])

    def broken(*_, **__):
        raise OSError("disk")

    monkeypatch.setattr(TensorReader, "__call__", broken)
    with pytest.raises(CheckpointException, match="disk"):
        model_dir_to_checkpoint(tmp_path / "source", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(dcp, "load", broken)
    with pytest.raises(OSError, match="disk"):
        checkpoint_to_model_dir(tmp_path / "good", tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_no_more_than_two_tensors_are_held(tmp_path, monkeypatch):
    """At most the tensor being written and the next one read are held."""
    write_with_transformers(tmp_path / "source", "default", tied=False)
    held: list[weakref.ref] = []
    most = 0

    def counting(function):
        def call(*arguments, **options):
            nonlocal most
            result = function(*arguments, **options)
            tensor = result if isinstance(result, torch.Tensor) else next(iter(arguments[0].values()))
            held.append(weakref.ref(tensor.untyped_storage()))  # kept alive by any view of the tensor
            most = max(most, sum(reference() is not None for reference in held))
            return result

        return call

    monkeypatch.setattr(TensorReader, "__call__", counting(TensorReader.__call__))
    main(["from-hf", str(tmp_path / "source"), str(tmp_path / "c")])
    assert len(held) == 21
    assert most <= 2
    held.clear()
    monkeypatch.setattr(dcp, "load", counting(dcp.load))
    main(["to-hf", str(tmp_path / "c"), str(tmp_path / "back")])
    assert len(held) == 21
    assert most <= 2


def test_a_checkpoint_of_another_shape_is_refused(tmp_path):
    write_with_transformers(tmp_path / "source", "default", tied=False)
    main(["from-hf", str(tmp_path / "source"), str(tmp_path / "c")])
    path = tmp_path / "c" / "farsight.json"
    text = path.read_text()
    path.write_text(text.replace('"ffn_dim": 48', '"ffn_dim": 40'))
    sign(tmp_path / "c")
    with pytest.raises(ConfigError, match=r"feed_forward.w1.weight has shape \(48, 32\), not \(40, 32\)"):
        checkpoint_to_model_dir(tmp_path / "c", tmp_path / "out")
    path.write_text(text.replace('"n_layers": 2', '"n_layers": 3'))
    sign(tmp_path / "c")
    with pytest.raises(ConfigError, match=r"lacks layers\.2\."):
        checkpoint_to_model_dir(tmp_path / "c", tmp_path / "out")


def test_the_tokenizer_goes_with_the_weights(tmp_path):
    source, checkpoint, out = (tmp_path / name for name in ("theirs", "checkpoint", "out"))
    write_with_transformers(source, "default", tied=False)
    BytesTokenizer().save(source)
    main(["from-hf", str(source), str(checkpoint)])
    assert find_tokenizer_dir(checkpoint) == checkpoint / "tokenizer"  # as a run that starts from it does
    main(["to-hf", str(checkpoint), str(out)])
    assert load_tokenizer_dir(out).fingerprint == BytesTokenizer().fingerprint
    values = json.loads((out / "config.json").read_text())
    assert (values["bos_token_id"], values["eos_token_id"]) == (256, 257)


def test_to_hf_does_not_write_over_a_checkpoint(tmp_path):
    source, checkpoint = tmp_path / "theirs", tmp_path / "checkpoint"
    write_with_transformers(source, "default", tied=False)
    main(["from-hf", str(source), str(checkpoint)])
    before = sorted(p.name for p in checkpoint.iterdir())
    with pytest.raises(SystemExit, match="exists and is not empty"):
        main(["to-hf", str(checkpoint), str(checkpoint)])
    assert sorted(p.name for p in checkpoint.iterdir()) == before


def test_nothing_that_is_there_is_replaced(tmp_path):
    """Neither another run's model/ nor a folder with the temporary name of a conversion is overwritten."""
    source, checkpoint, out = (tmp_path / name for name in ("theirs", "checkpoint", "out"))
    write_with_transformers(source, "default", tied=False)
    main(["from-hf", str(source), str(checkpoint)])
    main(["to-hf", str(checkpoint), str(out)])
    before = (out / "model.safetensors").stat().st_mtime_ns
    for arguments in (["to-hf", str(checkpoint), str(out)], ["from-hf", str(source), str(out)]):
        with pytest.raises(SystemExit, match=f"{out} exists and is not empty") as stop:
            main(arguments)
        assert stop.value.code == 2
    assert (out / "model.safetensors").stat().st_mtime_ns == before
    part = tmp_path / "more.part"
    part.mkdir()
    (part / "notes.txt").write_text("mine")
    with pytest.raises(SystemExit, match=r"more\.part holds files that Farsight did not write"):
        main(["from-hf", str(source), str(tmp_path / "more")])
    assert (part / "notes.txt").read_text() == "mine"
    (part / "notes.txt").rename(part / WRITING)  # left by an interrupted conversion
    main(["from-hf", str(source), str(tmp_path / "more")])
    assert not part.exists()


@pytest.mark.parametrize("direction", ["to-hf", "from-hf"])
def test_what_cannot_be_read_is_a_sentence(tmp_path, direction):
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    for name in ("missing", "file", "empty"):
        with pytest.raises(SystemExit, match=name) as stop:
            main([direction, str(tmp_path / name), str(tmp_path / "out")])
        assert stop.value.code == 2
    assert not (tmp_path / "out").exists()


def test_a_folder_of_the_other_kind_is_named(tmp_path, recwarn):
    """Nor does a conversion warn that it runs in one process."""
    source, run = tmp_path / "theirs", tmp_path / "run"
    write_with_transformers(source, "default", tied=False)
    for step in (2, 10):
        main(["from-hf", str(source), str(run / f"checkpoint/step-{step}")])
        os.utime(run / f"checkpoint/step-{step}/.metadata", (step, step))
    assert not [warning for warning in recwarn if "torch.distributed" in str(warning.message)]
    checkpoint = run / "checkpoint" / "step-10"
    for direction, folder, says in (
        ("to-hf", run, f"is a run folder, not a checkpoint. Did you mean {checkpoint}?"),
        ("to-hf", run / "checkpoint", f"is a run folder, not a checkpoint. Did you mean {checkpoint}?"),
        ("to-hf", source, "is a model directory already"),
        ("from-hf", checkpoint, "is a checkpoint already"),
    ):
        with pytest.raises(SystemExit) as stop:
            main([direction, str(folder), str(tmp_path / "out")])
        assert f"{folder} {says}" in str(stop.value)


def test_a_static_cache_saved_with_the_weights_is_left_out(tmp_path):
    """transformers 4.46 registers the cache of `generate(cache_implementation="static")` with the model, and saves it."""
    write_with_transformers(tmp_path / "theirs", "default", tied=False)
    plain, _ = load_model(tmp_path / "theirs")
    save_file({f"_cache.{kind}_cache_0": torch.ones(1, 2, 8, 8) for kind in ("key", "value")}, tmp_path / "cache")
    index = tmp_path / "theirs" / "model.safetensors.index.json"
    values = json.loads(index.read_text())
    (tmp_path / "cache").rename(tmp_path / "theirs" / "cache.safetensors")
    values["weight_map"] |= dict.fromkeys(["_cache.key_cache_0", "_cache.value_cache_0"], "cache.safetensors")
    index.write_text(json.dumps(values))
    main(["from-hf", str(tmp_path / "theirs"), str(tmp_path / "checkpoint")])
    loaded, _ = load_model(tmp_path / "checkpoint")
    for name, tensor in plain.named_parameters():
        assert torch.equal(dict(loaded.named_parameters())[name], tensor)
