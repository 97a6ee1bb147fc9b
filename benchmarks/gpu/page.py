"""Writes docs/performance/gpu.md from the files of `python -m benchmarks.gpu`.

    python -m benchmarks.gpu.page runs/gpu                            # prints the page of a run
    python -m benchmarks.gpu.page --out docs/performance/gpu.md       # the page of docs/performance/gpu

A part whose file is not there is said not to have run.
"""

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from farsight.benchmarks.attention import SIZES
from farsight.benchmarks.attention_rows import Case
from farsight.benchmarks.gpu.runs import PRETRAINING, plan_of, pretraining_options
from farsight.cli import command, new_parser
from farsight.files import write_text
from farsight.kernels.scoped_attention import visible_pairs
from farsight.kernels.scoped_attention.cost import Pass, Shape, best_split, gpu_of, split_seconds
from farsight.launch.plan.hardware import Efficiency
from farsight.outputs import output_file
from farsight.units import GIB

Rows = list[dict[str, Any]]
T_TARGET = 131072
DOCS = Path(__file__).resolve().parents[2] / "docs/performance/gpu"
"""The files that the page in the docs is made of; there are none until a GPU has run."""

HEAD = """\
# Measured on GPUs

`make gpu` runs the parts below one after the other, on one GPU, and writes a JSON file for each into runs/gpu. There are 14, of
at most eight minutes each. After seven minutes a part starts nothing new, and names what it left out.
`.venv/bin/python -m benchmarks.gpu attention prefill` runs single parts, and `--small` all of them on a CPU with small shapes, into
runs/gpu-small.

`attention`, `layers`, `prefill` and `decode` time a kernel only after its numbers agreed with the definition's (whole layers on
their first 1,024 tokens), and `tiles` times a tile only after it agreed with the shipped one. `speeds`, `decoding`, the training runs
and the profiles check no numbers: they rely on `correctness`, which runs first. A part that fails does not stop those after it.

## Before

    make setup                                      # on Linux, PyTorch for NVIDIA GPUs with CUDA 13
    nvidia-smi                                      # the driver: CUDA 13 needs version 580 or later
    .venv/bin/python -c "import torch; print(torch.cuda.is_available(), torch.version.cuda)"
    .venv/bin/python -m benchmarks.gpu --check      # GPU, driver, versions, and how to install what is missing

With an older driver, install a PyTorch that is built for it into .venv. `make gpu` installs nothing, and takes .venv's Python if
there is one, else `PYTHON=python3`. FlashAttention 3 (`flash_attn_interface`), which the first targets assume, is built from
FlashAttention's source. `finetuning` needs 16 GB in the folder for temporary files (`TMPDIR`, else /tmp), and frees them again.
`.venv/bin/python -m pytest tests/kernels` runs the kernels' tests on the GPU.

## Afterwards

The last lines of `make gpu` name the parts with faults and the folder of the files. Then:

1. `.venv/bin/python -m benchmarks.gpu.page runs/gpu` prints this page with the tables. If [Correctness](#correctness) names a
   kernel that failed, its times do not count.
2. `.venv/bin/python -m benchmarks.gpu.speeds --write` measures the constants of the cost model again, and writes them to
   `kernels/scoped_attention/speeds.json`; the part `speeds` only measures them.
3. Tiles that are faster than the shipped ones go into `kernels/scoped_attention/triton/tiles.py` by hand.
4. `make test`: `tests/kernels/test_attention_cost.py` compares predictions with those of the published speeds, so new constants need
   new ones there.
5. To keep the results, copy the files to docs/performance/gpu, and write this page from them:
   `.venv/bin/python -m benchmarks.gpu.page --out docs/performance/gpu.md`
"""
NOT_RUN = "\nNo GPU has run these parts yet: the tables appear when this page is written from their files.\n"
TARGETS_TEXT = """\
For an H200 in bf16: attention of 32 heads on 8 of dim 128, one row; prompts through 32 layers of 8B's shape; training with Llama 3.2
1B's. The targets are our choice, below what is predicted with FlashAttention 3 (`flash_attn_interface`) for the wide heads; without
it they go through FlashAttention 2. Attention is predicted by the cost model from Hopper's speeds in
[speeds.json](../../kernels/scoped_attention/speeds.json), which are {measured}; the best dense attention is assumed to be as fast as
FlashAttention 3, cuDNN's too. A prompt's other products are assumed to reach {matmul:.2f} of the peak, and MFU is that of `farsight plan`.
The ceiling is what fewer pairs gain at equal efficiency.
"""


@dataclass(frozen=True)
class Section:
    """A part's section: its title, what it measures, and its table."""

    title: str
    text: str
    table: Callable[[Rows], str]


def markdown(header: Sequence[str], lines: Iterable[Sequence[object]]) -> str:
    """A table."""
    rows = [f"| {' | '.join(map(_cell, line))} |" for line in lines]
    return "\n".join([f"| {' | '.join(header)} |", "|---" * len(header) + "|", *rows])


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def correctness(rows: Rows) -> str:
    largest: dict[str, tuple[float, int]] = {}
    for row in rows:
        error, cases = largest.get(row["what"], (0.0, 0))
        largest[row["what"]] = max(error, row["error"]), cases + 1
    return markdown(
        ("what", "cases", "largest error"), ((what, n, f"{error:.1e}") for what, (error, n) in largest.items())
    )


def attention(rows: Rows) -> str:
    return markdown(
        ("backend", "scopes", "pass", "T", "ms", "TFLOP/s", "over the best dense", "pairs", "extra MiB"),
        (
            (r["backend"], r["scopes"], r["pass"], r["T"], 1e3 * r["median_s"], r["tflops"], r["speedup_over_dense"],
             r["pair_ratio"], r["extra_bytes"] / 2**20)
            for r in rows
        ),
    )  # fmt: skip


def tiles(rows: Rows) -> str:
    """The shipped tile and the fastest of each kernel."""
    groups: dict[tuple[Any, ...], Rows] = {}
    for row in rows:
        groups.setdefault((row["kernel"], row["head_dim"], row["scopes"]), []).append(row)

    def line(name: tuple[Any, ...], tried: Rows) -> tuple[object, ...]:
        fastest = min(tried, key=lambda row: row["ms"])
        shipped = next((row["ms"] for row in tried if row["shipped"]), "failed")
        t = fastest["tile"]
        tile = f"{t['block_m']} × {t['block_n']}, {t['warps']}, {t['stages']}{', descriptors' * t['descriptors']}"
        return *name, len(tried), shipped, fastest["ms"], "shipped" if fastest["shipped"] else tile

    header = ("kernel", "head dim", "scopes", "tiles", "shipped, ms", "fastest, ms", "queries × keys, warps, stages")
    return markdown(header, (line(*group) for group in groups.items()))


def speeds(rows: Rows) -> str:
    constants = markdown(("constant", "value"), ((r["what"], r["value"]) for r in rows if r["what"] != "split"))
    splits = [r for r in rows if r["what"] == "split"]
    if not splits:
        return constants
    header = ("T", "pass", "wide heads", "the model's choice", "ms", "predicted")
    lines = ((r["T"], r["pass"], r["wide_heads"], "yes" * r["chosen"], r["ms"], r["predicted_ms"]) for r in splits)
    return f"{constants}\n\n{markdown(header, lines)}"


def decoding(rows: Rows) -> str:
    header = ("heads", "T", "rows", "CUDA graph", "tokens/s", "ms a token", "cache, GiB", "dense cache, GiB", "TB/s")
    return markdown(
        header,
        (
            (r["heads"], r["T"], r["batch"], "yes" if r["graph"] else "no", r["tokens_per_second"], r["ms"],
             r["cache_bytes"] / GIB, r["dense_cache_bytes"] / GIB, r["tbytes_per_second"])
            for r in rows
        ),
    )  # fmt: skip


def training(rows: Rows) -> str:
    header = ("model", "heads", "T", "tokens/s", "planned", "MFU", "planned", "peak GiB", "planned")
    return markdown(
        header,
        (
            (r["model"], r.get("heads", ""), r["T"], r["tokens_per_second"], r["planned"]["tokens_per_second"], r["mfu"],
             r["planned"]["mfu"], r["memory_gib"], r["planned"]["memory_gib"])
            for r in rows
        ),
    )  # fmt: skip


def profile(rows: Rows) -> str:
    kinds = list(dict.fromkeys(kind for row in rows for kind in row["by_kind_ms"]))
    header = ("heads", "T", "step, ms", "idle", *kinds)
    lines = (
        (r["heads"], r["T"], r["span_ms"], r["idle_ms"], *(r["by_kind_ms"].get(k, 0.0) for k in kinds)) for r in rows
    )
    return markdown(header, lines)


SECTIONS = {
    "correctness": Section(
        "Correctness",
        "Errors are norms over the exact values' norms, the largest over heads, outputs and gradients; a run's are of its losses.",
        correctness,
    ),
    "attention": Section("Attention", "SCOPE's scopes, windows of 1,024 tokens and dense heads; 32 heads on 8 of dim 128, one row, bf16.", attention),
    "layers": Section("Training step of 8B-shaped layers", "Four layers, forward, backward and AdamW.", attention),
    "prefill": Section("Prompts", "32 8B-shaped layers, in chunks of 16,384 tokens; cuDNN's attention takes them whole.", attention),
    "tiles": Section("Tiles", "dq and dkv are timed by the whole backward pass.", tiles),
    "speeds": Section("Constants of the hybrid's cost model", "TFLOP/s are those of the visible pairs.", speeds),
    "decode": Section("Attention of one token", "In a CUDA graph.", attention),
    "decoding": Section("Decoding with an 8B-shaped model", "TB/s are those of the weights and the cache.", decoding),
    "pretraining-8k": Section("Training a 1B-shaped model at 8,192 tokens", "131,072 tokens a step.", training),
    "pretraining-32k": Section("Training a 1B-shaped model at 32,768 tokens", "131,072 tokens a step.", training),
    "pretraining-128k": Section("Training a 1B-shaped model at 131,072 tokens", "131,072 tokens a step.", training),
    "finetuning": Section("QLoRA and GARFA on an 8B-shaped base", "One row a step.", training),
    "profile-8k": Section("Profile of a training step at 8,192 tokens", "Milliseconds by kind of kernel.", profile),
    "profile-128k": Section("Profile of a training step at 131,072 tokens", "Milliseconds by kind of kernel.", profile),
}  # fmt: skip


@dataclass(frozen=True)
class Target:
    """A figure to reach."""

    what: str
    least: float
    of: Callable[[dict[str, Rows]], float | None]
    """Finds it in the parts' rows."""
    predicted: Callable[[str], float] | None = None
    """For wide heads in "FA3" or "FA2"."""
    ceiling: Callable[[], float] | None = None


@cache
def _scopes(T: int) -> tuple[int, ...]:
    return tuple(Case(T, "exponential", 32, 8, 128, None, "cpu").scopes_N().tolist())


def _seconds(T: int, kernel: str, passes: Sequence[Pass]) -> tuple[float, float]:
    """Predicted times of a layer's dense attention, and of SCOPE's with wide heads in `kernel`, by the cost model for Hopper."""
    gpu, shape, scopes = gpu_of(9), Shape(1, T, group=4, head_dim=128), _scopes(T)
    dense = sum(split_seconds((T,) * len(scopes), shape, gpu, "FA3", pass_, 1) for pass_ in passes)
    return dense, sum(best_split(scopes, shape, gpu, kernel, pass_).seconds for pass_ in passes)


def _attention_gain(T: int, *passes: Pass) -> Callable[[str], float]:
    def gain(kernel: str) -> float:
        dense, scoped = _seconds(T, kernel, passes)
        return dense / scoped

    return gain


def _prompt_gain(T: int) -> Callable[[str], float]:
    def gain(kernel: str) -> float:
        stack = SIZES["cuda"].stack
        products = stack.flops(T, 0) / (Efficiency().matmul * gpu_of(9).peak)
        dense, scoped = (stack.layers * seconds for seconds in _seconds(T, kernel, ("forward",)))
        return (products + dense) / (products + scoped)

    return gain


def _fewer_pairs(T: int) -> float:
    return visible_pairs([T], T) * len(_scopes(T)) / visible_pairs(_scopes(T), T)


def _prompt_ceiling(T: int) -> float:
    stack, scopes = SIZES["cuda"].stack, _scopes(T)
    return stack.flops(T, visible_pairs((T,) * len(scopes), T)) / stack.flops(T, visible_pairs(scopes, T))


def _planned_mfu(_: str) -> float:
    kind = "h200-141g"
    return plan_of(PRETRAINING, pretraining_options(8192, False, small=False, kind=kind), kind).mfu


def _over_dense(part: str, pass_: str, T: int) -> Callable[[dict[str, Rows]], float | None]:
    """The best speed-up of SCOPE's heads over the best dense attention."""

    def found(parts: dict[str, Rows]) -> float | None:
        rows = [r for r in parts.get(part, ()) if (r["pass"], r["T"], r["scopes"]) == (pass_, T, "exponential")]
        return max((r["speedup_over_dense"] for r in rows), default=None)

    return found


def _over_flex(parts: dict[str, Rows]) -> float | None:
    """FlexAttention's time with SCOPE's mask over our best, both passes."""
    times = {
        r["backend"]: r["median_s"]
        for r in parts.get("attention", ())
        if (r["pass"], r["T"], r["scopes"]) == ("forward+backward", T_TARGET, "exponential")
    }
    flex = times.pop("flex", None)
    return flex / min(times.values()) if flex and times else None


def _mfu(parts: dict[str, Rows]) -> float | None:
    return next((row["mfu"] for row in parts.get("pretraining-8k", ()) if row["heads"] == "dense"), None)


TARGETS = (
    Target(
        "SCOPE over the best dense attention at 131,072 tokens, forward",
        5.5,
        _over_dense("attention", "forward", T_TARGET),
        _attention_gain(T_TARGET, "forward"),
        partial(_fewer_pairs, T_TARGET),
    ),
    Target(
        "the same, forward and backward",
        5.0,
        _over_dense("attention", "forward+backward", T_TARGET),
        _attention_gain(T_TARGET, "forward", "backward"),
        partial(_fewer_pairs, T_TARGET),
    ),
    Target("SCOPE over FlexAttention with the same mask, forward and backward", 1.3, _over_flex),
    *(
        Target(
            f"SCOPE over the best dense attention, a prompt of {T:,} tokens",
            least,
            _over_dense("prefill", "prefill", T),
            _prompt_gain(T),
            partial(_prompt_ceiling, T),
        )
        for T, least in ((T_TARGET, 2.3), (2 * T_TARGET, 3.0))
    ),
    Target("MFU of a dense 1B-shaped model at 8,192 tokens", 0.40, _mfu, _planned_mfu),
)


def targets(parts: dict[str, Rows]) -> str:
    """Each target, what was measured, and whether that reaches it."""
    lines = []
    for target in TARGETS:
        value = target.of(parts)
        predicted = [target.predicted(kernel) if target.predicted else "" for kernel in ("FA3", "FA2")]
        ceiling = target.ceiling() if target.ceiling else ""
        measured = ("", "") if value is None else (value, "yes" if value >= target.least else "no")
        lines.append((target.what, target.least, *predicted, ceiling, *measured))
    header = ("target", "at least", "predicted", "without FA3", "ceiling", "measured", "reached")
    return markdown(header, lines)


def page(folder: Path) -> str:
    """The page's text."""
    files = {part: json.loads(path.read_text()) for part in SECTIONS if (path := folder / f"{part}.json").is_file()}
    of_gpus = {part: file["rows"] for part, file in files.items() if not file["small"]}
    source = "measured" if gpu_of(9).measured else "published or assumed"
    sections = [
        HEAD if of_gpus else HEAD + NOT_RUN,
        "## Targets\n",
        TARGETS_TEXT.format(measured=source, matmul=Efficiency().matmul),
        targets(of_gpus) + "\n",
    ]
    for part, section in SECTIONS.items():
        sections += [f"## {section.title}\n", f"`.venv/bin/python -m benchmarks.gpu {part}`. {section.text}\n"]
        if part not in files:
            sections.append("Not run.\n")
            continue
        file = files[part]
        names = {"device": "", "torch": "torch ", "triton": "Triton ", "commit": "commit ", "date": ""}
        if made := ", ".join(f"{name}{file[key]}" for key, name in names.items() if file.get(key)):
            sections.append(f"{made}.\n")
        if file["small"]:
            sections.append("**Small shapes on a CPU**, which say nothing of a GPU.\n")
        if file["outcome"] != "ended":
            sections.append(f"**Incomplete** ({file['outcome']}): it has the rows until then.\n")
        if file["rows"]:
            sections.append(section.table(file["rows"]) + "\n")
        notes = [(what, text) for what in ("failed", "left_out") for text in file.get(what, ())]
        if notes:
            sections.append("\n".join(f"- {what.replace('_', ' ')}: {text}" for what, text in notes) + "\n")
    return "\n".join(sections)


@command
def main(argv: list[str] | None = None) -> None:
    parser = new_parser("python -m benchmarks.gpu.page", __doc__)
    parser.add_argument(
        "folder", type=Path, nargs="?", default=DOCS, help="folder of the files (default: docs/performance/gpu)"
    )
    parser.add_argument("--out", type=output_file, metavar="F", help="write it here (default: print it)")
    options = parser.parse_args(argv)
    if not options.folder.is_dir() and options.folder.resolve() != DOCS:
        parser.error(f"{options.folder} is no folder: name the one that `python -m benchmarks.gpu --out` wrote")
    text = page(options.folder)
    if options.out:
        write_text(options.out, text)
    else:
        print(text)


if __name__ == "__main__":
    sys.exit(main())
