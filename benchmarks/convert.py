"""Speed and memory of conversion in both directions, compared with a plain copy of the same files.

    python -m benchmarks.convert [--width 1024] [--json F]

A sharded Llama directory of random bf16 weights is made first, with the 8B model's 32 layers and vocabulary and hidden
sizes scaled to `--width` (4096 is the 8B model itself, 16 GB). Each step runs in a process of its own, as its user would
run it; the round trip has to give back the same bytes. Peak memory is that process's largest resident set; the share of
Python and torch themselves is reported separately.
"""

import hashlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from tqdm import tqdm

from farsight import cli
from farsight.checkpoints.model_dir.api import write_model_dir
from farsight.cli import above_zero, new_parser, positive
from farsight.configs.schema import Architecture, Position, Rope
from farsight.model.build import ModelConfig, build_model
from farsight.outputs import add_json_option, write_json

GB = 10**9


def make_model_dir(out: Path, width: int, shard_bytes: int) -> None:
    """A directory of the 8B shape at another width, without our own files, as from a hub."""
    architecture = Architecture(
        vocab_size=128256,
        dim=width,
        n_layers=32,
        n_heads=32,
        n_kv_heads=8,
        head_dim=width // 32,
        ffn_dim=width * 7 // 2,
    )
    config = ModelConfig(architecture, Position(rotary=Rope(theta=500000.0)), trained_length=8192)
    with torch.device("meta"):
        tensors = {name: p.to(torch.bfloat16) for name, p in build_model(config).named_parameters()}
    generator = torch.Generator().manual_seed(0)

    def read(name: str) -> torch.Tensor:
        return torch.empty(tensors[name].shape, dtype=torch.bfloat16).normal_(std=0.02, generator=generator)

    write_model_dir(out, config, tensors, read, shard_bytes=shard_bytes)
    (out / "farsight.json").unlink()


def digests(folder: Path) -> dict[str, str]:
    """Tensor name → hash of its bytes."""
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  safe_open is not a dict
                data = file.get_tensor(name).reshape(-1).view(torch.uint8).numpy()
                found[name] = hashlib.blake2b(data.data).hexdigest()
    return found


_PEAK = (
    "import atexit, re; atexit.register(lambda: print(re.search('VmHWM:.*', open('/proc/self/status').read())[0]))\n"
)
_CONVERT = "from farsight.checkpoints.convert.__main__ import main; main()"


def run(code: str, *arguments: str) -> tuple[float, int]:
    """Seconds and largest resident set in bytes of a Python process of its own (Linux).

    The process reads its own high-water mark: the one that `wait4` gives starts at this process's.
    """
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", _PEAK + code, *arguments], stdout=subprocess.PIPE, text=True, check=True
    )
    return time.perf_counter() - started, int(done.stdout.splitlines()[-1].split()[1]) * 1024


def measure(width: int, shard_bytes: int, rounds: int, folder: Path) -> dict[str, Any]:
    """Medians over `rounds`, the four kinds of step in turn."""
    source, checkpoint, back, copy = (folder / name for name in ("source", "checkpoint", "back", "copy"))
    make_model_dir(source, width, shard_bytes)
    expected = digests(source)
    shards = [path.stat().st_size for path in source.glob("*.safetensors")]
    _, bare = run("import farsight.checkpoints.convert.from_hf, farsight.checkpoints.convert.to_hf")
    convert = [_CONVERT]
    commands = {
        "from-hf": [*convert, "from-hf", str(source), str(checkpoint), "--dtype", "bfloat16"],
        "to-hf": [*convert, "to-hf", str(checkpoint), str(back)],
        "copy": [f"import shutil; shutil.copytree({str(source)!r}, {str(copy)!r})"],
    }
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    peaks: dict[str, list[int]] = {name: [] for name in commands}
    for _ in tqdm(range(rounds), unit="round", disable=not sys.stderr.isatty()):
        for name, command in commands.items():
            taken, peak = run(*command)
            os.sync()
            seconds[name].append(taken)
            peaks[name].append(peak)
        if digests(back) != expected:
            raise RuntimeError("what came back differs from what went in")
        for path in (checkpoint, back, copy):
            shutil.rmtree(path)
    rows = [
        {
            "what": name,
            "gb_per_second": sum(shards) / GB / statistics.median(seconds[name]),
            "seconds": statistics.median(seconds[name]),
            "peak_bytes": max(peaks[name]),
            "peak_over_largest_shard": max(peaks[name]) / max(shards),
        }
        for name in commands
    ]
    return {
        "rows": rows, "width": width, "bytes": sum(shards), "shards": len(shards), "largest_shard": max(shards),
        "bare_process_bytes": bare, "rounds": rounds, "torch": torch.__version__,
    }  # fmt: skip


@cli.command
def main(arguments: list[str] | None = None) -> None:
    parser = new_parser("python -m benchmarks.convert", __doc__)
    add = parser.add_argument
    add("--width", type=positive, default=1024, help="hidden size, a multiple of 64 (default: 1024)")
    add("--shard-gb", type=above_zero, default=5.0, help="size of a shard in GB (default: 5)")
    add("--rounds", type=positive, default=3, help="runs of each (default: 3)")
    add("--folder", type=Path, help="work in a new folder in this one (default: the system's temporary)")
    add_json_option(parser)
    options = parser.parse_args(arguments)
    if options.width < 64 or options.width % 64:
        parser.error(f"--width {options.width} must be a multiple of 64: 32 heads of an even size")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        result = measure(options.width, int(options.shard_gb * GB), options.rounds, Path(folder))
    print(
        f"{result['bytes'] / GB:.2f} GB in {result['shards']} shards, the largest {result['largest_shard'] / GB:.2f} GB; "
        f"a bare process takes {result['bare_process_bytes'] / GB:.2f} GB"
    )
    print(f"{'':<10}{'GB/s':>8}{'seconds':>10}{'peak GB':>10}{'of largest shard':>18}")
    for row in result["rows"]:
        print(
            f"{row['what']:<10}{row['gb_per_second']:>8.2f}{row['seconds']:>10.1f}{row['peak_bytes'] / GB:>10.2f}"
            f"{row['peak_over_largest_shard']:>17.2f}x"
        )
    write_json(options.json, result)


if __name__ == "__main__":
    main()
