"""Plans of pipelines against PyTorch's schedules, and against calculations by hand."""

from types import SimpleNamespace

import pytest
import torch
from torch.distributed.pipelining.schedules import _ComputationType, get_schedule_class

from farsight.errors import ConfigError
from farsight.launch.plan.layout import ParallelLayout
from farsight.launch.plan.memory import rank_memory
from farsight.launch.plan.run import Run
from tests.launch.test_plan import small


def schedule_orders(name, pp, stages_per_rank, microbatches):
    """Each rank's actions in the order of PyTorch's schedule, one per slot; None while the rank waits."""
    orders = []
    for rank in range(pp):
        numbers = range(rank, pp * stages_per_rank, pp) if name != "ZBVZeroBubble" else (rank, 2 * pp - 1 - rank)
        stages = [
            SimpleNamespace(
                group_size=pp, group_rank=rank, group=None, num_stages=pp * stages_per_rank, stage_index=number,
                is_first=number == 0, is_last=number == pp * stages_per_rank - 1, stage_index_to_group_rank={},
                has_backward=True, submod=None, device=torch.device("cpu"),
            )
            for number in numbers
        ]  # fmt: skip
        orders.append(get_schedule_class(name)(stages, microbatches, scale_grads=False).pipeline_order[rank])
    return orders


def most_in_flight(order):
    """The most forward passes without a finished backward pass."""
    held = peak = 0
    for action in order:
        kind = None if action is None else action.computation_type
        held += kind is _ComputationType.FORWARD
        held -= kind in (_ComputationType.FULL_BACKWARD, _ComputationType.BACKWARD_WEIGHT)
        peak = max(peak, held)
    return peak


def interleaved(name, microbatches):
    p = {"pipeline_parallel_degree": 4, "pipeline_parallel_schedule": name}
    config = small(parallelism=p, architecture={"n_layers": 8}, training={"local_batch_size": microbatches})
    return ParallelLayout.of(config, 4)


@pytest.mark.parametrize(
    ("name", "microbatches"),
    [
        ("Interleaved1F1B", 4),
        ("Interleaved1F1B", 8),
        ("Interleaved1F1B", 16),
        ("InterleavedZeroBubble", 4),
        ("InterleavedZeroBubble", 8),
        ("InterleavedZeroBubble", 16),
        ("ZBVZeroBubble", 8),
        ("ZBVZeroBubble", 16),
    ],
)
def test_micro_batches_in_flight_are_the_schedules(name, microbatches):
    layout = interleaved(name, microbatches)
    orders = schedule_orders(name, 4, 2, microbatches)
    assert [layout.in_flight(rank) for rank in range(4)] == [most_in_flight(order) for order in orders]


@pytest.mark.parametrize("name", ["InterleavedZeroBubble", "ZBVZeroBubble"])
@pytest.mark.parametrize("microbatches", [4, 8, 16])
def test_bubbles_of_split_backward_passes_are_the_schedules(name, microbatches):
    """A forward pass and either part of a backward pass take one slot each; the first rank has no extra slots."""
    order = schedule_orders(name, 4, 2, microbatches)[0]
    assert interleaved(name, microbatches).bubble == pytest.approx(order.count(None) / len(order))


def test_a_folded_pipeline_with_few_micro_batches_holds_no_more_than_planned():
    layout = interleaved("ZBVZeroBubble", 4)
    assert [most_in_flight(order) for order in schedule_orders("ZBVZeroBubble", 4, 2, 4)] == [5, 6, 7, 8]
    assert [layout.in_flight(rank) for rank in range(4)] == [8, 8, 8, 8]


@pytest.mark.parametrize(
    ("name", "buffers"),
    # Of activations on all stages but the first, of gradients on all but the last; folded, rank 0 has both ends.
    [("1F1B", [1, 2, 2, 1]), ("Interleaved1F1B", [3, 4, 4, 3]), ("ZBVZeroBubble", [2, 4, 4, 4])],
)
def test_receive_buffers_of_a_pipeline(name, buffers):
    p = {"pipeline_parallel_degree": 4, "pipeline_parallel_schedule": name}
    config = small(parallelism=p, architecture={"n_layers": 8}, training={"local_batch_size": 8})
    layout = ParallelLayout.of(config, 4)
    one = 128 * 64 * 4  # a row of fp32
    received = [rank_memory(Run(config, layout), rank).caches["pipeline"] for rank in range(4)]
    assert received == [count * 8 * one for count in buffers]


def test_1f1b():
    p = {"pipeline_parallel_degree": 4}
    layout = ParallelLayout.of(small(parallelism=p, architecture={"n_layers": 8}, training={"local_batch_size": 12}), 4)
    assert [layout.in_flight(rank) for rank in range(4)] == [4, 3, 2, 1]
    assert layout.bubble == pytest.approx(3 / 15)
    with pytest.raises(ConfigError, match="2 micro-batches, and 1F1B needs one for each of its 4 stages"):
        ParallelLayout.of(small(parallelism=p, architecture={"n_layers": 8}), 4)
