"""Writes docs/performance/gpu.md from the files of `python -m benchmarks.gpu`.

    python -m benchmarks.gpu.page runs/gpu --out docs/performance/gpu.md

A part whose file is not there is said not to have run.
"""

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from farsight.cli import command, new_parser
from farsight.files import write_text
from farsight.outputs import output_file
from farsight.units import GIB

Rows = list[dict[str, Any]]
T_TARGET = 131072

HEAD = """\
# Measured on GPUs

    make gpu                                                              # with .venv's Python, else PYTHON=python3
    python -m benchmarks.gpu.page runs/gpu --out docs/performance/gpu.md  # writes this page

`make gpu` runs the parts below one after the other, on one GPU, and puts a JSON file for each into runs/gpu. A part ends within
eight minutes; `python -m benchmarks.gpu attention prefill` runs single ones, `--wheels` names the packages that are missing, and
`--small` runs all parts on a CPU with small shapes. Every kernel is timed only after its numbers agreed with the definition's.
"""
NOT_RUN = "\nNo GPU has run these parts yet: the tables appear when this page is written from their files.\n"


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
    """A figure to reach; `of` finds it in the parts' rows."""

    what: str
    least: float
    of: Callable[[dict[str, Rows]], float | None]


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
    ),
    Target("the same, forward and backward", 5.0, _over_dense("attention", "forward+backward", T_TARGET)),
    Target("over FlexAttention with the same mask", 1.3, _over_flex),
    Target("prompt of 131,072 tokens, 8B-shaped", 2.3, _over_dense("prefill", "prefill", T_TARGET)),
    Target("prompt of 262,144 tokens", 3.0, _over_dense("prefill", "prefill", 2 * T_TARGET)),
    Target("MFU of a dense 1B-shaped model at 8,192 tokens, bf16", 0.40, _mfu),
)


def targets(parts: dict[str, Rows]) -> str:
    """Each target, what was measured, and whether that reaches it."""
    lines = []
    for target in TARGETS:
        value = target.of(parts)
        lines.append(
            (
                target.what,
                target.least,
                *(("", "") if value is None else (value, "yes" if value >= target.least else "no")),
            )
        )
    return markdown(("target", "at least", "measured", "reached"), lines)


def page(folder: Path) -> str:
    """The page's text."""
    files = {part: json.loads(path.read_text()) for part in SECTIONS if (path := folder / f"{part}.json").is_file()}
    sections = [
        HEAD if files else HEAD + NOT_RUN,
        "## Targets\n",
        targets({part: file["rows"] for part, file in files.items()}) + "\n",
    ]
    for part, section in SECTIONS.items():
        sections += [f"## {section.title}\n", f"`python -m benchmarks.gpu {part}`. {section.text}\n"]
        if part not in files:
            sections.append("Not run.\n")
            continue
        file = files[part]
        sections.append(
            f"{file['device']}, torch {file['torch']}{', Triton ' + file['triton'] if 'triton' in file else ''}.\n"
        )
        if file["rows"]:
            sections.append(section.table(file["rows"]) + "\n")
        failed = [f"- failed: {text}" for text in file.get("failed", file.get("left_out", []))]
        failed += [f"- left out: {text}" for text in file["left_out"] if "failed" in file]
        if failed:
            sections.append("\n".join(failed) + "\n")
    return "\n".join(sections)


@command
def main(argv: list[str] | None = None) -> None:
    parser = new_parser("python -m benchmarks.gpu.page", __doc__)
    parser.add_argument("folder", type=Path, help="folder of the files")
    parser.add_argument("--out", type=output_file, metavar="F", help="write it here (default: print it)")
    options = parser.parse_args(argv)
    if not options.folder.is_dir():
        parser.error(f"{options.folder} is no folder: name the one that `python -m benchmarks.gpu --out` wrote")
    text = page(options.folder)
    if options.out:
        write_text(options.out, text)
    else:
        print(text)


if __name__ == "__main__":
    sys.exit(main())
