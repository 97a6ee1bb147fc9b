"""JSON files: those from outside are read so that any error is one sentence that names the file."""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from farsight.errors import ConfigError


def read_object(path: Path) -> dict[str, Any]:
    """Reads a file that holds one JSON object.

    Raises:
        ConfigError: the file does not exist, can't be read, or holds something else.
    """
    try:
        values = json.loads(path.read_bytes().decode("utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise ConfigError(f"{path} is not valid JSON ({error}). Copy it again.") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds {_shown(values)}, not a JSON object.")
    return values


def finite_or_null(value: Any) -> Any:
    """Replaces NaN and infinities, which JSON lacks, by None, in nested dicts and lists too."""
    if isinstance(value, dict):
        return {key: finite_or_null(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [finite_or_null(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def or_nan(value: float | None) -> float:
    """A figure, or NaN for JSON's null."""
    return math.nan if value is None else value


@contextmanager
def fields_of(path: Path) -> Iterator[None]:
    """Turns errors caused by missing or wrongly typed fields into ones that name the file.

    Raises:
        ConfigError: in place of the KeyError, TypeError or AttributeError that such a field causes.
    """
    try:
        yield
    except KeyError as error:
        raise ConfigError(f"{path} lacks {error.args[0]!r}, or has it in the wrong place.") from error
    except (TypeError, AttributeError, IndexError, OverflowError, RecursionError) as error:
        raise ConfigError(f"{path} has a value of the wrong type ({error}).") from error


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) < 40 else f"{text[:40]}…"
