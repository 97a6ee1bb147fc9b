"""One rank of each replica reads and tokenises; the others get the same batches, places and errors."""

import json
from itertools import product

import pytest

from farsight.parallel.meshes import ParallelDims
from farsight.parallel.replica import ranks_by_replica
from tests.running import forked


@pytest.mark.parametrize("degrees", [(1, 4, 1, 2), (2, 2, 1, 2), (2, 1, 3, 2), (3, 2, 2, 1), (1, 1, 1, 4)])
def test_ranks_of_a_replica_differ_in_all_but_the_rows(degrees):
    """Ranks are numbered with tensor parallelism innermost, then context, data and pipeline parallelism."""
    pp, dp, cp, tp = degrees
    dims = ParallelDims(pp * dp * cp * tp, dp_shard=dp, cp=cp, tp=tp, pp=pp)
    places = list(product(range(pp), range(dp), range(cp), range(tp)))
    assert ranks_by_replica(dims) == [[r for r, place in enumerate(places) if place[1] == d] for d in range(dp)]


def test_eight_ranks_take_what_two_read(tmp_path):
    """Tensor 2, context 2, data 2: batches, states, resuming, validation, errors and closing as if every rank read for itself."""
    texts = [{"text": f"{i} " * (1 + i % 40)} for i in range(60)] + [{"text": None}]
    turns = [{"instruction": f"{i} " * (1 + i % 3), "output": f"It is {i}."} for i in range(60)]
    for name, rows in (("texts", texts), ("turns", turns)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = forked([str(tmp_path)], tmp_path / "printed", ranks=8, script="tests/parallel/replica_checks.py")
    assert done.returncode == 0, done.stderr[-4000:]
    assert all(f"rank {rank}: equal" in done.stdout for rank in range(8))
    counts = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    for name, tokenised in counts.items():
        print(f"{name} tokenised by each of eight ranks: {tokenised['each rank']}; by replica: {tokenised['replica']}")
        readers = [rank for rank, count in enumerate(tokenised["replica"]) if count]
        assert readers == [0, 4]
        assert all(tokenised["each rank"])
        if name == "conversations":  # all are read at the start
            assert sum(tokenised["replica"]) * 4 == sum(tokenised["each rank"])
