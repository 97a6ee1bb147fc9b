"""Context extensions in a model: attention against one that rotates the key separately for every pair, decoding, and settings."""

import dataclasses
import itertools
import math

import pytest
import torch
from torch.testing import assert_close

from farsight.configs.schema import (
    Alibi,
    DynamicNtkRope,
    Garfa,
    GarfaLayer,
    LayerRule,
    NoRotary,
    Position,
    Rope,
    Scope,
)
from farsight.errors import ConfigError
from farsight.inference.decoder import Decoder
from farsight.inference.extend import METHODS, parse_extension
from farsight.inference.extend.adagrope import AdaGroPE
from farsight.inference.extend.chunk_llama import ChunkLlama
from farsight.inference.extend.fixed import FixedPositions, PlainPositions
from farsight.inference.extend.gali import Gali
from farsight.inference.extend.interpolation import INTERPOLATIONS
from farsight.inference.extend.logit_noise import logit_noise
from farsight.inference.extend.remapped import LayerRotation, RemappedLayer
from farsight.inference.extend.self_extend import SelfExtend
from farsight.inference.kv_cache import Batch
from farsight.inference.model_options import EXTENSIONS
from farsight.model.attention import Attention
from farsight.model.build import ModelConfig
from farsight.model.position.layers import LayerPosition
from farsight.model.position.rope import RopeFrequencies
from farsight.model.position.scope import DENSE_SCOPE
from tests.inference.test_extension_maps import CPU, matrix
from tests.kernels.test_scoped_attention import sees
from tests.model.test_model import SMALL, fresh_model

# ── Attention ─────────────────────────────────────────────────────────────────────────────────────────


def turned_by(x_TH, position_T, inv_freq):
    """Vectors rotated by position · frequency, in double precision."""
    a, b = x_TH.chunk(2, dim=-1)
    angle = position_T[:, None] * inv_freq.double()
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), dim=-1)


def pair_by_pair(q_LNH, k_TKH, v_TKH, relative, inv_freq, factor=1.0, slopes=None, noise=None):
    """Attention in double precision, rotating every key again for every query; where there is noise, logits are interpolated between
    the two nearest whole positions."""
    (L, N, H), K = q_LNH.shape, k_TKH.shape[1]
    out = torch.empty(L, N, H, dtype=torch.float64)
    q, k, v = (x.double() for x in (q_LNH, k_TKH, v_TKH))
    for i in range(L):
        at_T = torch.as_tensor(relative(i), dtype=torch.float64)
        for n in range(N):
            keys = k[: i + 1, n // (N // K)]
            if inv_freq is not None:
                low_T = at_T.floor() if noise else at_T
                turned = turned_by(keys, -low_T, inv_freq)
                if noise:
                    turned = turned + (at_T - low_T)[:, None] * (turned_by(keys, -low_T - 1, inv_freq) - turned)
                keys = turned * factor**2
            scores = keys @ q[i, n] / math.sqrt(H)
            if slopes is not None:
                scores = scores - slopes[n].double() * at_T
            if noise:
                scores = scores + noise(n, i)
            out[i, n] = scores.softmax(0) @ v[: i + 1, n // (N // K)]
    return out


def drawn(rows, tokens, heads, seed=0):
    return torch.randn(rows, tokens, heads, SMALL.head_dim, generator=torch.Generator().manual_seed(seed))


def run_layer(layer, q, k, v, prompt, chunk, slopes=None):
    """[B, T, N, H]: the prompt in chunks, then token by token."""
    cuts = [*range(0, prompt, chunk), *range(prompt, q.shape[1] + 1)]
    outs, visibility = [], sees([DENSE_SCOPE] * q.shape[2], slopes=slopes)
    for a, b in itertools.pairwise(cuts):
        exchange = layer.exchange(k[:, a:b], v[:, a:b], (DENSE_SCOPE,) * q.shape[2])
        outs.append(exchange.attend(q[:, a:b], visibility, "auto"))
    return torch.cat(outs, dim=1)


@pytest.mark.parametrize("slopes", [None, torch.tensor([0.5, 0.1, 0.02, 0.3])], ids=["rope", "alibi"])
@pytest.mark.parametrize("name", ["plain", "self_extend", "chunk_llama", "adagrope", "gali"])
def test_attention_equals_pair_by_pair(name, slopes):
    """Prompts and decoded tokens of two rows, 26 and 20 tokens long, in a model trained on 12, in fp64."""
    starts, prompt, tokens, trained = (0, 6), 22, 26, 12
    batch = Batch(starts, prompt, tokens, CPU, torch.float32)
    method = {
        "self_extend": SelfExtend(group=4, window=3),
        "chunk_llama": ChunkLlama(chunk=5, window=3),
        "adagrope": AdaGroPE(),
        "gali": Gali(chunk=4, local=3, seed=5),
    }.get(name)
    maps = [
        PlainPositions() if method is None else method.positions(trained, prompt - start, tokens - start)
        for start in starts
    ]
    shared = FixedPositions(maps, batch, name == "gali", 5)
    frequencies = RopeFrequencies(torch.tensor([1.0, 0.31, 0.1, 0.01]), 1.1)
    position = LayerPosition(Rope(), (DENSE_SCOPE,) * 4, None)
    attention = Attention(SMALL, position, "auto")
    rotation = LayerRotation(0, frequencies) if slopes is None else None
    q, k, v = drawn(2, tokens, 4, 1), drawn(2, tokens, 2, 2), drawn(2, tokens, 2, 3)
    results = []
    for chunk in (7, 1, 22):
        layer = RemappedLayer(3, attention, batch, shared, rotation)
        shared._column = -1
        results.append(run_layer(layer, q, k, v, prompt, chunk, slopes))
    for row, start in enumerate(starts):
        positions = maps[row]
        own_prompt = prompt - start

        def relative(i, positions=positions, own_prompt=own_prompt):
            return matrix(positions, i, i + 1)[0, 0] if i < own_prompt - 1 else positions.distances(i, CPU).positions

        def noise(n, i, positions=positions, own_prompt=own_prompt):
            std = matrix(positions, i, i + 1)[1, 0] if i < own_prompt - 1 else positions.distances(i, CPU).noise
            keys = torch.arange(i + 1)
            return (0.0 if std is None else std) * logit_noise(5, 3, torch.arange(4), keys[-1:], keys)[n, 0]

        expected = pair_by_pair(
            q[row, start:], k[row, start:], v[row, start:], relative, None if slopes is not None else frequencies[0], 1.1,
            slopes, noise if name == "gali" else None,
        )  # fmt: skip
        for found in results:
            assert_close(found[row, start:].double(), expected, atol=2e-6, rtol=0)


# ── Whole models ──────────────────────────────────────────────────────────────────────────────────────

REMAPPED = [
    "self_extend",
    "self_extend:group=8,window=6",
    "chunk_llama",
    "adagrope",
    "adagrope:limit=12",
    "gali:chunk=5,local=4",
    "ripra:chunk=4",
    "ripra:chunk=4,anchors=all,isotonic=off",
    "ripra:chunk=4,relevance=off,round=on",
]
WITHIN = ["self_extend:group=8,window=6", "adagrope:limit=12"]
"""Those whose settings hold within the window of 24 tokens too."""
WINDOW = 24


def model_of(rotary=None, **position):
    config = ModelConfig(SMALL, Position(rotary=rotary or Rope(theta=100.0), **position), trained_length=WINDOW)
    return fresh_model(config), config


def logits_of(decoder, prompts, new):
    """Logits of each prompt's last token and of the given tokens after it, [rows, new + 1, V], and the caches' bytes."""
    longest = max(map(len, prompts))
    rows = decoder.start([len(p) for p in prompts], new.shape[1])
    tokens = torch.zeros(len(prompts), longest, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        tokens[row, longest - len(prompt) :] = prompt
    *_, h = rows.chunks(tokens)
    found = [decoder.logits(h[:, -1:])]
    found += [decoder.logits(rows.read(new[:, i : i + 1])) for i in range(new.shape[1])]
    return torch.cat(found, dim=1)


def tokens_of(*lengths):
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(96, (length,), generator=generator) for length in lengths]


@pytest.mark.parametrize("text", [text for text in REMAPPED if text not in WITHIN])
def test_a_context_within_the_window_is_left_as_it_is(text):
    """By methods without settings that say otherwise."""
    model, config = model_of()
    extension = parse_extension(text)
    decoder = Decoder(model, extension.change(config), extension, chunk=5)
    length = WINDOW // 2 + 1 if text.startswith("ripra") else WINDOW  # RiPRA's limit: of as many positions, from 0
    (tokens,) = tokens_of(length)
    with torch.no_grad():
        expected = model(tokens[None])
    found = decoder.logits(decoder.hidden_states(tokens))
    assert_close(found, expected[0], atol=2e-5, rtol=0)
    decoded = logits_of(decoder, [tokens[:-3]], tokens[None, -3:])
    assert_close(decoded, expected[:, -4:], atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    "text", [*WITHIN, "chunk_llama:chunk=6,window=4", "gali:limit=12,noise=0", "ripra:limit=8,chunk=4"]
)
def test_settings_change_a_context_within_the_window(text):
    model, config = model_of()
    extension = parse_extension(text)
    (tokens,) = tokens_of(WINDOW)
    with torch.no_grad():
        expected = model(tokens[None])[0]
    decoder = Decoder(model, extension.change(config), extension, chunk=5)
    assert (decoder.logits(decoder.hidden_states(tokens)) - expected)[-1].abs().max() > 2e-3
    decoded = logits_of(decoder, [tokens[:-3]], tokens[None, -3:])[0]
    assert ((decoded - expected[-4:]).abs().amax(1) > 2e-3).all()


@pytest.mark.slow
@pytest.mark.parametrize("text", REMAPPED)
def test_rows_and_chunks_change_nothing(text):
    """Rows of a batch, some within the window and some past it, come out as they would alone, whatever the chunk size."""
    model, config = model_of(rules=(LayerRule(layers="1", rotary=NoRotary()),))
    extension = parse_extension(text)
    config = extension.change(config)
    prompts, (new_tokens,) = tokens_of(46, 31, 9, 46), tokens_of(3)
    new = torch.stack([new_tokens, new_tokens.flip(0), new_tokens + 1, new_tokens - 1]).clamp(0, 95)
    together = logits_of(Decoder(model, config, extension, chunk=16), prompts, new)
    plain = logits_of(Decoder(model, config, None, chunk=16), prompts, new)
    for row, prompt in enumerate(prompts):
        for chunk in (1, 13) if row == 0 else (16,):
            alone = logits_of(Decoder(model, config, extension, chunk=chunk), [prompt], new[row : row + 1])
            assert_close(together[row], alone[0], atol=3e-5, rtol=0)
        changes = (together[row] - plain[row]).abs().max()
        assert (changes > 1e-2) == (len(prompt) > WINDOW - 4 or text == "self_extend:group=8,window=6"), (row, changes)


def test_alibi_models_take_remapped_distances():
    model, config = model_of(NoRotary(), bias=Alibi())
    for text in REMAPPED:
        extension = parse_extension(text)
        decoder = Decoder(model, extension.change(config), extension)
        (tokens,) = tokens_of(60)
        h = decoder.hidden_states(tokens)
        assert h.isfinite().all()
        with torch.no_grad():
            plain = model.hidden_states(tokens[None])[0]
        if text.startswith(("ripra", "gali")):  # the others change sequences past the window from their first tokens on
            assert_close(h[:13], plain[:13], atol=2e-5, rtol=0)
        assert (h[-1] - plain[-1]).abs().max() > 1e-4


def test_models_that_do_not_fit_are_refused():
    plain = ModelConfig(SMALL, Position(), trained_length=WINDOW)
    for position, says in [
        (Position(heads=Scope()), "sees"),
        (Position(rotary=NoRotary()), "neither RoPE nor ALiBi"),
        (Position(embedding="sinusoidal"), "sinusoidal"),
        (Position(rotary=DynamicNtkRope(original_length=24)), "dynamic"),
        (Position(garfa=Garfa(layers=(GarfaLayer(1, (0.0, 0.0)),))), "GARFA"),
    ]:
        for name in ("ripra", "self_extend"):
            with pytest.raises(ConfigError, match=says):
                parse_extension(name).change(dataclasses.replace(plain, position=position))


def test_settings():
    assert parse_extension("yarn:4") == parse_extension("yarn:factor=4") == INTERPOLATIONS["yarn"](4.0)
    assert parse_extension("ripra:limit=2048,chunk=128").limit == 2048
    assert set(METHODS) == {
        "linear", "ntk", "dynamic", "yarn", "llama3", "ripra", "self_extend", "chunk_llama", "adagrope", "gali",
    }  # fmt: skip
    config = ModelConfig(SMALL, Position(), trained_length=WINDOW)
    for text, says in [
        ("self_extent", "Did you mean 'self_extend'"),
        ("ripra:chnk=4", "Did you mean 'chunk'"),
        ("ripra:limit=half", "whole number"),
        ("ripra:isotonic=no", "'on', 'off'"),
        ("yarn", "set factor"),
        ("yarn:0.5", "at least 1"),
    ]:
        with pytest.raises(ConfigError, match=says):
            parse_extension(text)
    for text, says in [
        ("ripra:limit=30", "limit = 30 must be 2 to 24"),
        ("ripra:limit=8,near=8", "near = 8 must be 1 to 7"),
        ("ripra:near=4,block=5", "block = 5 must be 1 to 4"),
        ("ripra:anchors=1", "layer 0 among them"),
        ("ripra:anchors=0+first", "layer 0 among them"),
        ("ripra:anchors=0+9", "0 to 2"),
    ]:
        with pytest.raises(ConfigError, match=says):
            parse_extension(text).change(config)
    for method, says in [
        (SelfExtend(group=2, window=4), "set group to"),
        (SelfExtend(window=20), "smaller window"),
        (ChunkLlama(chunk=20, window=5), "at most the 24"),
        (AdaGroPE(limit=25), "limit = 25"),
        (AdaGroPE(ratio=0.5), "ratio = 0.5"),
        (Gali(local=24), "local = 24"),
        (Gali(limit=25), "limit = 25"),
    ]:
        with pytest.raises(ConfigError, match=says):
            method.positions(WINDOW, 90, 100)
    for method in (SelfExtend(window=20), SelfExtend(group=-1), ChunkLlama(chunk=20, window=5), Gali(local=24)):
        with pytest.raises(ConfigError, match=f"--extend {method.name}"):
            method.change(config)


def test_help_lists_every_method_with_its_settings_and_defaults():
    expected = []
    for name, method in METHODS.items():
        settings = []
        for field in dataclasses.fields(method):
            default = "…" if field.default is dataclasses.MISSING else field.default
            settings.append(f"{field.name}={default:.3g}" if isinstance(default, float) else f"{field.name}={default}")
        expected.append(f"{name}:{','.join(settings)}")
    assert list(EXTENSIONS) == expected
