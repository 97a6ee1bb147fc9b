"""LASP against the RoPE that it is laid over: refused where nothing rotates, a warning where the first layers' base changes."""

import logging

import pytest

from farsight.configs.load import build_config, load_config, parse_options
from farsight.configs.schema import Lasp, NoRotary, Position, Rope, YarnRope
from farsight.configs.shipped import shipped_configs
from farsight.errors import ConfigError
from farsight.launch.plan.read import read_configs
from farsight.training.finetune.model import load_finetune_config
from farsight.training.stages import load_recipe
from farsight.training.start import report_theta
from tests.finetuned import write_base


def warnings(caplog, *options):
    caplog.clear()
    report_theta(load_config(options), options)
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


LASP = ["--position.lasp.schedule", "both"]


def test_the_size_8b_with_the_papers_bases(caplog):
    """Its theta is 10,000, and LASP's default b_min Llama 3's 500,000."""
    (said,) = warnings(caplog, "--model.flavor", "8b", *LASP)
    assert (
        "position.lasp.b_min = 500000 gives layer 0 the RoPE base 500000 instead of position.rotary.theta = 10000"
        in said
    )
    assert "set position.lasp.b_min = 10000 and position.lasp.b_max above it" in said
    for fix in (
        ["--position.lasp.b_min", "10000"],
        ["--position.rotary.theta", "500000"],
        ["--position.lasp.schedule", "scale"],
    ):
        assert warnings(caplog, "--model.flavor", "8b", *LASP, *fix) == []


@pytest.mark.parametrize(
    ("theirs", "options", "says"),
    [
        (Rope(theta=1e4), [], "instead of 10000, with which the weights of"),
        (Rope(theta=1e4), ["--position.rotary.theta", "500000"], "instead of 10000, with which the weights of"),
        (Rope(theta=5e5), [], None),  # though position.rotary.theta is 10,000 by default: LASP replaces it
        (Rope(theta=5e5), ["--position.lasp.b_min", "20000"], "gives layer 0 the RoPE base 20000 instead of 500000"),
        (YarnRope(theta=2e4), ["--position.lasp.b_min", "20000"], None),
        (NoRotary(), [], "instead of 10000"),
    ],
    ids=str,
)  # fmt: skip
def test_the_weights_that_a_run_starts_from_count(tmp_path, caplog, theirs, options, says):
    write_base(tmp_path / "base", Position(rotary=theirs))
    start = ["--checkpoint.initial_load_path", str(tmp_path / "base"), *LASP, "--position.lasp.anchor_layers", "2"]
    found = warnings(caplog, *start, *options)
    assert len(found) == (says is not None)
    assert all(says in line for line in found)


def test_weights_trained_with_lasp_are_compared_by_layer(tmp_path, caplog):
    lasp = Lasp(b_min=3e4, b_max=9e4, anchor_layers=2)
    write_base(tmp_path / "base", Position(rotary=Rope(theta=1e4), lasp=lasp))
    start = ["--checkpoint.initial_load_path", str(tmp_path / "base"), *LASP, "--position.lasp.anchor_layers", "2"]
    assert warnings(caplog, *start, "--position.lasp.b_min", "30000") == []
    assert len(warnings(caplog, *start, "--position.lasp.b_min", "10000")) == 1


def test_the_first_layer_that_rotates_counts(caplog):
    skip = ["--position.rules", '[{layers = "0:2", rotary = {kind = "none"}}]']
    (said,) = warnings(caplog, *LASP, "--position.lasp.anchor_layers", "4", *skip)
    assert "gives layer 2 the RoPE base 500000" in said


NOTHING_ROTATES = [
    {"rotary": {"kind": "none"}},
    {"rotary": {"kind": "none"}, "heads": {"kind": "scope"}},
    {"rules": [{"layers": "0:2", "rotary": {"kind": "none"}}, {"layers": "2:", "rotary": {"kind": "none"}}]},
]


@pytest.mark.parametrize("position", NOTHING_ROTATES, ids=str)
def test_where_nothing_rotates_it_is_refused(position):
    lasp = {"schedule": "scale", "s_max": 8.0, "anchor_layers": 2}
    with pytest.raises(
        ConfigError, match=r'schedule = "scale", s_max = 8, .*does nothing here, since no layer rotates'
    ) as error:
        report_theta(build_config({"position": {**position, "lasp": lasp}}), [])
    assert "Leave it out" in str(error.value)


RECIPE = """
[tokenizer]
kind = "bytes"
[lr_scheduler]
warmup_steps = 1
[position.rotary]
kind = "{kind}"
[[stages]]
name = "short"
[[stages]]
name = "long"
position.lasp = {{ anchor_layers = 2 }}
"""


def test_stages_are_compared_with_the_one_before(tmp_path, caplog):
    path = tmp_path / "r.toml"
    path.write_text(RECIPE.format(kind="rope"))
    load_recipe(path, {})
    assert "long: position.lasp.b_min = 500000 gives layer 0" in caplog.text
    assert "instead of 10000, with which the weights of stage short were trained" in caplog.text
    caplog.clear()
    load_recipe(path, parse_options(["--position.rotary.theta", "500000"]))
    assert caplog.text == ""
    path.write_text(RECIPE.format(kind="none"))
    with pytest.raises(ConfigError, match=r"stage 1 \(long\): \[position.lasp\] .* no layer rotates"):
        load_recipe(path, {})


def test_fine_tuning_is_compared_with_its_base(tmp_path, caplog):
    write_base(tmp_path / "base", Position(rotary=Rope(theta=1e4)))
    own = ["--base_model.path", str(tmp_path / "base"), "--tokenizer.kind", "bytes"]
    load_finetune_config(own)
    assert "b_min" not in caplog.text
    load_finetune_config([*own, *LASP, "--position.lasp.anchor_layers", "2"])
    assert "gives layer 0 the RoPE base 500000 instead of 10000, with which the weights of" in caplog.text


def test_what_is_shipped_keeps_the_base(caplog):
    found = 0
    for path in shipped_configs().values():
        if "lasp" not in path.read_text() or path.parent.name == "finetune":
            continue
        for options in ([], ["--tiny"]):
            if options and path.stem in ("quickstart", "tiny"):
                continue
            for config in read_configs(path, options, None)[1].values():
                report_theta(config, [])
                found += config.position.lasp is not None
    assert found == 16
    assert "position.lasp" not in caplog.text
