"""Halo attention on gloo ranks against the reference over the whole sequence; `test_context_parallel.py` starts it.

    torchrun --nproc_per_node 4 -m tests.context_ranks

Every rank draws the same whole tensors, keeps its part, and compares its outputs and gradients with its part of the
reference's.
"""

import itertools

import torch
import torch.distributed as dist

from kernels.scoped_attention import scoped_attention
from parallel.context import Layout, reaches, received_bytes
from parallel.halo import Context
from tests.test_scoped_attention import documents, draw

T, N, K = 96, 6, 3
SCOPES = {
    "mixed": [1, 5, 3, 2, 96, 40],
    "alike": [7] * 6,
    "dense": [2**31 - 1] * 6,
    "one token": [1] * 6,
    "over several ranks": [30, 30, 60, 61, 10, 25],
}


def check(context: Context, scopes: list[int], starts, slopes) -> None:
    whole, do = draw(B=2, Lq=T, N=N, K=K, H=4, seed=3)
    scopes_N = torch.tensor(scopes)
    exact_o = scoped_attention(*whole, scopes_N, starts, slopes, backend="reference")
    exact = exact_o, *torch.autograd.grad(exact_o, whole, do)

    q, k, v = (context.own(x).detach().requires_grad_() for x in whole)
    exchange = context.exchange(k, v, scopes)
    o = exchange.attend(q, scopes_N, starts, slopes, "banded")
    found = o, *torch.autograd.grad(o, (q, k, v), context.own(do))
    for name, a, b in zip(("o", "dq", "dk", "dv"), found, exact, strict=True):
        torch.testing.assert_close(a, context.own(b), rtol=1e-10, atol=1e-10, msg=lambda text, name=name: name + text)
    ranks, rank = context.group.size(), context.group.rank()
    planned = received_bytes(rank, ranks, T, reaches(scopes, K, T), context.layout, 4, 8)
    assert exchange.received_bytes == 2 * planned  # two rows


def main() -> None:
    dist.init_process_group("gloo")
    world = dist.group.WORLD
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    layouts: tuple[Layout, ...] = ("contiguous", "zigzag")
    slopes = torch.tensor([0.5, 0.25, 0.1, 0.0, 1.0, 2.0], dtype=torch.float64)
    for layout, group in itertools.product(layouts, (world, halves[dist.get_rank() // 2])):
        context = Context(group, layout)
        for scopes in SCOPES.values():
            check(context, scopes, None, None)
        for new_document in (1.0, 0.2, 0.03):
            check(context, SCOPES["mixed"], documents(2, T, new_document), slopes)
    print(f"rank {dist.get_rank()}: equal")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
