"""Compiles a Triton kernel for GPUs that this machine lacks; prints registers, spills and shared memory as JSON lines.

    python -m tests.kernels.triton_ahead_of_time forward|dq|dkv|decode|delta|combine|head_rotation HEAD_DIM …

It runs in a separate process, because the tests' process may have the kernels interpreted.
"""

import itertools
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from farsight.kernels import triton_head_rotation
from farsight.kernels.scoped_attention.triton import (
    attention as triton_attention,
)
from farsight.kernels.scoped_attention.triton import (
    backward as triton_backward,
)
from farsight.kernels.scoped_attention.triton import (
    decode as triton_decode,
)
from farsight.kernels.scoped_attention.triton import (
    forward as triton_forward,
)
from farsight.kernels.scoped_attention.triton.attention import tiles
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
TOGETHER = {"head_rotation": ("rotate", "rotate_by_tables", "rotate_backward")}
GROUPS = {"decode": (4, 32)}  # query heads per key-value head, if they change the block; else 4
OPTIONAL = {
    "forward": ("p_starts", "p_slopes"), "dq": ("p_starts", "p_slopes"), "dkv": ("p_starts", "p_until", "p_slopes"),
    "decode": ("p_starts", "p_slopes"), "rotate_backward": ("p_x", "x_strides"),
}  # fmt: skip
TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
POINTERS = dict.fromkeys(
    ("p_scopes", "p_order", "p_positions"), "*i64"
)  # of the others, those that are not of the inputs' type:
POINTERS |= dict.fromkeys(("p_starts", "p_until", "p_tokens", "p_heads", "p_first_parts", "p_first_slots"), "*i32")
POINTERS |= dict.fromkeys(
    ("p_lse", "p_delta", "p_slopes", "p_parts", "p_inv_freq", "p_factor", "p_cos", "p_sin"), "*fp32"
)


def compile_kernel(name: str, head_dim: int, dtype: torch.dtype, sm: int, group: int, given: bool = True):
    """`given`: whether the inputs that may be absent are there."""
    kernel = KERNELS[name]
    if name == "decode":
        options = triton_decode.launch_options(dtype, group)
    elif name == "delta":
        options = {"BLOCK_M": triton_attention.DELTA_ROWS, "num_warps": 4, "num_stages": 3}
    elif name == "combine":
        options = {"BLOCK_P": triton_decode.PARTS_AT_ONCE, "num_warps": 4, "num_stages": 3}
    elif name.startswith("rotate"):
        options = triton_head_rotation.block_sizes(head_dim) | {"num_stages": 3}
        options["num_warps"] = triton_head_rotation.NUM_WARPS
    else:
        options = tiles(name, padded(head_dim), dtype.itemsize, sm // 10).options()
    launch = {key: options.pop(key) for key in ("num_warps", "num_stages")}
    constants = {"GROUP": group, "HEAD_DIM": head_dim, **options}
    constants |= {} if given else dict.fromkeys(OPTIONAL[name])
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    signature, attributes = {}, {}
    for position, argument in enumerate(kernel.arg_names):
        if argument in constants:
            signature[argument] = "constexpr"
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
    """Registers and spills as the assembler reports them; the binary alone does not contain them."""
    target = re.search(r"\.target\s+(\w+)", ptx).group(1)
    assembler = Path(triton.__file__).parent / "backends/nvidia/bin" / ("ptxas-blackwell" if sm >= 100 else "ptxas")
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [assembler, "-v", f"--gpu-name={target}", file.name, "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    stores, loads = (int(re.search(rf"(\d+) bytes spill {what}", said).group(1)) for what in ("stores", "loads"))
    return {"registers": int(re.search(r"Used (\d+) registers", said).group(1)), "spills": stores + loads}


def main() -> None:
    asked, *head_dims = sys.argv[1:]
    # float16 compiles like bfloat16: the same instructions and sizes.
    for name, head_dim, dtype, sm in itertools.product(
        TOGETHER.get(asked, (asked,)), map(int, head_dims), (torch.bfloat16, torch.float32), (80, 90, 100)
    ):
        # Documents and slopes take the most registers; without them, one GPU and type tell whether the kernels compile.
        bare = name in OPTIONAL and (dtype, sm) == (torch.bfloat16, 90)
        for group, given in [*((group, True) for group in GROUPS.get(name, (4,))), *[(4, False)] * bare]:
            compiled = compile_kernel(name, head_dim, dtype, sm, group, given)
            report = {"kernel": name, "head_dim": head_dim, "dtype": str(dtype).removeprefix("torch."), "sm": sm}
            report |= {"group": group, "optional_inputs": given, "shared": compiled.metadata.shared}
            print(json.dumps(report | registers_and_spills(compiled.asm["ptx"], sm)), flush=True)


if __name__ == "__main__":
    main()
