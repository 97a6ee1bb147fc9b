"""Instruction data of two sources, and loaders of it."""

import json
from itertools import islice

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from farsight.configs.finetuning import (
    FinetuneConfig,
    InstructionData,
    InstructionJsonl,
    InstructionParquet,
)
from farsight.configs.schema import Architecture
from farsight.data.instructions.loader import (
    InstructionLoader,
    build_instruction_loader,
)
from farsight.data.tokenizers.tokenizer import BytesTokenizer

BYTES = BytesTokenizer()
L, G = 512, 8


def alpaca(number: int, name: str = "a") -> dict:
    return {"instruction": f"{name} {number} " * (1 + number % 7), "output": f"It is {number}." * (1 + number % 5)}


def write(path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two sources of 60 and 20 conversations."""
    folder = tmp_path_factory.mktemp("instructions")
    write(folder / "a.jsonl", [alpaca(i) for i in range(60)])
    turns = [
        [
            {"from": "human", "value": f"b{i}"},
            {"from": "gpt", "value": "x" * i + "!"},
            {"from": "human", "value": "?"},
            {"from": "gpt", "value": "yes"},
        ]
        for i in range(20)
    ]
    pq.write_table(pa.table({"conversations": turns}), folder / "b.parquet", row_group_size=7)
    return folder


@pytest.fixture(scope="module")
def data(folder) -> InstructionData:
    sources = (InstructionJsonl(path=str(folder / "a.jsonl")), InstructionParquet(path=str(folder / "b.parquet")))
    return InstructionData(sources=sources, seed=3, held_out=0.0)


def job(data: InstructionData, micro: int = 2, **changes) -> FinetuneConfig:
    config = FinetuneConfig(data=data)
    config.architecture = Architecture(vocab_size=300)
    config.training.seq_len = config.validation.seq_len = changes.get("seq_len", L)
    config.training.global_batch_size = changes.get("global_batch_size", G)
    config.training.local_batch_size = config.validation.local_batch_size = micro
    return config


def build(data: InstructionData, rank: int = 0, ranks: int = 1, micro: int = 2, **changes) -> InstructionLoader:
    return build_instruction_loader(job(data, micro, **changes), BYTES, rank, ranks)


def one_row(folder, name: str, row: dict, **settings) -> InstructionData:
    return InstructionData(sources=(InstructionJsonl(path=write(folder / name, [row])),), held_out=0.0, **settings)


def micro_batches(loaders: list[InstructionLoader], steps: int) -> list[list[dict[str, torch.Tensor]]]:
    """All ranks' micro-batches of each of the next steps, rank by rank."""
    of_ranks = [list(islice(loader, steps * loader.micro_batches_per_step)) for loader in loaders]
    return [
        [
            inputs | {"labels": labels}
            for loader, of_rank in zip(loaders, of_ranks, strict=True)
            for inputs, labels in of_rank[
                step * loader.micro_batches_per_step : (step + 1) * loader.micro_batches_per_step
            ]
        ]
        for step in range(steps)
    ]


def global_batches(loaders: list[InstructionLoader], steps: int) -> list[dict[str, torch.Tensor]]:
    """The next global batches of packed rows, assembled from all ranks' micro-batches."""
    return [{name: torch.cat([one[name] for one in own]) for name in own[0]} for own in micro_batches(loaders, steps)]
