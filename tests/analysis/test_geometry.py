"""farsight geometry against planted structure, numpy and scikit-learn."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA

from farsight.analysis.capture import __main__ as capture
from farsight.analysis.capture.heads import Head
from farsight.analysis.capture.samples import Samples
from farsight.analysis.geometry.__main__ import main
from farsight.analysis.geometry.measure import measure
from farsight.analysis.geometry.pca import head_class, paper_class, principal_components
from farsight.analysis.geometry.rotation import planar_rotation
from farsight.checkpoints.model_dir.api import write_model_dir
from farsight.configs.schema import Alibi, NoRotary, Position, Rope, Scope, Tokenizer
from farsight.data.tokenizers.tokenizer import load_tokenizer
from farsight.model.build import ModelConfig
from tests.model.test_model import SMALL, fresh_model

T, H, LENGTH = 4000, 16, 1000


def planted(query_slope=0.0, key_slope=0.0, query_mean=1.0, noise=0.3, seed=0, apart=2.0):
    """Queries and keys that drift along one direction and are separated along another: q, k, positions, the two directions."""
    g = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(H, H, generator=g, dtype=torch.float64))[0]
    along, across = basis[0], basis[1]
    t = torch.randint(LENGTH, (T,), generator=g).double()
    noise_q, noise_k = noise * torch.randn(2, T, H, generator=g, dtype=torch.float64)
    middle = t.mean()
    q = noise_q + (query_mean + query_slope * (t - middle))[:, None] * along + apart * across
    k = noise_k + key_slope * (t - middle)[:, None] * along
    return q, k, t.long(), along, across


@pytest.mark.parametrize("seed", range(3))
def test_the_plane(seed):
    """a and b are orthonormal, no direction orthogonal to a has a covariance with position, and b separates the most."""
    q, k, t, _, _ = planted(0.001, 0.003, seed=seed)
    found = planar_rotation(q, k, t)
    a, b = found.a_H.numpy(), found.b_H.numpy()
    assert a @ a == pytest.approx(1, abs=1e-12)
    assert b @ b == pytest.approx(1, abs=1e-12)
    assert a @ b == pytest.approx(0, abs=1e-12)
    pool, both = np.concatenate([q, k]), np.concatenate([t, t])
    draw = np.random.default_rng(seed)
    for _ in range(50):
        u = draw.standard_normal(H)
        u -= (u @ a) * a
        u /= np.linalg.norm(u)
        assert np.cov(pool @ u, both)[0, 1] == pytest.approx(0, abs=1e-6)
        assert (q.numpy().mean(0) - k.numpy().mean(0)) @ u <= found.separation + 1e-12
    # Each figure against numpy.
    centred = pool - pool.mean(0)
    assert found.query_correlation == pytest.approx(np.corrcoef(q.numpy() @ a, t)[0, 1])
    assert found.key_correlation == pytest.approx(np.corrcoef(k.numpy() @ a, t)[0, 1])
    assert found.key_slope == pytest.approx(np.polyfit(t, k.numpy() @ a, 1)[0])
    assert found.query_mean == pytest.approx((q.numpy() @ a).mean())
    assert found.bias_strength == pytest.approx((q.numpy() @ a).mean() * np.polyfit(t, k.numpy() @ a, 1)[0])
    drift = np.polyfit(t, k.numpy(), 1)[0]
    assert found.query_bias == pytest.approx(q.numpy().mean(0) @ drift)
    assert found.key_drift == pytest.approx(np.linalg.norm(drift))
    assert found.drift_cosine == pytest.approx(drift @ a / np.linalg.norm(drift))
    assert found.plane_share == pytest.approx(((centred @ np.stack([a, b], 1)) ** 2).sum() / (centred**2).sum())
    for x, share in ((q.numpy(), found.query_linear_share), (k.numpy(), found.key_linear_share)):
        rest = x - np.outer(t, np.polyfit(t, x, 1)[0]) - np.polyfit(t, x, 1)[1]
        assert share == pytest.approx(1 - (rest**2).sum() / ((x - x.mean(0)) ** 2).sum())


@pytest.mark.parametrize(
    ("query_mean", "key_slope"), [(2.0, 0.01), (-2.0, -0.01), (2.0, -0.01), (-2.0, 0.01), (5.0, 0.002)]
)
def test_planted_bias(query_mean, key_slope):
    """Planted bias is found to 1 %, with its sign: positive if the mean query's score grows with the key's position."""
    slope = 0.5 * key_slope
    q, k, t, along, _ = planted(slope, key_slope, query_mean, noise=0.1)
    found = planar_rotation(q, k, t)
    assert abs(float(found.a_H @ along)) == pytest.approx(1, abs=1e-3)
    assert found.bias_strength == pytest.approx(query_mean * key_slope, rel=0.01)
    assert found.query_bias == pytest.approx(query_mean * key_slope, rel=0.01)
    # Against the scores themselves: late keys versus early ones.
    scores = k @ q.mean(0)
    late, early = scores[t >= LENGTH // 2].mean(), scores[t < LENGTH // 2].mean()
    assert (found.bias_strength > 0) == (late > early)


def test_queries_and_keys_that_drift_apart():
    """With opposite slopes the pooled covariance cancels and a points elsewhere, but the keys' own drift is still reported."""
    q, k, t, along, _ = planted(-0.01, 0.01, 2.0)
    found = planar_rotation(q, k, t)
    assert abs(found.drift_cosine) < 0.7
    assert abs(found.bias_strength) < 0.7 * 0.02
    assert found.query_bias == pytest.approx(0.02, rel=0.02)
    assert found.key_drift == pytest.approx(0.01, rel=0.02)
    assert abs(float(found.a_H @ along)) < 0.7


def test_clouds_without_a_plane_still_get_one():
    """Queries equal to keys, or separated only along the drift; no drift at all. A single position is refused."""
    g = torch.Generator().manual_seed(0)
    x, t = torch.randn(50, 4, generator=g, dtype=torch.float64), torch.arange(50)
    a = planar_rotation(x, x, t).a_H
    for q, k in ((x, x), (x + 3 * a, x), (torch.zeros_like(x), torch.zeros_like(x))):
        found = planar_rotation(q, k, t)
        plane = torch.stack([found.a_H, found.b_H])
        torch.testing.assert_close(plane @ plane.T, torch.eye(2, dtype=torch.float64))
        assert all(np.isfinite(getattr(found, f.name)) for f in dataclasses.fields(found) if f.type is float)
    with pytest.raises(ValueError, match="are at one position"):
        planar_rotation(x, x, torch.zeros(50))


def test_components_equal_scikit_learns():
    q, k, t, _, _ = planted(0.004, 0.002, -1.0)
    theirs = PCA(n_components=4).fit(np.concatenate([q, k]))
    for component, v, share in zip(
        principal_components(q, k, t, 4), theirs.components_, theirs.explained_variance_ratio_, strict=True
    ):
        assert component.share == pytest.approx(share)
        assert abs(component.direction_H.numpy() @ v) == pytest.approx(1)
        r_q, r_k = (np.corrcoef(x.numpy() @ v, t)[0, 1] for x in (q, k))
        sign = np.sign(r_q if abs(r_q) > abs(r_k) else r_k)
        assert component.query_correlation == pytest.approx(sign * r_q)
        assert component.key_correlation == pytest.approx(sign * r_k)
        assert np.corrcoef(q.numpy() @ component.direction_H.numpy(), t)[0, 1] == pytest.approx(sign * r_q)
    assert len(principal_components(q, k, t, 99)) == H


@pytest.mark.parametrize(
    ("r_q", "r_k", "name", "in_the_thesis"),
    [
        (0.71, 0.71, "position-dominated", "position-dominated"),
        (-0.71, 0.8, "position-dominated", "position-dominated"),
        (0.71, 0.7, "Q-positional", "Q-positional"),
        (-0.9, 0.0, "Q-positional", "Q-positional"),
        (0.7, 0.71, "K-positional", "mixed"),
        (0.0, -0.9, "K-positional", "mixed"),
        (0.7, 0.7, "mixed", "mixed"),
        (0.29, -0.29, "content-focused", "content-focused"),
        (0.3, 0.0, "mixed", "mixed"),
        (0.0, 0.3, "mixed", "mixed"),
        (0.5, 0.1, "mixed", "mixed"),
    ],
)
def test_classes(r_q, r_k, name, in_the_thesis):
    """The thesis says "exceed 0.7" and "below 0.3": the limits themselves are neither."""
    assert head_class(r_q, r_k) == name
    assert paper_class(name) == in_the_thesis


def test_summaries():
    """Two layers: recency in both heads of the first, primacy in the single head of the second."""
    heads = [Head(0, 0, 0, LENGTH, True), Head(0, 1, 0, LENGTH, True), Head(1, 0, 0, LENGTH, True)]
    clouds = [planted(0.005, 0.01, 2.0, 0.1), planted(0.01, 0.02, 1.0, 0.1), planted(0.005, 0.01, -4.0, 0.1)]
    t = clouds[0][2]
    parts = [
        {
            "q": torch.stack([cloud[0] for cloud in clouds]),
            "k": torch.stack([cloud[1] for cloud in clouds]),
            "position": t,
            "sequence": torch.zeros_like(t),
        }
    ]
    figures = measure(Samples(heads, LENGTH, 16, parts, [0, 1, 2]))
    first, second, model = figures["layers"]["0"], figures["layers"]["1"], figures["model_summary"]
    assert first["bias_strength"] == pytest.approx(0.02, rel=0.01)
    assert first["bias_context"] == pytest.approx(20, rel=0.01)
    assert second["bias_strength"] == pytest.approx(-0.04, rel=0.01)
    assert (first["recency"], first["primacy"], second["recency"], second["primacy"]) == (1, 0, 0, 1)
    assert model["bias_strength"] == pytest.approx(0, abs=1e-3)
    assert model["recency"] == pytest.approx(2 / 3)
    assert model["abs_key_slope"] == pytest.approx(0.04 / 3, rel=0.01)
    assert model["query_mean"] == pytest.approx(np.mean([head["query_mean"] for head in figures["heads"]]))
    assert model["classes"]["position-dominated"] == 3
    for number in range(4):
        sizes = []
        for q, k, *_ in clouds:
            axis = PCA(4).fit(np.concatenate([q, k])).components_[number]
            sizes.append([abs(np.corrcoef(x.numpy() @ axis, t)[0, 1]) for x in (q, k)])
        expected = np.mean(sizes, axis=0)
        assert [model["pca"][number][key] for key in ("abs_r_q", "abs_r_k")] == pytest.approx(
            expected.tolist(), abs=1e-6
        )
    pairs = np.array([(head["bias_strength"], head["separation"]) for head in figures["heads"]])
    assert model["bias_separation"] == pytest.approx(np.corrcoef(pairs, rowvar=False)[0, 1])
    assert model["separation"] == pytest.approx(pairs[:, 1].mean())
    assert sum(model["class_shares"].values()) == pytest.approx(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("geometry")
    load_tokenizer(Tokenizer(kind="bytes")).save(folder / "tokenizer")
    position = Position(rotary=NoRotary(), heads=Scope(), bias=Alibi())
    for name, chosen in (("scoped", position), ("rope", Position(rotary=Rope()))):
        config = ModelConfig(dataclasses.replace(SMALL, vocab_size=320), chosen, trained_length=64)
        write_model_dir(folder / name, config, fresh_model(config).state_dict(), tokenizer_dir=folder / "tokenizer")
    (folder / "text.txt").write_text(
        "A head's queries may drift with position while its keys stay where they are. " * 40
    )
    return folder


def test_the_command(folder, tmp_path, capsys):
    """A model and its capture give the same figures; contents of the JSON; a picture."""
    data = ["--data", str(folder / "text.txt"), "--per-bucket", "2", "--heads", "9"]
    made = ["--json", str(tmp_path / "m.json"), "--picture", str(tmp_path / "m.png")]
    main([str(folder / "scoped"), *data, *made])
    printed = capsys.readouterr().out
    assert "heads have scopes" in printed
    assert "ALiBi" in printed
    capture.main([str(folder / "scoped"), *data, "--out", str(tmp_path / "c")])
    main([str(tmp_path / "c"), "--json", str(tmp_path / "c.json"), "--components", "2"])
    from_model, from_capture = (json.loads((tmp_path / name).read_text()) for name in ("m.json", "c.json"))
    assert (tmp_path / "m.png").read_bytes().startswith(b"\x89PNG")
    assert from_model["tool"] == "analysis.geometry"
    assert from_model["model"] == str(folder / "scoped")
    assert (from_model["length"], from_model["per_bucket"], from_model["sequences"]) == (64, 2.0, 48)
    assert [len(head["pca"]) for head in from_capture["heads"]] == [2] * 9
    for head in (*from_model["heads"], *from_capture["heads"]):
        head["pca"] = head["pca"][:2]
    for summary in (from_model["model_summary"], *from_model["layers"].values()):
        assert len(summary["pca"]) == 4
        summary["pca"] = summary["pca"][:2]
    from_model["components"] = 2
    assert from_model == from_capture
    keys = {
        "layer", "head", "kv_head", "scope", "slope", "class", "paper_class", "pca", "bias_strength", "bias_context",
        "key_slope", "query_mean", "r_q", "r_k", "separation", "query_bias", "key_drift", "drift_cosine",
        "query_linear_share", "key_linear_share", "plane_share",
    }  # fmt: skip
    assert all(keys <= head.keys() for head in from_model["heads"])
    assert {head["slope"] for head in from_model["heads"]} <= {2**-8, 2**-6, 2**-4, 2**-2}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["c", "--heads", "5"], "is a capture, which fixes --heads: leave"),
        (["c", "--data", "text.txt"], "is a capture, which fixes --data: leave"),
    ],
)
def test_refused(folder, monkeypatch, arguments, words):
    monkeypatch.chdir(folder)
    (folder / "c").mkdir(exist_ok=True)
    (folder / "c" / "capture.json").write_text("{}")
    with pytest.raises(SystemExit, match=words):
        main(arguments)


def test_refused_usage(folder, capsys):
    for arguments, words in (
        ([str(folder / "scoped"), "--picture", str(folder / "x.gif")], "must end with .png, .svg or .pdf"),
        ([str(folder / "scoped")], "is not a capture; to capture the model there, add --data"),
        ([str(folder / "nowhere"), "--data", "text.txt"], "nowhere is not a folder"),
    ):
        with pytest.raises(SystemExit):
            main(arguments)
        assert words in capsys.readouterr().err
