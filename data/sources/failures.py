"""Says what to do when a dataset of the hub, or files behind a URL, can't be read.

The libraries raise anything from HTTP errors to ValueError, and wrap some in others without naming them as the cause, so
that only the message tells.
"""

import re
from collections.abc import Iterator

from farsight.extras import how_to_install
from farsight.remote import LOG_IN, without_token

_NOT_JSON = re.compile(r"JSON parse error(?!: Column\()|when decoding|Expected object or value|Trailing data")
"""Messages of pyarrow's parser and that of `datasets` for a line that is not JSON; for a column whose type changes, pyarrow names it."""


def in_words(error: BaseException) -> str:
    """An error's type and message in one line, without the hub's token."""
    said = without_token(str(error)).rstrip(".")
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def what_to_do(error: BaseException, place: str) -> str | None:
    """A sentence with the remedy for an error of `datasets`, `huggingface_hub` or fsspec; None for an error without a known one.

    Args:
        place: the dataset's name on the hub, or a format with its files: "json (hf://datasets/NAME/*.jsonl)".
    """
    from huggingface_hub import constants, errors, get_token

    chain = list(_chain(error))
    kinds = {kind for link in chain for kind in type(link).__mro__}
    statuses = {link.response.status_code for link in chain if isinstance(link, errors.HfHubHTTPError)}
    said = " ".join(str(link) for link in chain)
    in_url = re.search(r"hf://datasets/([\w.-]+/[\w.-]+)", place)
    repository = in_url[1] if in_url else place.partition(" ")[0]
    page = f"{constants.ENDPOINT}/datasets/{repository}"
    if errors.GatedRepoError in kinds or "is a gated dataset" in said:
        if get_token() is None:
            return f"It is gated: accept its conditions on {page}, and {LOG_IN} (there is no token here)."
        return (
            f"It is gated: accept its conditions on {page} with the account that the token here belongs to; for another "
            f"account, {LOG_IN}."
        )
    if errors.RepositoryNotFoundError in kinds or "doesn't exist on the Hub" in said:
        return f"Correct the name; if {page} is private, {LOG_IN}, with an account that may read it."
    if errors.LocalTokenNotFoundError in kinds or statuses & {401, 403}:
        return f"The hub refuses the token here, or there is none: {LOG_IN}, with an account that may read {page}."
    if in_url and isinstance(error, StopIteration | FileNotFoundError):  # to a glob, what may not be read is not there
        return (
            f"No file matches: correct data_files; if {page} is gated or private, accept its conditions, and {LOG_IN}."
        )
    if "Dataset scripts are no longer supported" in said:
        return (
            'A script reads it, which `datasets` no longer runs: name its files, with name = "json" or "parquet" and '
            f'data_files = "hf://datasets/{repository}/…".'
        )
    if "Compression type zstd not supported" in said:
        return how_to_install(ModuleNotFoundError(name="zstandard"))
    for link in chain:
        if isinstance(link, ModuleNotFoundError):  # fsspec's package for a kind of URL, such as s3fs
            return f"This needs the package {link.name}, which is not installed: pip install {link.name}"
    if missing := re.search(r"No match for FieldRef\.Name\((.*?)\)", said):
        return (
            f"A file of the dataset has no column '{missing[1]}': in the source's `data_dir`, name folders whose files have it, "
            "or set `field`."
        )
    return None


def is_not_json(error: BaseException) -> bool:
    """True if an error of `datasets` is about a line that is not JSON."""
    return _NOT_JSON.search(" ".join(str(link) for link in _chain(error))) is not None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error, the one it came from, and so on."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
