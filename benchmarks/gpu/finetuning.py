"""QLoRA and GARFA on an 8B-shaped base in 4 bits, on one GPU: tokens/s and peak memory, beside the plan's.

    python -m benchmarks.gpu.finetuning --json F        # writes a base of 16 GB of random weights to a temporary folder

The run is `train.py finetune`'s own with the GARFA paper's settings (configs/finetune/llama3.1_8b_qlora_garfa.toml), but one row
of --length tokens at a time. It needs bitsandbytes and peft.
"""

import json
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from farsight.benchmarks.gpu.part import Rows, add_length_option, part_parser
from farsight.benchmarks.gpu.runs import measured_beside_plan
from farsight.checkpoints.model_dir.api import write_model_dir
from farsight.cli import command
from farsight.configs.load import build_config
from farsight.configs.shipped import CONFIGS
from farsight.model.build import ModelConfig, build_model

CONFIG = CONFIGS / "finetune" / "llama3.1_8b_qlora_garfa.toml"
WORDS = 3000
"""Length of an answer: longer than a row, so that rows are full."""


def write_base(directory: Path, flavor: str, device: str) -> None:
    """A model directory of random weights in bf16."""
    config = ModelConfig.from_job(build_config({"model": {"flavor": flavor}}))
    with torch.device("meta"):
        model = build_model(config)
    tensors: dict[str, Tensor] = {name: x.data.bfloat16() for name, x in model.named_parameters()}

    def read(name: str) -> Tensor:
        x = tensors[name]
        if x.dim() == 1:
            return torch.ones(x.shape, dtype=x.dtype)
        return (torch.randn(x.shape, device=device) * x.shape[-1] ** -0.5).to("cpu", x.dtype)

    write_model_dir(directory, config, tensors, read)


def settings(folder: Path, rows: Rows, length: int) -> dict[str, Any]:
    """The config's changes: our base, and rows that fill it."""
    line = json.dumps({"instruction": "Count.", "output": "one two three " * WORDS})
    (folder / "rows.jsonl").write_text(f"{line}\n" * 32)
    own: dict[str, Any] = {
        "base_model.path": folder / "base", "tokenizer.kind": "bytes", "training.seq_len": length, "training.local_batch_size": 1,
        "training.global_batch_size": 1, "training.steps": 8, "validation.enable": False,
        "checkpoint.enable": False, "metrics.log_freq": 1, "metrics.trackers": [], "data.held_out": 0.0,
    }  # fmt: skip
    return own | ({"model.flavor": "tiny", "lora.layers": "0", "garfa.layers": "0"} if rows.small else {})


@command
def main(argv: list[str] | None = None) -> int:
    parser = part_parser("finetuning", __doc__)
    add_length_option(parser)
    options = parser.parse_args(argv)
    rows = Rows(options, "finetuning")
    length, flavor = (128, "tiny") if rows.small else (options.length, "llama3.1-8b")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write: Callable[[], None] = partial(write_base, folder / "base", flavor, rows.device)
        rows.attempt("writing the base", write)
        config = folder / "finetune" / CONFIG.name
        config.parent.mkdir()
        config.write_text(_config(folder))
        measure = partial(measured_beside_plan, rows, config, settings(folder, rows, length), ("finetune",))
        if (found := rows.attempt(f"T = {length:,}", measure)) is not None:
            rows.add(model=flavor, T=length, **found)
    return rows.end()


def _config(folder: Path) -> str:
    """The shipped config with our rows for its data."""
    text = CONFIG.read_text()
    begin, end = text.index("sources = ["), text.index("\n]\n")
    return f'{text[:begin]}sources = [{{ kind = "jsonl", path = "{folder}/rows.jsonl" }}]{text[end + 2 :]}'


if __name__ == "__main__":
    sys.exit(main())
