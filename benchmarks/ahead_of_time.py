"""Compiles the Triton kernels for GPUs that this machine lacks: registers, spills, shared memory and work of the tensor cores.

    python -m benchmarks.ahead_of_time forward dq dkv [--head-dims 64 128] [--table]      # --help: all options

It prints JSON lines, or the table of docs/performance/kernels.md. Kernels that are interpreted (TRITON_INTERPRET=1) can't be
compiled in the same process. `candidates` are the tiles that are worth timing on a GPU.
"""

import itertools
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from farsight.cli import command, new_parser, positive
from farsight.kernels import triton_head_rotation
from farsight.kernels.scoped_attention.triton import attention as triton_attention
from farsight.kernels.scoped_attention.triton import backward as triton_backward
from farsight.kernels.scoped_attention.triton import decode as triton_decode
from farsight.kernels.scoped_attention.triton import forward as triton_forward
from farsight.kernels.scoped_attention.triton.tiles import Tiles, tiles
from farsight.kernels.triton_rows import padded

KERNELS = {
    "forward": triton_forward.forward_kernel,
    "dq": triton_backward.dq_kernel,
    "dkv": triton_backward.dkv_kernel,
    "decode": triton_decode.decode_kernel,
    "delta": triton_backward.delta_kernel,
    "combine": triton_decode.combine_kernel,
    "rotate": triton_head_rotation.rotate_kernel,
    "rotate_by_tables": triton_head_rotation.rotate_by_tables_kernel,
    "rotate_backward": triton_head_rotation.rotate_backward_kernel,
}
GPUS = (80, 90, 100)
SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Most bytes of shared memory per program; the compiler does not check."""
REGISTERS = 65536  # of a multiprocessor
GROUPS = {"decode": (4, 32)}  # query heads per key-value head, if they change the block; else 4
OPTIONAL = {
    "forward": ("p_starts", "p_slopes"), "dq": ("p_starts", "p_slopes"), "dkv": ("p_until", "p_slopes"),
    "decode": ("p_starts", "p_slopes"), "rotate_backward": ("p_x", "x_strides"),
}  # fmt: skip
DESCRIBED = {"forward": ("p_k", "p_v"), "dq": ("p_k", "p_v"), "dkv": ("p_q", "p_do")}
TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
POINTERS = dict.fromkeys(
    ("p_scopes", "p_order", "p_positions"), "*i64"
)  # of the others, those that are not of the inputs' type:
POINTERS |= dict.fromkeys(
    ("p_starts", "p_until", "p_segments", "p_tokens", "p_heads", "p_first_parts", "p_first_slots"), "*i32"
)
POINTERS |= dict.fromkeys(
    ("p_lse", "p_delta", "p_slopes", "p_parts", "p_inv_freq", "p_factor", "p_cos", "p_sin"), "*fp32"
)


def compile_kernel(
    name: str, head_dim: int, dtype: torch.dtype, sm: int, group: int, given: bool, segments: bool, tile: Tiles | None
) -> Any:
    """The compiled kernel.

    Args:
        sm: the GPU's compute capability, times 10.
        given: whether the inputs that may be absent are there.
        segments: whether keys are in segments, for a kernel of attention's.
        tile: a kernel of attention's.
    """
    kernel, step = KERNELS[name], 0
    if tile:
        options = tile.options()
        step = tile.step(name)
    elif name == "decode":
        options = triton_decode.launch_options(dtype, group)
    elif name == "delta":
        options = {"BLOCK_M": triton_attention.DELTA_ROWS, "num_warps": 4, "num_stages": 3}
    elif name == "combine":
        options = {"BLOCK_P": triton_decode.PARTS_AT_ONCE, "num_warps": 4, "num_stages": 3}
    else:
        options = triton_head_rotation.block_sizes(head_dim) | {"num_stages": 3}
        options["num_warps"] = triton_head_rotation.NUM_WARPS
    launch = {key: options.pop(key) for key in ("num_warps", "num_stages")}
    constants: dict[str, Any] = {"GROUP": group, "HEAD_DIM": head_dim, **options}
    constants |= {} if given else dict.fromkeys(OPTIONAL[name])
    constants |= {} if segments else {"p_segments": None}
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    signature: dict[str, Any] = {}
    attributes = {}
    for position, argument in enumerate(kernel.arg_names):
        if argument in constants:
            signature[argument] = "constexpr"
        elif tile and tile.descriptors and argument in DESCRIBED[name]:
            signature[argument] = f"tensordesc<{TYPES[dtype]}[1,1,{step},{padded(head_dim)}]>"
        elif argument.startswith("p_"):
            signature[argument] = POINTERS.get(argument, "*" + TYPES[dtype])
            attributes[(position,)] = [["tt.divisibility", 16]]
        elif argument.startswith("scale"):
            signature[argument] = "fp32"
        elif argument.endswith("_strides"):  # multiples of the head dim
            signature[argument] = ("i32", "i32", "i32")
            attributes |= {(position, place): [["tt.divisibility", 16]] for place in range(3)}
        else:
            signature[argument] = "i32"
            if "_by_" in argument:
                attributes[(position,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", sm, 32), options=launch)


def registers_and_spills(ptx: str, sm: int) -> dict[str, int]:
    """Registers of a thread and bytes spilled, as the assembler reports them; the binary alone does not contain them."""
    assembler = Path(triton.__file__).parent / "backends/nvidia/bin" / ("ptxas-blackwell" if sm >= 100 else "ptxas")
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        gpu = _found(r"\.target\s+(\w+)", ptx)
        command = [assembler, "-v", f"--gpu-name={gpu}", file.name, "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    stores, loads = (int(_found(rf"(\d+) bytes spill {what}", said)) for what in ("stores", "loads"))
    return {"registers": int(_found(r"Used (\d+) registers", said)), "spills": stores + loads}


def tensor_work(compiled: Any) -> float | None:
    """Multiply-adds of the compiled tensor-core instructions over those of the kernel's products; None without products.

    It exceeds 1 where warps repeat each other's work because the block has too few rows for them. Instructions are those of
    the PTX, times the warps that issue them. On sm_100 one thread issues a product for the whole program, in tcgen05 blocks
    whose 64 rows take as long as 128.
    """
    warps, done, needed = compiled.metadata.num_warps, 0, 0
    for line in compiled.asm["ttgir"].splitlines():
        if not re.search(r"(tt\.dot|ttng\.warp_group_dot|ttng\.tc_gen5_mma) ", line):
            continue
        (m, k), (_, n) = (map(int, shape) for shape in re.findall(r"<(\d+)x(\d+)x[bt]?f\d+", line)[:2])
        needed += m * n * k
        if "tc_gen5_mma" in line:
            done += max(m, 128) * n * k
    for group, m, n, k in re.findall(r"(wg)?mma\.\S*?\.m(\d+)n(\d+)k(\d+)", compiled.asm["ptx"]):
        done += int(m) * int(n) * int(k) * (warps // 4 if group else warps)
    return done / needed if needed else None


def report(
    name: str,
    head_dim: int,
    dtype: torch.dtype,
    sm: int,
    group: int = 4,
    given: bool = True,
    segments: bool = False,
    tile: Tiles | None = None,
) -> dict[str, Any]:
    """The compiler's report on a kernel, with the shipped tile unless one is given.

    `programs` is how many a multiprocessor holds, by registers and shared memory. Other arguments as in `compile_kernel`.
    """
    if name in DESCRIBED:
        tile = tile or tiles(name, padded(head_dim), dtype.itemsize, sm // 10)
    compiled = compile_kernel(name, head_dim, dtype, sm, group, given, segments, tile)
    figures = registers_and_spills(compiled.asm["ptx"], sm)
    shared, warps = compiled.metadata.shared, compiled.metadata.num_warps
    by_registers = REGISTERS // (triton.cdiv(figures["registers"], 8) * 8 * 32 * warps)
    return {
        "kernel": name, "head_dim": head_dim, "dtype": str(dtype).removeprefix("torch."), "sm": sm, "group": group,
        "optional_inputs": given, "segments": segments, "tile": tile and asdict(tile), "shared": shared, **figures,
        "programs": min(by_registers, (SHARED_MEMORY[sm] + 1024) // (shared + 1024)), "tensor_work": tensor_work(compiled),
    }  # fmt: skip


def variants(name: str, head_dim: int) -> Iterator[tuple[str, int, torch.dtype, int, int, bool, bool]]:
    """The arguments of `report` for every way in which a shipped kernel is compiled."""
    # float16 compiles like bfloat16: the same instructions and sizes.
    for dtype, sm in itertools.product((torch.bfloat16, torch.float32), GPUS):
        for group in GROUPS.get(name, (4,)):
            yield name, head_dim, dtype, sm, group, True, False
        if name in DESCRIBED:
            yield name, head_dim, dtype, sm, 4, True, True
        # Documents and slopes take the most registers; without them, one GPU and type tell whether the kernels compile.
        if name in OPTIONAL and (dtype, sm) == (torch.bfloat16, 90):
            yield name, head_dim, dtype, sm, 4, False, False


def _grid(kernel: str, itemsize: int, major: int) -> Iterator[Tiles]:
    """Tiles that use the tensor cores well: each warp has its own rows of the block whose sums stay in registers."""
    rows_and_warps = ((64, 4), (128, 8), (128, 4)) if itemsize == 2 else ((16, 1), (32, 2), (64, 4))
    steps = (32, 64, 128) if itemsize == 2 else (16, 32)
    stages = (2, 3) if itemsize == 2 else (1, 2)
    for (rows, warps), step, stage in itertools.product(rows_and_warps, steps, stages):
        m, n = (step, rows) if kernel == "dkv" else (rows, step)
        yield Tiles(m, n, warps, stage, itemsize == 2 and major >= 9)


def reports(asked: Sequence[tuple[Any, ...]], processes: int | None) -> Iterator[dict[str, Any]]:
    """`report` of each tuple of arguments, in order, from processes of their own unless it is one."""
    if processes == 1:
        yield from itertools.starmap(report, asked)
        return
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        yield from pool.map(report, *zip(*asked, strict=True))


def candidates(kernel: str, head_dim: int, itemsize: int, major: int, processes: int | None = None) -> list[Tiles]:
    """The tiles worth timing for a kernel on a GPU of a major architecture, the shipped one first.

    The others compile without spills, fit, and do no needless tensor work: first those with most warps on a multiprocessor,
    then the largest. Compiling takes seconds a tile, in `processes`, by default as many as there are cores.
    """
    dtype = torch.bfloat16 if itemsize == 2 else torch.float32
    sm = max((sm for sm in GPUS if sm // 10 <= major), default=GPUS[0])
    shipped = tiles(kernel, padded(head_dim), itemsize, major)
    grid = [tile for tile in _grid(kernel, itemsize, major) if tile != shipped]
    rows = reports([(kernel, head_dim, dtype, sm, 4, True, False, tile) for tile in grid], processes)
    found = [(tile, row) for tile, row in zip(grid, rows, strict=True) if sound(row)]
    found.sort(key=lambda x: (-x[1]["programs"] * x[0].warps, -x[0].block_m * x[0].block_n))
    return [shipped, *(tile for tile, _ in found)]


def sound(row: dict[str, Any]) -> bool:
    """True if a row of `report` has no spills, does no needless tensor work, and fits the GPU's shared memory."""
    return not row["spills"] and row["tensor_work"] == 1 and row["shared"] <= SHARED_MEMORY[row["sm"]]


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: a line for each kernel, head dim, type and GPU, as every optional input is given.

    Registers and programs are those for a whole sequence, then those for keys in segments.
    """
    lines = [
        "| kernel | head dim | type | GPU | queries × keys, warps, stages | registers | spills | shared, KiB | programs | work |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    given = [row for row in rows if row["optional_inputs"]]
    whole, in_segments = ([row for row in given if row["segments"] is segments] for segments in (False, True))
    for row, other in zip(whole, in_segments, strict=True):
        tile = row["tile"]
        sizes = f"{tile['block_m']} × {tile['block_n']}, {tile['warps']}, {tile['stages']}{', descriptors' * tile['descriptors']}"
        registers, programs = (f"{row[name]} / {other[name]}" for name in ("registers", "programs"))
        spills, shared, work = (max(row[name], other[name]) for name in ("spills", "shared", "tensor_work"))
        cells = (
            row["kernel"], row["head_dim"], row["dtype"], f"sm_{row['sm']}", sizes, registers, spills,
            f"{shared / 1024:.0f}", programs, f"{work:.2f}",
        )  # fmt: skip
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def _found(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    assert found, f"no {pattern} in the compiler's output"
    return found.group(1)


@command
def main(argv: list[str] | None = None) -> None:
    parser = new_parser("python -m benchmarks.ahead_of_time", __doc__)
    parser.add_argument("kernels", nargs="+", choices=tuple(KERNELS), help="kernels to compile")
    parser.add_argument("--head-dims", nargs="+", type=positive, default=[64, 128], help="default: 64 128")
    parser.add_argument("--processes", type=positive, default=1, help="kernels compiled at a time; default: 1")
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--table", action="store_true", help="Markdown; only for forward, dq and dkv")
    shown.add_argument(
        "--candidates", type=int, metavar="MAJOR", help="tiles worth timing on GPUs of this major architecture"
    )
    args = parser.parse_args(argv)
    if not (DESCRIBED.keys() >= {*args.kernels}) and (args.table or args.candidates):
        parser.error("--table and --candidates are for forward, dq and dkv")
    asked = list(itertools.product(args.kernels, args.head_dims))
    if args.candidates:
        for (kernel, head_dim), itemsize in itertools.product(asked, (2, 4)):
            for tile in candidates(kernel, head_dim, itemsize, args.candidates, args.processes):
                print(kernel, head_dim, itemsize, tile, flush=True)
        return
    rows = reports([variant for names in asked for variant in variants(*names)], args.processes)
    if args.table:
        print(table(list(rows)))
    else:
        for row in rows:
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
