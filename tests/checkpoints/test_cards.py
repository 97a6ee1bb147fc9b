"""The code in the cards of model directories and adapters runs as printed, with the same results as our tools."""

import json
import re
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard

from farsight.benchmarks.forked import Forked
from farsight.checkpoints.adapter.load import load_adapter
from farsight.checkpoints.cards.adapter import adapter_card
from farsight.checkpoints.load import load_model
from farsight.checkpoints.model_dir.api import write_model_dir
from farsight.configs.finetuning import GarfaTraining, Lora
from farsight.configs.schema import Architecture, NoRotary, Position, Rope, Scope
from farsight.data.tokenizers.tokenizer import BytesTokenizer
from farsight.inference.generate import __main__ as generate
from farsight.inference.generate.completions import encode_prompt
from farsight.model.build import ModelConfig, build_model
from tests.checkpoints.test_adapter import trained_adapter
from tests.finetuned import tokens, write_base

POSITIONS = {"llama": Position(rotary=Rope()), "farsight": Position(heads=Scope(), rotary=NoRotary())}
MORE_OF_MODEL = """
import json
written = model.generate(**inputs, max_new_tokens=20)[0].tolist()
print(json.dumps([inputs["input_ids"][0].tolist(), written]))
"""
MORE_OF_ADAPTER = """
import json, torch
tokens = torch.tensor(json.load(open("../tokens.json")))
for module in model.modules():
    if hasattr(module, "support_avx512bf16_for_cpu"):
        module.support_avx512bf16_for_cpu = False  # it would repack weights, with scales in bf16
with torch.no_grad():
    found = model.eval()(tokens)
print(json.dumps(getattr(found, "logits", found).float().tolist()))
"""


def blocks(card: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", card.read_text(encoding="utf-8"), re.DOTALL)


def metadata(card: Path) -> dict:
    """What a hub reads, which its client checks."""
    return ModelCard.load(card).data.to_dict()


def run(code: str, folder: Path) -> list:
    """Runs code in a new process with the folder as working directory, and returns the last line of its output."""
    script, printed = folder.parent / "card.py", folder.parent / "printed"
    script.write_text(code)
    done = Forked([], 1, printed, str(script), folder).wait()
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("kind", POSITIONS)
def test_a_model_s_card_writes_what_generate_writes(tmp_path, kind, capsys):
    shape = Architecture(vocab_size=320, dim=64, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=16, ffn_dim=96)
    config = ModelConfig(shape, POSITIONS[kind], 64)
    model = build_model(config)
    model.init_weights()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(4)
        model.output.weight[127:] = 0  # letters, which all tokenizers encode alike
    BytesTokenizer().save(tmp_path / "tokenizer")
    write_model_dir(tmp_path / "model", config, dict(model.named_parameters()), tokenizer_dir=tmp_path / "tokenizer")
    found = metadata(tmp_path / "model" / "README.md")
    tags = ["farsight", "rope"] if kind == "llama" else ["farsight", "scope"]
    assert found == {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": tags}
    (block,) = blocks(tmp_path / "model" / "README.md")
    assert ("trust_remote_code=True" in block) == (kind == "farsight")
    ids, written = run(block + MORE_OF_MODEL, tmp_path / "model")

    prompt = re.search(r'tokenizer\("(.+?)"', block)[1]
    assert ids == encode_prompt(BytesTokenizer(), prompt) == [256, *prompt.encode()]
    command = ["--prompt", prompt, "--new-tokens", "20", "--json", str(tmp_path / "f.json"), "--device", "cpu"]
    generate.main([str(tmp_path / "model"), *command])
    (completion,) = json.loads((tmp_path / "f.json").read_text())["completions"]
    assert written == ids + completion["tokens"]
    assert len(set(completion["tokens"])) > 3


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/home/me/.cache/huggingface/hub/models--Qwen--Qwen2.5-0.5B/snapshots/060db64", "Qwen/Qwen2.5-0.5B"),
        ("/home/me/runs/first/model", "first"),
        ("/home/me/Phi-3", "Phi-3"),
    ],
)
def test_an_adapter_s_card_names_its_base_as_other_machines_know_it(path, name):
    entry = {"quantization": "none", "double_quantization": True, "dtype": "float32"}
    card = adapter_card("mine", path, False, entry, ["lora"], None, [])
    assert f"on top of `{name}`" in card
    assert f'from_pretrained("{name}", dtype' in card
    assert "/home" not in card


@pytest.mark.parametrize(
    ("kind", "quantization"), [("llama", "none"), ("farsight", "none"), ("llama", "nf4"), ("farsight", "int8")]
)
def test_an_adapter_s_card_loads_it(tmp_path, kind, quantization):
    """All of it with our loader, LoRA alone with peft, on a base kept as in training; they differ by GARFA if keys rotate."""
    write_base(tmp_path / "a base", POSITIONS[kind])
    parts = {"lora": Lora(rank=4, alpha=8.0, dropout=0.0), "garfa": GarfaTraining(enable=kind == "llama")}
    trained_adapter(tmp_path / "adapter", tmp_path / "a base", quantization, **parts)
    (tmp_path / "tokens.json").write_text(json.dumps(tokens().tolist()))
    found = metadata(tmp_path / "adapter" / "README.md")
    tags = ["farsight", "lora", "garfa"] if kind == "llama" else ["farsight", "lora"]
    assert found == {"library_name": "peft", "pipeline_tag": "text-generation", "tags": tags}
    ours, theirs = blocks(tmp_path / "adapter" / "README.md")
    assert ("trust_remote_code=True" in theirs) == (kind == "farsight")
    assert ("BitsAndBytesConfig" in theirs) == (quantization != "none")
    assert str(tmp_path) not in (tmp_path / "adapter" / "README.md").read_text()
    for block, garfa in ((ours, True), (theirs, False)):
        model, _ = load_adapter(tmp_path / "adapter", garfa=garfa)
        with torch.no_grad():
            expected = model(tokens()).float()
        block = block.replace('("a base"', f'("{tmp_path / "a base"}"')
        found = torch.tensor(run(block + MORE_OF_ADAPTER, tmp_path / "adapter"))
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    with torch.no_grad():
        assert not torch.allclose(load_model(tmp_path / "a base")[0](tokens()), expected, atol=0.01)
