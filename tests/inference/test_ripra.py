"""RiPRA: properties of its allocation, its positions against the algorithm written out with scikit-learn's isotonic regression, and
attention with them against a pair-by-pair computation in double precision."""

import dataclasses
import itertools
import json
import math
import re

import numpy as np
import pytest
import torch
from sklearn.isotonic import IsotonicRegression
from torch.testing import assert_close

from farsight.checkpoints.load import load_model
from farsight.checkpoints.model_dir.api import write_model_dir
from farsight.configs.schema import Alibi, NoRotary, Position, Rope, Tokenizer
from farsight.data.tokenizers.tokenizer import load_tokenizer, load_tokenizer_dir
from farsight.evals.ripra.__main__ import main
from farsight.evals.ripra.diagnose import passkey_prompts
from farsight.inference.extend.ripra import Allocation, Ripra, relevance_landscape
from farsight.inference.kv_cache import Batch
from farsight.model.build import ModelConfig
from farsight.model.position.scope import DENSE_SCOPE
from tests.inference.test_extension_maps import CPU
from tests.inference.test_extensions import drawn, pair_by_pair
from tests.kernels.test_scoped_attention import sees
from tests.model.test_model import SMALL, fresh_model

RELEVANCES = {
    "uniform": lambda g, n, c: g.random((n, c)),
    "constant": lambda g, n, c: np.repeat(g.random((n, 1)), c, axis=1),
    "one-hot": lambda g, n, c: np.eye(c)[g.integers(0, c, n)],
    "few": lambda g, n, c: (g.random((n, c)) < 0.1).astype(float),
    "peaked": lambda g, n, c: g.random((n, c)) ** 20,
    "falling": lambda g, n, c: np.sort(g.random((n, c)), axis=1),
    "rising": lambda g, n, c: -np.sort(-g.random((n, c)), axis=1),
    "scores": lambda g, n, c: g.standard_normal((n, c)),
}
"""Landscapes for n rows of c chunks; "scores" are turned into one."""


@pytest.mark.parametrize("kind", RELEVANCES)
@pytest.mark.parametrize("isotonic", [True, False], ids=["isotonic", "free"])
def test_the_budget_is_met(kind, isotonic):
    """10,000 landscapes with monotone resolutions and as many without, over settings and context lengths."""
    generator = np.random.default_rng(0)
    for _ in range(25):
        near, chunk = int(generator.integers(1, 300)), int(generator.integers(1, 200))
        limit = near + int(generator.integers(1, 500))
        query = limit + int(generator.integers(0, 10 * limit))
        chunks = query // chunk + 1
        values = torch.from_numpy(RELEVANCES[kind](generator, 50, chunks))
        if kind == "scores":
            values = relevance_landscape(values, torch.tensor([chunks]))
        allocation = Allocation(limit, near, chunk, 1, isotonic, False)
        query_B = torch.full((50,), query)
        resolutions = allocation.resolutions(values, query_B)
        positions = allocation.positions(resolutions, query_B, query + 1).flip(1)  # by distance, from 0
        g = positions.diff(dim=1)
        assert (g.sum(1) - limit).abs().max() <= 1e-4
        assert g.min() >= -1e-9
        assert g.max() <= 1 + 1e-9
        assert (g[:, :near] == 1).all()
        assert (positions.diff(dim=1) >= -1e-9).all()
        if isotonic:
            assert (g[:, near:].diff(dim=1) <= 1e-9).all()


def written_out(relevance, query, limit, near, chunk, isotonic=True):
    """P of the keys 0 … query from the relevance of all chunks, one chunk after another (algorithm 1 with its corrections)."""
    if query <= limit:
        return [float(query - j) for j in range(query + 1)]
    sizes = {}  # of the chunks' tokens beyond the near window, by distance
    for j in range(query - near - 1, -1, -1):
        sizes[j // chunk] = sizes.get(j // chunk, 0) + 1
    wanted = [relevance[c] + 1e-6 for c in sizes]
    if isotonic:
        wanted = list(IsotonicRegression(increasing=False).fit_transform(range(len(wanted)), wanted))
    shares, capped = {}, set()
    while True:
        left = limit - near - sum(sizes[c] for c in capped)
        total = sum(sizes[c] * w for c, w in zip(sizes, wanted, strict=True) if c not in capped)
        shares = {c: 1.0 if c in capped else w * left / total for c, w in zip(sizes, wanted, strict=True)}
        over = {c for c, share in shares.items() if share > 1 + 1e-12} - capped
        if not over:
            break
        capped |= over
    positions = [0.0]
    for distance in range(1, query + 1):
        positions.append(positions[-1] + (1.0 if distance <= near else shares[(query - distance) // chunk]))
    return positions[::-1]


def test_positions_equal_the_algorithm_written_out():
    generator = np.random.default_rng(1)
    for draw in range(300):
        near, chunk = int(generator.integers(1, 40)), int(generator.integers(1, 30))
        limit, isotonic = near + int(generator.integers(1, 60)), draw % 3 > 0
        query = int(generator.integers(1, 6 * limit))
        chunks = query // chunk + 1
        kind = list(RELEVANCES)[draw % (len(RELEVANCES) - 1)]
        relevance = RELEVANCES[kind](generator, 1, chunks)
        allocation, query_B = Allocation(limit, near, chunk, 1, isotonic, False), torch.tensor([query])
        resolutions = allocation.resolutions(torch.from_numpy(relevance), query_B)
        found = allocation.positions(resolutions, query_B, query + 1)[0]
        expected = written_out(relevance[0], query, limit, near, chunk, isotonic)
        assert_close(found, torch.tensor(expected, dtype=torch.float64), atol=1e-6, rtol=0)


def test_whole_positions():
    allocation, query_B = Allocation(20, 5, 4, 1, True, True), torch.tensor([90])
    positions = allocation.positions(allocation.resolutions(torch.rand(1, 23), query_B), query_B, 91)
    assert torch.equal(positions, positions.round())
    assert positions[0, 0] == 20
    assert (positions.diff(dim=1) <= 0).all()


def relevances(q_NH, k_TKH, query, chunk):
    """Relevance by Eq. 4 to 6 for the query at this index, in double precision."""
    (N, _), K = q_NH.shape, k_TKH.shape[1]
    scores = []
    for begin in range(0, query + 1, chunk):
        mean_KH = k_TKH[begin : min(begin + chunk, query + 1)].double().mean(0)
        scores.append(float(sum(q_NH[n].double() @ mean_KH[n // (N // K)] for n in range(N)) / N))
    least, most = min(scores), max(scores)
    return [(score - least) / (most - least + 1e-6) for score in scores]


@pytest.mark.parametrize("bias", ["rope", "alibi"])
@pytest.mark.parametrize(
    "settings",
    [Ripra(chunk=4, block=1), Ripra(chunk=5, block=3), Ripra(chunk=4, isotonic="off"), Ripra(chunk=3, relevance="off")],
    ids=["exact", "blocks", "free", "uniform"],
)
def test_layers_equal_pair_by_pair(settings, bias):
    """An anchor layer and a layer after it, rows of 50 and 43 tokens, limit 16 and near 6. The last prompt token and those after it
    are exact, and a block of the prompt has its first query's relevance, laid out for its last query."""
    settings = dataclasses.replace(settings, limit=16, near=6, anchors="0")
    position = Position(rotary=Rope(theta=50.0)) if bias == "rope" else Position(rotary=NoRotary(), bias=Alibi())
    config = ModelConfig(SMALL, position, trained_length=32)
    model = fresh_model(config)
    starts, prompt, tokens = (0, 7), 44, 50
    batch = Batch(starts, prompt, tokens, CPU, torch.float32)
    block = settings.allocation(32).block
    slopes = None if bias == "rope" else model.layers["0"].attention.bias_PN[0]
    visibility = sees([DENSE_SCOPE] * 4, slopes=slopes)
    inv_freq = model.rope_frequencies[0] if bias == "rope" else None
    inputs = {
        number: (drawn(2, tokens, 4, number), drawn(2, tokens, 2, 10 + number), drawn(2, tokens, 2, 20 + number))
        for number in (0, 1)
    }
    caches = settings.caches(model, config, batch)
    outs = {0: [], 1: []}
    cuts = [0, 9, 10, 30, *range(prompt, tokens + 1)]
    for a, b in itertools.pairwise(cuts):
        for number, (q, k, v) in inputs.items():
            exchange = caches[str(number)].exchange(k[:, a:b], v[:, a:b], (DENSE_SCOPE,) * 4)
            outs[number].append(exchange.attend(q[:, a:b], visibility, "auto"))
    for row, start in enumerate(starts):
        q0, k0, _ = (x[row, start:] for x in inputs[0])
        maps = {}

        def relative(i, maps=maps, start=start, q0=q0, k0=k0):
            asks, laid_out = i, i
            if 16 < i < prompt - start - 1:
                asks = 17 + (i - 17) // block * block
                laid_out = asks + block - 1
            if (asks, laid_out) not in maps:
                landscape = relevances(q0[asks], k0, asks, settings.chunk)
                landscape += [0.0] * (laid_out // settings.chunk + 1 - len(landscape))
                if settings.relevance == "off":
                    landscape = [1.0] * len(landscape)
                maps[asks, laid_out] = written_out(
                    landscape, laid_out, 16, 6, settings.chunk, settings.isotonic == "on"
                )
            return [position - (laid_out - i) for position in maps[asks, laid_out][: i + 1]]

        for number, (q, k, v) in inputs.items():
            found = torch.cat(outs[number], dim=1)[row, start:]
            expected = pair_by_pair(q[row, start:], k[row, start:], v[row, start:], relative, inv_freq, slopes=slopes)
            assert_close(found.double(), expected, atol=3e-6, rtol=0)
    assert caches["0"].nbytes - caches["1"].nbytes == (
        0 if settings.relevance == "off" else 2 * math.ceil(tokens / settings.chunk) * 2 * 8 * 4
    )


def test_anchor_layers():
    assert Ripra().anchor_layers(32) == (0, 16)
    assert Ripra(anchors="0").anchor_layers(32) == (0,)
    assert Ripra(anchors="all").anchor_layers(3) == (0, 1, 2)
    assert Ripra(anchors="0+8+middle").anchor_layers(32) == (0, 8, 16)
    for trained, limit, near in [(8192, 4096, 1024), (2048, 1024, 512)]:
        allocation = Ripra().allocation(trained)
        assert (allocation.limit, allocation.near, allocation.chunk, allocation.block) == (limit, near, 256, 128)


def test_diagnostics(tmp_path, capsys):
    """The tool on a small model: relevance, similarity and the error of blocks against the test's own computation."""
    architecture = dataclasses.replace(SMALL, vocab_size=320)
    config = ModelConfig(architecture, Position(rotary=Rope(theta=50.0)), trained_length=64)
    load_tokenizer(Tokenizer(kind="bytes")).save(tmp_path / "tokenizer")
    write_model_dir(tmp_path / "m", config, fresh_model(config).state_dict(), tokenizer_dir=tmp_path / "tokenizer")
    text = "".join(f"line {i}: {i * i % 97}\n" for i in range(30))
    (tmp_path / "d.jsonl").write_text("".join(json.dumps({"text": text[n:]}) + "\n" for n in range(2)))
    command = [
        str(tmp_path / "m"),
        "--data",
        str(tmp_path / "d.jsonl"),
        "--length",
        "160",
        "--evidence",
        "40:44",
        "150:160",
    ]
    command += ["--extend", "ripra:chunk=8,block=4", "--json", str(tmp_path / "f.json")]
    main([*command, "--picture", str(tmp_path / "p.png")])
    found = json.loads((tmp_path / "f.json").read_text())
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")

    assert found["anchors"] == [0, 1]
    similarity = torch.tensor(found["similarity"])
    assert_close(similarity.diagonal(), torch.ones(3))
    assert found["similarity_to_anchor"] == pytest.approx([1.0, 1.0, float(similarity[2, 1])])
    assert [e["chunk"] for e in found["evidence"]] == [5, 19]
    assert found["evidence"][1]["window"][11:] == [None] * 10

    one_chunk = [*command[:-4], "--length", "150", "--evidence", "40:44", "50:60", "--extend", "ripra:chunk=150"]
    one_chunk += ["--json", str(tmp_path / "one.json")]
    main(one_chunk)
    assert "one chunk, so there is no relevance to compare; set chunk below 150, as in --extend ripra:chunk=18" in (
        capsys.readouterr().out
    )
    one = json.loads((tmp_path / "one.json").read_text())
    assert one["similarity"] is one["similarity_to_anchor"] is None
    with pytest.raises(SystemExit, match="the whole text is one chunk; set chunk below 150"):
        main([*one_chunk, "--picture", str(tmp_path / "one.png")])
    assert not (tmp_path / "one.png").exists()

    # Layer 0 has the embeddings alone before it: its queries and keys need no cache.
    model = load_model(tmp_path / "m")[0]
    tokens = torch.tensor(load_tokenizer_dir(tmp_path / "tokenizer").encode(text))[:160]
    attention = model.layers["0"].attention
    with torch.no_grad():
        x = model.layers["0"].attention_norm(model.tok_embeddings(tokens))
        q, k = (linear(x).unflatten(-1, (-1, 8)) for linear in (attention.wq, attention.wk))
    differences = []
    for query in torch.linspace(33, 158, 64).long().unique().tolist():
        begin = 33 + (query - 33) // 4 * 4
        own = written_out(relevances(q[query], k, query, 8), query, 32, 16, 8)
        landscape = [*relevances(q[begin], k, begin, 8), 0.0]
        block = written_out(landscape, begin + 3, 32, 16, 8)
        differences += [abs(own[j] - block[j] + begin + 3 - query) for j in range(query - 16)]
    blocks = found["blocks"]
    assert blocks["positions"]["0"]["mean"] == pytest.approx(sum(differences) / len(differences), rel=1e-4)
    assert blocks["positions"]["0"]["max"] == pytest.approx(max(differences), rel=1e-4)
    assert blocks["logits"]["max"] > 1e-3

    with pytest.raises(SystemExit, match="START:END"):
        main([*command[:-4], "--evidence", "5", "7:9"])
    with pytest.raises(SystemExit, match="about RiPRA"):
        main([*command[:3], "--extend", "gali"])


def test_passkey_prompts_know_where_their_evidence_is():
    tokenizer = load_tokenizer(Tokenizer(kind="bytes"))
    prompts, spans = passkey_prompts(tokenizer, 3, 600)
    for number, (prompt, (start, stop)) in enumerate(zip(prompts, spans, strict=True)):
        text = tokenizer.decode(prompt[start:stop].tolist())
        assert re.fullmatch(r"The passkey is (\d{5})\. Remember \1\.", text)
        assert len(prompt) <= 600
        assert abs(start / len(prompt) - (number + 0.5) / 3) < 0.2
