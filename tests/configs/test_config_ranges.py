"""Every number in the config is checked against its field's declared range, wherever it comes from."""

import dataclasses
import math
import typing
from typing import get_args, get_origin

import pytest
import tomli_w

from farsight.configs.finetuning import FinetuneConfig
from farsight.configs.load import build_config, load_config, parse_options, read_toml
from farsight.configs.schema import JobConfig
from farsight.configs.typed import default_of
from farsight.errors import ConfigError
from farsight.ranges import Range


def numbers(cls, path=""):
    """Yields (option, type, declared range or None) for every number in a config class and its sections."""
    for field in dataclasses.fields(cls):
        hint = typing.get_type_hints(cls, include_extras=True)[field.name]
        name = f"{path}{field.name}"
        of_kind = type(default_of(field))
        if of_kind in get_args(hint) and "kind" in getattr(of_kind, "__dataclass_fields__", ()):
            hint = of_kind  # the kind that an option without one belongs to
        spans = [a for h in (hint, *get_args(hint)) for a in (h, *get_args(h)) if isinstance(a, Range)]
        kinds = {t for h in (hint, *get_args(hint)) for t in (h, *get_args(h)) if t in (int, float)}
        if dataclasses.is_dataclass(hint):
            yield from numbers(hint, f"{name}.")
        elif kinds and not any(get_origin(h) in (tuple, list, dict) for h in (hint, *get_args(hint))):
            yield name, kinds.pop(), spans[0] if spans else None


EVERY = sorted({*numbers(JobConfig), *numbers(FinetuneConfig)}, key=str)


def refused(option, value, cls):
    """Returns the errors for `--option value` and for the same value in a file."""
    said = []
    values = {}
    for key in reversed(option.split(".")):
        values = {key: values or value}
    # Files can't hold more than 64 bits' worth of a whole number.
    places = [parse_options([f"--{option}={value}"])]
    if not isinstance(value, int) or abs(value) < 2**63:
        places.append(values)
    for given in places:
        with pytest.raises(ConfigError) as error:
            build_config(given, cls)
        said.append(str(error.value))
    assert all(option in text for text in said), said
    return said


def test_there_are_numbers_to_check():
    assert len(EVERY) > 60
    assert {"optimizer.lr", "training.seq_len", "lora.alpha", "early_stopping.patience"} <= {name for name, *_ in EVERY}


def test_every_number_declares_its_range():
    unbounded = {name for name, _, span in EVERY if span is None}
    assert unbounded == {"data.seed"}


@pytest.mark.parametrize(("option", "kind", "span"), EVERY, ids=str)
def test_what_lies_outside_is_refused_by_name(option, kind, span):
    cls = FinetuneConfig if option.split(".")[0] in {"lora", "garfa", "early_stopping", "trained_length"} else JobConfig
    cls = FinetuneConfig if option == "training.epochs" or "warmup_ratio" in option else cls
    bad = [math.nan, math.inf, -math.inf] if kind is float else [2**63, -(2**63) - 1]
    if span is not None:
        step = 1 if kind is int else 1e-6
        below = [bound for bound in (span.least, span.also) if bound is not None and math.isfinite(bound)]
        bad += [kind(bound) - step for bound in below if bound - step != span.also]
        bad += [kind(bound) + step for bound in (span.most,) if math.isfinite(bound)]
        bad += [kind(bound) for bound in (span.above, span.below) if math.isfinite(bound)]
        assert len(bad) > 2
    for value in bad:
        refused(option, value, cls)


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("optimizer.weight_decay", "-0.5", "must be at least 0"),
        ("optimizer.beta2", "1.5", "less than 1"),
        ("optimizer.eps", "-1", "more than 0"),
        ("optimizer.lr", "inf", "finite"),
        ("optimizer.lr", "1e999", "finite"),
        ("early_stopping.patience", "-2", "at least 0"),
        ("lr_scheduler.warmup_steps", "-3", "at least 0"),
        ("lr_scheduler.decay_ratio", "5", "at most 1"),
        ("lr_scheduler.min_lr_factor", "7", "at most 1"),
        ("training.global_batch_size", "-4", "at least 1, or -1"),
        ("training.global_batch_size", "0", "at least 1, or -1"),
        ("checkpoint.keep_latest_k", "-1", "at least 0"),
        ("loss.chunk_tokens", "-5", "at least 0"),
        ("architecture.dim", "99999999999999999999", "64 bits"),
        ("architecture.dim", "1000000000", "at most 1,048,576"),
        ("parallelism.data_parallel_shard_degree", "0", "at least 1, or -1"),
        ("parallelism.data_parallel_shard_degree", "-2", "at least 1, or -1"),
        ("position.rotary.theta", "inf", "finite"),
        ("training.epochs", "nan", "finite"),
        ("training.steps", "9" * 5000, "whole number"),
        ("debug.seed", "-1", "at least 0"),
    ],
)
def test_values_that_make_no_sense(option, value, words):
    with pytest.raises(ConfigError) as error:
        load_config([f"--{option}", value], FinetuneConfig)
    assert option in str(error.value)
    assert words in str(error.value)


@pytest.mark.parametrize("name", ["checkpoint.folder", "metrics.save_tb_folder", "profiling.save_traces_folder"])
@pytest.mark.parametrize("folder", ["../elsewhere", "/tmp/elsewhere", "a/../../b", ""])
def test_a_run_writes_below_its_own_folder(name, folder):
    with pytest.raises(ConfigError, match=f"{name}.*inside the run folder"):
        build_config(parse_options([f"--{name}={folder}"]))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'base = "loop.toml"\n', "is its own base"),
        (b"[training]\nsteps = " + b"9" * 5000, "not valid TOML"),
        (b"x = " + b"[" * 20000 + b"]" * 20000, "not valid TOML"),
        (b"\xff\xfe[\x00", "not valid TOML"),
        (b"[training]\nsteps = 1\nsteps = 2\n", "not valid TOML"),
        (b"data = 3", "must be a table"),
        (b"[data]\nsources = 3", "must be a list"),
        (b"[data]\nsources = [3]", "must be a table"),
    ],
)
def test_files_that_are_no_config(tmp_path, content, words):
    path = tmp_path / "loop.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        build_config(read_toml(path))


def test_a_directory_and_a_file_without_permission_are_named(tmp_path):
    with pytest.raises(ConfigError, match="can't be read: Is a directory"):
        read_toml(tmp_path)


def test_a_byte_order_mark_is_no_harm(tmp_path):
    path = tmp_path / "bom.toml"
    path.write_bytes(b"\xef\xbb\xbf" + tomli_w.dumps({"training": {"steps": 300}}).encode())
    assert load_config(["--job.config_file", str(path)]).training.steps == 300


def test_a_value_and_options_below_it_do_not_go_together():
    for arguments in (["--training", "5", "--training.steps", "3"], ["--training.steps", "3", "--training", "5"]):
        with pytest.raises(ConfigError, match="options of its own"):
            parse_options(arguments)
    with pytest.raises(ConfigError, match=r"sources\.0"):
        build_config({"data": {"sources": ["x"]}} | {"training": {"steps": 300}})
