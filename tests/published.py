"""Imitations of published datasets, in a folder each: the same layout, format, compression and columns, and a few rows.

`datasets` takes a folder of the working directory for the repository of that name.
"""

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

Rows = Sequence[dict[str, Any]]

ROWS = 40
"""Rows of each file."""


def texts(file: str) -> list[str]:
    """The text of each row of a file. A few of SlimPajama are longer than the recipes' filters."""

    def words(row: int) -> str:
        return "words and more words " * (7000 if "SlimPajama" in file and row % 8 == 0 else 40)

    return [f"{file} row {row}: {words(row)}" for row in range(ROWS)]


def rows(file: str, field: str = "text", **others: Any) -> Rows:
    """The rows of a file: the text, and the same other columns in each."""
    return [{field: text, **others} for text in texts(file)]


def write(path: Path, found: Rows) -> None:
    """Writes rows in the format and compression that the path's suffixes say."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(list(found)), path)
        return
    raw = (
        json.dumps(list(found)) if path.suffix == ".json" else "".join(json.dumps(row) + "\n" for row in found)
    ).encode()
    compress = {".gz": gzip.compress, ".zst": zstandard.compress, ".zstd": zstandard.compress}
    path.write_bytes(compress[path.suffix](raw) if path.suffix in compress else raw)


STARCODER = (
    "c",
    "cpp",
    "c-sharp",
    "go",
    "html",
    "java",
    "javascript",
    "markdown",
    "php",
    "python",
    "rust",
    "typescript",
)
"""Folders of StarCoderData that the recipes read."""


def write_published(root: Path) -> None:
    """Writes every imitation below `root`, the working directory of a test."""
    for chunk in (1, 2):
        for split in ("train", "validation"):
            file = f"cerebras/SlimPajama-627B/{split}/chunk{chunk}/example_{split}_0.jsonl.zst"
            write(root / file, rows(file, meta={"redpajama_set_name": "RedPajamaC4"}))
    stars = {"max_stars_repo_path": "a", "max_stars_repo_name": "b", "max_stars_count": 1, "id": "c"}
    other = {
        "git-commits-cleaned": {
            "commit": "0",
            "old_file": "a",
            "new_file": "b",
            "old_contents": "c",
            "new_contents": "d",
        },
        "github-issues-filtered-structured": {
            "repo": "a",
            "issue_id": 1,
            "events": [{"text": "x", "action": "opened"}],
        },
        "jupyter-structured-clean-dedup": {"path": "a", "quality_prob": 0.5},
    }
    for folder in (*STARCODER, *other):
        file = f"bigcode/starcoderdata/{folder}/train-00000-of-00001.parquet"
        found = [dict(row) for row in rows(file, "content", **(other.get(folder) or stars))]
        if folder == "git-commits-cleaned":
            for row in found:
                del row["content"]
        write(root / file, found)
    c4 = root / "allenai/c4"
    page = {"timestamp": "2019-01-01T00:00:00Z", "url": "https://a"}
    write(c4 / "en/c4-train.00000-of-01024.json.gz", rows("en", **page))
    write(c4 / "multilingual/c4-zh.tfrecord-00000-of-01024.json.gz", rows("zh", **page))
    write(c4 / "multilingual/c4-zh-validation.tfrecord-00000-of-00002.json.gz", rows("zh-validation", **page))
    (c4 / "README.md").write_text(
        "---\nconfigs:\n- config_name: en\n  data_files:\n  - split: train\n    path: en/c4-train.*.json.gz\n"
        "- config_name: zh\n  data_files:\n  - split: train\n    path: multilingual/c4-zh.*.json.gz\n"
        "  - split: validation\n    path: multilingual/c4-zh-validation.*.json.gz\n---\n"
    )
    web = {"url": "https://a", "timestamp": "b", "dump": "c", "segment": "d", "image_urls": [["e", "f"]]}
    for file in ("train-00000-of-05534-b8fc5348cbe605a5", "train-00001-of-05534-9bca3ce859516338"):
        write(root / f"tiiuae/falcon-refinedweb/data/{file}.parquet", rows(file, "content", **web))
    for folder, meta in (
        ("arxiv", {"yymm": "0001"}),
        ("open-web-math", '{"url": 1}'),
        ("algebraic-stack", {"size": 3}),
    ):
        write(root / f"EleutherAI/proof-pile-2/{folder}/train/{folder}_000.jsonl.zst", rows(folder, meta=meta))
    (root / "EleutherAI/proof-pile-2/proof-pile-2.py").write_text("raise AssertionError\n")
    edu = root / "HuggingFaceFW/fineweb-edu"
    for file in ("data/CC-MAIN-2013-20/train-00000-of-00014", "sample/10BT/000_00000"):
        write(edu / f"{file}.parquet", rows(file, id="a", dump="b", url="c", score=3.1, int_score=3, token_count=9))
    (edu / "README.md").write_text(
        "---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n    path: data/*/*\n"
        "- config_name: sample-10BT\n  data_files:\n  - split: train\n    path: sample/10BT/*\n---\n"
    )
    for number, metadata in ((1, {"WARC-Type": "response"}), (2, {"Content-Length": 12, "WARC-Block": ["x"]})):
        file = f"global-shard_{number:02}_of_10/local-shard_0_of_10/shard_00000000_processed.jsonl.zstd"
        others = {"metadata": metadata, "url": "a"} | ({"warcinfo": "b"} if number == 2 else {})
        write(root / "mlfoundations/dclm-baseline-1.0" / file, rows(file, **others))
    for language in ("en", "zh"):
        file = f"data/ultrafineweb_{language}/ultrafineweb-{language}-part-0001-of-2048.parquet"
        write(root / "openbmb/Ultra-FineWeb" / file, rows(file, "content", score=0.9, source="a"))
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    write(root / "THUDM/LongAlign-10k/long.jsonl", [{"messages": talk, "length": 2}] * ROWS)
    alpaca = {"instruction": "a", "input": "", "output": "b", "file": "c"}
    write(root / "Yukang/LongAlpaca-12k/LongAlpaca-12k.json", [alpaca] * ROWS)
