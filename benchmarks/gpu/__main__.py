"""Everything to check and to measure on a GPU, in parts that each take less than eight minutes and write a JSON file.

    make gpu                                          # or: python -m benchmarks.gpu
    python -m benchmarks.gpu correctness attention    # some parts, in this order
    python -m benchmarks.gpu --small                  # all of them on a CPU with small shapes, to see that they run
    python -m benchmarks.gpu.page runs/gpu            # the page docs/performance/gpu.md, from the files

It needs torch 2.11 or later, Triton 3.6 or later, the packages of pyproject.toml's dependencies, and for fine-tuning peft and
bitsandbytes. It installs nothing, so that it runs where nothing can be downloaded: --wheels names what this Python lacks.
"""

import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path

from farsight.cli import command, new_parser
from farsight.extras import REQUIRED

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 480
"""Seconds of a part."""
PARTS = {
    "correctness": ["gpu.correctness"],
    "attention": ["attention", "--passes", "forward", "forward+backward"],
    "layers": ["attention", "--passes", "training step"],
    "prefill": ["attention", "--passes", "prefill"],
    "tiles": ["gpu.tile_search"],
    "speeds": ["gpu.speeds"],
    "decode": ["attention", "--passes", "decode"],
    "decoding": ["gpu.decoding"],
    "pretraining-8k": ["gpu.pretraining", "--length", "8192"],
    "pretraining-32k": ["gpu.pretraining", "--length", "32768"],
    "pretraining-128k": ["gpu.pretraining", "--length", "131072"],
    "finetuning": ["gpu.finetuning"],
    "profile-8k": ["gpu.profiles", "--length", "8192"],
    "profile-128k": ["gpu.profiles", "--length", "131072"],
}
"""Module of `benchmarks` and options, most wanted first."""
MORE = {"peft": "fine-tuning", "bitsandbytes": "fine-tuning", "flash_attn_interface": "FlashAttention 3, on Hopper"}
"""Packages of single parts."""


def missing() -> dict[str, str]:
    """Packages that this Python lacks, and what they are for."""
    wanted = dict.fromkeys(sorted(REQUIRED | {"triton"}), "everything") | MORE
    return {name: what for name, what in wanted.items() if importlib.util.find_spec(name) is None}


def command_of(part: str, out: Path, small: bool) -> list[str]:
    """The command line of a part."""
    module, *options = PARTS[part]
    if small:
        options += ["--device", "cpu", "--quick"] if module == "attention" else ["--small"]
    return [sys.executable, "-m", f"benchmarks.{module}", *options, "--json", str((out / f"{part}.json").resolve())]


@command
def main(argv: list[str] | None = None) -> int:
    parser = new_parser("python -m benchmarks.gpu", __doc__)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], metavar="PART", help=f"default: {', '.join(PARTS)}")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/gpu"), metavar="DIR", help="folder of the files (default: %(default)s)"
    )
    parser.add_argument("--small", action="store_true", help="small shapes on the CPU")
    parser.add_argument("--wheels", action="store_true", help="list the packages that this Python lacks, and stop")
    options = parser.parse_args(argv)
    lacking = missing()
    for name, what in lacking.items():
        print(f"missing: {name} ({what})", flush=True)
    if options.wheels:
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    }
    status = 0
    for part in options.parts or PARTS:
        print(f"── {part}", flush=True)
        begin = time.perf_counter()
        try:
            ended = subprocess.run(
                command_of(part, options.out, options.small), cwd=ROOT, env=environment, timeout=LIMIT
            )
            outcome, failed = f"status {ended.returncode}", ended.returncode != 0
        except subprocess.TimeoutExpired:
            outcome, failed = f"stopped after {LIMIT} s: its file has the rows until then", True
        print(f"── {part}: {outcome}, {time.perf_counter() - begin:.0f} s", flush=True)
        status |= failed
    return status


if __name__ == "__main__":
    sys.exit(main())
