"""Downloads a model from the hub into a folder, and checks every byte of it."""

import shutil
import sys
from collections.abc import Mapping
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from fnmatch import fnmatch
from pathlib import Path, PurePath, PurePosixPath
from threading import Event
from typing import Any

from tqdm import tqdm

from farsight.checkpoints.model_dir.api import ADAPTER_CONFIG, ADAPTER_MARKER
from farsight.errors import UserError
from farsight.new_folder import new_folder
from farsight.progress import progress
from farsight.remote import SECOND_COPY, SMALL_FILES, WEIGHTS, hub_errors, parse_hub

RESULTS = ("evals", "analysis")
"""Subfolders with JSON files of results."""


def belongs(path: PurePath) -> bool:
    """Whether a file, by its path in a model directory or adapter, is one of those that are uploaded and downloaded."""
    match path.parts:
        case (name,):
            return any(fnmatch(name, own) for own in (*WEIGHTS, *SMALL_FILES)) and not fnmatch(name, SECOND_COPY)
        case (folder, _):
            return folder in RESULTS and path.suffix == ".json"
    return False


def download(place: str, out: Path) -> None:
    """Downloads a model directory or adapter of the hub; the next call goes on with what an interrupted one left.

    Args:
        place: ORG/NAME[@REVISION][/SUBFOLDER], with or without hf://.
        out: folder to write, which must be new or empty.

    Raises:
        UserError: the repository can't be read, holds no model there, or files differ from the hub's checksums; `out` exists.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    url = f"hf://{place.removeprefix('hf://')}"
    uri, api = parse_hub(url), HfApi()
    inner = PurePosixPath(uri.path_in_repo)
    with hub_errors(url, uri.id, uri.revision):
        revision = api.resolve_revision(uri.id, revision=uri.revision).resolved
        tree = api.list_repo_tree(uri.id, recursive=True, revision=revision)
        sizes = {PurePosixPath(entry.path): entry.size for entry in tree if isinstance(entry, RepoFile)}
    sizes = {
        path: size for path, size in sizes.items() if path.is_relative_to(inner) and belongs(path.relative_to(inner))
    }
    if not {inner / name for name in ("config.json", ADAPTER_CONFIG, ADAPTER_MARKER)} & {*sizes}:
        raise UserError(f"{url} holds no model: it has neither config.json nor the files of an adapter.")
    with new_folder(out, lambda there: False, resumed=f"{uri.id}@{revision}/{inner}") as part:
        with hub_errors(url, uri.id, uri.revision):
            _fetch_all(uri.id, revision, sizes, part)
            print("comparing the files with the hub's checksums", file=sys.stderr, flush=True)
            found = api.verify_repo_checksums(uri.id, local_dir=part, revision=revision)
        if differing := [entry["path"] for entry in found.mismatches]:
            for name in differing:  # so that the next call downloads them again
                (part / name).unlink()
            names = ", ".join(differing)
            raise UserError(f"{names} of {url} came with other bytes than the hub's checksum says: pull again.")
        if inner.parts:
            for path in list((part / inner).iterdir()):
                path.rename(part / path.name)
            shutil.rmtree(part / inner.parts[0])


def _fetch_all(repository: str, revision: str, sizes: Mapping[PurePosixPath, int], folder: Path) -> None:
    """Downloads files of a repository, several at once, by plain requests.

    The library's own downloads into a folder begin a file anew after a kill.

    Args:
        sizes: bytes of each file, by its path in the repository.
    """
    from huggingface_hub import hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    headers, stopped = build_hf_headers(), Event()

    def fetch(name: PurePosixPath) -> None:
        path = folder / name
        if path.exists():
            bar.update(sizes[name])
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.incomplete")
        with partial.open("ab") as file:
            bar.update(file.tell())
            address = hf_hub_url(repository, str(name), revision=revision)
            http_get(
                address, file, resume_size=file.tell(), headers=headers, expected_size=sizes[name], _tqdm_bar=watched
            )
        partial.rename(path)

    with progress(total=sum(sizes.values()), desc="download", unit="B", unit_scale=True) as bar:
        watched: Any = _Watched(bar, stopped)
        with ThreadPoolExecutor(8) as pool:
            try:
                for done in as_completed([pool.submit(fetch, name) for name in sizes]):
                    done.result()
            except BaseException:
                stopped.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise


class _Watched:
    """A bar whose updates end downloads that go on in threads after another has failed, or after Ctrl-C."""

    def __init__(self, bar: tqdm, stopped: Event) -> None:
        self.bar, self.stopped = bar, stopped

    def update(self, count: int) -> None:
        if self.stopped.is_set():
            raise CancelledError
        self.bar.update(count)
