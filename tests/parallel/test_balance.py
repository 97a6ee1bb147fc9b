"""The balance of visible pairs: counts against whole masks, arrangements against what they must not change, runs against one process."""

import itertools
import json
import random
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farsight.configs.load import load_config
from farsight.data.loader import build_loader
from farsight.data.packing import Rows
from farsight.data.tokenizers.tokenizer import BytesTokenizer
from farsight.kernels.scoped_attention import Visibility
from farsight.model.build import ModelConfig
from farsight.parallel.balance import PairBalance
from farsight.parallel.context import pieces
from tests.running import TINY, metrics, train

LAYOUTS = ["contiguous", "zigzag"]


def rows_of(rows: list[list[int]], first: int = 0) -> Rows:
    """Rows with documents of these lengths; tokens count up from `first`."""
    packed = Rows.empty(len(rows), sum(rows[0]))
    for row, lengths in enumerate(rows):
        ends = list(itertools.accumulate(lengths))
        starts = [end - length for end, length in zip(ends, lengths, strict=True) for _ in range(length)]
        packed.inputs[row] = np.arange(first, first + ends[-1])
        packed.labels[row] = packed.inputs[row] + 1
        packed.positions[row] = np.arange(ends[-1]) - starts
        packed.document_starts[row] = starts
        first += ends[-1]
    return packed


def pairs_by_masks(scopes: list[int], starts: np.ndarray, ranks: int, layout: str) -> list[int]:
    """Pairs of each rank's queries, counted in the mask of every head."""
    mask = Visibility(torch.tensor(scopes), torch.from_numpy(starts)).mask(starts.shape[1])
    of_queries = mask.sum((0, 1, 3))
    return [
        sum(int(of_queries[begin:end].sum()) for begin, end in pieces(rank, ranks, starts.shape[1], layout))
        for rank in range(ranks)
    ]


@st.composite
def cases(draw):
    ranks, layout = draw(st.sampled_from([1, 2, 3, 4])), draw(st.sampled_from(LAYOUTS))
    spans = draw(st.lists(st.integers(1, 8), min_size=1, max_size=4))
    of_micro_batches = [2 * ranks * span for span in sorted(spans, reverse=True)]
    tokens = of_micro_batches[0]
    scopes = draw(st.lists(st.integers(1, tokens + 3), min_size=1, max_size=6))
    cuts = st.sets(st.integers(1, max(1, tokens - 1)), max_size=8)

    def row(tokens: int) -> list[int]:
        edges = [0, *sorted(cut for cut in draw(cuts) if cut < tokens), tokens]
        return [b - a for a, b in itertools.pairwise(edges)]

    return ranks, layout, tokens, scopes, [[row(tokens) for _ in range(2)] for tokens in of_micro_batches]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(case=cases())
def test_pairs_and_arrangements(case):
    ranks, layout, tokens, scopes, step = case
    balance = PairBalance(scopes, tokens, ranks, layout)
    read = [rows_of(rows, first=1000 * number) for number, rows in enumerate(step)]
    for rows in read:
        assert balance.of_ranks(rows.document_starts).tolist() == pairs_by_masks(
            scopes, rows.document_starts, ranks, layout
        )
    arranged = balance(read)
    assert [rows.inputs.shape for rows in arranged] == [rows.inputs.shape for rows in read]

    def documents(step: list[Rows]) -> list[list[set]]:
        """Tokens, labels and positions of the documents of each row, rows in the order of their smallest token."""
        rows = []
        for micro_batch in step:
            for row in range(len(micro_batch.inputs)):
                starts = micro_batch.document_starts[row]
                assert (starts[starts] == starts).all()
                found = {}
                for at, start in enumerate(starts.tolist()):
                    token = (micro_batch.inputs[row, at], micro_batch.labels[row, at], micro_batch.positions[row, at])
                    found.setdefault(start, []).append(token)
                rows.append(sorted(found.values()))
        return sorted(rows)

    assert documents(arranged) == documents(read)
    again = balance(read)
    assert all((a.inputs == b.inputs).all() for a, b in zip(arranged, again, strict=True))
    if len(step) > 1:
        totals = [
            (len(starts), balance.pairs[np.bincount(starts)].sum())
            for rows in arranged
            for starts in rows.document_starts
        ]
        assert totals == sorted(totals, reverse=True)
    else:
        before, after = (balance.of_ranks(rows[0].document_starts).max() for rows in (read, arranged))
        assert after <= before or len(step[0]) > 1  # the second row makes up for the first


def test_the_search_finds_the_best_order_of_a_few_documents():
    for layout, lengths in itertools.product(LAYOUTS, [[40, 3, 5, 16], [24, 20, 10, 6, 4], [9, 9, 30, 16]]):
        balance = PairBalance([64, 7], 64, 2, layout)
        (found,) = balance([rows_of([lengths])])
        best = min(
            max(pairs_by_masks([64, 7], rows_of([[*order]]).document_starts, 2, layout))
            for order in itertools.permutations(lengths)
        )
        assert balance.of_ranks(found.document_starts).max() <= 1.02 * best


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> str:
    """A run on short documents of two sources."""
    folder, draw = tmp_path_factory.mktemp("short"), random.Random(0)
    for name, most in (("a", 40), ("b", 90)):
        texts = ["".join(draw.choices("abcdefgh ", k=draw.randint(1, most))) for _ in range(300)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    source = '{{ kind = "jsonl", path = "{}/{}.jsonl", packing = "best_fit" }}'
    sources = ", ".join(source.format(folder, name) for name in "ab")
    return re.sub(r"sources = .*", f"sources = [{sources}]", TINY)


@pytest.fixture(scope="module")
def one(config, tmp_path_factory):
    folder = tmp_path_factory.mktemp("one") / "run"
    train(folder, *SHORT, config=config)
    return folder


SHORT = ["--training.steps=4", "--training.global_batch_size=8", "--validation.enable=false"]


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (2, ["--parallelism.context_parallel_degree=2", "--training.local_batch_size=4"]),
        (
            4,
            ["--parallelism.context_parallel_degree=2", "--parallelism.context_parallel_load_balancer=contiguous",
             "--parallelism.data_parallel_shard_degree=2", "--training.local_batch_size=2"],
        ),
    ],
    ids=["cp", "cp-fsdp-accumulation"],
)  # fmt: skip
def test_a_balanced_run_equals_one_process(config, one, tmp_path, ranks, options):
    train(tmp_path / "run", *SHORT, *options, ranks=ranks, config=config)
    for a, b in zip(metrics(one), metrics(tmp_path / "run"), strict=True):
        for key in ("loss", "grad_norm"):
            assert b[key] == pytest.approx(a[key], rel=1e-5)
        assert [b[key] for key in ("tokens", "padding", "cut_documents")] == [
            a["tokens"],
            a["padding"],
            a["cut_documents"],
        ]
        assert a["padding"] > 0
        assert "imbalance" not in a
    assert metrics(one)[-1]["tokens"] < 4 * 8 * 64
    job = load_config(["--job.config_file", str(tmp_path / "run" / "config.toml")])
    found = metrics(tmp_path / "run")[0]["imbalance"]
    assert found == pytest.approx(imbalance(job, ranks // 2), rel=1e-9)
    assert found < imbalance(job, ranks // 2, arranged=False)


def imbalance(job, dp: int, arranged: bool = True) -> float:
    """That of the first step, from masks."""
    cp, layout = job.parallelism.context_parallel_degree, job.parallelism.context_parallel_load_balancer

    scopes = [scope for layer in ModelConfig.from_job(job).layers() for scope in layer.scopes]
    balance, pairs = PairBalance(scopes, job.training.seq_len, cp, layout), []
    for rank in range(dp):
        loader = build_loader(job, BytesTokenizer(), rank, dp)
        loader.arrange = balance if arranged else None
        batches = itertools.islice(loader, loader.micro_batches_per_step)
        pairs.append([pairs_by_masks(scopes, inputs["document_starts"].numpy(), cp, layout) for inputs, _ in batches])
    of_micro_batches = np.array(pairs).swapaxes(0, 1).reshape(-1, dp * cp)
    return float(of_micro_batches.max(1).sum() / of_micro_batches.mean(1).sum())
