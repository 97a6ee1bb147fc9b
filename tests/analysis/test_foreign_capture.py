"""The analysis tools on models that only transformers builds: queries and keys against the projections that hooks record here,
rotated by the equations; with slopes they give transformers' own attention weights."""

import json
import math
from argparse import Namespace

import pytest
import torch
from torch.testing import assert_close

from farsight.analysis.capture.__main__ import main as capture_main
from farsight.analysis.capture.samples import read_capture
from farsight.analysis.capture.sampling import CaptureSettings, capture
from farsight.analysis.geometry.__main__ import main as geometry_main
from farsight.analysis.layers.__main__ import main as layers_main
from farsight.analysis.plasticity.__main__ import main as plasticity_main
from farsight.analysis.probes.measure import read_layers
from farsight.inference.loading import load
from tests.foreign import HEADS, LAYERS, VOCABULARY, write

TOKENS = 40
OPTIONS = {
    "device": "cpu", "dtype": None, "quantization": None, "extend": None, "scope_max": None, "chunk": 7,
    "trust_remote_code": False,
}  # fmt: skip


def loaded_from(folder, **options):
    return load(folder, Namespace(**OPTIONS | options))


def tokens(rows=1):
    return torch.randint(VOCABULARY, (rows, TOKENS), generator=torch.Generator().manual_seed(3))


def projections(model, tokens_BL, *names):
    """The outputs of the modules whose names end so, by layer: {(layer, name): output}."""
    found = {}
    for path, module in model.named_modules():
        for name in names:
            if path.endswith("." + name):
                layer = int(next(part for part in path.split(".") if part.isdigit()))
                module.register_forward_hook(
                    lambda _, inputs, output, key=(layer, name): found.__setitem__(key, output)
                )
    with torch.no_grad():
        model(tokens_BL)
    return {key: x.double() for key, x in found.items()}


def turned(x_TH, theta, pairs):
    """RoPE (Su et al., 2021) at the positions 0 … T − 1: dimensions `pairs` [F, 2] are turned by t · theta^(−i/F)."""
    out, many = x_TH.clone(), len(pairs)
    for i, (a, b) in enumerate(pairs):
        angle = torch.arange(len(x_TH), dtype=torch.float64) * theta ** (-i / many)
        out[:, a] = x_TH[:, a] * angle.cos() - x_TH[:, b] * angle.sin()
        out[:, b] = x_TH[:, b] * angle.cos() + x_TH[:, a] * angle.sin()
    return out


def halves(many, first=0):
    """Each dimension with the one half of the rotated ones further."""
    return [(first + i, first + i + many // 2) for i in range(many // 2)]


def neighbours(many, first=0):
    return [(first + i, first + i + 1) for i in range(0, many, 2)]


def expected_heads(kind, model, tokens_BL):
    """{(layer, head): (query, key) [T, H]} in fp64, and how many key heads there are."""
    heads, theta, keys = {}, 10000.0, HEADS
    match kind:
        case "phi":
            found = projections(model, tokens_BL, "q_proj", "k_proj")
        case "deepseek_v2":
            found = projections(model, tokens_BL, "q_proj", "kv_a_proj_with_mqa", "kv_b_proj")
        case "deepseek_v3":
            found = projections(model, tokens_BL, "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
        case "mpt":
            found = projections(model, tokens_BL, "Wqkv")
        case _:
            found = projections(model, tokens_BL, "query_key_value")
    for layer in range(LAYERS):
        for head in range(HEADS):
            pairs = halves(8)
            match kind:
                case "phi":  # half of each head's 8 dimensions is rotated
                    q, k = (found[layer, name][0].unflatten(-1, (HEADS, 8))[:, head] for name in ("q_proj", "k_proj"))
                    pairs = halves(4)
                case "mpt":
                    q, k, _ = found[layer, "Wqkv"][0].unflatten(-1, (3, HEADS, 8))[:, :, head].unbind(1)
                    pairs = []
                case "gpt_neox":
                    q, k, _ = found[layer, "query_key_value"][0].unflatten(-1, (HEADS, 3, 8))[:, head].unbind(1)
                    pairs = halves(4)
                case "bloom" | "falcon_alibi":
                    q, k, _ = found[layer, "query_key_value"][0].unflatten(-1, (HEADS, 3, 8))[:, head].unbind(1)
                    pairs = []
                case "falcon":  # two query heads, their key head and its values, twice
                    group = found[layer, "query_key_value"][0].unflatten(-1, (2, 4, 8))[:, head // 2]
                    q, k, keys = group[:, head % 2], group[:, 2], 2
                case "falcon_one_key":
                    every = found[layer, "query_key_value"][0].unflatten(-1, (HEADS + 2, 8))
                    q, k, keys = every[:, head], every[:, HEADS], 1
                case "deepseek_v2" | "deepseek_v3":  # 8 dimensions without rotation, then 4 that are rotated and shared
                    q = found[layer, "q_proj" if kind == "deepseek_v2" else "q_b_proj"][0]
                    q = q.unflatten(-1, (HEADS, 12))[:, head]
                    nope = found[layer, "kv_b_proj"].reshape(TOKENS, HEADS, 14)[:, head, :8]
                    k = torch.cat([nope, found[layer, "kv_a_proj_with_mqa"][0][:, 16:]], dim=1)
                    pairs = neighbours(4, first=8)
            q, k = turned(q, theta, pairs), turned(k, theta, pairs)
            if kind == "deepseek_v3":  # transformers sorts rotated dimensions: the first of each pair, then the second
                order = [*range(8), 8, 10, 9, 11]
                q, k = q[:, order], k[:, order]
            heads[layer, head] = q, k
    return heads, keys


SLOPES = {"mpt": [2**-2, 2**-4, 2**-6, 2**-8], "bloom": [2**-2, 2**-4, 2**-6, 2**-8]}
SLOPES["falcon_alibi"] = [slope / math.sqrt(8) for slope in SLOPES["bloom"]]


@pytest.mark.parametrize(
    "kind",
    ["phi", "gpt_neox", "mpt", "bloom", "falcon", "falcon_one_key", "falcon_alibi", "deepseek_v2", "deepseek_v3"],
)
def test_queries_and_keys_equal_those_of_hooks(tmp_path, kind):
    """Every head at every token of two sequences, read in chunks with transformers' cache."""
    theirs, tokens_SL = write(tmp_path, kind), tokens(2)
    opened = loaded_from(tmp_path)
    samples = capture(opened, tokens_SL, CaptureSettings(TOKENS, 4, 10, heads=100))
    assert [(head.layer, head.head) for head in samples.heads] == [(m, n) for m in range(LAYERS) for n in range(HEADS)]
    heads, keys = expected_heads(kind, theirs, tokens_SL[:1])
    first = samples.sequences_T == 0
    for number, head in enumerate(samples.heads):
        q, k = heads[head.layer, head.head]
        assert_close(samples.queries(number)[first], q, atol=2e-5, rtol=0)
        assert_close(samples.keys(number)[first], k, atol=2e-5, rtol=0)
        assert head.kv_head == head.head * keys // HEADS
        assert head.rotates == (kind not in SLOPES)
        assert head.scope == TOKENS
        assert head.slope == pytest.approx(SLOPES.get(kind, [0.0] * HEADS)[head.head], rel=1e-6)


@pytest.mark.parametrize(
    "kind", ["phi", "gpt_neox", "mpt", "mpt_scaled", "deepseek_v3", "bloom", "stablelm", "window", "gpt2"]
)
def test_they_give_the_attention_of_transformers(tmp_path, kind):
    """softmax(q·k / √H − slope · distance) of what was captured, within its scope, is the attention that transformers reports."""
    write(tmp_path, kind)
    theirs, tokens_SL = write(tmp_path, kind, "eager"), tokens()
    with torch.no_grad():
        weights = theirs(tokens_SL, output_attentions=True).attentions
    samples = capture(loaded_from(tmp_path), tokens_SL, CaptureSettings(TOKENS, 4, 10, heads=100))
    distance_TT = torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)
    for number, head in enumerate(samples.heads):
        q, k = samples.queries(number), samples.keys(number)
        scores = q @ k.T / math.sqrt(q.shape[1]) - head.slope * distance_TT
        if kind == "mpt_scaled":  # the order of the scores is the model's, and so is what follows from it
            scores *= 0.5 * math.sqrt(q.shape[1])
        hidden_TT = (distance_TT < 0) | (distance_TT >= head.scope)
        found = scores.masked_fill(hidden_TT, -torch.inf).softmax(-1)
        assert_close(found, weights[head.layer][0, head.head].double(), atol=1e-5, rtol=0)
        assert head.scope == (8 if kind == "window" else TOKENS)
        assert head.rotates == (kind not in ("mpt", "mpt_scaled", "bloom", "gpt2"))


def test_hidden_states_of_probes(tmp_path):
    """The states that position probes read: the first block's input, and each block's output before the final norm."""
    theirs, tokens_SL = write(tmp_path, "phi"), tokens()
    expected = []
    blocks = theirs.model.layers
    blocks[0].register_forward_pre_hook(lambda _, inputs: expected.append(inputs[0]))
    for block in blocks:
        block.register_forward_hook(lambda _, inputs, output: expected.append(output))
    with torch.no_grad():
        theirs(tokens_SL)
    positions = torch.tensor([0, 6, 7, 39])
    found = read_layers(loaded_from(tmp_path), tokens_SL[0], positions)
    assert_close(found, torch.stack([x[0, positions] for x in expected]), atol=2e-5, rtol=0)


@pytest.mark.parametrize("kind", ["phi", "mpt", "deepseek_v2"])
def test_tools(tmp_path, kind):
    """Captured on disk and measured from there, a model has the same plasticity as when it is measured directly."""
    write(tmp_path / "m", kind)
    text = tmp_path / "text.txt"
    text.write_text("The score grows with the position of the key, so the late keys win. " * 20)
    data = ["--data", str(text), "--length", "48", "--sequences", "20", "--buckets", "8"]
    model, captured = str(tmp_path / "m"), str(tmp_path / "c")
    capture_main([model, *data, "--out", captured])
    assert len(read_capture(tmp_path / "c")) == LAYERS * HEADS
    manifest = json.loads((tmp_path / "c" / "capture.json").read_text())
    assert {head["slope"] > 0 for head in manifest["heads"]} == {kind == "mpt"}
    for source, file, more in ((captured, "a.json", []), (model, "b.json", data)):
        plasticity_main([source, *more, "--draws", "50", "--json", str(tmp_path / file)])
    a, b = (json.loads((tmp_path / file).read_text()) for file in ("a.json", "b.json"))
    assert a["profile"] == b["profile"]
    assert a["layers"] == b["layers"]
    geometry_main([model, *data, "--heads", "3", "--json", str(tmp_path / "g.json")])
    assert json.loads((tmp_path / "g.json").read_text())["model_summary"]["heads"] == 3


def test_no_capture_of_keys_that_every_query_rotates_again(tmp_path):
    write(tmp_path, "phi")
    with pytest.raises(ValueError, match="rotates the keys again for every query"):
        capture(loaded_from(tmp_path, extend="ripra"), tokens(), CaptureSettings(TOKENS, 4))


def test_tools_that_change_layers_refuse_such_models(tmp_path):
    write(tmp_path, "phi")
    (tmp_path / "text.txt").write_text("Some text. " * 100)
    with pytest.raises(
        SystemExit,
        match=r"model_type 'phi', which this command does not take: it takes only the types that Farsight builds",
    ):
        layers_main([str(tmp_path), "--data", str(tmp_path / "text.txt")])
