"""Times the tiles that are worth it for each kernel of attention on this GPU, the shipped ones first.

    python -m benchmarks.gpu.tile_search --json tiles.json     # some minutes, most of them compiling

A tile is timed in SCOPE's scopes and in dense heads, after its results agreed with the shipped one's. For dq and dkv the time is
that of the whole backward pass, in which only that kernel's tile changes. The fastest ones go into
`kernels/scoped_attention/triton/tiles.py`.
"""

import itertools
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import cache, partial
from typing import Any

import torch

from farsight.benchmarks.ahead_of_time import candidates
from farsight.benchmarks.attention_rows import TOLERANCE, Case, relative
from farsight.benchmarks.gpu.part import Rows, milliseconds, part_parser
from farsight.cli import command, positive
from farsight.kernels.scoped_attention.triton.attention import triton_backward, triton_forward
from farsight.kernels.scoped_attention.triton.tiles import Tiles, tiles, use_tiles
from farsight.kernels.triton_rows import padded

KERNELS = ("forward", "dq", "dkv")


def passes(case: Case) -> dict[str, Callable[[], Any]]:
    """Both passes of Triton's attention, each of which returns its tensors."""
    (q, k, v), do = case.inputs()
    q, k, v = (x.detach() for x in (q, k, v))
    rest = (case.scopes_N(), None, None, 0, case.H**-0.5)
    o, lse = triton_forward(q, k, v, *rest)
    return {
        "forward": lambda: triton_forward(q, k, v, *rest),
        "backward": lambda: triton_backward(do, q, k, v, o, lse, *rest),
    }


def time_tile(
    rows: Rows, kernel: str, tile: Tiles, case: Case, runs: dict[str, Callable[[], Any]], expected: Any
) -> float:
    """Milliseconds of the kernel's pass.

    Raises:
        RuntimeError: results that differ from those of the shipped tile.
    """
    run = runs["forward" if kernel == "forward" else "backward"]
    with use_tiles(**{kernel: tile}):
        off = max(relative(x, y.double(), tuple(range(x.dim()))) for x, y in zip(run(), expected, strict=True))
        if not off <= TOLERANCE[case.dtype]:
            raise RuntimeError(f"results differ from the shipped tile's by {off:.1e} of the norm")
        return milliseconds(run, rows.device, *((1, 0) if rows.small else ()))


worth_timing = cache(partial(candidates, itemsize=torch.bfloat16.itemsize))


@command
def main(argv: list[str] | None = None) -> int:
    parser = part_parser("tile_search", __doc__)
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=KERNELS, help="default: all")
    parser.add_argument("--head-dims", nargs="+", type=positive, help="default: 128 64")
    parser.add_argument("--most", type=positive, default=6, help="tiles of each kernel that are timed (default: 6)")
    options = parser.parse_args(argv)
    rows = Rows(options, "tiles")
    T, (N, K), head_dims = (64, (2, 1), [32]) if rows.small else (32768, (32, 8), [128, 64])
    dtype = torch.bfloat16
    for head_dim, kind in itertools.product(options.head_dims or head_dims, ("exponential", "dense")):
        case = Case(T, kind, N, K, head_dim, dtype, rows.device)
        runs = passes(case)
        for kernel in options.kernels:
            shipped = tiles(kernel, padded(head_dim), dtype.itemsize, rows.major)
            expected = runs["forward" if kernel == "forward" else "backward"]()
            if rows.small:
                tried = [shipped, replace(shipped, stages=1)]
            else:
                tried = (
                    rows.attempt(f"{kernel}, {head_dim}", partial(worth_timing, kernel, head_dim, major=rows.major))
                    or []
                )
            for tile in tried[: options.most]:
                time = partial(time_tile, rows, kernel, tile, case, runs, expected)
                if (ms := rows.attempt(f"{kernel}, {head_dim}, {tile}", time)) is not None:
                    rows.add(
                        kernel=kernel, head_dim=head_dim, scopes=kind, T=T, shipped=tile == shipped, ms=ms, tile=asdict(tile),
                    )  # fmt: skip
    return rows.end()


if __name__ == "__main__":
    sys.exit(main())
