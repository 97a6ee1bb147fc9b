"""The heads that the backend "hybrid" gives to FlashAttention and to Triton, and the times that its cost model predicts.

    python -m benchmarks.attention_split --gpu h200

Nothing is timed. Scopes are SCOPE's exponential ones unless others are given; a row of the batch is one document.
"""

import sys

from farsight.benchmarks.attention_rows import Case
from farsight.cli import command, new_parser, positive
from farsight.kernels.scoped_attention.cost import Gpu, Pass, Shape, best_split, gpu_of, split_seconds
from farsight.outputs import add_json_option, write_json

GPUS = {"a100": 8, "h100": 9, "h200": 9, "b200": 10}
"""Major architectures by the names of their GPUs. An H100 differs from an H200 in its memory only."""
PASSES: tuple[Pass, ...] = ("forward", "backward")


def row(scopes: tuple[int, ...], shape: Shape, gpu: Gpu, kernel: str, pass_: Pass) -> dict:
    """The split of a call, and the milliseconds of it and of what else could be done."""
    split = best_split(scopes, shape, gpu, kernel, pass_)
    dense = (shape.queries,) * len(scopes)

    def ms(heads: tuple[int, ...], wide_from: int) -> float:
        return 1e3 * split_seconds(heads, shape, gpu, kernel, pass_, wide_from)

    return {
        "T": shape.queries, "pass": pass_, "kernel": kernel, "wide_heads": sum(s >= split.wide_from for s in scopes),
        "wide_from": min((s for s in scopes if s >= split.wide_from), default=None), "hybrid_ms": 1e3 * split.seconds,
        "triton_ms": ms(scopes, max(scopes) + 1), "varlen_ms": ms(scopes, 1), "dense_ms": ms(dense, 1),
    }  # fmt: skip


def table(rows: list[dict]) -> str:
    """The rows, as a table of Markdown."""
    lines = [
        "| T | pass | wide heads | from scope | hybrid, ms | Triton alone | {0} alone | dense {0} |",
        "|---" * 8 + "|",
    ]
    for r in rows:
        least = "" if r["wide_from"] is None else f"{r['wide_from']:,}"
        times = " | ".join(f"{r[name]:.3g}" for name in ("hybrid_ms", "triton_ms", "varlen_ms", "dense_ms"))
        lines.append(f"| {r['T']:,} | {r['pass']} | {r['wide_heads']} | {least} | {times} |")
    return "\n".join(lines).format(rows[0]["kernel"])


@command
def main(argv: list[str] | None = None) -> int:
    parser = new_parser("python -m benchmarks.attention_split", __doc__)
    add = parser.add_argument
    add("--gpu", choices=GPUS, default="h200", help="architecture; h100 is planned as an h200 (default: %(default)s)")
    add("--kernel", choices=("FA2", "FA3"), help="kernel of wide heads (default: FA3 on h100 and h200, else FA2)")
    add(
        "--lengths",
        type=positive,
        nargs="+",
        default=[8192, 32768, 131072, 262144],
        metavar="T",
        help="tokens of a row",
    )
    add(
        "--scopes",
        type=positive,
        nargs="+",
        metavar="S",
        help="one of each head, in a multiple of --kv-heads (default: SCOPE's for 32 heads)",
    )
    add("--kv-heads", type=positive, default=8, metavar="K", help="(default: %(default)s)")
    add("--head-dim", type=positive, default=128, metavar="H", help="(default: %(default)s)")
    add("--rows", type=positive, default=1, metavar="B", help="rows of the batch (default: %(default)s)")
    add_json_option(parser)
    args = parser.parse_args(argv)
    gpu = gpu_of(GPUS[args.gpu])
    kernel = args.kernel or ("FA3" if "FA3" in gpu.kernels else "FA2")
    if kernel not in gpu.kernels:
        parser.error(
            f"--kernel {kernel} does not run on --gpu {args.gpu}: use {' or '.join(set(gpu.kernels) - {'triton'})}"
        )
    rows = []
    for T in args.lengths:
        scopes = tuple(args.scopes or _exponential(T))
        if len(scopes) % args.kv_heads:
            parser.error(f"{len(scopes)} heads do not share --kv-heads {args.kv_heads} evenly: set it to a divisor")
        shape = Shape(args.rows, T, group=len(scopes) // args.kv_heads, head_dim=args.head_dim)
        rows += [row(scopes, shape, gpu, kernel, pass_) for pass_ in PASSES]
    print(table(rows))
    print(f"\n{gpu.name}, {'measured' if gpu.measured else 'not measured'}: {gpu.source}")
    write_json(args.json, {"gpu": gpu.name, "measured": gpu.measured, "source": gpu.source, "rows": rows})
    return 0


def _exponential(T: int) -> list[int]:
    return Case(T, "exponential", 32, 8, 128, None, "cpu").scopes_N().tolist()


if __name__ == "__main__":
    sys.exit(main())
