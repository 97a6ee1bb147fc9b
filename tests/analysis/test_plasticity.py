"""farsight plasticity: the closed form against sampling and the error function, the theorem, and each figure recomputed."""

import json
import math
import re

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from farsight.analysis.capture import __main__ as capture
from farsight.analysis.capture.heads import Head
from farsight.analysis.plasticity import __main__ as tool
from farsight.analysis.plasticity.heads import (
    HeadProfile,
    QueryModel,
    counted_plasticity,
    draw_pairs,
    head_profile,
    householder,
    pairwise_plasticity,
)
from farsight.analysis.plasticity.lengths import by_length, read_lengths
from farsight.analysis.plasticity.summary import (
    DistanceMap,
    band,
    bands,
    check_buckets,
    head_figures,
    model_figures,
    overall,
    quintiles,
)
from farsight.checkpoints.convert.__main__ import main as convert
from farsight.data.tokenizers.tokenizer import BytesTokenizer
from farsight.errors import ConfigError
from tests.checkpoints.test_convert import write_with_transformers
from tests.reports.test_report import write_run

MILLION = 1_000_000


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def normal(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=seeded(seed))


def random_model(seed, H=6, keys=40, diagonal=False):
    """A model of queries with a single bucket, number 3, and a random covariance; and differences of keys."""
    u = normal(2 + keys, H, seed=seed)
    root = normal(H, H, seed=seed + 1000)
    covariance = torch.diag(root.diagonal().square() + 0.1) if diagonal else root @ root.T
    intercept, slope = normal(2, seed=seed + 2000).tolist()
    model = QueryModel(
        householder(u[0]), intercept, 0.1 * slope, float(covariance[0, 0]), {3: u[1, 1:]}, {3: covariance}
    )
    return model, u[2:]


def drawn_queries(model, tau, many, seed):
    """Queries sampled from bucket 3, in the basis of the keys."""
    root = torch.linalg.cholesky(model.covariances_HH[3])
    mean = torch.cat([torch.tensor([model.intercept + model.slope * tau]), model.semantic_means[3]])
    turned = torch.randn(many, len(root), generator=seeded(seed)) @ root.T.float() + mean.float()
    return turned @ model.reflection_HH.float()


def exact(model, differences_PH, tau):
    """4 p (1 − p) by the error function, from the queries' mean and covariance in the basis of the keys."""
    H_HH, found = model.reflection_HH.numpy(), []
    mean = H_HH @ np.r_[model.intercept + model.slope * tau, model.semantic_means[3]]
    covariance = H_HH @ model.covariances_HH[3].numpy() @ H_HH
    for d in differences_PH.numpy():
        p = 0.5 * (1 + math.erf(d @ mean / math.sqrt(2 * d @ covariance @ d)))
        found.append(4 * p * (1 - p))
    return torch.tensor(found, dtype=torch.float64)


@pytest.mark.parametrize("covariance", ["diagonal", "full"])
def test_the_closed_form_is_what_a_million_queries_do(covariance):
    off = 0.0
    for seed in range(3):
        model, differences_PH = random_model(seed, keys=10, diagonal=covariance == "diagonal")
        got_P = pairwise_plasticity(model.signal_to_noise(differences_PH, 3, 7.5, covariance))
        p_P = (drawn_queries(model, 7.5, MILLION, seed) @ differences_PH.T.float() > 0).double().mean(0)
        assert (got_P - 4 * p_P * (1 - p_P)).abs().max() < 0.01
        assert_close(got_P, exact(model, differences_PH, 7.5), atol=1e-9, rtol=0)
        # Equation 4.12's diagonal is right only if the covariance is diagonal.
        diagonal_P = pairwise_plasticity(model.signal_to_noise(differences_PH, 3, 7.5))
        off = max(off, float((diagonal_P - got_P).abs().max()))
    assert off < 1e-9 if covariance == "diagonal" else off > 0.1


def test_equal_keys_tie():
    model, differences_PH = random_model(0)
    for covariance in ("diagonal", "full"):
        z_P = model.signal_to_noise(differences_PH[:1] * 0, 3, 7.5, covariance)
        assert pairwise_plasticity(z_P).tolist() == [1.0]


def planted(tokens=1500, H=8, length=128, sequences=20, seed=0):
    """Queries and keys of random tokens that drift with position; the queries' content is correlated and has a mean."""
    place = torch.randperm(sequences * length, generator=seeded(seed))[:tokens].sort().values
    t_T = place % length
    q_TH = normal(tokens, H, seed=seed + 1) @ normal(H, H, seed=seed + 2) + normal(H, seed=seed + 3)
    k_TH = normal(tokens, H, seed=seed + 4)
    drift = t_T[:, None] / length
    q_TH, k_TH = q_TH + 4 * drift * normal(H, seed=seed + 5), k_TH + 2 * drift * normal(H, seed=seed + 6)
    return q_TH, k_TH, t_T, place // length


def profile(data=None, **options):
    return head_profile(*(data or planted()), **{"length": 128, "buckets": 16, "draws": 300} | options)


def test_the_fit_against_numpy():
    q_TH, _, t_T, _ = planted()
    model = QueryModel.fit(q_TH, t_T, t_T // 8)
    q, t = q_TH.numpy(), t_T.numpy()
    beta = np.polyfit(t, q, 1)[0]
    turn = model.reflection_HH.numpy()
    assert np.allclose(turn @ turn, np.eye(8))
    assert np.allclose(turn @ beta, np.eye(8)[0] * np.linalg.norm(beta))  # equation 4.10
    line = np.polyfit(t, q @ turn[0], 1)
    assert np.allclose([model.slope, model.intercept], line)
    residual = q @ turn[0] - np.polyval(line, t)
    assert model.residual_variance == pytest.approx(residual.var(ddof=1))
    semantic = (q @ turn)[:, 1:]
    assert np.abs(np.cov(semantic.T, t)[-1, :-1]).max() < 1e-9  # no drift remains
    for bucket in (0, 5, 15):
        here = t // 8 == bucket
        assert np.allclose(model.semantic_means[bucket], semantic[here].mean(0))
        assert np.allclose(model.covariances_HH[bucket], np.cov(np.c_[residual, semantic][here].T))


def test_full_covariance_knows_no_basis_and_the_diagonal_does():
    q_TH, k_TH, t_T, sequences_T = planted()
    worst = {"full": 0.0, "diagonal": 0.0}
    for seed in range(4):
        turn = torch.linalg.qr(normal(8, 8, seed=seed)).Q
        for covariance in worst:
            before = profile((q_TH, k_TH, t_T, sequences_T), covariance=covariance)
            after = profile((q_TH @ turn, k_TH @ turn, t_T, sequences_T), covariance=covariance)
            for bucket, was in before.of_bucket.items():
                now = after.of_bucket[bucket]
                worst[covariance] = max(worst[covariance], float((was.plasticity_P - now.plasticity_P).abs().max()))
                assert_close(was.counted_P, now.counted_P, atol=1e-5, rtol=0)
    assert worst["full"] < 1e-5
    assert worst["diagonal"] > 0.05


@pytest.mark.parametrize("tied", [False, True], ids=["distinct", "some_tied"])
def test_decay_is_bounded_beyond_t0(tied):
    """Theorem 4.4 with the constants of Lemma A.2, on 100 random models. The bound need not hold before T0."""
    least, broken_before = 0.3, 0
    for seed in range(100):
        model, delta_PH = random_model(seed, diagonal=True)
        turned_PH = delta_PH @ model.reflection_HH
        # |δ₁| is bounded from below; with ties, it is 0 for 10 of 40 pairs.
        turned_PH[:, 0] += least * turned_PH[:, 0].sign()
        turned_PH[: 10 * tied, 0] = 0
        delta_PH = turned_PH @ model.reflection_HH
        moves_P = turned_PH[:, 0].abs() >= least
        rest_PH, first_P = turned_PH[:, 1:], turned_PH[:, 0]
        variance_P = first_P**2 * model.residual_variance + rest_PH**2 @ model.covariances_HH[3].diagonal()[1:]
        gamma_P = first_P * model.slope / variance_P.sqrt()
        start_P = (first_P * model.intercept + rest_PH @ model.semantic_means[3]) / variance_P.sqrt()
        # |z| ≥ |γ| t / 2 from t = 2 |z₀| / |γ| on, and ≥ 1 from 2 / |γ| on; the factor in A.7 is then 4 / √2π.
        begins_P = 2 * start_P.abs().clamp_min(1) / gamma_P.abs()
        C_0, share = 4 / math.sqrt(2 * math.pi), float(moves_P.double().mean())
        c = least**2 * model.slope**2 / (8 * float(variance_P.max()))
        rigid = 2 * torch.special.erf(start_P[~moves_P] / 2**0.5) ** 2
        limit = float((1 - rigid / 2).sum()) / 40  # equation A.9, as 4 p (1 − p) = 1 − erf²
        for t in (float(begins_P[moves_P].max()) * torch.tensor([1.0, 1.1, 1.5, 3.0])).tolist():
            got_P = pairwise_plasticity(model.signal_to_noise(delta_PH, 3, t))
            bound_P = C_0 * torch.exp(-(gamma_P**2) * t * t / 8)
            assert (got_P <= bound_P * (1 + 1e-6) + 1e-12)[moves_P].all()
            assert float(got_P.mean()) <= limit + share * C_0 * math.exp(-c * t * t) + 1e-9
        far = pairwise_plasticity(model.signal_to_noise(delta_PH, 3, 1e7 / abs(model.slope))).mean()
        assert float(far) == pytest.approx(limit, abs=1e-9)
        assert (limit > 0) == tied
        # At z = 0 plasticity is 1.
        at_P = torch.where(moves_P, -start_P / gamma_P, -1.0)
        for pair in torch.nonzero(at_P > 0)[:3, 0].tolist():
            z_P = model.signal_to_noise(delta_PH[pair : pair + 1], 3, float(at_P[pair]))
            assert float(pairwise_plasticity(z_P)) == pytest.approx(1)
            broken_before += C_0 * math.exp(-(float(gamma_P[pair] * at_P[pair]) ** 2) / 8) < 1
    assert broken_before > 0


def test_pooled_pairs_lie_a_third_apart_and_those_of_a_prefix_a_sixth():
    t = 200
    sequences_T, positions_T = (x.flatten() for x in torch.meshgrid(torch.arange(8), torch.arange(256), indexing="ij"))
    distance = {}
    for pairs in ("pooled", "prefix"):
        found = draw_pairs(positions_T < t, positions_T, sequences_T, 200_000, seeded(), pairs)
        first_P, second_P = positions_T[found.first_P], positions_T[found.second_P]
        assert max(int(first_P.max()), int(second_P.max())) == t - 1
        assert not (found.first_P == found.second_P).any()
        same = (sequences_T[found.first_P] == sequences_T[found.second_P]).double().mean()
        assert same == 1 if pairs == "prefix" else same < 0.2
        distance[pairs] = float((first_P - second_P).abs().double().mean())
    assert distance["pooled"] == pytest.approx(t / 3, rel=0.02)
    assert distance["prefix"] == pytest.approx(t / 6, rel=0.03)
    # Two different ones of N successive tokens are (N + 1) / 3 apart on average.
    assert distance["prefix"] == pytest.approx(np.mean([(N + 1) / 3 for N in range(2, t + 1)]), rel=0.01)


@pytest.mark.parametrize("t", [1024, 4096])
def test_few_tokens_of_each_sequence_make_no_prefix_longer(t):
    """With ten tokens before t, as in captures, short prefixes of a sequence rarely hold two, but must have the same weight."""
    sequences_T, positions_T = torch.nonzero(torch.rand(60, 4096, generator=seeded()) < 10 / t).unbind(1)
    found = draw_pairs(positions_T < t, positions_T, sequences_T, 40_000, seeded(1), "prefix")
    distance = float((positions_T[found.first_P] - positions_T[found.second_P]).abs().double().mean())
    assert distance == pytest.approx(t / 6, rel=0.06)


@pytest.mark.parametrize("pairs", ["pooled", "prefix"])
def test_keys_beyond_the_scope_never_compete(pairs):
    data = q_TH, _, t_T, _ = planted()
    for scope, seen in ((20, set(range(1, 16))), (9, set(range(1, 16))), (4, set())):
        found = profile(data, scope=scope, pairs=pairs)
        assert set(found.of_bucket) == seen
        for number, bucket in found.of_bucket.items():
            middle = (8 * number + 8 * number + 7) / 2
            allowed = {t for t in range(8 * number) if middle - t < scope}
            both = torch.cat([bucket.pairs.first_P, bucket.pairs.second_P])
            assert set(t_T[both].tolist()) <= allowed
            if pairs == "pooled":
                assert set(t_T[both].tolist()) == allowed
            assert bucket.queries == int((t_T // 8 == number).sum())
    everything, whole = profile(data, pairs=pairs), profile(data, scope=128, pairs=pairs)
    assert everything.plasticity[1:] == whole.plasticity[1:]
    assert math.isnan(everything.plasticity[0])
    assert len(q_TH) == len(t_T)


def test_alibi_against_all_scores():
    data = q_TH, k_TH, t_T, _ = planted(tokens=6000, H=4, sequences=50)
    plain, slope = profile(data, covariance="full"), 0.05
    shifted = profile(data, slope=slope, covariance="full")
    for number in (4, 15):
        bucket = shifted.of_bucket[number]
        near = torch.nonzero(t_T // 8 == number)[:, 0]
        score = {}
        for name in ("first_P", "second_P"):
            keys = getattr(bucket.pairs, name)
            distance_QP = t_T[near][:, None] - t_T[keys]
            score[name] = q_TH[near] @ k_TH[keys].T / 4**0.5 - slope * distance_QP
        p_P = (score["first_P"] > score["second_P"]).double().mean(0)
        want_P = 4 * p_P * (1 - p_P) * len(near) / (len(near) - 1)
        assert_close(bucket.counted_P, want_P, atol=1e-9, rtol=0)
        assert float((bucket.plasticity_P - want_P).abs().mean()) < 0.03
        assert float((plain.of_bucket[number].plasticity_P - want_P).abs().mean()) > 0.06


def test_counting_few_queries_is_right_on_average():
    p = 0.5 * (1 + math.erf(0.6 / 2**0.5))  # probability that N(0.6, 1) is above 0
    q = normal(5 * 4000, 1) + 0.6
    one, none = torch.ones(1, 1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    found = torch.cat([counted_plasticity(five, one, none) for five in q.split(5)])
    assert float(found.mean()) == pytest.approx(4 * p * (1 - p), abs=4 * float(found.std()) / 4000**0.5)
    ties = counted_plasticity(torch.zeros(5, 1, dtype=torch.float64), one, none)
    assert ties.tolist() == [1.0]


def test_distance_map_against_a_loop():
    data = _, _, t_T, _ = planted()
    heat, cells, found = DistanceMap(128, 8), {}, [profile(data, draws=60, seed=seed) for seed in (0, 1)]
    for one in found:
        heat.add(one, t_T)
        for number, bucket in one.of_bucket.items():
            for first, second, value in zip(*vars(bucket.pairs).values(), bucket.plasticity_P, strict=True):
                i, j = int(t_T[first]), int(t_T[second])
                behind = 8 * number + 3.5 - (i + j) / 2
                cells.setdefault((int(behind // 16), abs(i - j) // 16), []).append(float(value))
    got = heat.figures()
    assert got["distances"] == [16.0 * edge for edge in range(9)]
    for row in range(8):
        for column in range(8):
            want = cells.get((row, column), [])
            assert got["pairs"][row][column] == len(want)
            value = got["plasticity"][row][column]
            assert value == pytest.approx(np.mean(want)) if want else value is None


def test_bands_by_hand():
    ten = [None, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1]
    assert quintiles(ten) == pytest.approx([0.9, 0.75, 0.55, 0.35, 0.15])
    assert bands(ten) == pytest.approx({"ap_first": 0.9, "ap_last": 0.15, "ap_drop": 0.75})
    queries = [50, 1, 1, 1, 1, 1, 1, 1, 1, 11]
    assert overall(ten, queries) == pytest.approx((4.4 + 11 * 0.1) / 19)
    # Of 16 buckets, 1 and 2 have their middles in the first fifth (0.094, 0.156; not 0.219), 13 to 15 in the last (0.844, …).
    sixteen = [float(2**b) for b in range(16)]
    assert bands(sixteen) == {"ap_first": 3.0, "ap_last": 7 * 2**13 / 3, "ap_drop": 3 - 7 * 2**13 / 3}
    assert band([5.0, 1.0, None, 3.0], 0.0, 1.0) == 2.0  # the first never counts
    assert bands([None] * 10) == {"ap_first": None, "ap_last": None, "ap_drop": None}
    with pytest.raises(ConfigError, match=r"7 buckets: .* --buckets 8 or more"):
        check_buckets(7)
    assert band([None] + [1.0] * 7, 0, 0.2) == 1.0


def test_a_model_is_the_mean_of_the_heads_that_can_be_measured():
    q_TH, k_TH, t_T, sequences_T = planted()
    found = [profile((q_TH, k_TH, t_T, sequences_T), scope=scope, seed=scope) for scope in (128, 20, 4)]
    heads = [Head(layer, n, 0, (128, 20, 4)[n], True) for n, layer in enumerate((0, 1, 1))]
    heat = DistanceMap(128, 16)
    figures = model_figures([head_figures(*pair) for pair in zip(heads, found, strict=True)], heat)
    assert figures["not_measurable"] == ["1.2"]
    assert [head["measurable"] for head in figures["heads"]] == [True, True, False]
    one, two = figures["heads"][:2]
    assert figures["profile"][0] is None
    assert one["profile"][0] is None
    for bucket in (1, 7, 15):
        mean = (found[0].plasticity[bucket] + found[1].plasticity[bucket]) / 2
        assert figures["profile"][bucket] == pytest.approx(mean)
    for key in ("ap_overall", "ap_first", "ap_last", "ap_drop"):
        assert figures[key] == pytest.approx((one[key] + two[key]) / 2)
        assert figures["layers"]["1"][key] == two[key]
    assert figures["meets_target"] == (figures["ap_drop"] < 0.10)
    lonely = model_figures([head_figures(heads[2], HeadProfile(128, 16, {}))], heat)
    assert lonely["ap_overall"] is lonely["meets_target"] is None


def test_lengths_beside_plasticity(tmp_path):
    model, file = tmp_path / "runs" / "x" / "model", tmp_path / "needle.json"
    cells = [
        {"length": 64, "depth": 0, "accuracy": 1.0, "trials": 1},
        {"length": 64, "depth": 1, "accuracy": 0.5, "trials": 3},
        {"length": 300, "depth": 0, "accuracy": 0.0, "trials": 2},
    ]
    values = [None, 0.9, 0.8, 0.7]  # buckets of 64 tokens
    file.write_text(json.dumps({"model": "runs/x/model", "cells": cells}))
    assert by_length(values, 256, read_lengths(file, model)) == [
        {"length": 64, "accuracy": 0.625, "plasticity": None},
        {"length": 300, "accuracy": 0.0, "plasticity": None},
    ]
    lengths = {"256": 3.0, "65": 5.0, "128": 4.0}
    file.write_text(json.dumps({"models": {"y": {}, str(model): {"lengths": lengths}}}))
    rows = by_length(values, 256, read_lengths(file, model))
    assert [(row["length"], row["perplexity"], row["plasticity"]) for row in rows] == [
        (65, 5.0, 0.9),
        (128, 4.0, 0.9),
        (256, 3.0, 0.7),
    ]
    for text, says in (
        ("{", "is not valid JSON"),
        ('{"model": "runs/y/model", "cells": []}', "figures of runs/y/model, but none of"),
        (json.dumps({"model": str(model)}), "not written by farsight needle or farsight perplexity"),
        (None, "there is no such file"),
    ):
        file.unlink(missing_ok=True) if text is None else file.write_text(text)
        with pytest.raises(ConfigError, match=says):
            read_lengths(file, model)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A Llama written by transformers, its tokenizer, and a text."""
    root = tmp_path_factory.mktemp("plasticity")
    write_with_transformers(root / "llama", "default", tied=False)
    BytesTokenizer().save(root / "llama")
    (root / "text.txt").write_text("How far does the query decide? " * 120)
    return root


def test_one_command_on_a_model_of_transformers(llama, tmp_path, capsys):
    data, out = llama / "text.txt", tmp_path / "f.json"
    needle = tmp_path / "needle.json"
    cells = [{"length": length, "depth": 0, "accuracy": 0.5, "trials": 2} for length in (32, 64, 128)]
    needle.write_text(json.dumps({"model": str(llama / "llama"), "cells": cells}))
    options = ["--data", str(data), "--buckets", "8", "--per-bucket", "4", "--draws", "50", "--needle", str(needle)]
    tool.main([str(llama / "llama"), *options, "--json", str(out), "--picture", str(tmp_path / "p.png")])
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    got, printed = json.loads(out.read_text()), capsys.readouterr().out
    assert (got["tool"], got["model"], got["length"], got["covariance"], got["pairs"]) == (
        "analysis.plasticity", str(llama / "llama"), 64, "diagonal", "pooled",
    )  # fmt: skip
    assert got["positions"] == [8 * bucket + 3.5 for bucket in range(8)]
    assert [(head["layer"], head["head"]) for head in got["heads"]] == [(n // 4, n % 4) for n in range(8)]
    assert got["profile"][0] is None
    assert all(0 < value <= 1 for value in got["profile"][1:])
    assert got["ap_drop"] == pytest.approx(np.mean([head["ap_drop"] for head in got["heads"]]))
    assert [row["plasticity"] for row in got["by_length"]] == [got["profile"][3], got["profile"][7], None]
    assert f"AP_drop {got['ap_drop']:.3f}" in printed
    assert f"{got['positions'][5]:>10,.1f} {got['profile'][5]:>11.3f} {got['counted'][5]:>8.3f}" in printed


def test_rows_of_a_recipe_and_a_capture(llama, tmp_path, capsys):
    """Two stages, the first with a checkpoint and a model; a checkpoint's figures equal those of its capture."""
    root, data = tmp_path / "recipe", str(llama / "text.txt")
    for name, start in (("short", ""), ("long", str(root / "short" / "checkpoint" / "step-3"))):
        write_run(root / name, [5.0, 4.0, 3.0], start=start, stage=True)
        (root / name / "model").symlink_to(llama / "llama")
    with capsys.disabled():
        convert(["from-hf", str(llama / "llama"), str(root / "short" / "checkpoint" / "step-2")])
    options = ["--data", data, "--buckets", "8", "--per-bucket", "4", "--draws", "50"]
    out, picture = tmp_path / "f.json", tmp_path / "p.svg"
    tool.main([str(root), *options, "--json", str(out), "--picture", str(picture)])
    rows = json.loads(out.read_text())["checkpoints"]
    assert [(row["stage"], row["step"], row["tokens"], row["length"]) for row in rows] == [
        ("short", 2, 2000.0, 64),
        ("short", 3, 3000.0, 64),
        ("long", 3, 6000.0, 64),
    ]
    capture.main(
        [str(llama / "llama"), "--data", data, "--buckets", "8", "--per-bucket", "4", "--out", str(tmp_path / "c")]
    )
    tool.main([str(tmp_path / "c"), "--draws", "50", "--json", str(out)])
    captured = json.loads(out.read_text())
    assert (captured["model"], captured["captured_in"]) == (str(llama / "llama"), str(tmp_path / "c"))
    for row in rows:
        assert row["ap_drop"] == pytest.approx(captured["ap_drop"], abs=1e-6)
        assert row["bias_context"] == pytest.approx(64 * row["bias_strength"])
    assert "<svg" in picture.read_text()[:500]
    for arguments, says in (
        ([str(llama / "llama")], "is not a capture; to capture the model there, add --data FILE"),
        ([str(llama / "none"), "--data", data], "is not a folder; name a model directory"),
        ([str(llama / "llama"), "--data", data, "--covariance", "half"], "invalid choice: 'half'"),
        ([str(llama / "llama"), "--data", data, "--draws", "0"], "0 must be at least 1"),
        ([str(llama / "llama"), "--data", data, "--json", str(tmp_path)], "is a folder; name a file"),
    ):
        capsys.readouterr()
        with pytest.raises(SystemExit) as raised:
            tool.main(arguments)
        assert raised.value.code == 2
        assert re.search(says, capsys.readouterr().err)
    for arguments, says in (
        ([str(llama / "llama"), "--data", data, "--buckets", "4"], "4 buckets: the first has no earlier keys"),
        ([str(root), "--data", data, "--buckets", "4"], "4 buckets: the first has no earlier keys"),
        ([str(root), "--data", data, "--needle", data], "--needle is for one model"),
        ([str(llama), "--data", data], "Nor is it a run folder"),
        ([str(tmp_path / "c"), "--data", data], "which fixes --data: leave"),
        ([str(tmp_path / "c"), "--per-bucket", "2"], "which fixes --per-bucket: leave"),
        ([str(tmp_path / "c"), "--dtype", "float32"], "which fixes --dtype: leave"),
        ([str(llama / "llama"), "--data", data, "--sequences", "1", "--per-bucket", "0.001"], "No head has a pair"),
    ):
        with pytest.raises(SystemExit, match=says):
            tool.main(arguments)
