"""Batches that one rank of each replica reads for all its ranks, against loaders that every rank reads for itself.

    torchrun --nproc_per_node 8 -m tests.parallel.replica_checks FOLDER

Eight ranks: tensor 2, context 2, data 2. Every comparison is with a loader of the rank's own, without a replica. Rank 0 prints
how many texts were tokenised, and by how many ranks, with the replica's loaders and with the ranks' own.
"""

import json
import sys
import threading
import time
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist

from farsight.configs.finetuning import FinetuneConfig, InstructionData, InstructionJsonl
from farsight.configs.schema import Architecture, Data, JobConfig, JsonlSource
from farsight.data.instructions.loader import build_instruction_loader, build_instruction_validation_loader
from farsight.data.loader import build_loader, build_validation_loader
from farsight.data.read_ahead import shared_loader
from farsight.data.replica import ALONE
from farsight.data.tokenizers.tokenizer import BytesTokenizer
from farsight.errors import DataError
from farsight.parallel.device import prepare_device
from farsight.parallel.meshes import ParallelDims
from farsight.parallel.ranks import on_every_rank
from farsight.parallel.replica import replica_of

L, G, MICRO, W = 64, 8, 2, 2
STEPS = 6


class Counting(BytesTokenizer):
    """Counts the texts that it encodes."""

    def __init__(self):
        self.texts, self.wait = 0, threading.Event()
        self.wait.set()

    def encode_array(self, text):
        self.wait.wait()
        self.texts += 1
        return super().encode_array(text)

    def encode_rendered(self, texts):
        self.texts += len(texts)
        return super().encode_rendered(texts)


def equal(left, right) -> bool:
    (a, labels), (b, others) = left, right
    return torch.equal(labels, others) and all(torch.equal(a[name], b[name]) for name in a | b)


def same_batches(shared, own, first: bool = False) -> None:
    """The next steps of both, with the state after each micro-batch; ranks are slow at different moments.

    In later iterations, `skipped` also counts what the earlier ones had read ahead.
    """
    mine = iter(own)
    for number, batch in enumerate(islice(shared, STEPS * own.micro_batches_per_step)):
        time.sleep(0.002 * ((number + dist.get_rank()) % 3))
        assert equal(batch, next(mine)), number
        assert shared.state_dict() == own.state_dict()
    assert shared.epochs == own.epochs
    assert not first or shared.skipped == own.skipped


def same_loader(name: str, replica, build, build_validation) -> dict:
    """Compares loaders for training and validation; returns the texts tokenised on each rank, shared and each its own."""
    counting, own_counting = Counting(), Counting()
    shared, own = shared_loader(lambda: build(counting), replica), build(own_counting)
    same_batches(shared, own, first=True)
    same_batches(shared, own)  # a new iteration goes on
    state = own.state_dict()
    texts = on_every_rank(lambda: (counting.texts, own_counting.texts))

    resumed = shared_loader(lambda: build(counting), replica), build(own_counting)
    for loader in resumed:
        loader.load_state_dict(state)
    same_batches(*resumed, first=True)
    for loader in resumed:
        loader.rewind()
    same_batches(*resumed)
    for loader in (shared, own, *resumed):
        loader.close()

    held_out = build_validation(counting, replica), build_validation(own_counting, ALONE)
    assert len(held_out[0]) == len(held_out[1]) > 0
    for _ in range(2):
        assert all(equal(a, b) for a, b in zip(*held_out, strict=True))
    return {name: {"replica": [n for n, _ in texts], "each rank": [n for _, n in texts]}}


def same_error(replica, config: JobConfig, data_rank: int, folder: Path) -> None:
    """Bad data ends every rank of the replica with the same message, after the same batches; so does a bad source."""
    rows = ["x" * 62] * 5 * G
    lines = [json.dumps({"text": text}) for text in rows] + ["nope"] * G
    path = folder / f"bad-{dist.get_rank()}.jsonl" if replica.reads else folder / "none"
    if replica.reads:
        path.write_text("\n".join(lines) + "\n")
    config.data = Data(sources=(JsonlSource(path=str(path)),), held_out=0.0)
    running = shared_loader(lambda: build_loader(config, Counting(), data_rank, W), replica)
    taken, message = 0, ""
    try:
        for _ in islice(running, 1000):
            taken += 1
    except DataError as error:
        message = str(error)
    assert "bad JSON" in message, message
    ends = on_every_rank(lambda: (replica.ranks[0], taken, message))
    assert all(end == ends[reader] for end in ends for reader in end[:1])

    config.data = Data(sources=(JsonlSource(path=str(folder / "missing.jsonl")),))
    try:
        shared_loader(lambda: build_loader(config, Counting(), data_rank, W), replica)
    except DataError as error:
        assert "missing.jsonl" in str(error)  # noqa: PT017  the other ranks wait for no assertion
    else:
        raise AssertionError("no error")


def closes_at_any_moment(replica, build) -> None:
    """While batches are on their way, and while the rank that reads is still looking for the next one."""
    for moment in range(3):
        counting = Counting()
        loader = shared_loader(lambda counting=counting: build(counting), replica)
        batches = iter(loader)
        for _ in range(2 * moment):
            next(batches)
        counting.wait.clear()  # the next document takes for ever
        time.sleep(0.02 * dist.get_rank())
        started = time.monotonic()
        if replica.reads:
            threading.Timer(0.3, counting.wait.set).start()
        loader.close()
        assert time.monotonic() - started < 4  # a thread that does not end is given up after five seconds
        assert not [t for t in threading.enumerate() if t.name == "data-prefetch"]


def main(folder: Path) -> None:
    prepare_device()
    dist.init_process_group("gloo")
    dims = ParallelDims(8, dp_shard=2, cp=2, tp=2)
    data_rank, replica = dims.need("batch").get_local_rank(), replica_of(dims)
    rows = on_every_rank(lambda: data_rank)
    assert replica.ranks == [rank for rank in range(8) if rows[rank] == data_rank]
    assert replica_of(ParallelDims(8, dp_replicate=2, dp_shard=4)) is ALONE

    job = JobConfig(
        data=Data(sources=(JsonlSource(path=str(folder / "texts.jsonl")),), held_out=0.2, on_bad_row="skip")
    )
    tuning = FinetuneConfig(
        data=InstructionData(sources=(InstructionJsonl(path=str(folder / "turns.jsonl")),), held_out=0.2)
    )
    for config in (job, tuning):
        config.architecture = Architecture(vocab_size=300)
        config.training.seq_len = config.validation.seq_len = 4 * L if config is tuning else L
        config.training.global_batch_size, config.training.local_batch_size = G, MICRO
        config.validation.steps, config.validation.local_batch_size = 2, MICRO
    counts = same_loader(
        "documents",
        replica,
        lambda counting: build_loader(job, counting, data_rank, W),
        lambda counting, of: build_validation_loader(job, counting, data_rank, W, of),
    ) | same_loader(
        "conversations",
        replica,
        lambda counting: build_instruction_loader(tuning, counting, data_rank, W),
        lambda counting, of: build_instruction_validation_loader(tuning, counting, data_rank, W, replica=of),
    )
    closes_at_any_moment(replica, lambda counting: build_loader(job, counting, data_rank, W))
    same_error(replica, job, data_rank, folder)
    if dist.get_rank() == 0:
        print(json.dumps(counts))
    print(f"rank {dist.get_rank()}: equal\n", end="")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
