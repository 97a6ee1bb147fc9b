"""Tokens per second: preparing shards, and batches from shards and from raw text, beside other ways to do the same."""

import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from farsight.benchmarks.data.corpus import write_corpus
from farsight.configs.schema import Data, JsonlSource, ShardsSource
from farsight.data.loader import Loader
from farsight.data.prepare.write import Job, prepare
from farsight.data.shards.reader import Shards
from farsight.data.tokenizers.huggingface import HuggingFaceTokenizer

L = 4096
ROWS, MICRO = 8, 2


def measure(calls: dict[str, Callable[[], int]], rounds: int, clock: Callable[[], float]) -> dict[str, list[float]]:
    """Tokens per second of each call, which returns its tokens; they take turns."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start = clock()
            tokens = call()
            found[name].append(tokens / (clock() - start))
    return found


def row(what: str, found: dict[str, list[float]], ours: str, cores: int, **more: Any) -> dict[str, Any]:
    """A row of the table: our median beside those of the others."""
    medians = {name: statistics.median(speeds) for name, speeds in found.items()}
    others = {name: speed for name, speed in medians.items() if name != ours}
    return {
        "what": what, "tokens_per_second": medians[ours], "cores": cores,
        "spread": [min(found[ours]), max(found[ours])], "beside": others,
        "ratio": {name: medians[ours] / speed for name, speed in others.items()}, **more,
    }  # fmt: skip


def preparing(folder: Path, megabytes: int, rounds: int) -> Iterator[dict[str, Any]]:
    """`farsight prepare` from JSON lines beside `tokenizers` alone, which gets the same texts in memory; one process, one core."""
    path, texts, tokenizer = write_corpus(folder, megabytes)
    fast, out = tokenizer._fast, folder / "out"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"

    def ours() -> int:
        shutil.rmtree(out, ignore_errors=True)
        return prepare(Job(JsonlSource(path=str(path)), out), tokenizer, 1).tokens

    def limit() -> int:
        return sum(len(encoding.ids) for encoding in fast.encode_batch_fast(texts, add_special_tokens=False))

    ours()
    shards = Shards(out)
    for (_, start, shard, length), text in zip(shards.index.tolist(), texts, strict=True):
        if shards.tokens(shard, start, length).tolist() != fast.encode(text, add_special_tokens=False).ids:
            raise RuntimeError("the shards' ids are not the library's")
    yield row("prepare", measure({"ours": ours, "tokenizers": limit}, rounds, time.perf_counter), "ours", 1)


def loading(folder: Path, megabytes: int, rounds: int) -> Iterator[dict[str, Any]]:
    """Batches from shards, packed and masked, in CPU time; and from raw text beside torchtitan's loader and `datasets`."""
    path, texts, tokenizer = write_corpus(folder, megabytes)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    out = folder / "out"
    prepare(Job(JsonlSource(path=str(path)), out), tokenizer, 1)
    shards, raw = ShardsSource(path=str(out)), JsonlSource(path=str(path))
    reads = {name: micro_batches(source, tokenizer) for name, source in (("shards", shards), ("raw", raw))}
    first = {name: [next(batches) for _ in range(40)] for name, batches in reads.items()}
    for ours, theirs in zip(*first.values(), strict=True):
        for name in vars(ours):
            if not np.array_equal(getattr(ours, name), getattr(theirs, name)):
                raise RuntimeError(f"{name} from shards are not those from raw text")

    def drawn(batches: Iterator[Any], tokens: int) -> int:
        return sum(batch.inputs.size for batch in islice(batches, tokens // (MICRO * L))) if tokens else 0

    found = measure({"ours": lambda: drawn(reads["shards"], 40_000_000)}, rounds, time.process_time)
    yield row("batches from shards", found, "ours", 1)
    tokens = sum(len(fast.ids) for fast in tokenizer._fast.encode_batch_fast(texts)) // 2
    calls = {
        "ours": lambda: drawn(reads["raw"], tokens),
        "torchtitan": titan(path, tokenizer, folder, tokens),
        "datasets": hugging_face(path, tokenizer, tokens // 8),  # slow
    }
    for call in calls.values():
        call()
    yield row("batches from raw text", measure(calls, rounds, time.perf_counter), "ours", 1)
    reads["raw"] = micro_batches(raw, tokenizer, processes=2)
    yield row("batches from raw text, two processes", measure(calls, rounds, time.perf_counter), "ours", 2)


def micro_batches(source: Any, tokenizer: HuggingFaceTokenizer, processes: int = 0) -> Iterator[Any]:
    """The loader's rows, without its thread."""
    loader = Loader(
        Data(sources=(source,), reader_processes=processes), tokenizer, seq_len=L, vocab_size=tokenizer.vocab_size, global_batch_size=ROWS,
        micro_batch_size=MICRO, dp_rank=0, dp_world_size=1,
    )  # fmt: skip
    return (rows for rows, _ in loader._read({f"lane_{lane:05d}": "" for lane in range(ROWS)}))


def titan(path: Path, tokenizer: HuggingFaceTokenizer, folder: Path, tokens: int) -> Callable[[], int]:
    """torchtitan's own loader on the same file and tokenizer."""
    from datasets import load_dataset
    from torchtitan.components.tokenizer import HuggingFaceTokenizer as TitanTokenizer
    from torchtitan.hf_datasets import DatasetConfig, text_datasets

    text_datasets.DATASETS["corpus"] = DatasetConfig(
        path=str(path),
        loader=lambda place: load_dataset("json", data_files=place, split="train", streaming=True),
        sample_processor=lambda sample: sample["text"],
    )
    theirs = TitanTokenizer(str(folder))

    def call() -> int:
        data = text_datasets.HuggingFaceTextDataset("corpus", None, theirs, seq_len=L)
        return sum(labels.numel() for _, labels in islice(data, tokens // L))

    return call


def hugging_face(path: Path, tokenizer: HuggingFaceTokenizer, tokens: int) -> Callable[[], int]:
    """`datasets` with batched tokenising and packing, as transformers' example run_clm.py does it, streamed."""
    from datasets import load_dataset

    fast = tokenizer._fast

    def tokenised(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        return {"input_ids": [e.ids for e in fast.encode_batch(batch["text"], add_special_tokens=False)]}

    def packed(batch: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
        joined = list(chain.from_iterable(batch["input_ids"]))
        rows = [joined[i : i + L] for i in range(0, len(joined) - L + 1, L)]
        return {"input_ids": rows, "labels": [row.copy() for row in rows]}

    def call() -> int:
        data = load_dataset("json", data_files=str(path), split="train", streaming=True)
        data = data.map(tokenised, batched=True, remove_columns=["text"]).map(packed, batched=True).with_format("torch")
        return sum(row["labels"].numel() for row in islice(data, tokens // L))

    return call
