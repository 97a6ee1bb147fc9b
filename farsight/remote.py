"""Places with a scheme, such as hf://ORG/NAME: the one module that turns them into local folders.

A place stays written as it is in configs, results and messages; `local` gives the folder to read it from, and `shown` the way
back. Several ranks read the same version of a place, which rank 0 looks up, and one rank of each node downloads it.
"""

import fcntl
import json
import os
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

from farsight import process
from farsight.errors import UserError
from farsight.stores import StorePath, path_of

WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
SMALL_FILES = (
    "*.json", "*.jinja", "*.py", "*.txt", "*.md", "tokenizer.model", "LICENSE*", "NOTICE*",
)  # fmt: skip
"""Files of model directories and adapters beside the weights. Pickles (*.bin, *.pt, *.pth) are never downloaded."""
SECOND_COPY = "consolidated*.safetensors"
"""Files with the whole model once more, under Mistral's own names."""

_WAIT = timedelta(hours=12)
"""Longest time that ranks wait for another's download."""


@dataclass(frozen=True)
class Scheme:
    """The two steps of reading a place with a scheme."""

    pin: Callable[[str], str]
    """The same place with the exact version that it has now, which all ranks read."""
    fetch: Callable[[str, bool], Path]
    """Downloads a pinned place, with or without its weights, and gives its folder; what is there already is not sent again."""


# ── Any scheme ────────────────────────────────────────────────────────────────────────────────────────


def url_of(place: str | Path) -> str | None:
    """A place as SCHEME://REST, or None if it is a local path; `Path` merges the two slashes into one.

    Raises:
        UserError: a scheme that is not known.
    """
    found = re.match(r"([a-z][a-z0-9]+):(/+)", str(place))
    if not found or (found[1] not in SCHEMES and len(found[2]) == 1):
        return None
    if found[1] not in SCHEMES:
        known = ", ".join(f"{scheme}://" for scheme in SCHEMES)
        raise UserError(f"{place}: {found[1]}:// is not a scheme that can be read here; {known} is, or name a folder.")
    return f"{found[1]}://{str(place)[found.end() :]}"


def local(place: str | Path, weights: bool = True) -> Path:
    """The local folder of a place; a local path is returned unchanged. What is missing is downloaded first.

    In a run of several ranks, the first call for a place is collective: all ranks make it, and one of each node downloads.

    Args:
        weights: False leaves out weights, for what reads configs and tokenizers alone.

    Raises:
        UserError: the place can't be read, in one sentence that says why.
    """
    url = url_of(place)
    return Path(place) if url is None else _local(url, weights)


def shown(path: Path) -> str:
    """The place that a folder of `local`, or a path inside one, was read from; any other path as text."""
    folder = next((above for above in (path, *path.parents) if above in _urls), None)
    return str(path) if folder is None else "/".join((_urls[folder], *path.relative_to(folder).parts))


_urls: dict[Path, str] = {}
"""Places that this process has read, by local folder."""


@cache
def _local(url: str, weights: bool) -> Path:
    scheme, ranks = _scheme(url), process.ranks()
    exact = _pinned(url)
    if ranks.world_size == 1:
        folder = scheme.fetch(exact, weights)
    else:
        key = f"fetch {exact} {weights} {socket.gethostname()} {os.environ.get('GROUP_RANK')}"
        folder = path_of(_from_one(key, ranks.local_rank == 0, lambda: str(scheme.fetch(exact, weights))))
    _urls[folder] = _urls[folder.resolve()] = url  # records of a base have the real path
    return folder


@cache
def _pinned(url: str) -> str:
    """The place with the version that it had at the first look, for all ranks and for the rest of the run."""
    scheme, ranks = _scheme(url), process.ranks()
    if ranks.world_size == 1:
        return scheme.pin(url)
    return _from_one(f"pin {url}", ranks.rank == 0, lambda: scheme.pin(url))


def _scheme(url: str) -> Scheme:
    return SCHEMES[url.partition(":")[0]]


def _from_one(key: str, works: bool, work: Callable[[], str]) -> str:
    """Runs `work` in one process; returns its result, or raises its error, in every process that waits for it."""
    if works:
        try:
            said = {"result": work()}
        except UserError as error:
            said = {"error": str(error)}
        _store().set(key, json.dumps(said))
    said = json.loads(_store().get(key))
    if "error" in said:
        raise UserError(said["error"])
    return said["result"]


@cache
def _store() -> Any:
    """The store in which the launcher's ranks meet, before and independent of any process group."""
    import torch.distributed as dist

    store, _, _ = next(dist.rendezvous("env://"))
    store.set_timeout(_WAIT)
    return store


# ── The Hugging Face Hub ──────────────────────────────────────────────────────────────────────────────

LOG_IN = "log in with `hf auth login`, or set the environment variable HF_TOKEN"


def without_token(text: str) -> str:
    """A text in one line, with the hub's token replaced by an ellipsis."""
    from huggingface_hub import get_token

    token = get_token()
    text = " ".join(text.split())
    return text.replace(token, "…") if token else text


@contextmanager
def hub_errors(place: str, repository: str, revision: str | None = None) -> Iterator[None]:
    """Turns errors of huggingface_hub into sentences without the token.

    Args:
        place: what was asked for, as the user wrote it.
        repository: ORG/NAME.
        revision: branch, tag or commit, if one was named.

    Raises:
        UserError: in place of any error of the library; the error itself, whose text may hold the token, is dropped.
    """
    from huggingface_hub import constants, errors, get_token

    page = f"{constants.ENDPOINT}/{repository}"
    try:
        yield
    except UserError:
        raise
    except errors.GatedRepoError:
        problem = f"is gated: accept its conditions on {page}, and {LOG_IN}, with the account that accepted them"
    except errors.RepositoryNotFoundError:
        problem = f"is not there: correct the name; if {page} is private, {LOG_IN}, with an account that may read it"
    except errors.RevisionNotFoundError:
        problem = (
            f"has no revision {revision or constants.DEFAULT_REVISION!r}: name a branch, a tag or a commit of {page}"
        )
    except errors.HfHubHTTPError as error:
        if error.response.status_code in (401, 403):
            problem = (
                f"can't be used with the token here, or without one: {LOG_IN}, with an account that may use {page}"
            )
        else:
            problem = f"can't be used now ({without_token(str(error)).rstrip('.')}); the same command goes on from here"
    except (errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError, errors.RevisionResolutionError):
        cause = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"{constants.ENDPOINT} can't be reached"
        problem = f"can't be downloaded, since {cause}, and {constants.HF_HUB_CACHE} has no complete copy of it"
    except Exception as error:  # of the HTTP client, hf_xet and the file system
        token = get_token() or ""
        if token.isascii() and token.isprintable():
            said = without_token(str(error)).rstrip(".")
            problem = f"can't be used now ({type(error).__name__}: {said}); the same command goes on from here"
        else:  # no header can hold it, and the error may quote the header
            problem = f"can't be used with the token here, which has characters that no token has: {LOG_IN}"
    else:
        return
    raise UserError(f"{place} {problem}.") from None


def parse_hub(url: str) -> Any:
    """The parts of hf://ORG/NAME[@REVISION][/SUBFOLDER], as huggingface_hub's HfUri: `id`, `revision`, `path_in_repo`.

    Raises:
        UserError: another form, or a dataset.
    """
    from huggingface_hub import parse_hf_uri
    from huggingface_hub.errors import HfUriError

    try:
        found = parse_hf_uri(url)
    except HfUriError:
        found = None
    if found is None or found.type != "model" or ".." in found.path_in_repo.split("/"):
        raise UserError(f"{url} does not name a model of the hub; write hf://ORG/NAME[@REVISION][/SUBFOLDER].")
    return found


def _pin_hub(url: str) -> str:
    from dataclasses import replace

    from huggingface_hub import resolve_revision

    uri = parse_hub(url)
    with hub_errors(url, uri.id, uri.revision):
        return replace(uri, revision=resolve_revision(uri.id, revision=uri.revision).resolved).to_uri()


def _fetch_hub(url: str, weights: bool) -> Path:
    from huggingface_hub import snapshot_download

    uri = parse_hub(url)
    inner = uri.path_in_repo.strip("/")
    place, start = f"hf://{uri.id}@{uri.revision}" + f"/{inner}" * bool(inner), f"{inner}/" * bool(inner)
    with hub_errors(place, uri.id, uri.revision):
        snapshot = snapshot_download(  # type: ignore[call-overload]  # any callable that makes a bar will do
            uri.id,
            revision=uri.revision,
            allow_patterns=[start + name for name in (*SMALL_FILES, *WEIGHTS * weights)],
            ignore_patterns=[f"{start}*/*", start + SECOND_COPY],  # subfolders, since `*` matches slashes too
            tqdm_class=download_bar,
        )
    folder = Path(snapshot) / inner
    if not folder.is_dir() or not any(path.is_file() for path in folder.iterdir()):
        raise UserError(f"{place} has no files of a model; name the folder in the repository that holds one.")
    return folder


def download_bar(*args: Any, total: float | None = None, desc: str = "", unit: str = "it", **kwargs: Any) -> Any:
    """Our bar for the bytes of a download, in place of huggingface_hub's three."""
    from farsight.progress import progress

    hidden = unit != "B" or desc == "Downloading bytes"
    return progress(total=total, desc="download", unit="B", unit_scale=True, disable=hidden)


# ── Object stores and web servers ─────────────────────────────────────────────────────────────────────

INDEX = "model.safetensors.index.json"
NAMES = (
    "config.json", "farsight.json", "model.safetensors", INDEX, "tokenizer.json", "tokenizer.model",
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "generation_config.json", "chat_template.jinja",
    "adapter_config.json", "farsight_adapter.json", "adapter_model.safetensors", "garfa.safetensors",
)  # fmt: skip
"""Files to ask a web server for, which has no lists of files; the index of a model names its other weights."""


def cache_folder() -> Path:
    """The folder for copies of models on stores and web servers."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "farsight"


def _fetch_store(url: str, weights: bool) -> Path:
    """Checkpoints are read from where they are; models, adapters and tokenizers are copied, as safetensors are mapped into memory."""
    place = StorePath(url)
    try:
        with suppress(PermissionError):
            if (place / ".metadata").is_file():
                return place
        return download_store(place, (*SMALL_FILES, *WEIGHTS * weights))
    except OSError as error:
        raise UserError(f"{url} can't be read: {error.strerror or error}.") from error


def download_store(place: StorePath, patterns: tuple[str, ...] = SMALL_FILES) -> Path:
    """Copies the files of a folder on a store, without its subfolders, into the cache, and returns their folder there.

    The same version is not copied again, and one that was copied in part goes on from there.

    Args:
        patterns: names of files to copy.

    Raises:
        UserError: there is no such folder, or nothing of that name in it.
        OSError: it can't be read now, or the cache can't be written.
    """
    import xxhash

    from farsight.progress import progress

    found = _versions(place)
    if not found:
        raise UserError(f"{place} has no files of a model; name the folder that holds one.")
    version = xxhash.xxh3_128_hexdigest(json.dumps([str(place), sorted(found.items())]).encode())
    folder = cache_folder() / place.scheme / version
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        missing = [name for name in found if any(map(Path(name).match, patterns)) and not (folder / name).is_file()]
        size = sum(found[name][0] for name in missing)
        with progress(total=size, desc="download", unit="B", unit_scale=True) as bar:
            for name in missing:
                (place / name).fetch(folder / name, resume=True, moved=bar.update)
                if found[name][0] not in (0, (folder / name).stat().st_size):  # a server may not say the size
                    (folder / name).unlink()
                    raise OSError(None, f"{name} has changed meanwhile, or its answer was cut short; try again")
    return folder


def _versions(place: StorePath) -> dict[str, tuple[int, str]]:
    """The files of a model in a folder, each with its size and version."""
    if place.scheme not in ("http", "https"):
        paths = (
            [path for path in place.iterdir() if any(map(path.match, (*SMALL_FILES, *WEIGHTS)))]
            if place.is_dir()
            else []
        )
        return {path.name: path.version() for path in paths if path.is_file()}
    found, refused = {}, None
    names = [*NAMES]
    for name in names:
        try:
            found[name] = (place / name).version()
        except FileNotFoundError:
            continue
        except PermissionError as error:  # which some servers say of a file that is not there
            refused = error
            continue
        if name == INDEX:
            with suppress(ValueError, KeyError, AttributeError):  # refused when the model is read
                parts = {str(part) for part in json.loads((place / name).read_bytes())["weight_map"].values()}
                names += sorted(part for part in parts - {*names} if "/" not in part and part.endswith(".safetensors"))
    if refused is not None and not found:
        raise refused
    return found


_STORE = Scheme(lambda url: url, _fetch_store)  # a store keeps no older versions that could be asked for

SCHEMES = {"hf": Scheme(_pin_hub, _fetch_hub), "s3": _STORE, "gs": _STORE, "http": _STORE, "https": _STORE}
"""The known schemes."""
