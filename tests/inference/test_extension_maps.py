"""Context extensions: each method's relative positions against a loop over pairs from its definition."""

import dataclasses
import itertools
import math
import random

import pytest
import torch
from torch.testing import assert_close

from farsight.configs.schema import (
    Position,
    Rope,
)
from farsight.inference.extend import parse_extension
from farsight.inference.extend.adagrope import AdaGroPE
from farsight.inference.extend.chunk_llama import ChunkLlama
from farsight.inference.extend.gali import Gali, GreedyPositions
from farsight.inference.extend.interpolation import INTERPOLATIONS
from farsight.inference.extend.logit_noise import logit_noise
from farsight.inference.extend.self_extend import SelfExtend
from farsight.inference.kv_cache import Batch
from farsight.model.build import ModelConfig
from farsight.model.position.rope import rope_frequencies
from tests.model.test_model import SMALL, fresh_model

CPU = torch.device("cpu")
MODEL = fresh_model(ModelConfig(SMALL, Position(rotary=Rope()), trained_length=24))
DRAWS = 200


# ── Definitions, a pair at a time ─────────────────────────────────────────────────────────────────────


def self_extend(i, j, group, window):
    if i - j < window:
        return i - j
    return i // group + window - window // group - j // group


def chunk_llama(i, j, chunk, window):
    limit = chunk + window
    key, own = j % chunk, i % chunk
    if i // chunk == j // chunk:
        return own - key
    if i // chunk == j // chunk + 1:
        return (chunk + own if own < window else limit - 1) - key
    return limit - 1 - key


def adagrope(length, limit, ratio):
    """Relative position of each distance: starts with one token at every position, then adds one at a time to the farthest position
    that may have another, until the length is reached."""
    counts, reserved, most = [1] * limit, 0, 1
    while sum(counts) < length:
        if most & (most - 1) == 0:
            reserved += math.floor(limit * ratio / most)  # the nearest stay with `most` tokens
        for position in range(limit - 1, reserved - 1, -1):
            if sum(counts) < length:
                counts[position] += 1
        most += 1
    return [position for position, count in enumerate(counts) for _ in range(count)]


def gali(length, window, local):
    """Position of each token, added one base position at a time as the authors' code does."""
    if length <= window:
        return [float(i) for i in range(length)]
    parts = math.ceil((length - local) / (window - local))
    fractions, base = [], 0
    while window - base + len(fractions) < length:
        fractions += [base + part / parts for part in range(parts)]
        base += 1
    whole = [float(i) for i in range(base, window)]
    return fractions[: length - len(whole)] + whole


def gali_pair(positions, i, j):
    """A relative position between two whole ones, with the share of the farther one as its fraction."""
    at = math.ceil(positions[i])
    return at - math.ceil(positions[j]) + (at - positions[j]) % 1


# ── Position maps ─────────────────────────────────────────────────────────────────────────────────────


def matrix(positions, first, stop):
    """Relative position, noise, and number of regions for each pair of [first, stop) and [0, stop)."""
    found = torch.zeros(3, stop - first, stop)
    for region in positions.regions(first, stop, CPU):
        relative = region.query_positions[:, None] - region.key_positions
        found[0, region.queries, region.keys] += torch.where(region.seen, relative, 0)
        if region.noise is not None:
            found[1, region.queries, region.keys] += torch.where(region.seen, region.noise, 0)
        found[2, region.queries, region.keys] += region.seen
    return found


def assert_same_map(positions, prompt, expected, decoded, noise=None, tolerance=1e-5):
    """Checks a map against `expected(i, j)` for a prompt's pairs and `decoded(i, j)` for decoded queries."""
    cuts = sorted({0, prompt, *random.sample(range(prompt + 1), k=min(2, prompt))})
    for first, stop in itertools.pairwise(cuts):
        found = matrix(positions, first, stop)
        for i in range(first, stop):
            want = torch.tensor([expected(i, j) for j in range(i + 1)], dtype=torch.float32)
            assert (found[0, i - first, : i + 1] - want).abs().max() <= tolerance, (first, i)
            assert torch.equal(found[2, i - first], (torch.arange(stop) <= i).float())
            if noise is not None:
                want = torch.tensor([noise(i, j) for j in range(i + 1)], dtype=torch.float32)
                assert (found[1, i - first, : i + 1] - want).abs().max() <= tolerance
    for query in (prompt - 1, prompt, prompt + 5):
        distances = positions.distances(query, CPU)
        want = torch.tensor([decoded(query, j) for j in range(query + 1)], dtype=torch.float32)
        assert (distances.positions - want).abs().max() <= tolerance


def test_self_extend_map():
    random.seed(0)
    for _ in range(DRAWS):
        trained, prompt = random.randint(8, 30), random.randint(1, 50)
        window, length = random.randint(1, trained // 2), prompt + 6
        least = math.ceil(length / (trained - window))
        group = random.randint(least, least + 3)
        positions = SelfExtend(group=group, window=window, share=1.0).positions(trained, prompt, length)

        def expected(i, j, group=group, window=window):
            return self_extend(i, j, group, window)

        assert_same_map(positions, prompt, expected, expected)
        assert max(expected(length - 1, j) for j in range(length)) < trained


def test_chunk_llama_map():
    random.seed(1)
    for _ in range(DRAWS):
        chunk, window, prompt = random.randint(1, 14), random.randint(1, 7), random.randint(1, 50)
        positions = ChunkLlama(chunk=chunk, window=window).positions(chunk + window, prompt, prompt + 6)

        def expected(i, j, chunk=chunk, window=window):
            return chunk_llama(i, j, chunk, window)

        assert_same_map(positions, prompt, expected, expected)


def test_adagrope_map():
    random.seed(2)
    for _ in range(DRAWS):
        limit, prompt, ratio = random.randint(4, 30), random.randint(1, 60), random.choice([0.1, 0.25, 0.4])
        positions = AdaGroPE(limit=limit, ratio=ratio).positions(limit, prompt, prompt + 6)
        of_prompt = adagrope(prompt, limit, ratio)
        of_length = {query: adagrope(query + 1, limit, ratio) for query in (prompt - 1, prompt, prompt + 5)}
        assert_same_map(positions, prompt, lambda i, j, p=of_prompt: p[i - j], lambda i, j, p=of_length: p[i][i - j])
        assert max(of_length[prompt + 5][: prompt + 6]) < limit


def test_gali_map():
    random.seed(3)
    for _ in range(DRAWS):
        window, prompt, chunk = random.randint(4, 20), random.randint(1, 50), random.randint(1, 20)
        local, noise = random.randint(0, window - 1), random.choice([0.0, 1.0])
        positions = GreedyPositions(window, chunk, local, noise, prompt)

        def target(i, window=window, chunk=chunk, prompt=prompt):
            """Length at the end of the chunk that holds i."""
            end = window
            while end <= i:
                end += chunk
            return min(end, prompt)

        lengths = {target(i): gali(target(i), window, local) for i in range(prompt)}
        decoded = {i: gali(i + 1, window, local) for i in (prompt - 1, prompt, prompt + 5)}
        assert_same_map(
            positions,
            prompt,
            lambda i, j, lengths=lengths, target=target: gali_pair(lengths[target(i)], i, j),
            lambda i, j, decoded=decoded: gali_pair(decoded[i], i, j),
            lambda i, j, lengths=lengths, target=target, noise=noise: (
                noise * (i - j) / target(i) * (lengths[target(i)][j] % 1 != 0)
            ),
            tolerance=2e-5,
        )


# ── Within the trained window ─────────────────────────────────────────────────────────────────────────


def map_within(method, trained, prompt, length):
    """The map that a model gets which was trained on sequences of `trained` tokens."""
    config = ModelConfig(SMALL, Position(rotary=Rope()), trained_length=trained)
    batch = Batch((0,), prompt, length, CPU, torch.float32)
    shared = method.caches(MODEL, method.change(config), batch)["0"].positions
    return shared.map_of([0])


def smallest_group(length, trained, window, share):
    """The smallest group that brings a sequence into a share of the trained window, and leaves no position outside."""
    return next(
        group
        for group in itertools.count(1)
        if window + (length - window) / group <= share * trained + 1e-9
        and max(self_extend(length - 1, j, group, window) for j in range(length)) < trained
    )


def test_settings_hold_within_the_trained_window():
    random.seed(5)
    for _ in range(DRAWS // 4):
        trained = random.randint(24, 40)
        prompt = random.randint(1, trained - 6)
        length = prompt + 6
        window, group = random.randint(1, trained // 2), random.randint(2, 9)
        for method, used in (
            (SelfExtend(group=group, window=window), group),
            (SelfExtend(window=window), smallest_group(length, trained, window, 2 / 3)),
            (SelfExtend(window=window, share=0.55), smallest_group(length, trained, window, 0.55)),
        ):

            def expected(i, j, group=used, window=window):
                return self_extend(i, j, group, window)

            assert_same_map(map_within(method, trained, prompt, length), prompt, expected, expected)

        chunk, near = random.randint(2, 14), random.randint(1, 7)

        def expected(i, j, chunk=chunk, window=near):
            return chunk_llama(i, j, chunk, window)

        assert_same_map(map_within(ChunkLlama(chunk, near), trained, prompt, length), prompt, expected, expected)

        limit = random.randint(4, trained - 1)
        of_prompt, of_length = adagrope(prompt, limit, 0.3), {i: adagrope(i + 1, limit, 0.3) for i in range(length)}
        found = map_within(AdaGroPE(limit=limit, ratio=0.3), trained, prompt, length)
        assert_same_map(found, prompt, lambda i, j, p=of_prompt: p[i - j], lambda i, j, p=of_length: p[i][i - j])

        local = random.randint(1, limit - 1)
        whole, decoded = gali(prompt, limit, local), {i: gali(i + 1, limit, local) for i in range(length)}
        found = map_within(Gali(chunk=trained, local=local, noise=0.0, limit=limit), trained, prompt, length)
        assert_same_map(
            found,
            prompt,
            # The first tokens, as many as positions, are read together.
            lambda i, j, whole=whole, limit=limit: i - j if i < limit else gali_pair(whole, i, j),
            lambda i, j, decoded=decoded: gali_pair(decoded[i], i, j),
            tolerance=2e-5,
        )


@pytest.mark.parametrize("method", [SelfExtend(), ChunkLlama(), AdaGroPE(), Gali(), AdaGroPE(ratio=0.1), Gali(chunk=4)])
def test_without_them_the_trained_window_is_left_as_it_is(method):
    """A setting that only says how positions are shared has nothing to share there."""
    for trained, prompt in ((24, 1), (24, 18), (37, 25)):
        found = map_within(method, trained, prompt, prompt + 6)
        assert_same_map(found, prompt, lambda i, j: i - j, lambda i, j: i - j)


def test_noise_is_standard_normal_and_the_same_in_every_part():
    noise = logit_noise(0, 3, torch.arange(4), torch.arange(100), torch.arange(400))
    assert abs(float(noise.mean())) < 0.01
    assert float(noise.std()) == pytest.approx(1, abs=0.01)
    for bound in (0.5, 1.0, 2.0, 3.0):
        assert float((noise.abs() > bound).float().mean()) == pytest.approx(math.erfc(bound / math.sqrt(2)), abs=0.005)
    for shift in (noise[1:] * noise[:-1], noise[:, 1:] * noise[:, :-1], noise[..., 1:] * noise[..., :-1]):
        assert abs(float(shift.mean())) < 0.01
    part = logit_noise(0, 3, torch.arange(2, 4), torch.arange(50, 60), torch.arange(7, 20))
    assert torch.equal(part, noise[2:, 50:60, 7:20])
    assert not torch.equal(part, logit_noise(1, 3, torch.arange(2, 4), torch.arange(50, 60), torch.arange(7, 20)))


def test_defaults_follow_the_trained_window():
    group = SelfExtend().positions(4096, 16000, 16384)
    assert (
        group.window == 1024
    )  # the example of the authors' README, with its upper share of the positions that are trained
    assert group.group == math.ceil((16384 - 1024) / (4096 * 2 / 3 - 1024))
    chunks = ChunkLlama().positions(4096, 16000, 16384)
    assert (chunks.chunk, chunks.limit) == (2560, 3072)
    assert AdaGroPE().positions(4096, 16000, 16384).limit == 4096
    assert Gali().positions(8192, 16000, 16384).chunk == 3000
    assert [Gali().positions(window, 16000, 16384).local for window in (8192, 128, 24)] == [128, 32, 6]
    # Of whole groups, 2 reach 8 + 3 − 1 = 10, where the model knows 0 to 9; 3 reach 5 + 3 − 1 = 7.
    assert SelfExtend(window=3, share=1).positions(10, 17, 17).group == 3


def angles(name, factor, theta, trained, head_dim, length, i):
    """Angle per token of pair i, written out in double precision."""
    if name == "linear":
        return theta ** (-2 * i / head_dim) / factor
    if name == "ntk":
        return (theta * factor ** (head_dim / (head_dim - 2))) ** (-2 * i / head_dim)
    if name == "dynamic":
        growth = factor * length / trained - (factor - 1) if length > trained else 1.0
        return (theta * growth ** (head_dim / (head_dim - 2))) ** (-2 * i / head_dim)
    if name == "llama3":  # Meta's code, with its bands of 1 and 4 turns within the trained length
        plain = theta ** (-2 * i / head_dim)
        wavelength = 2 * math.pi / plain
        if wavelength < trained / 4:
            return plain
        kept = max(0.0, (trained / wavelength - 1) / (4 - 1))
        return (1 - kept) * plain / factor + kept * plain
    # YaRN, with the ramp over dimensions of the authors' code
    low = math.floor(head_dim * math.log(trained / (32 * 2 * math.pi)) / (2 * math.log(theta)))
    high = math.ceil(head_dim * math.log(trained / (1 * 2 * math.pi)) / (2 * math.log(theta)))
    low, high = max(low, 0), min(high, head_dim - 1)
    interpolated = min(max((i - low) / (high - low if high != low else 0.001), 0.0), 1.0)
    plain = theta ** (-2 * i / head_dim)
    return plain / factor * interpolated + plain * (1 - interpolated)


@pytest.mark.parametrize("name", INTERPOLATIONS)
def test_interpolation_angles(name):
    random.seed(4)
    for _ in range(DRAWS):
        factor, theta = random.uniform(1, 16), 10 ** random.uniform(2, 6)
        trained, head_dim = random.randint(256, 8192), random.choice([8, 16, 64, 128])
        length = random.randint(1, 8 * trained)
        config = ModelConfig(
            dataclasses.replace(SMALL, head_dim=head_dim), Position(rotary=Rope(theta=theta)), trained_length=trained
        )
        changed = parse_extension(f"{name}:factor={factor!r}").change(config)
        found = rope_frequencies(changed.layers()[0].rotary, head_dim, length)
        expected = [angles(name, factor, theta, trained, head_dim, length, i) for i in range(head_dim // 2)]
        position = random.randrange(length)
        assert_close(
            found.inv_freq.double() * position,
            torch.tensor(expected, dtype=torch.float64) * position,
            rtol=2e-5,
            atol=0,
        )
        temperature = 0.1 * math.log(factor) + 1 if name == "yarn" else 1.0
        assert found.attention_factor == pytest.approx(temperature)
