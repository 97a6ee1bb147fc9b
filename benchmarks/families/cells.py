"""Comparisons of a family with transformers: each function returns the largest difference."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn

from farsight.benchmarks.families.models import LENGTH, tokens, write_hf
from farsight.benchmarks.forked import Forked
from farsight.checkpoints.adapter.peft import PeftNames
from farsight.checkpoints.adapter.write import write_adapter
from farsight.checkpoints.cards.model import CONFIG
from farsight.checkpoints.checksums import MANIFEST
from farsight.checkpoints.convert.from_hf import model_dir_to_checkpoint
from farsight.checkpoints.convert.to_hf import checkpoint_to_model_dir
from farsight.checkpoints.dcp import Writer
from farsight.checkpoints.load import load_model
from farsight.checkpoints.model_dir.api import directory_names
from farsight.checkpoints.model_dir.fingerprint import base_entry
from farsight.checkpoints.model_dir.names import TensorNames
from farsight.configs.finetuning import Base, FinetuneConfig, FinetuneTraining, GarfaTraining, Lora
from farsight.configs.schema import Tokenizer
from farsight.inference.decoder import Decoder
from farsight.model.adapt.lora import is_lora
from farsight.model.adapt.quantized import keep_packing
from farsight.model.llama import Llama
from farsight.training.finetune.model import build_adapted, whole_weights, with_base

NEW_TOKENS, PROMPT = 16, 24
"""`PROMPT` is longer than the length that LongRoPE switches at: transformers' cache would mix keys of both sides."""


def largest(found: Tensor, expected: Tensor) -> float:
    """The largest absolute difference."""
    return float((found.detach().float() - expected.detach().float()).abs().max())


def relative(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """The largest difference within a tensor over its largest value, of all tensors; names must be the same.

    Some gradients are zero but for rounding, such as those of keys' biases without RoPE, so no tensor's largest value counts as
    less than a thousandth of the largest of all.
    """
    if found.keys() != expected.keys():
        raise ValueError(f"the tensors differ: {sorted(found.keys() ^ expected.keys())}")
    sizes = {name: float(value.abs().max()) for name, value in expected.items()}
    least = max(sizes.values()) / 1000
    return max(largest(found[name], value) / max(sizes[name], least) for name, value in expected.items())


def hf_load(directory: Path, **options: Any) -> Any:
    """A model directory as transformers opens it."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager", **options)


def by_hf_names(tensors: Mapping[str, Tensor], names: TensorNames) -> dict[str, Tensor]:
    """Our tensors by their names in transformers' model, fused as there."""
    return {
        theirs: torch.cat([tensors[part] for part in names.parts(theirs)])
        for theirs in dict.fromkeys(names.of(name) for name in tensors)
    }


def loss(logits_BLV: Tensor, rows_BL: Tensor) -> Tensor:
    """The mean loss of next tokens."""
    return F.cross_entropy(logits_BLV[:, :-1].flatten(0, 1), rows_BL[:, 1:].flatten())


# ── Cells ─────────────────────────────────────────────────────────────────────────────────────────────


def logits(name: str, folder: Path) -> float:
    """Logits of rows that are longer than the windows."""
    theirs, rows = write_hf(name, folder / "hf"), tokens()
    ours, _ = load_model(folder / "hf", length=LENGTH)
    with torch.no_grad():
        return largest(ours(rows), theirs(rows).logits)


def generate(name: str, folder: Path) -> float:
    """Tokens of a greedy continuation that differ from those of `generate()`."""
    theirs, rows = write_hf(name, folder / "hf"), tokens(length=PROMPT)
    ours, config = load_model(folder / "hf")
    expected = theirs.generate(
        rows, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, attention_mask=torch.ones_like(rows)
    )
    decoder = Decoder(ours, config)
    state = decoder.start([PROMPT] * len(rows), NEW_TOKENS)
    following = decoder.logits(state.read(rows)[:, -1:]).argmax(-1)
    found = [rows, following]
    for _ in range(NEW_TOKENS - 1):
        following = decoder.logits(state.read(following)).argmax(-1)
        found.append(following)
    return float((torch.cat(found, dim=1) != expected).sum())


def cache(name: str, folder: Path) -> float:
    """Logits of tokens that are read one at a time after a prompt, which is read in chunks, through our cache."""
    theirs, rows = write_hf(name, folder / "hf"), tokens()
    ours, config = load_model(folder / "hf")
    decoder = Decoder(ours, config, chunk=7)
    state = decoder.start([PROMPT] * len(rows), LENGTH - PROMPT)
    parts = [decoder.logits(h) for h in state.chunks(rows[:, :PROMPT])]
    parts += [decoder.logits(state.read(column)) for column in rows[:, PROMPT:].split(1, dim=1)]
    with torch.no_grad():
        return largest(torch.cat(parts, dim=1), theirs(rows).logits)


def gradients(name: str, folder: Path) -> float:
    """Gradients of every parameter, relative to the largest of each."""
    theirs, rows = write_hf(name, folder / "hf"), tokens()
    ours, _ = load_model(folder / "hf", length=LENGTH)
    ours.train()
    loss(ours(rows), rows).backward()
    loss(theirs(rows).logits, rows).backward()
    found = by_hf_names(gradients_of(ours), directory_names(folder / "hf"))
    return relative(found, gradients_of(theirs))


def trained(name: str, folder: Path) -> float:
    """Logits after from-hf, two steps and to-hf, as transformers opens the result; against two steps of its own model.

    Steps are gradient descent with momentum: Adam would divide the rounding errors of small gradients by their size.
    """
    theirs, rows = write_hf(name, folder / "hf"), tokens()
    model_dir_to_checkpoint(folder / "hf", folder / "start")
    ours, config = load_model(folder / "start", length=LENGTH)
    for model, output in ((ours, ours), (theirs, lambda rows: theirs(rows).logits)):
        optimizer = torch.optim.SGD(model.train().parameters(), lr=0.005, momentum=0.9)
        for _ in range(2):
            optimizer.zero_grad()
            loss(output(rows), rows).backward()
            optimizer.step()
    (folder / "end").mkdir()
    config.save(folder / "end" / CONFIG, checksums=MANIFEST)
    dcp.save(dict(ours.named_parameters()), storage_writer=Writer(folder / "end"), no_dist=True)
    checkpoint_to_model_dir(folder / "end", folder / "out")
    again = hf_load(folder / "out")
    if type(again) is not type(theirs):
        raise ValueError(f"{name} went out as {type(again).__name__}, not as {type(theirs).__name__}")
    with torch.no_grad():
        return largest(again(rows).logits, theirs.eval()(rows).logits)


def quantized(name: str, folder: Path, bits: int = 4) -> float:
    """Gradients of LoRA on a base in 4 or 8 bits, relative to the largest of each; against peft and bitsandbytes.

    peft loads the adapter that we write, on transformers' quantised model.
    """
    from peft import PeftModel
    from transformers import BitsAndBytesConfig

    write_hf(name, folder / "hf")
    base = Base(str(folder / "hf"), "nf4" if bits == 4 else "int8", double_quantization=False, dtype="float32")
    ours, config = adapted(base, Lora(rank=4, alpha=8.0, dropout=0.0))
    write_adapter(folder / "adapter", config, whole_weights(ours), base_entry(folder / "hf"))
    settings: dict[str, Any] = {"load_in_8bit": True}
    if bits == 4:
        settings = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32}
    whole = hf_load(folder / "hf", quantization_config=BitsAndBytesConfig(**settings))
    theirs = PeftModel.from_pretrained(whole, folder / "adapter", is_trainable=True)
    keep_packing(theirs)
    rows = tokens()
    loss(ours(rows), rows).backward()
    loss(theirs(rows).logits, rows).backward()
    names = PeftNames(base_entry(folder / "hf")["model_type"], ours.architecture)
    own = {key: value for key, value in gradients_of(ours).items() if is_lora(key)}
    expected = {key.replace(".default", ""): value for key, value in gradients_of(theirs).items() if is_lora(key)}
    # Where transformers fuses modules, B has gradients between our blocks too.
    inside = names.join({key: torch.ones_like(value) for key, value in own.items()})
    return relative(names.join(own), {key: value * inside[key] for key, value in expected.items()})


def tensor_parallel(name: str, folder: Path) -> float:
    """Loss and gradients of a model divided over two ranks, and the logits that it decodes (`two_ranks.py`)."""
    done = Forked([str(folder), name], 2, folder / "printed", "benchmarks/families/two_ranks.py").wait()
    if done.returncode:
        raise RuntimeError(done.stderr[-4000:])
    return json.loads((folder / f"{name}.json").read_text())


CELLS = {
    "logits": logits,
    "generate": generate,
    "gradients": gradients,
    "from-hf → 2 steps → to-hf": trained,
    "quantised step": quantized,
    "cache": cache,
    "TP 2": tensor_parallel,
}
TOLERANCES = dict.fromkeys(CELLS, 1e-4) | {"generate": 0.0}
"""In fp32. A part that is missing or in the wrong place changes logits by 0.1 or more."""


def adapted(base: Base, lora: Lora) -> tuple[Llama, FinetuneConfig]:
    """A base with LoRA whose matrices are all random, as the trainer builds it."""
    config = with_base(
        FinetuneConfig(
            base_model=base, lora=lora, garfa=GarfaTraining(enable=False), tokenizer=Tokenizer(kind="bytes"),
            training=FinetuneTraining(seq_len=LENGTH),
        )
    )  # fmt: skip
    with torch.device("meta"):
        model = build_adapted(config)
    model.to_empty(device="cpu")
    model.init_weights(torch.device("cpu"))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(std=0.1, generator=generator)
    return model.eval(), config


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """The gradients of a model, by name."""
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
