"""Start-up and memory of a run over shards of 1 and of 20 GB.

The token files are sparse: they have the size, the header and the pages of real ones, but no blocks on the disk.
"""

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from farsight.benchmarks.data.corpus import lengths
from farsight.data.shards.layout import INDEX, MANIFEST, RECORD, TOKENIZER, TOKENS, Manifest, Shard
from farsight.data.tokenizers.tokenizer import BytesTokenizer

SHARD_TOKENS = 64 << 20
GIGABYTES = (1, 20)
STEPS = 300
CHILD = """
import gc, json, resource, sys, time
from itertools import islice
from farsight.configs.schema import Data, ShardsSource
from farsight.data.loader import Loader
from farsight.data.tokenizers.tokenizer import BytesTokenizer

gc.freeze()  # a garbage collection of PyTorch's objects takes 0.2 s, and falls into any of these runs
before = time.perf_counter()
loader = Loader(Data(sources=(ShardsSource(path=sys.argv[1]),)), BytesTokenizer(), seq_len=4096, vocab_size=258,
                global_batch_size=64, micro_batch_size=8, dp_rank=0, dp_world_size=8)
batches = iter(loader)
next(batches)
started = time.perf_counter() - before
for _ in islice(batches, int(sys.argv[2])):
    pass
resident = int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize() / 2**20
print(json.dumps({"seconds": started, "resident_mib": resident}))
loader.close()
"""


def start_up(folder: Path, megabytes: int, rounds: int) -> Iterator[dict[str, Any]]:
    """A rank of 8 opens the shards, takes its first batch and then 300 more; each time a process of its own."""
    for gigabytes in GIGABYTES:
        write_sparse(folder / str(gigabytes), gigabytes * 10**9)
    found: dict[int, list[dict[str, float]]] = {gigabytes: [] for gigabytes in GIGABYTES}
    for _ in range(rounds):
        for gigabytes, runs in found.items():
            runs.append(measured(folder, gigabytes))
    for gigabytes, runs in found.items():
        medians = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
        seconds = [run["seconds"] for run in runs]
        yield {"what": f"start-up with {gigabytes} GB", **medians, "cores": 1, "spread": [min(seconds), max(seconds)]}


def measured(folder: Path, gigabytes: int) -> dict[str, float]:
    command = [sys.executable, "-c", CHILD, str(folder / str(gigabytes)), str(STEPS)]
    ended = subprocess.run(command, check=True, capture_output=True, text=True)
    return dict(json.loads(ended.stdout.splitlines()[-1]))


def write_sparse(out: Path, size: int) -> None:
    """Shards of `size` bytes of 16-bit tokens, all 0, in documents with the lengths of the corpus."""
    (out / TOKENS).mkdir(parents=True)
    total = size // 2
    drawn = lengths(total // 900, 500)
    drawn = drawn[: int(np.searchsorted(np.cumsum(drawn), total))]
    ends = np.cumsum(drawn)
    shard_of = (ends - 1) // SHARD_TOKENS
    index = np.zeros(len(drawn), RECORD)
    index["tokens"], index["shard"] = drawn, shard_of
    first = np.searchsorted(shard_of, np.arange(shard_of[-1] + 1))
    index["start"] = ends - drawn - (ends - drawn)[first][shard_of]
    index["hash"] = np.random.default_rng(0).integers(0, 2**64, len(drawn), dtype=np.uint64)
    np.save(out / INDEX, index)
    shards = []
    for number in range(len(first)):
        rows = index[shard_of == number]
        tokens = int(rows["start"][-1] + rows["tokens"][-1])
        name = f"{number:05d}-000.npy"
        with open(out / TOKENS / name, "wb") as file:
            header = {"descr": "<u2", "fortran_order": False, "shape": (tokens,)}
            np.lib.format.write_array_header_1_0(file, header)
            file.truncate(file.tell() + 2 * tokens)
        shards.append(Shard(name, "sparse", len(rows), len(rows), tokens, 4 * tokens, 0, ""))
    BytesTokenizer().save(out / TOKENIZER)
    tokens = int(drawn.sum())
    manifest = Manifest(
        {"kind": "jsonl"}, {"fingerprint": "bytes", "vocab_size": 258}, "<u2", len(drawn), len(drawn), tokens, 0, {},
        4 * tokens, [], {}, "", shards,
    )  # fmt: skip
    (out / MANIFEST).write_text(json.dumps(asdict(manifest)))
