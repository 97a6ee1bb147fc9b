"""A report's figures as CSV files, for spreadsheets and other plots."""

import csv
import io
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
        "positions.csv": list(_positions(results)),
        "checkpoints.csv": [
            {"model": _name(r, results), **checkpoint}
            for r in of_kind(results, "plasticity")
            for checkpoint in r.values.get("checkpoints", [])
        ],
        "probes.csv": list(_probes(results)),
        "order.csv": [
            {"model": _name(r, results), **span}
            for r in of_kind(results, "order_awareness")
            for span in r.values["spans"]
        ],
        "grafts.csv": [
            {"model": _name(r, results), "mode": mode, "depth": point["depth"], "length": length, "perplexity": value}
            for r in of_kind(results, "graft_sweep")
            for mode, points in r.values["modes"].items()
            for point in points
            for length, value in point["perplexity"].items()
        ],
    }
    return {name: _text(rows) for name, rows in tables.items() if rows}


def write_csv(folder: Path, results: Sequence[Result]) -> list[Path]:
    """Writes the CSV files into a folder, creating it if needed."""
    paths = []
    for name, text in csv_files(results).items():
        paths.append(folder / name)
        write_text(paths[-1], text)
    return paths


def _name(result: Result, results: Sequence[Result]) -> str:
    """The model's name, with what distinguishes the result if the model has several of its kind."""
    alike = of_kind(results, result.kind)
    return names(alike)[[other is result for other in alike].index(True)]


def _scalars(values: Mapping[str, Any], prefix: str = "") -> Row:
    return {prefix + key: value for key, value in values.items() if not isinstance(value, list | dict)}


def _heads(results: Sequence[Result]) -> Iterable[Row]:
    for kind, prefix in (("plasticity", "ap_"), ("geometry", "")):
        for result in of_kind(results, kind):
            for head in result.values.get("heads", []):
                place = {key: head[key] for key in ("layer", "head")}
                shared = {key: head[key] for key in ("kv_head", "scope", "slope") if key in head}
                own = {key: value for key, value in _scalars(head).items() if key not in {**place, **shared}}
                yield {"model": _name(result, results), **place, **shared, **_scalars(own, prefix)}


def _layers(results: Sequence[Result]) -> Iterable[Row]:
    for kind, prefix in (("plasticity", "ap_"), ("geometry", "")):
        for result in of_kind(results, kind):
            for layer, figures in result.values.get("layers", {}).items():
                yield {"model": _name(result, results), "layer": int(layer), **_scalars(figures, prefix)}
    for result in of_kind(results, "layers"):
        for key in ("delta", "rho"):
            for layer, value in enumerate(result.values[key]):
                yield {"model": _name(result, results), "layer": layer, key: value}
    for result in of_kind(results, "layer_probes"):
        probe = result.values["probe"]
        for one in result.values["layers"]:
            factor = f"_{one['factor']:g}" if one.get("factor") is not None else ""
            figures = {f"{probe}{factor}_{key}": one[key] for key in ("perplexity", "passkey") if key in one}
            yield {"model": _name(result, results), "layer": one["layer"], **figures}
    for result in of_kind(results, "probes"):
        for one in result.values["layers"]:
            yield {"model": _name(result, results), "layer": one["layer"], "position_error": one["error"]}


def _positions(results: Sequence[Result]) -> Iterable[Row]:
    for result in of_kind(results, "plasticity"):
        values = result.values
        if "profile" in values:
            for at, plasticity, counted in zip(values["positions"], values["profile"], values["counted"], strict=True):
                yield {"model": _name(result, results), "position": at, "plasticity": plasticity, "counted": counted}


def _probes(results: Sequence[Result]) -> Iterable[Row]:
    for result in of_kind(results, "probes"):
        edges = result.values["positions"]
        for layer in result.values["layers"]:
            for low, high, error in zip(edges[:-1], edges[1:], layer["by_position"], strict=True):
                yield {
                    "model": _name(result, results),
                    "layer": layer["layer"],
                    "from": low,
                    "to": high,
                    "error": error,
                }


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
