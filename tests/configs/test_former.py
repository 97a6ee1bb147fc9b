"""Config files of earlier versions, and torchtitan's options that have another name here."""

import pytest

from farsight.configs.finetuning import FinetuneConfig
from farsight.configs.former import HERE, WITHOUT_EFFECT
from farsight.configs.help import help_text
from farsight.configs.load import build_config
from farsight.configs.schema import JobConfig
from farsight.configs.typed import to_dict
from farsight.errors import ConfigError


def nested(option, value):
    for key in reversed(option.split(".")):
        value = {key: value}
    return value


def leaves(table, path=""):
    for key, value in table.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


@pytest.mark.parametrize("cls", [JobConfig, FinetuneConfig])
def test_a_config_file_of_an_earlier_version_means_the_same(cls):
    ours = to_dict(cls())
    theirs = {**ours, "engine": "torchtitan"}
    for section, options in WITHOUT_EFFECT.items():
        theirs[section] = {**ours.get(section, {}), **options}
    theirs["quantize"] = {"linear": {**ours["quantize"]["linear"], **WITHOUT_EFFECT["quantize"]["linear"]}}
    theirs["optimizer"] |= {"name": "AdamW"}
    del theirs["optimizer"]["kind"]
    theirs["checkpoint"] |= {
        "exclude_from_loading": ["dataloader", "lr_scheduler", "train_state"],
        "initial_load_model_only": False,
    }
    config = build_config(theirs, cls)
    assert config.checkpoint.exclude_from_loading == ["dataloader", "train_state"]
    config.checkpoint.exclude_from_loading, config.checkpoint.initial_load_model_only = [], True
    assert config == build_config(ours, cls)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("AdamW", "adamw"), ("Adam", "adam"), ("AdamW8bit", "adamw8bit"), ("PagedAdamW8bit", "paged_adamw8bit")],
)
def test_optimizers_of_earlier_versions_have_a_kind(name, kind):
    config = build_config({"optimizer": {"name": name, "implementation": "fused", "lr": 0.5}}, FinetuneConfig)
    assert (config.optimizer.kind, config.optimizer.lr) == (kind, 0.5)


@pytest.mark.parametrize(("option", "value"), leaves(WITHOUT_EFFECT))
def test_what_had_no_effect_is_no_option(option, value):
    """With the one value that earlier versions accepted it is ignored, with any other refused by name."""
    assert f"--{option} " not in help_text()
    assert build_config(nested(option, value)) == build_config({})
    other = (not value) if isinstance(value, bool) else [*value, "x"] if isinstance(value, list) else "another"
    with pytest.raises(
        ConfigError, match=r"no option \S+: (torchtitan has it, Farsight does not|it is \S+ here)"
    ) as error:
        build_config(nested(option, other))
    named = str(error.value).removeprefix("There is no option ").partition(":")[0]
    assert option.startswith(named)  # it, or the section that is not there


@pytest.mark.parametrize("option", HERE)
def test_torchtitans_names_lead_to_ours(option):
    with pytest.raises(ConfigError, match=rf"no option {option}: it is {HERE[option]} here\."):
        build_config(nested(option, "anything"))
    config: object = JobConfig()
    for key in HERE[option].split("."):
        config = getattr(config, key)  # it exists


@pytest.mark.parametrize(
    ("metrics", "trackers"),
    [
        ({"enable_tensorboard": True}, ["tensorboard"]),
        ({"enable_tensorboard": False}, []),
        ({"enable_tensorboard": False, "trackers": ["wandb"]}, ["wandb"]),
        ({}, ["tensorboard"]),
    ],
)
def test_tensorboards_switch_is_among_the_trackers(metrics, trackers):
    assert build_config({"metrics": metrics}).metrics.trackers == trackers
