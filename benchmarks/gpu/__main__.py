"""Everything to check and to measure on a GPU, in parts that each take less than eight minutes and write a JSON file.

    make gpu                                          # or: python -m benchmarks.gpu
    python -m benchmarks.gpu --check                  # what this machine has and lacks for it
    python -m benchmarks.gpu correctness attention    # some parts, in this order
    python -m benchmarks.gpu --small                  # all of them on a CPU with small shapes, to see that they run
    python -m benchmarks.gpu.page runs/gpu            # the page docs/performance/gpu.md, from the files

It needs torch 2.11 or later, Triton 3.6 or later, the packages of pyproject.toml's dependencies, and for fine-tuning peft and
bitsandbytes. It installs nothing, so that it runs where nothing can be downloaded.
"""

import getpass
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import packages_distributions, version
from importlib.util import find_spec
from pathlib import Path

from farsight.benchmarks.gpu import limits
from farsight.cli import command, new_parser
from farsight.errors import UserError
from farsight.extras import REQUIRED, install_command
from farsight.outputs import write_json
from farsight.process import EXIT_INTERRUPTED, signals_to
from farsight.units import GIB

ROOT = Path(__file__).resolve().parents[2]
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
SETUP = "make setup"
PACKAGES = dict.fromkeys(sorted(REQUIRED | {"triton"}), ("everything", SETUP)) | {
    "peft": ("finetuning", install_command("finetune")),
    "bitsandbytes": ("finetuning", install_command("finetune")),
    "flash_attn_interface": (
        "FlashAttention 3, on Hopper",
        "build it from the folder hopper of FlashAttention's source",
    ),
    "flash_attn": ("the backend flash", install_command("gpu")),
}
"""Modules: the parts that need them, and how to install them."""


def missing() -> dict[str, str]:
    """Lines about the packages that this Python lacks, by module."""
    return {
        name: f"{name.replace('_', '-')}: missing, for {what}: {how}"
        for name, (what, how) in PACKAGES.items()
        if find_spec(name) is None
    }


def why_no_gpu() -> str | None:
    """Says that PyTorch can use no GPU here, and why if that is known; None if it can."""
    import torch

    from farsight.parallel.device import unusable_gpu

    if torch.cuda.is_available():
        return None
    return unusable_gpu() or "PyTorch sees no GPU here. To see that all parts run, use --small, on the CPU."


def check() -> int:
    """Prints what is there for the parts, and what is missing. The status is 1 if no part can run."""
    lacking = missing()
    names = packages_distributions()
    for name in PACKAGES:
        package = names.get(name, [None])[0]
        found = f"{package}: found {version(package)}" if package else f"{name}: found"
        print(lacking.get(name) or found)
    if "torch" in lacking:
        return 1
    import torch

    print(f"PyTorch is built for {f'CUDA {torch.version.cuda}' if torch.version.cuda else 'CPUs'}")
    if (why := why_no_gpu()) is not None:
        print(why)
        return 1
    gpu = torch.cuda.get_device_properties()
    print(f"GPU: {gpu.name}, {gpu.total_memory / GIB:.1f} GiB, capability {gpu.major}.{gpu.minor}, driver {_driver()}")
    return int(any(PACKAGES[name][1] == SETUP for name in lacking))


def _driver() -> str:
    with suppress(OSError, subprocess.CalledProcessError):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    return "unknown"


def command_of(part: str, out: Path, small: bool) -> list[str]:
    """The command line of a part."""
    module, *options = PARTS[part]
    if module == "attention":
        options += [
            "--seconds",
            str(limits.START),
            *(("--device", "cpu", "--quick") if small else ("--device", "cuda")),
        ]
    elif small:
        options.append("--small")
    return [sys.executable, "-m", f"benchmarks.{module}", *options, "--json", str((out / f"{part}.json").resolve())]


def run_part(command: Sequence[str], environment: Mapping[str, str], limit: float) -> int | None:
    """The exit status; None if it was stopped after `limit` seconds. Its processes and its temporary files go in any case."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        own = {**environment, "TMPDIR": temporary}
        process = subprocess.Popen(command, cwd=ROOT, env=own, start_new_session=True)
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def outcome_of(path: Path, part: str, small: bool, status: int | None) -> str:
    """How a part ended, which its file says too, even if the part could not write one."""
    found = json.loads(path.read_text()) if path.is_file() else {"part": part, "small": small, "rows": []}
    outcome = f"stopped after {limits.PART:g} s" if status is None else f"ended with status {status}"
    if found.get("outcome") != "ended":
        write_json(path, found | {"outcome": outcome})
        return outcome
    return "ended" if status == 0 else f"{outcome}, failed rows: {len(found['failed'])}"


@command
def main(argv: list[str] | None = None) -> int:
    parser = new_parser("python -m benchmarks.gpu", __doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"default: {', '.join(PARTS)}")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="folder of the files (default: runs/gpu, with --small runs/gpu-small)"
    )
    parser.add_argument("--small", action="store_true", help="small shapes on the CPU")
    parser.add_argument(
        "--check", action="store_true", help="show this machine's GPU, packages and what is missing, and stop"
    )
    options = parser.parse_args(argv)
    for part in options.parts:
        if part not in PARTS:
            parser.error(f"{part} is none of the parts {', '.join(PARTS)}")
    if options.check:
        return check()
    for line in missing().values():
        print(line, flush=True)
    if not options.small and (why := why_no_gpu()) is not None:
        raise UserError(why)
    out = options.out or Path("runs/gpu-small" if options.small else "runs/gpu")
    out.mkdir(parents=True, exist_ok=True)
    # The defaults of the Makefile and of PyTorch: a part's own temporary folder would lose compiled kernels to the next part.
    compiled = Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}"
    defaults = {"OMP_NUM_THREADS": "2", "TORCHINDUCTOR_CACHE_DIR": str(compiled)}
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = defaults | os.environ | {"PYTHONPATH": path}
    outcomes = {}
    with signals_to({signal.SIGTERM: lambda *_: sys.exit(EXIT_INTERRUPTED)}):
        for part in options.parts or PARTS:
            print(f"── {part}", flush=True)
            begin, file = time.perf_counter(), out / f"{part}.json"
            file.unlink(missing_ok=True)
            status = run_part(command_of(part, out, options.small), environment, limits.PART)
            outcomes[part] = outcome_of(file, part, options.small, status)
            print(f"── {part}: {outcomes[part]}, {time.perf_counter() - begin:.0f} s", flush=True)
    bad = [f"{part} ({outcome})" for part, outcome in outcomes.items() if outcome != "ended"]
    print(
        f"\n{len(outcomes) - len(bad)} of {len(outcomes)} parts without a fault{'; not ' * bool(bad)}{', '.join(bad)}"
    )
    print(f"Files: {out}. Next: {sys.executable} -m benchmarks.gpu.page {out}")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
