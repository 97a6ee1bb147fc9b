"""Errors of the hub, of missing packages and of URLs end in a sentence that says what to do."""

import functools
import gzip
import http.server
import subprocess
import sys
import threading
from collections import Counter

import fsspec
import pytest
import zstandard

from farsight.configs.schema import HubSource, JsonlSource, ParquetSource, TextSource
from farsight.data.sources.build import open_source
from farsight.data.sources.failures import in_words
from farsight.errors import DataError
from tests.published import rows, texts, write

HUB = """\
import http.server, os, sys, threading

class Hub(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        status, code, message = ANSWER
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", message)
        self.send_header("Content-Length", "0")
        self.end_headers()
    do_HEAD = do_POST = do_GET

    def log_message(self, *arguments):
        pass

server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
threading.Thread(target=server.serve_forever, daemon=True).start()
os.environ |= {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": sys.argv[1]}

from farsight.configs.schema import HubSource
from farsight.data.sources.build import open_source
from farsight.errors import DataError

def ask(answer, token="", name="owner/corpus", **settings):
    global ANSWER
    ANSWER = answer
    os.environ["HF_TOKEN"] = token
    try:
        open_source(HubSource(name=name, **settings), 0.0, "train", 0)
    except DataError as error:
        print(str(error).replace(os.environ["HF_ENDPOINT"], "HUB"))

gated = "GatedRepo", "Access to dataset owner/corpus is restricted for hf_secret."
ask((401, *gated))
ask((403, *gated), "hf_secret")
ask((404, "RepoNotFound", "Repository not found"), "hf_secret")
ask((401, "", "Invalid credentials: hf_secret"), "hf_secret")
ask((403, *gated), name="json", data_files="hf://datasets/owner/corpus/*.jsonl.zst")
"""
"""A hub that answers every request with one error, and what sources say of it; the hub's address is read at import."""


def test_gated_private_and_missing_datasets(tmp_path):
    """Each says what to accept and how to log in, and none shows the token."""
    done = subprocess.run([sys.executable, "-c", HUB, str(tmp_path)], capture_output=True, text=True)
    assert not done.stderr
    assert "hf_secret" not in done.stdout
    gated, no_access, missing, refused, in_url = done.stdout.splitlines()
    log_in = "log in with `hf auth login`, or set the environment variable HF_TOKEN"
    accept = "It is gated: accept its conditions on HUB/datasets/owner/corpus"
    assert gated.startswith("huggingface source 'owner/corpus': it can't be opened: DatasetNotFoundError: ")
    assert gated.endswith(f"{accept}, and {log_in} (there is no token here).")
    assert no_access.endswith(
        f"{accept} with the account that the token here belongs to; for another account, {log_in}."
    )
    assert missing.endswith(
        f"Correct the name; if HUB/datasets/owner/corpus is private, {log_in}, with an account that may read it."
    )
    assert refused.endswith(
        f"The hub refuses the token here, or there is none: {log_in}, with an account that may read HUB/datasets/owner/corpus."
    )
    assert in_url.endswith(
        "No file matches: correct data_files; if HUB/datasets/owner/corpus is gated or private, accept its conditions, and "
        f"{log_in}."
    )


def test_words_of_an_error_are_one_line_without_the_token(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert in_words(ValueError("Illegal header:\n  Bearer hf_secret.")) == "ValueError: Illegal header: Bearer …"
    assert in_words(StopIteration()) == "StopIteration"


def failure(**settings) -> str:
    with pytest.raises(DataError) as error:
        list(open_source(HubSource(**settings), 0.0, "train", 0).documents())
    return str(error.value)


def test_scripts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "owner/corpus/train.jsonl", rows("a"))
    (tmp_path / "owner/corpus/corpus.py").touch()
    said = failure(name="owner/corpus")
    assert said.endswith(
        'A script reads it, which `datasets` no longer runs: name its files, with name = "json" or "parquet" and '
        'data_files = "hf://datasets/owner/corpus/…".'
    )


def test_missing_packages(tmp_path, monkeypatch):
    write(tmp_path / "a.jsonl.zst", rows("a"))
    with monkeypatch.context() as patch:
        patch.delitem(fsspec.compression.compr, "zstd")  # as without the package
        said = failure(name="json", data_files=f"{tmp_path}/a.jsonl.zst")
    assert "needs the package zstandard, which is not installed: pip install" in said
    assert said.rstrip("'").endswith("[data]")
    for scheme, package in (("s3", "s3fs"), ("gs", "gcsfs")):
        monkeypatch.setitem(sys.modules, package, None)
        said = failure(name="json", data_files=f"{scheme}://bucket/*.jsonl")
        assert said.endswith(f"This needs the package {package}, which is not installed: pip install {package}")


class TestUrls:
    """Files behind URLs, which `datasets` opens through fsspec as it does those of S3 and GCS."""

    def read(self, path: str) -> Counter:
        source = open_source(HubSource(name="json", data_files=path), 0.0, "train", 0)
        return Counter(document.text for document in source.documents())

    def test_globs_and_compression(self, tmp_path):
        memory = fsspec.filesystem("memory")
        for name in ("a.jsonl.zst", "b.jsonl.zst", "c.jsonl.gz"):
            write(tmp_path / name, rows(name))
            memory.pipe(f"/bucket/{name}", (tmp_path / name).read_bytes())
        assert self.read("memory://bucket/*.zst") == Counter(texts("a.jsonl.zst") + texts("b.jsonl.zst"))
        assert self.read("memory://bucket/c.jsonl.gz") == Counter(texts("c.jsonl.gz"))

    def test_a_web_server(self, tmp_path):
        class Quiet(http.server.SimpleHTTPRequestHandler):
            def log_message(self, *arguments):
                pass

        write(tmp_path / "a.jsonl.zst", rows("a"))
        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=tmp_path)) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            assert self.read(f"http://127.0.0.1:{server.server_port}/a.jsonl.zst") == Counter(texts("a"))
            server.shutdown()

    def test_a_file_that_ends_early(self, tmp_path):
        for compress, suffix in ((gzip.compress, "gz"), (zstandard.compress, "zst")):
            write(tmp_path / "a.jsonl", rows("a"))
            raw = compress((tmp_path / "a.jsonl").read_bytes())
            (tmp_path / f"a.jsonl.{suffix}").write_bytes(raw[:-40])
            assert "can't be " in failure(name="json", data_files=f"{tmp_path}/a.jsonl.{suffix}")

    @pytest.mark.parametrize("kind", [TextSource, JsonlSource, ParquetSource])
    def test_local_kinds_say_how_to_stream_a_url(self, kind):
        with pytest.raises(DataError, match=r'a URL; .* kind = "huggingface", .* data_files = "s3://b/\*.jsonl"'):
            open_source(kind(path="s3://b/*.jsonl"), 0.0, "train", 0)
