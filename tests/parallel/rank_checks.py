"""Halo attention, the sharded loss and a sharded model on gloo ranks, against one process, and what recomputation repeats; run by
`test_context_parallel.py`.

    torchrun --nproc_per_node 4 -m tests.parallel.rank_checks

Every rank draws the same full tensors, keeps its part, and compares its outputs and gradients with its part of the
reference.
"""

import itertools

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._dynamo import register_backend

from farsight.configs.load import build_config
from farsight.configs.schema import Scope
from farsight.kernels.chunked_loss import chunked_cross_entropy
from farsight.kernels.scoped_attention import scoped_attention
from farsight.model.adapt.garfa import garfa_of, train_garfa
from farsight.model.build import ModelConfig, build_model
from farsight.model.position.scope import head_scopes
from farsight.parallel.context import SequenceLayout, reaches, received_bytes
from farsight.parallel.device import prepare_device
from farsight.parallel.halo import Context
from farsight.parallel.meshes import ParallelDims
from farsight.parallel.parallelize import parallelize
from tests.kernels.test_scoped_attention import documents, draw, sees
from tests.parallel.counting import Count

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
    visibility = sees(scopes, starts, slopes)
    exact_o = scoped_attention(*whole, visibility, backend="reference")
    exact = exact_o, *torch.autograd.grad(exact_o, whole, do)

    q, k, v = (context.own(x).detach().requires_grad_() for x in whole)
    exchange = context.exchange(k, v, scopes)
    o = exchange.attend(q, visibility, "banded")
    found = o, *torch.autograd.grad(o, (q, k, v), context.own(do))
    for name, a, b in zip(("o", "dq", "dk", "dv"), found, exact, strict=True):
        torch.testing.assert_close(a, context.own(b), rtol=1e-10, atol=1e-10, msg=lambda text, name=name: name + text)
    ranks, rank = context.group.size(), context.group.rank()
    planned = received_bytes(rank, ranks, T, reaches(scopes, K, T), context.layout, 4, 8)
    assert exchange.received_bytes == 2 * planned  # two rows


def check_traffic(context: Context) -> None:
    """Bytes received in a layer at 4,096 tokens, 16 heads on 4, four ranks: as planned, and as a fraction of an all-gather."""
    N, K, H, length = 16, 4, 8, 4096
    scopes = head_scopes(Scope(layout="group_balanced"), N, K, length, length)
    ranks, rank = context.group.size(), context.group.rank()
    k, v = torch.zeros(2, 1, length // ranks, K, H)
    received = torch.tensor(context.exchange(k, v, scopes).received_bytes)
    assert received == received_bytes(rank, ranks, length, reaches(scopes, K, length), context.layout, H, 4)
    dist.all_reduce(received, group=context.group)
    everything = ranks * (ranks - 1) * 2 * k.nbytes
    assert round(float(received / everything), 3) == {"contiguous": 0.160, "zigzag": 0.258}[context.layout]


def check_loss(group: dist.ProcessGroup) -> None:
    """The vocabulary sharded over the ranks, in chunks of a few tokens, against PyTorch's loss on the full vocabulary."""
    generator = torch.Generator().manual_seed(5)
    h = torch.randn(23, 6, generator=generator, dtype=torch.float64).requires_grad_()
    weight = (3 * torch.randn(20, 6, generator=generator, dtype=torch.float64)).requires_grad_()
    labels = torch.randint(0, 20, (23,), generator=generator)
    labels[::5] = -100
    exact = F.cross_entropy(h @ weight.T, labels, reduction="sum")
    exact_h, exact_weight = torch.autograd.grad(exact, (h, weight))
    own = weight.detach().chunk(group.size())[group.rank()].requires_grad_()
    for chunk in (4, 0):
        loss = chunked_cross_entropy(h, own, labels, chunk, vocabulary_group=group)
        dh, dw = torch.autograd.grad(loss, (h, own))
        dist.all_reduce(dh, group=group)
        for a, b in ((loss, exact), (dh, exact_h), (dw, exact_weight.chunk(group.size())[group.rank()])):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def check_logits() -> None:
    """A model sharded over four ranks returns all logits on each of them. Each rank has one of GARFA's heads."""
    config = build_config(
        {
            "architecture": {"vocab_size": 64, "dim": 32, "n_layers": 2, "n_heads": 8, "n_kv_heads": 4, "ffn_dim": 64},
            "position": {
                "heads": {"kind": "scope", "layout": "group_balanced"},
                "bias": {"kind": "alibi"},
                "garfa": {"layers": [{"layer": layer, "raw": [-3.0, -2.0, 0.0, 1.0]} for layer in (0, 1)]},
            },
            "training": {"seq_len": 32, "mixed_precision_param": "float32"},
            "parallelism": {"tensor_parallel_degree": 4, "data_parallel_shard_degree": 1},
            "activation_checkpoint": {"mode": "none"},
        }
    )
    whole, divided = (build_model(ModelConfig.from_job(config)) for _ in range(2))
    for model in (whole, divided):
        train_garfa(model, [1])
    whole.init_weights()
    dims = ParallelDims(4, tp=4)
    parallelize(divided, dims, config)
    divided.init_weights()
    tokens, positions = torch.arange(64).view(2, 32) * 7 % 64, torch.arange(32)[None]
    logits, expected = divided(tokens, positions), whole(tokens, positions)
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    assert garfa_of(divided) == garfa_of(whole) == config.position.garfa
    for model in (whole, divided):
        model(tokens, positions, labels=tokens).backward()
    found, exact = (model.layers["1"].attention.garfa.raw.grad for model in (divided, whole))
    torch.testing.assert_close(found.full_tensor(), exact, rtol=1e-4, atol=0)


LINEAR = {"wq", "wk", "wv", "wo", "w1", "w2", "w3"}
"""Linear layers of a block."""


def check_recomputation() -> None:
    """Two blocks over four context-parallel ranks, plain and compiled: what is compiled, what runs again, and the gradients."""
    attention = torch.ops.farsight.banded_attention.default
    exchange = torch.ops._c10d_functional.all_to_all_single.default
    compiled: set[str] = set()

    def backend(graph, inputs):
        compiled.update(name for node in graph.graph.nodes for name in LINEAR if f"_{name}_" in str(node.target))
        return graph

    register_backend(backend, name="names_of_layers")
    dims, exact = ParallelDims(4, cp=4), None
    for mode, compiles in (("none", False), ("full", True), ("selective", True)):
        config = build_config(
            {
                "architecture": {"vocab_size": 64, "dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 64},
                "position": {"heads": {"kind": "scope"}},
                "training": {"seq_len": 64, "mixed_precision_param": "float32"},
                "parallelism": {"context_parallel_degree": 4},
                "activation_checkpoint": {"mode": mode, "selective_ac_option": "attention"},
                "compile": {"enable": compiles, "backend": "names_of_layers"},
            }
        )  # fmt: skip
        model = build_model(ModelConfig.from_job(config))
        parallelize(model, dims, config)
        model.init_weights()
        tokens, positions = torch.arange(64)[None] * 7 % 64, torch.arange(64)[None]
        own = Context.of(dims, config).own
        with Count() as forward:
            loss = model(own(tokens), own(positions), labels=own(tokens.roll(-1)))
        with Count() as backward:
            loss.backward()
        once, again = forward.ran, backward.ran
        assert compiled == (LINEAR if compiles else set()), (mode, compiled)
        assert once[attention] > 0
        assert again[attention] == once[attention] * (mode == "full"), mode
        assert once[exchange] == 2
        assert again[exchange] == 2 + 2 * (mode == "full"), mode  # the gradients' own, and the forward pass's
        gradients = [p.grad.full_tensor() for p in model.parameters()]
        exact = exact or gradients
        for a, b in zip(gradients, exact, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        torch.compiler.reset()
        compiled.clear()


def main() -> None:
    prepare_device()
    dist.init_process_group("gloo")
    world = dist.group.WORLD
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    layouts: tuple[SequenceLayout, ...] = ("contiguous", "zigzag")
    slopes = torch.tensor([0.5, 0.25, 0.1, 0.0, 1.0, 2.0], dtype=torch.float64)
    for layout, group in itertools.product(layouts, (world, halves[dist.get_rank() // 2])):
        context = Context(group, layout)
        for scopes in SCOPES.values():
            check(context, scopes, None, None)
        for new_document in (1.0, 0.2, 0.03):
            check(context, SCOPES["mixed"], documents(2, T, new_document), slopes)
    for layout in layouts:
        check_traffic(Context(world, layout))
    check_loss(world)
    check_loss(halves[dist.get_rank() // 2])
    check_logits()
    check_recomputation()
    print(f"rank {dist.get_rank()}: equal")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
