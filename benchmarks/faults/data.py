"""Data, tokenizers and chat templates that can't be used."""

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path

from farsight.benchmarks.faults.settings import TRAIN, TUNE
from farsight.benchmarks.faults.workshop import Case, Content, fifo

LINE = json.dumps({"text": "some words of a document " * 8}) + "\n"
CHAT = json.dumps({"instruction": "Say 1.", "input": "", "output": "It is 1."}) + "\n"


def _parquet(**columns: list) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.table(columns), path)

    return write


def _cut(path: Path) -> None:
    _parquet(text=["words " * 100] * 50)(path)
    path.write_bytes(path.read_bytes()[:-40])


def _loop(path: Path) -> None:
    path.symlink_to(path.name)


def _folder(path: Path) -> None:
    path.mkdir()


SOURCES: dict[str, tuple[str, str, Content | None, tuple[str, ...]]] = {
    # name: (kind, file, content, words)
    "text that is not there": ("text", "gone.txt", None, ("gone.txt", "no such file")),
    "a text file of 0 bytes": ("text", "x.txt", b"", ("x.txt", "0 bytes")),
    "a text file that is no UTF-8": ("text", "x.txt", b"caf\xe9 " * 9, ("x.txt", "UTF-8")),
    "a text file in UTF-16": ("text", "x.txt", ("words " * 40).encode("utf-16"), ("x.txt", "UTF-16")),
    "a folder without texts": ("text", "d", _folder, ("d",)),
    "a link to itself": ("text", "x.txt", _loop, ("x.txt",)),
    "a pipe as text": ("text", "x.txt", fifo, ("x.txt",)),
    "a pipe as JSON lines": ("jsonl", "x.jsonl", fifo, ("x.jsonl",)),
    "a device": ("text", "x.txt", lambda path: os.symlink("/dev/zero", path), ("x.txt",)),
    "JSON lines that are not there": ("jsonl", "gone*.jsonl", None, ("gone", "no such file")),
    "a folder as JSON lines": ("jsonl", "d", _folder, ("d", "directory")),
    "JSON lines of 0 bytes": ("jsonl", "x.jsonl", b"", ("x.jsonl",)),
    "a broken line": ("jsonl", "x.jsonl", LINE * 3 + '{"text": "half\n' + LINE, ("x.jsonl:4", "JSON")),
    "a line that is a list": ("jsonl", "x.jsonl", "[1]\n" * 9, ("x.jsonl:", "object")),
    "a JSON array": ("jsonl", "x.jsonl", json.dumps([{"text": "a"}] * 9, indent=1), ("x.jsonl", "array")),
    "JSON lines in UTF-16": ("jsonl", "x.jsonl", (LINE * 9).encode("utf-16"), ("x.jsonl", "UTF-16")),
    "another field": ("jsonl", "x.jsonl", '{"content": "words"}\n' * 9, ("x.jsonl:", "text", "content")),
    "a text that is a number": ("jsonl", "x.jsonl", '{"text": 3}\n' * 9, ("x.jsonl:", "int")),
    "a lone surrogate": ("jsonl", "x.jsonl", '{"text": "\\ud800 words"}\n' * 9, ("x.jsonl:", "surrogate")),
    "lines nested 100,000 deep": ("jsonl", "x.jsonl", ("[" * 100_000 + "\n") * 3, ("x.jsonl:",)),
    "texts that are all empty": ("jsonl", "x.jsonl", '{"text": ""}\n' * 9, ("x.jsonl",)),
    "JSON lines in gzip": ("jsonl", "x.jsonl.gz", gzip.compress(LINE.encode() * 9), ("x.jsonl.gz", "ompress")),
    "no Parquet": ("parquet", "x.parquet", b"PAR1 but not really", ("x.parquet", "Parquet")),
    "a Parquet file cut short": ("parquet", "x.parquet", _cut, ("x.parquet", "Parquet")),
    "Parquet without the column": (
        "parquet",
        "x.parquet",
        _parquet(content=["a"] * 9),
        ("x.parquet", "text", "content"),
    ),
    "a Parquet column of numbers": ("parquet", "x.parquet", _parquet(text=[1, 2]), ("x.parquet", "int64")),
    "Parquet without rows": ("parquet", "x.parquet", _parquet(text=["a"][:0]), ("x.parquet",)),
    "a hub's file that is not there": ("huggingface", "gone.jsonl", None, ("gone.jsonl",)),
}
ROWS: dict[str, tuple[str | bytes, tuple[str, ...]]] = {
    "conversations of 0 bytes": (b"", ("x.jsonl",)),
    "unknown columns": ('{"a": 1, "b": 2}\n' * 9, ("x.jsonl", "format")),
    "an answer that is a number": ('{"instruction": "a", "output": 3}\n' * 9, ("x.jsonl:1",)),
    "messages without a role": ('{"messages": [{"content": "a"}]}\n' * 9, ("x.jsonl:1", "role")),
    "no answer": ('{"messages": [{"role": "user", "content": "a"}]}\n' * 9, ("x.jsonl",)),
    "a broken row": (CHAT * 3 + "{", ("x.jsonl:4",)),
}
_LONG = "x" * 3000
TEMPLATES: dict[str, tuple[str, tuple[str, ...]]] = {
    "a template that is no Jinja": ("{% for m in messages %}", ("t.jinja",)),
    "a template that loops": ("{% for i in range(10**9) %}a{% endfor %}", ("t.jinja",)),
    "a template of nested loops": (
        "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}", ("t.jinja",),
    ),
    "a template of loops over a text": (
        "{% set x = '" + _LONG + "' %}{% for a in x %}{% for b in x %}{% for c in x %}{% endfor %}{% endfor %}{% endfor %}",
        ("t.jinja",),
    ),
    "a template that grows": ("{{ 'a' * 10**10 }}", ("t.jinja",)),
    "a template that grows by and by": (
        "{% set n = namespace(s='a') %}{% for i in range(200) %}{% set n.s = n.s ~ n.s %}{% endfor %}{{ n.s }}", ("t.jinja",),
    ),
    "a template of a large power": ("{{ 10 ** (10 ** 10) }}", ("t.jinja",)),
    "a template that calls itself": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", ("t.jinja",)),
    "a template that reaches for Python": (
        "{{ ''.__class__.__mro__[1].__subclasses__() }}{{ cycler.__init__.__globals__.os.system('touch executed') }}",
        ("t.jinja",),
    ),
    "a template that includes a file": ("{% include '/etc/passwd' %}", ("t.jinja",)),
    "a template that refuses": ("{{ raise_exception('no such role') }}", ("no such role",)),
    "a template that is not there": ("", ("gone.jinja",)),
}  # fmt: skip
TOKENIZERS: dict[str, tuple[str, Content, tuple[str, ...]]] = {
    "tokenizer.model of 0 bytes": ("tokenizer.model", b"", ("tokenizer.model",)),
    "tokenizer.model of noise": ("tokenizer.model", b"\x00\xff" * 900, ("tokenizer.model",)),
    "tokenizer.json of 0 bytes": ("tokenizer.json", b"", ("tokenizer.json",)),
    "tokenizer.json that is []": ("tokenizer.json", "[]", ("tokenizer.json",)),
    "tokenizer.json that is {}": ("tokenizer.json", "{}", ("tokenizer.json",)),
    "tokenizer.json that is text": ("tokenizer.json", "hello", ("tokenizer.json",)),
    "tokenizer.json in UTF-16": ("tokenizer.json", "{}".encode("utf-16"), ("tokenizer.json",)),
    "tokenizer_config.json that is []": ("tokenizer_config.json", "[]", ("tokenizer_config.json",)),
    "an empty folder": ("sub/x", b"", ("tokenizer",)),
}


def cases() -> list[Case]:
    found = []
    for name, (kind, file, content, says) in SOURCES.items():
        files = {} if content is None else {file: content}
        source = f"kind=\"{kind}\", path=\"{{here}}/{file}\"" if kind != "huggingface" else (
            f"kind=\"huggingface\", name=\"json\", data_files=\"{{here}}/{file}\""
        )  # fmt: skip
        command = f"{TRAIN} --data.held_out 0 --no_validation.enable --data.sources '[{{{{{source}}}}}]'"
        found.append(Case(name, command.replace("--no_validation.enable", "--validation.no_enable"), says, files))
    for name, (content, says) in ROWS.items():
        source = '--data.sources \'[{{kind="jsonl", path="{here}/x.jsonl"}}]\''
        found.append(Case(name, f"{TUNE} {source}", says, {"x.jsonl": content}))
    for name, (template, says) in TEMPLATES.items():
        file = says[0] if says[0].endswith(".jinja") else "t.jinja"
        files = {file: template} if template else {}
        found.append(Case(name, f"{TUNE} --data.chat_template {{here}}/{file}", says, files))
    for name, (file, content, says) in TOKENIZERS.items():
        command = f"{TRAIN} --tokenizer.kind auto --tokenizer.path {{here}}/t"
        found.append(Case(name, command, says, {f"t/{file}": content}))
    vanished = Case("a document longer than nothing", f"{TRAIN} --data.sources.0.min_tokens 100000000", ("min_tokens",))
    small = Case("a vocabulary too small", f"{TRAIN} --architecture.vocab_size 64", ("vocab_size",))
    return [*found, vanished, small]
