"""The same losses and gradient norms under every parallel layout, on gloo ranks of this machine.

    python -m benchmarks.parity --json parity.json

Five steps of the tiny size in fp32 on the same global batch of packed documents, for SCOPE, RoPE and a stack of both; each
layout against one process.
"""

import json
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from farsight.benchmarks.forked import Forked
from farsight.benchmarks.tiny import SETTINGS
from farsight.cli import command, new_parser
from farsight.outputs import add_json_option, write_json

TOLERANCE = 1e-4
"""Relative. Sums are taken in another order; a wrong share or a missing token makes a far larger difference."""

CONFIG = (
    SETTINGS
    + """
[model]
flavor = "tiny"

[training]
seq_len = 128
global_batch_size = 4
steps = 5
mixed_precision_param = "float32"

[checkpoint]
enable = false

[validation]
enable = false

[metrics]
log_freq = 1
trackers = []

[position]
"""
)

MODELS = {
    "SCOPE": 'heads = { kind = "scope", layout = "group_balanced" }\nlasp = { s_max = 2.0, anchor_layers = 1 }',
    "RoPE": 'rotary = { kind = "rope", theta = 10000.0 }',
    "mixed": 'rotary = { kind = "rope" }\nrules = [{ layers = "1::2", rotary = { kind = "none" }, '
    'heads = { kind = "scope" } }]',
}


@dataclass(frozen=True)
class Layout:
    name: str
    ranks: int
    local_batch_size: int
    degrees: dict[str, int | str]
    """Options of [parallelism]; degrees without `_degree`."""
    zero_stage: int = 0
    """DeepSpeed's stage; 0 is PyTorch's engine."""

    def options(self) -> list[str]:
        words = ("balancer", "schedule")
        named = {name if name.endswith(words) else f"{name}_degree": value for name, value in self.degrees.items()}
        options = [f"--parallelism.{name}={value}" for name, value in named.items()]
        if self.zero_stage:
            options += ["--engine=deepspeed", f"--deepspeed.zero_stage={self.zero_stage}"]
        return [*options, f"--training.local_batch_size={self.local_batch_size}"]


def _context(ranks: int, cut: str, **others: int) -> dict[str, int | str]:
    return {"context_parallel": ranks, "context_parallel_load_balancer": cut, "data_parallel_shard": 1, **others}


def _pipeline(schedule: str, **others: int) -> dict[str, int | str]:
    return {"pipeline_parallel": 2, "pipeline_parallel_schedule": schedule, "data_parallel_shard": 1, **others}


ONE = Layout("one process", 1, 4, {})
LAYOUTS = [
    ONE,
    Layout("accumulation 4", 1, 1, {}),
    Layout("DDP 2", 2, 2, {"data_parallel_replicate": 2, "data_parallel_shard": 1}),
    Layout("FSDP 2", 2, 2, {"data_parallel_shard": 2}),
    Layout("HSDP 2 × 2", 4, 1, {"data_parallel_replicate": 2, "data_parallel_shard": 2}),
    Layout("TP 2", 2, 4, {"tensor_parallel": 2, "data_parallel_shard": 1}),
    Layout("TP 2 × FSDP 2", 4, 2, {"tensor_parallel": 2, "data_parallel_shard": 2}),
    Layout("TP 2 × DDP 2", 4, 2, {"tensor_parallel": 2, "data_parallel_replicate": 2, "data_parallel_shard": 1}),
    Layout("CP 2, zigzag", 2, 4, _context(2, "zigzag")),
    Layout("CP 2, contiguous", 2, 4, _context(2, "contiguous")),
    Layout("CP 4, zigzag", 4, 4, _context(4, "zigzag")),
    Layout("CP 4, contiguous", 4, 4, _context(4, "contiguous")),
    Layout("CP 2 × FSDP 2, accumulation 2", 4, 1, _context(2, "zigzag", data_parallel_shard=2)),
    Layout("CP 2 × DDP 2", 4, 2, _context(2, "zigzag", data_parallel_replicate=2)),
    Layout("TP 2 × CP 2", 4, 4, _context(2, "zigzag", tensor_parallel=2)),
    Layout("PP 2, 1F1B", 2, 4, _pipeline("1F1B")),
    Layout("PP 2, accumulation 2", 2, 2, _pipeline("1F1B")),
    Layout("PP 2, interleaved", 2, 4, _pipeline("Interleaved1F1B")),
    Layout("PP 2, interleaved zero-bubble", 2, 4, _pipeline("InterleavedZeroBubble")),
    Layout("PP 2, ZBV zero-bubble", 2, 4, _pipeline("ZBVZeroBubble")),
    Layout("PP 2 × FSDP 2", 4, 2, _pipeline("1F1B", data_parallel_shard=2)),
    Layout("PP 2 × CP 2", 4, 4, _pipeline("1F1B", context_parallel=2)),
    Layout("TP 2 × PP 2", 4, 4, _pipeline("1F1B", tensor_parallel=2)),
    Layout("DeepSpeed ZeRO 2", 2, 2, {}, zero_stage=2),
    Layout("DeepSpeed ZeRO 3", 2, 2, {}, zero_stage=3),
    Layout("DeepSpeed ZeRO 3, accumulation 2", 2, 1, {}, zero_stage=3),
]


def run(layout: Layout, model: str, folder: Path) -> None:
    out = folder / layout.name / model
    arguments = ["--job.config_file", str(folder / f"{model}.toml"), f"--job.dump_folder={out}", *layout.options()]
    done = Forked(arguments, layout.ranks, out / "printed").wait()
    if done.returncode:
        raise SystemExit(f"{layout.name}, {model}: ended with {done.returncode}:\n{done.stderr[-4000:]}")


def series(folder: Path, key: str) -> list[float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row[key] for row in rows if key in row]


def largest(found: list[float], expected: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))


def table(rows: list[dict]) -> str:
    header = ("layout", "model", "ranks", "last loss", "off by", "last grad norm", "off by")
    lines = [
        (
            row["layout"], row["model"], str(row["ranks"]), f"{row['loss'][-1]:.6f}", f"{row['max_rel_loss']:.0e}",
            f"{row['grad_norm'][-1]:.6f}", f"{row['max_rel_grad_norm']:.0e}",
        )
        for row in rows
    ]  # fmt: skip
    widths = [max(map(len, column)) for column in zip(header, *lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) for line in (header, *lines)
    )


@command
def main() -> int:
    parser = new_parser("python -m benchmarks.parity", __doc__)
    names = [layout.name for layout in LAYOUTS]
    parser.add_argument("--layouts", nargs="+", choices=names, default=names, help="which (default: all)")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS), help="which (default: all)")
    add_json_option(parser, "the rows")
    args = parser.parse_args()

    begin, rows = time.perf_counter(), []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for model in args.models:
            (folder / f"{model}.toml").write_text(CONFIG + MODELS[model])
        chosen = [ONE, *(layout for layout in LAYOUTS if layout.name in args.layouts and layout is not ONE)]
        runs = [(layout, model) for layout in chosen for model in args.models]
        for layout, model in tqdm(runs, disable=None, unit="run", leave=False):
            run(layout, model, folder)
            row: dict = {"layout": layout.name, "model": model, "ranks": layout.ranks}
            for key in ("loss", "grad_norm"):
                row[key] = series(folder / layout.name / model, key)
                row[f"max_rel_{key}"] = largest(row[key], series(folder / ONE.name / model, key))
            rows.append(row)
    print(table(rows))
    print(f"{time.perf_counter() - begin:.0f} s")
    write_json(args.json, {"rows": rows})
    off = [row for row in rows if max(row["max_rel_loss"], row["max_rel_grad_norm"]) > TOLERANCE]
    for row in off:
        print(f"{row['layout']}, {row['model']}: off by more than {TOLERANCE}", file=sys.stderr)
    return 1 if off else 0


if __name__ == "__main__":
    sys.exit(main())
