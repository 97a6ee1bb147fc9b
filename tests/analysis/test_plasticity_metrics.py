"""Plasticity during training, against analysis of the model that the run saved, and under every parallel layout."""

import dataclasses
import random

import numpy as np
import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from farsight.analysis.capture.recorder import recording
from farsight.analysis.capture.sampling import CaptureSettings, capture
from farsight.analysis.geometry.rotation import planar_rotation
from farsight.analysis.plasticity.heads import head_profile
from farsight.analysis.plasticity.live import rows_of_rank, uncompiled
from farsight.checkpoints.load import load_model
from farsight.configs.check_finetuning import check_base
from farsight.configs.finetuning import FinetuneConfig
from farsight.configs.load import load_config
from farsight.configs.schema import Position
from farsight.data.loader import build_validation_loader
from farsight.data.tokenizers.tokenizer import BytesTokenizer
from farsight.errors import ConfigError
from farsight.inference.decoder import Decoder
from farsight.inference.loading import LoadedModel
from farsight.model.build import ModelConfig
from tests.model.test_model import SMALL, fresh_model
from tests.running import TINY, metrics, train

SEQUENCES, BUCKETS, TOKENS, HEADS = 3, 8, 4, 2
SETTINGS = f"""[metrics]
plasticity_freq = 5
plasticity_heads = {HEADS}
plasticity_sequences = {SEQUENCES}
plasticity_buckets = {BUCKETS}
plasticity_tokens = {TOKENS}"""
RULE = '[position]\nrules = [{ layers = "1", heads = { kind = "dense" }, bias = { kind = "alibi" } }]'
CONFIG = TINY.replace("steps = 12", "steps = 2").replace("[metrics]", SETTINGS).replace("[position]", RULE)
NAMES = ("bias_strength", "bias_context", "ap_overall", "ap_first", "ap_last", "ap_drop")
OF_LAYERS = [f"{name}.{layer}" for name in NAMES for layer in (0, 1)]


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """The folder of a run with a single process."""
    folder = tmp_path_factory.mktemp("plasticity") / "one"
    train(folder, config=CONFIG)
    return folder


def test_equal_to_the_analysis_of_its_model(one):
    """Against a capture of the model directory, which reads with a cache, and figures put together by hand."""
    rows = metrics(one, "ap_drop")
    assert [row["step"] for row in rows] == [0, 2]
    assert all(row.keys() == {"step", "time", "plasticity_seconds", *NAMES, *OF_LAYERS} for row in rows)
    assert all(rows[0][name] != rows[1][name] for name in NAMES)

    config = load_config(["--job.config_file", str(one / "config.toml")])
    config.training.global_batch_size = config.validation.local_batch_size = SEQUENCES
    config.validation.seq_len, config.data = 64, dataclasses.replace(config.data, mask_documents=False)
    inputs, _ = next(iter(build_validation_loader(config, BytesTokenizer(), 0, 1)))
    model, model_config = load_model(one / "model")
    loaded = LoadedModel(one / "model", Decoder(model, model_config, chunk=20), BytesTokenizer(), 64)
    samples = capture(loaded, inputs["input"], CaptureSettings(64, BUCKETS, TOKENS, heads=8))

    draw = random.Random(0)
    drawn = [4 * layer + head for layer in range(2) for head in sorted(draw.sample(range(4), HEADS))]
    expected = {}
    for place, number in enumerate(drawn):
        q_TH, k_TH, head = samples.queries(number), samples.keys(number), samples.heads[number]
        bias = planar_rotation(q_TH, k_TH, samples.positions_T).bias_strength
        profile = head_profile(
            q_TH, k_TH, samples.positions_T, samples.sequences_T, length=64, buckets=BUCKETS, scope=head.scope,
            slope=head.slope, seed=place,
        )  # fmt: skip
        ap, queries = np.array(profile.plasticity), np.array(profile.queries)
        there = ~np.isnan(ap)
        # Of eight buckets, only the second has its middle in the first fifth, and the last two in the last.
        first, last = ap[1], ap[6:][there[6:]].mean() if there[6:].any() else np.nan
        overall = np.average(ap[there], weights=queries[there]) if there.any() else np.nan
        found = [bias, 64 * bias, overall, first, last, first - last]
        for of in ("", f".{head.layer}"):
            for name, value in zip(NAMES, found, strict=True):
                expected.setdefault(name + of, []).append(value)
    for name, values in expected.items():
        kept = [value for value in values if not np.isnan(value)]
        assert rows[1][name] == (pytest.approx(np.mean(kept), rel=1e-4, abs=1e-6) if kept else None), name
    assert len(expected) == 18
    assert rows[1]["ap_drop.1"] is not None  # dense heads have all pairs


LAYOUTS = {
    "fsdp": ["--training.local_batch_size=2"],
    "tp": ["--parallelism.tensor_parallel_degree=2"],
    "cp": ["--parallelism.context_parallel_degree=2"],
    # Without validation, which would already prepare the schedule for evaluation.
    "pp": ["--parallelism.pipeline_parallel_degree=2", "--validation.enable=false"],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_under_a_layout(tmp_path, one, layout):
    train(tmp_path / layout, *LAYOUTS[layout], ranks=2, config=CONFIG)
    for found, expected in zip(metrics(tmp_path / layout, "ap_drop"), metrics(one, "ap_drop"), strict=True):
        for name in (*NAMES, *OF_LAYERS):
            assert found[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name


def test_sequences_are_shared_out():
    """Each is read once; all ranks have equally many batches of equally many rows, padded with number S."""
    for sequences, ranks, most, whole in [
        (8, 1, 4, False),
        (3, 2, 4, False),
        (5, 3, 1, True),
        (2, 8, 4, True),
        (7, 2, 2, False),
    ]:
        of_rank = [rows_of_rank(sequences, rank, ranks, most, whole) for rank in range(ranks)]
        assert len({str([len(batch) for batch in batches]) for batches in of_rank}) == 1
        rows = sorted(row for batches in of_rank for batch in batches for row in batch)
        assert [row for row in rows if row < sequences] == list(range(sequences))
        assert {*rows} <= {*range(sequences + 1)}
        assert all(len(batch) == most if whole else len(batch) <= most for batches in of_rank for batch in batches)


@pytest.mark.parametrize("wrap", [lambda block: block, checkpoint_wrapper], ids=["plain", "recomputed"])
def test_compiled_blocks_stay_as_they_were(wrap):
    """Nothing is compiled while recording, or recompiled afterwards."""
    model = fresh_model(ModelConfig(SMALL, Position(), trained_length=32))
    compiled = []

    def backend(graph, _):
        compiled.append(graph)
        return graph

    for name, block in model.layers.named_children():
        model.layers.register_module(name, wrap(torch.compile(block, backend=backend, fullgraph=True)))
    tokens = torch.arange(32)[None]
    before, graphs = model(tokens), len(compiled)
    assert graphs > 0
    rows = columns = torch.zeros(1, dtype=torch.int64)
    attentions = {int(name): attention for name, attention in model.attentions()}
    with torch.no_grad(), uncompiled(model), recording(attentions, rows, columns) as recorders:
        torch.testing.assert_close(model(tokens), before)
    assert recorders[2].queries_TNH.shape == (1, 4, 8)
    assert torch.equal(model(tokens), before)
    assert len(compiled) == graphs
    torch.compiler.reset()  # other tests compile the same code for other shapes


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--metrics.plasticity_buckets=4"], "plasticity_buckets = 4"),
        (["--metrics.plasticity_buckets=32"], "have 2 in each bucket"),
        (["--metrics.plasticity_heads=5"], "a layer has 4"),
        (["--metrics.plasticity_sequences=1"], "keeps 4 queries of each bucket"),
        (["--metrics.plasticity_freq=-1"], "plasticity_freq = -1"),
    ],
)
def test_refused_at_start(tmp_path, options, words):
    path = tmp_path / "c.toml"
    path.write_text(CONFIG)
    with pytest.raises(ConfigError, match=words):
        load_config(["--job.config_file", str(path), *options])


def test_fine_tuning_refuses():
    config = FinetuneConfig()
    config.metrics.plasticity_freq = 5
    with pytest.raises(ConfigError, match=r"metrics\.plasticity_freq = 5 is not for fine-tuning"):
        check_base(config, 1)
