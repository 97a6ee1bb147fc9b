"""A decoding step as a CUDA graph would replay it: the operators of one step, recorded with the tensors that they were given.

No graph can be captured on a CPU. `Recorded` stands in: it runs a step once, keeping each operator with its arguments, and
replays these for later tokens. Memory stays where it was and numbers keep their values, as in a CUDA graph, so that a position
computed in Python would give wrong logits. Reading a tensor's values on the host fails, as it does in a capture. Attention is
the Triton kernel that GPUs run, interpreted, or, which is faster, a few tensor operators in its place.
"""

from itertools import accumulate
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from farsight.configs.finetuning import Base
from farsight.errors import ConfigError
from farsight.inference import decoder as decoder_module
from farsight.inference import step as step_module
from farsight.inference.decoder import Decoder
from farsight.inference.extend import parse_extension
from farsight.inference.generate.completions import generate
from farsight.inference.sampling import GREEDY, Sampling
from farsight.inference.step import Step, written
from farsight.kernels.scoped_attention.triton import decode as triton_decode
from farsight.model.adapt.quantized import quantize_linears
from farsight.parallel.tensor import shard_for_decoding
from tests.inference.test_generate import POSITIONS, EndlessTokenizer, forward, make_model, prompts

NOT_IN_A_GRAPH = ("_local_scalar_dense", "lift_fresh", "nonzero", "masked_select", "equal", "unique")
"""Operators that wait for the device: those that read values on the host, and copies of Python numbers."""


class Recorded(TorchDispatchMode):
    """Stands in for `CudaGraph`."""

    made: list["Recorded"]

    def __init__(self):
        super().__init__()
        self.operators, self.replays, self.ran = [], 0, False
        self.made.append(self)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        assert name not in NOT_IN_A_GRAPH, f"{function} in a captured step"
        result = function(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in pytree.tree_leaves((args, kwargs)) if torch.is_tensor(x)}
        new = [
            x for x in pytree.tree_leaves(result) if torch.is_tensor(x) and x.untyped_storage().data_ptr() not in given
        ]
        if new or function._schema.is_mutable:  # views are where they were
            self.operators.append((function, args, kwargs or {}, result))
        return result

    def warm_up(self, run):
        run()

    def capture(self, run):
        def refuse(_):
            raise AssertionError("a tensor is read in a captured step")

        with self, mock.patch.object(torch.Tensor, "tolist", refuse), mock.patch.object(torch.Tensor, "numpy", refuse):
            run()
        self.ran = True  # a capture launches nothing; here the first replay has already run

    def replay(self):
        self.replays += 1
        if self.ran:
            self.ran = False
            return
        for function, args, kwargs, result in self.operators:
            again = function(*args, **kwargs)
            for old, new in zip(pytree.tree_leaves(result), pytree.tree_leaves(again), strict=True):
                if torch.is_tensor(old) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


@pytest.fixture(autouse=True)
def recorded(monkeypatch):
    """Steps are captured on the CPU, after one for the warm-up; the list of all recordings."""
    monkeypatch.setattr(decoder_module, "GRAPH_DEVICES", ("cpu",))
    monkeypatch.setattr(step_module, "WARM_UP", 1)
    monkeypatch.setattr(step_module, "CudaGraph", Recorded)
    monkeypatch.setattr(Recorded, "made", [], raising=False)
    return Recorded.made


def whole_rings(q_BNH, k_BKH, v_BKH, cache, visibility, document_starts_B, scale):
    """In place of `triton_decode`: every query head over all slots of its ring, in tensors alone."""
    cache.append(k_BKH[:, None], v_BKH[:, None])
    query, outputs, ends = cache.tokens.long() - 1, [], [*accumulate(cache.capacities)]
    for head, q_BH in enumerate(q_BNH.unbind(1)):
        kv_head = head * cache.kv_heads // q_BNH.shape[1]
        capacity = cache.capacities[kv_head]
        slots = slice(ends[kv_head] - capacity, ends[kv_head])
        distance_S = (query - torch.arange(capacity)) % capacity
        seen_S = (distance_S < visibility.scopes_N[head]) & (distance_S <= query)
        if document_starts_B is not None:
            seen_S = seen_S & ((query - distance_S >= document_starts_B[:, None]) | (distance_S == 0))
        scores_BS = (cache.keys_BSH[:, slots] @ q_BH[..., None])[..., 0] * scale
        if visibility.bias is not None:
            scores_BS = scores_BS - visibility.bias.coefficients_PN[0, head] * distance_S
        weights_BS = scores_BS.masked_fill(~seen_S, -torch.inf).softmax(-1)
        values_BSH = torch.where((distance_S <= query)[:, None], cache.values_BSH[:, slots], 0.0)
        outputs.append((weights_BS[..., None] * values_BSH).sum(1))
    return torch.stack(outputs, dim=1)


@pytest.fixture(params=[True])
def on_rings(request, monkeypatch):
    """Rows decode with `whole_rings`, or with Triton where the parameter is False; prompts are read with `banded`."""
    layers = decoder_module.rolling_layers

    def decoding_in_triton(model, batch):
        caches = layers(model, batch)
        for cache in caches.values():
            cache.decode = "triton"
        return caches

    monkeypatch.setattr(decoder_module, "rolling_layers", decoding_in_triton)
    if request.param:
        monkeypatch.setattr(triton_decode, "triton_decode", whole_rings)


def read(decoder, rows, new_tokens):
    """Left-padded rows that have been read, and the logits of their last tokens."""
    started, longest = decoder.start([len(row) for row in rows], new_tokens), max(map(len, rows))
    tokens_BL = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    *_, h_BLD = started.chunks(tokens_BL)
    return started, decoder.logits(h_BLD[:, -1:])[:, -1]


SMALL = {"n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 16}
GARFA = {"garfa": {"queries": True, "layers": [{"layer": 1, "raw": [0.5, -2.0]}]}}
YARN_LASP = {"lasp": {"s_max": 4.0, "b_min": 1e4, "b_max": 4e4, "anchor_layers": 1}, **POSITIONS["yarn"]}
CASES = {
    **{name: POSITIONS[name] for name in POSITIONS if "garfa" not in name and name not in ("longrope", "mixed")},
    "yarn and lasp": YARN_LASP,
    "garfa, queries too": GARFA,
    "mixed": {**POSITIONS["mixed"], "rules": POSITIONS["mixed"]["rules"][:1]},
}


@pytest.mark.parametrize(
    ("name", "on_rings"), [*((name, True) for name in CASES), ("mixed", False)], indirect=["on_rings"]
)
def test_replays_equal_the_uncached_forward(name, recorded, on_rings):
    """Padded rows, longer than narrow heads' rings, which wrap. Tokens are any, and not those that the step would choose."""
    model, config = make_model(CASES[name], **SMALL, qk_norm=name == "mixed")
    rows, new = prompts((19, 12)), prompts((6, 6))
    started, logits_BV = read(Decoder(model, config, chunk=16), rows, 6)
    step, found = Step(started, logits_BV, 258), [logits_BV]
    for column in zip(*new, strict=True):
        step.tokens_B1.copy_(torch.tensor(column)[:, None])
        step()
        found.append(step.logits_BV.clone())
    assert [graph.replays for graph in recorded] == [5]
    assert started.tokens == int(started.columns_11) == 25
    assert {(cache.tokens, int(cache.cache.tokens)) for cache in started.caches.values()} == {(25, 25)}
    for prompt, more, logits_LV in zip(rows, new, torch.stack(found, dim=1), strict=True):
        exact = forward(model, config, [*prompt, *more], 25)[len(prompt) - 1 :]
        torch.testing.assert_close(logits_LV, exact, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="25 tokens were read and 1 are to be"):
        step()


def test_a_number_from_python_would_be_noticed(recorded, monkeypatch):
    """`banded` cuts rings with Python numbers, and is not captured. If it were, the replays' logits would be wrong."""
    model, config = make_model(POSITIONS["scope, sorted"], **SMALL)
    (prompt,), tokens = prompts((19,)), []
    started, logits_BV = read(Decoder(model, config), [prompt], 6)
    assert not started.capturable
    monkeypatch.setattr(decoder_module.RollingLayer, "capturable", True)
    step = Step(started, logits_BV, 258)
    for (token,) in written(step, 7, GREEDY, ()):
        tokens.append(token)
    assert [graph.replays for graph in recorded] == [5]
    exact = forward(model, config, [*prompt, *tokens[:-1]], 25)[-1]
    assert not torch.allclose(step.logits_BV[0], exact, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=1.5, top_p=0.9, seed=3)])
def test_generating_with_replays(sampling, recorded, on_rings, monkeypatch):
    """Whole texts, of rows that end at different tokens, equal those that are decoded eagerly."""
    model, config = make_model(POSITIONS["scope that grows"], **SMALL)
    rows, tokenizer = prompts((19, 12, 19)), EndlessTokenizer()
    found = generate(Decoder(model, config), tokenizer, rows, 7, sampling, rows_at_once=2)
    assert [graph.replays for graph in recorded] == [5, 5]
    ends = {found[0].tokens[3]}
    ended = generate(Decoder(model, config), tokenizer, rows[:1], 7, sampling, end_tokens=ends)
    replays = [graph.replays for graph in recorded]
    monkeypatch.setattr(decoder_module, "GRAPH_DEVICES", ())
    assert generate(Decoder(model, config), tokenizer, rows, 7, sampling, rows_at_once=2) == found
    assert generate(Decoder(model, config), tokenizer, rows[:1], 7, sampling, end_tokens=ends) == ended
    length = found[0].tokens.index(*ends) + 1
    assert len(ended[0].tokens) == length
    # The first token needs no step and the first step no graph; greedy decoding is a step ahead.
    assert sum(replays[2:]) == max(0, length - 2 + (sampling == GREEDY))


def test_logits_that_are_not_finite_end_it(on_rings):
    """Found while the next step already runs; the flag is read with the tokens."""
    model, config = make_model({}, **SMALL)
    started, logits_BV = read(Decoder(model, config), prompts((9, 5)), 8)
    tokens = written(Step(started, logits_BV, 258), 8, GREEDY, ())
    for _ in range(4):
        next(tokens)
    model.layers["1"].feed_forward.w3.weight.data[3, 3] = torch.nan
    next(tokens)  # its step has run already
    with pytest.raises(ConfigError, match=r"its tensor model\.layers\.1\.mlp\.up_proj\.weight"):
        next(tokens)


def test_rows_read_in_between_keep_their_positions(on_rings):
    """A replay reads the model's scopes and frequencies, which other rows change."""
    model, config = make_model({**POSITIONS["scope that grows"], **POSITIONS["dynamic ntk"]}, **SMALL)
    decoder, rows, found = Decoder(model, config), prompts((19, 40)), []
    steps = [Step(*read(decoder, [row], 6), 258) for row in rows]
    for _ in range(6):
        for step in steps:
            step.tokens_B1.fill_(7)
            step()
    for step, row in zip(steps, rows, strict=True):
        found.append(step.logits_BV[0].clone())
        exact = forward(model, config, [*row, *[7] * 6], len(row) + 6)[-1]
        torch.testing.assert_close(found[-1], exact, rtol=1e-4, atol=1e-4)


def test_what_is_not_captured(on_rings):
    """Extensions that rotate keys themselves, quantised weights, and weights divided over processes."""
    model, config = make_model({}, **SMALL)
    assert Decoder(model, config).start([9], 4).capturable
    for name, captured in (("yarn:2", True), ("self_extend", False)):
        extension = parse_extension(name)
        assert Decoder(model, extension.change(config), extension).start([40], 4).capturable == captured, name
    quantize_linears(model, Base(quantization="nf4"))
    assert not Decoder(model, config).start([9], 4).capturable
    divided, _ = make_model({}, **SMALL)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        shard_for_decoding(divided, init_device_mesh("cpu", (1,)))
        assert not Decoder(divided, config).start([9], 4).capturable
    finally:
        dist.destroy_process_group()
