"""The configs, model sizes and example files that come with Farsight, found by name."""

import functools
import glob
import os
import sys
from pathlib import Path

from farsight.errors import ConfigError, nearest

CONFIGS = Path(__file__).resolve().parent
SIZES = CONFIGS / "sizes"
ROOT = CONFIGS.parent
"""The checkout or the installed package: shipped configs and examples are below it."""


def size_file(flavor: str) -> Path:
    """The TOML file of a model size.

    Raises:
        ConfigError: there is no such size.
    """
    path = SIZES / f"{flavor}.toml"
    if not path.is_file():
        known = sorted(p.stem for p in SIZES.glob("*.toml"))
        raise ConfigError(f"model.flavor = {str(flavor)!r} is not a known size.{nearest(flavor, known)}")
    return path


def find_config(path: Path, folder: Path = Path()) -> Path:
    """Finds a config file: in `folder`, or else among the shipped ones.

    A shipped config is found by its path below the package (`configs/tiny.toml`, `finetune/ablation_a`) or by its name alone
    (`scope_llama3_8b`). A path through a folder `configs` that is not there counts as a name: shipped files may move.

    Raises:
        ConfigError: there is none.
    """
    there = folder / path
    if there.exists() and not there.is_dir():
        return there
    name = path.name.removesuffix(".toml")
    if path.parent.name == "tiny" and name in shipped_configs():
        raise ConfigError(f"There is no config file {there}. Name {name} and add --tiny.")
    for shipped in (ROOT / path, CONFIGS / path.with_name(f"{name}.toml")):
        if shipped.is_file():
            return _taken(there, shipped)
    if name in shipped_configs() and (path.parent == Path() or "configs" in path.parts):
        return _taken(there, shipped_configs()[name])
    if there.is_dir():
        raise ConfigError(f"{there} is a folder: name a .toml file in it, or a shipped config.")
    siblings = [str(p) for p in there.parent.glob("*.toml")]
    hint = nearest(str(there), siblings, say_known=False) or nearest(name, shipped_configs(), say_known=False)
    raise ConfigError(f"There is no config file {there}.{hint or nearest(str(there), siblings)}")


@functools.cache
def shipped_configs() -> dict[str, Path]:
    """The configs that come with Farsight, by name: those that can be run, without sizes and shared parts."""
    paths = sorted(CONFIGS.rglob("*.toml"), key=lambda path: (-len(path.parts), path))
    return {path.stem: path for path in paths if not {"sizes", "parts"} & {*path.parts}}


@functools.cache
def _taken(asked: Path, shipped: Path) -> Path:
    """Says once, on the first rank's stderr, which file stands in for the one that was asked for."""
    if os.environ.get("RANK", "0") == "0":
        print(f"{asked}: taking {shipped}", file=sys.stderr)
    return shipped


def shipped_file(value: str) -> str:
    """Relative paths of shipped files (`examples/…`, `configs/…`) lead into the package where they do not exist here."""
    shipped = str(ROOT / value)
    if value.startswith(("examples/", "configs/")) and not glob.glob(value) and glob.glob(shipped):
        return shipped
    return value
