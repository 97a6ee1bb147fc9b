"""The order of data that a checkpoint was saved under, compared with that of the run that resumes it."""

import logging
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from farsight.data.sources.identity import difference
from farsight.errors import DataError

logger = logging.getLogger(__name__)

_FILES = "the files of "
"""Prefix of the keys that identify a source's files."""
_NOT_IDENTITY = ("path", "data_dir", "data_files")
"""Fields that may change between save and resume: moved data is the same data."""
_ADDED = {"packing": "cut"}
"""Fields that older checkpoints lack, with what was done then."""


def source_settings(source: Any) -> dict[str, Any]:
    """The settings of a source (a dataclass of the config) that affect the order of data."""
    return {key: value for key, value in asdict(source).items() if key not in _NOT_IDENTITY}


def refuse_other_order(saved: dict[str, Any], now: dict[str, Any]) -> None:
    """Raises `DataError`, naming both values, where a checkpoint's order of data differs from the current one."""
    differences = list(_differences(saved, now))
    if differences:
        raise DataError(
            "\n  ".join(["the checkpoint's data order can't be continued, because these changed:", *differences])
            + "\nSet them back, or begin a new order, as a new stage does: a run in a folder of its own "
            "(job.dump_folder) that starts from the checkpoint's weights (checkpoint.initial_load_path)."
        )


def _differences(saved: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    for key in saved | now:
        if key.startswith(_FILES):
            if key not in saved:
                logger.info("the checkpoint does not record %s: whether they have changed is not known", key)
            elif key in now and (change := difference(saved[key], now[key])):
                yield f"{key}: {change}"
        elif (old := saved.get(key, _ADDED.get(key.rpartition(".")[2]))) != now.get(key):
            yield f"{key} was {old}, is {now.get(key)}"
