"""A report's figures as CSV files, for spreadsheets and other plots."""

import csv
import io
import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from farsight.files import write_text
from farsight.reports.results import Result, names, of_kind

Row = dict[str, Any]


def csv_files(results: Sequence[Result]) -> dict[str, str]:
    """Text of each file by name; files without rows are left out.

    A row is a query head in heads.csv, a layer in layers.csv, a bucket of positions in positions.csv, a checkpoint in
    checkpoints.csv, a layer and bucket in probes.csv, a span of permuted tokens in order.csv, a graft and length in grafts.csv.
    """
    tables = {
        "heads.csv": _joined(_heads(results), ("model", "layer", "head")),
        "layers.csv": _joined(_layers(results), ("model", "layer")),
        "positions.csv": [
            {"model": name, "position": at, "plasticity": plasticity, "counted": counted}
            for name, values in _named(results, "plasticity")
            if "profile" in values
            for at, plasticity, counted in zip(values["positions"], values["profile"], values["counted"], strict=True)
        ],
        "checkpoints.csv": [
            {"model": name, "measured": kind, **_scalars(checkpoint), **_scalars(checkpoint.get("model_summary", {}))}
            for kind in ("plasticity", "geometry")
            for name, values in _named(results, kind)
            for checkpoint in values.get("checkpoints", [])
        ],
        "probes.csv": [
            {"model": name, "layer": layer["layer"], "from": low, "to": high, "error": error}
            for name, values in _named(results, "probes")
            for layer in values["layers"]
            for (low, high), error in zip(itertools.pairwise(values["positions"]), layer["by_position"], strict=True)
        ],
        "order.csv": [
            {"model": name, **span} for name, values in _named(results, "order_awareness") for span in values["spans"]
        ],
        "grafts.csv": [
            {"model": name, "mode": mode, "depth": point["depth"], "length": length, "perplexity": value}
            for name, values in _named(results, "graft_sweep")
            for mode, points in values["modes"].items()
            for point in points
            for length, value in point["perplexity"].items()
        ],
    }
    return {name: _text(rows) for name, rows in tables.items() if rows}


def write_csv(folder: Path, results: Sequence[Result]) -> list[Path]:
    """Writes the CSV files into a folder, creating it if needed."""
    files = {folder / name: text for name, text in csv_files(results).items()}
    for path, text in files.items():
        write_text(path, text)
    return list(files)


def _named(results: Sequence[Result], kind: str) -> list[tuple[str, Mapping[str, Any]]]:
    """Figures of one kind, each with the model's name, and what distinguishes the result if the model has several."""
    found = of_kind(results, kind)
    return list(zip(names(found), (result.values for result in found), strict=True))


def _scalars(values: Mapping[str, Any]) -> Row:
    return {key: value for key, value in values.items() if not isinstance(value, list | dict)}


def _heads(results: Sequence[Result]) -> Iterable[Row]:
    shared = ("layer", "head", "kv_head", "scope", "slope")
    for kind in ("plasticity", "geometry"):
        for name, values in _named(results, kind):
            for head in values.get("heads", []):
                place = {key: head[key] for key in shared if key in head}
                own = {key: value for key, value in head.items() if key not in shared}
                yield {"model": name, **place, **_scalars(own)}


def _layers(results: Sequence[Result]) -> Iterable[Row]:
    for kind in ("plasticity", "geometry"):
        for name, values in _named(results, kind):
            for layer, figures in values.get("layers", {}).items():
                yield {"model": name, "layer": int(layer), **_scalars(figures)}
    for name, values in _named(results, "layers"):
        for layer, (delta, rho) in enumerate(zip(values["delta"], values["rho"], strict=True)):
            yield {"model": name, "layer": layer, "delta": delta, "rho": rho}
    for name, values in _named(results, "layer_probes"):
        for one in values["layers"]:
            probe = values["probe"] + (f"_{one['factor']:g}" if one.get("factor") is not None else "")
            figures = {f"{probe}_{key}": one[key] for key in ("perplexity", "passkey") if key in one}
            yield {"model": name, "layer": one["layer"], **figures}
    for name, values in _named(results, "probes"):
        for one in values["layers"]:
            yield {"model": name, "layer": one["layer"], "position_error": one["error"]}


def _joined(rows: Iterable[Row], keys: Sequence[str]) -> list[Row]:
    """Merges rows with the same keys."""
    found: dict[tuple, Row] = {}
    for row in rows:
        found.setdefault(tuple(row[key] for key in keys), {}).update(row)
    return [found[place] for place in sorted(found)]


def _text(rows: Sequence[Row]) -> str:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    file = io.StringIO()
    writer = csv.DictWriter(file, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()
