"""Each option of the architecture against a decoder written out here, in fp64 and with whole attention matrices."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from farsight.configs.load import build_config
from farsight.configs.schema import (
    Architecture,
    Garfa,
    GarfaLayer,
    LayerRule,
    NoRotary,
    Position,
    QueryScaling,
    Rope,
    SlidingWindow,
    YarnRope,
)
from farsight.errors import ConfigError
from farsight.inference.decoder import Decoder
from farsight.model.build import ModelConfig, build_model

SMALL = Architecture(vocab_size=50, dim=24, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, ffn_dim=40, norm_eps=1e-3)
YARN = YarnRope(theta=100.0, factor=4.0, original_length=16, attention_factor=1.3)
OPTIONS = {
    "plain": ({}, {}),
    "post-norm": ({"norm_placement": "post"}, {}),
    "sandwich": ({"norm_placement": "sandwich", "zero_centered_norms": True, "qk_norm": True}, {}),
    "projection": ({"qk_norm": True, "qk_norm_span": "projection", "zero_centered_norms": True}, {}),
    "qkv-bias": ({"attention_bias": "qkv"}, {}),
    "biases": ({"attention_bias": "all", "mlp_bias": True}, {}),
    "gelu": ({"activation": "gelu_tanh", "scaled_embeddings": True, "tie_embeddings": True}, {}),
    "partial": ({"rotary_dim": 4, "softmax_scale": 0.2}, {"rotary": YARN}),
    "query-scaling": ({}, {"query_scaling": QueryScaling(beta=0.5, original_length=8)}),
    "mixed": (
        {"rotary_dim": 6, "attention_bias": "qkv", "norm_placement": "sandwich"},
        {"heads": SlidingWindow(window=5), "rules": (LayerRule("1", rotary=NoRotary()),)},
    ),
}


def random_model(config: ModelConfig):
    """A model whose every parameter is random, and far from what it starts with."""
    model = build_model(config)
    model.init_weights()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(parameter + 0.3 * noise if parameter.dim() == 1 else 0.4 * noise)
    return model.eval()


def written_out(config: ModelConfig, weights: dict[str, torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    """Logits [L, V] of one sequence, from the equations."""
    a, L = config.architecture, len(tokens)

    def norm(name, x):
        weight = weights[name + ".weight"]
        weight = 1 + weight if a.zero_centered_norms else weight
        return x / (x.square().mean(-1, keepdim=True) + a.norm_eps).sqrt() * weight

    def linear(name, x):
        y = x @ weights[name + ".weight"].T
        return y + weights[name + ".bias"] if name + ".bias" in weights else y

    def heads_of(name, x, norm_name, count):
        y = linear(name, x)
        if a.qk_norm and norm_name and a.qk_norm_span == "projection":
            y = norm(norm_name, y)
        y = y.view(L, count, a.head_dim)
        return norm(norm_name, y) if a.qk_norm and norm_name and a.qk_norm_span == "head" else y

    def turned(x, rotary):
        if isinstance(rotary, NoRotary):
            return x
        dims, y = a.rotary_dim or a.head_dim, x.clone()
        for i in range(dims // 2):
            frequency = rotary.theta ** (-2 * i / dims)
            factor = 1.0
            if isinstance(rotary, YarnRope):

                def turns(rotations):
                    return dims * math.log(16 / (rotations * 2 * math.pi)) / (2 * math.log(rotary.theta))

                low, high = max(math.floor(turns(32)), 0), min(math.ceil(turns(1)), dims - 1)
                keep = 1 - min(max((i - low) / (high - low), 0), 1)
                frequency, factor = frequency * keep + frequency / rotary.factor * (1 - keep), 1.3
            angle = torch.arange(L, dtype=torch.float64)[:, None] * frequency
            first, second = x[..., i], x[..., i + dims // 2]
            y[..., i] = factor * (first * angle.cos() - second * angle.sin())
            y[..., i + dims // 2] = factor * (second * angle.cos() + first * angle.sin())
        return y

    h = weights["tok_embeddings.weight"][tokens]
    if a.scaled_embeddings:
        h = h * a.dim**0.5
    distance = torch.arange(L)[:, None] - torch.arange(L)
    for number, layer in enumerate(config.layers()):
        at = f"layers.{number}."
        x = h if a.norm_placement == "post" else norm(at + "attention_norm", h)
        q = turned(heads_of(at + "attention.wq", x, at + "attention.q_norm", a.n_heads), layer.rotary)
        k = turned(heads_of(at + "attention.wk", x, at + "attention.k_norm", a.n_kv_heads), layer.rotary)
        v = heads_of(at + "attention.wv", x, None, a.n_kv_heads)
        if (scaling := config.position.query_scaling) is not None:
            steps = torch.arange(L).div(scaling.original_length, rounding_mode="floor").double()
            q = q * (1 + scaling.beta * torch.log(1 + steps))[:, None, None]
        scale = a.softmax_scale or a.head_dim**-0.5
        outputs = []
        for head in range(a.n_heads):
            group = head // (a.n_heads // a.n_kv_heads)
            seen = (distance >= 0) & (distance < layer.scopes[head])
            scores = (q[:, head] @ k[:, group].T * scale).masked_fill(~seen, -math.inf)
            outputs.append(scores.softmax(-1) @ v[:, group])
        added = linear(at + "attention.wo", torch.cat(outputs, -1))
        h = h + (added if a.norm_placement == "pre" else norm(at + "attention_post_norm", added))
        x = h if a.norm_placement == "post" else norm(at + "ffn_norm", h)
        gate = linear(at + "feed_forward.w1", x)
        gate = F.silu(gate) if a.activation == "silu" else F.gelu(gate, approximate="tanh")
        added = linear(at + "feed_forward.w2", gate * linear(at + "feed_forward.w3", x))
        h = h + (added if a.norm_placement == "pre" else norm(at + "ffn_post_norm", added))
    head = weights["tok_embeddings.weight" if a.tie_embeddings else "output.weight"]
    return norm("norm", h) @ head.T


@pytest.mark.parametrize("name", OPTIONS)
def test_the_equations(name):
    """Logits, gradients of every parameter, and logits read through the cache, token by token."""
    options, position = OPTIONS[name]
    architecture = dataclasses.replace(SMALL, **options)
    config = ModelConfig(architecture, Position(**{"rotary": Rope(theta=100.0), **position}), trained_length=32)
    model = random_model(config)
    tokens = torch.randint(0, 50, (19,), generator=torch.Generator().manual_seed(0))
    weights = {n: p.detach().double().requires_grad_() for n, p in model.named_parameters()}
    expected = written_out(config, weights, tokens)
    logits = model(tokens[None])[0]
    assert_close(logits.double(), expected, rtol=1e-4, atol=1e-4)

    direction = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    ours = torch.autograd.grad((logits * direction).sum(), [*model.parameters()])
    theirs = torch.autograd.grad((expected * direction).sum(), [*weights.values()])
    for parameter, mine, other in zip(weights, ours, theirs, strict=True):
        assert_close(
            mine.double(),
            other,
            rtol=2e-3,
            atol=max(1e-5, 2e-4 * float(other.abs().max())),  # keys that do not rotate give their bias no gradient
            msg=lambda m, p=parameter: f"{p}: {m}",
        )

    decoder = Decoder(model, config, chunk=4)
    rows = decoder.start([7], new_tokens=12)
    read = [decoder.logits(h)[0] for h in rows.chunks(tokens[None, :7])]
    read += [decoder.logits(rows.read(tokens[None, i : i + 1]))[0] for i in range(7, 19)]
    assert_close(torch.cat(read).double(), expected, rtol=1e-4, atol=1e-4)


def test_a_partial_rotation_with_separate_frequencies_for_each_head():
    """A GARFA factor of 1 (w = −ln 10) leaves a partial rotation as it is, and another changes rotated dimensions alone."""
    architecture = dataclasses.replace(SMALL, rotary_dim=4, n_layers=1)
    tokens = torch.arange(12)[None]
    found = {}
    for w in (None, -math.log(10), 0.0):
        garfa = None if w is None else Garfa(layers=(GarfaLayer(0, (w, w)),))
        config = ModelConfig(architecture, Position(rotary=Rope(theta=100.0), garfa=garfa), trained_length=32)
        found[w] = random_model(config)(tokens).detach()
    assert torch.equal(found[None], found[-math.log(10)])
    assert not torch.allclose(found[None], found[0.0], atol=1e-3)


def test_scaled_embeddings_round_the_factor_to_the_weights_dtype():
    """sqrt(1152) is 33.94, in bf16 34."""
    config = ModelConfig(dataclasses.replace(SMALL, dim=1152, n_layers=1, scaled_embeddings=True), Position(), 16)
    with torch.device("meta"):
        model = build_model(config)
    assert model.architecture.scaled_embeddings
    from farsight.model.llama import _rounded

    assert _rounded(1152**0.5, torch.bfloat16) == 34.0
    assert _rounded(1152**0.5, torch.float32) == float(torch.tensor(1152**0.5))


@pytest.mark.parametrize("dims", [3, 10])
def test_dimensions_that_can_not_rotate_are_refused(dims):
    with pytest.raises(ConfigError, match=rf"rotary_dim = {dims} must be even and at most head_dim = 8"):
        build_config({"architecture": {**dataclasses.asdict(SMALL), "rotary_dim": dims}})
