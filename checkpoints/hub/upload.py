"""Uploads a model directory or an adapter to the hub."""

import tempfile
from pathlib import Path

from farsight.checkpoints.adapter.config import read_adapter
from farsight.checkpoints.cards.adapter import hub_name
from farsight.checkpoints.cards.model import CARD
from farsight.checkpoints.dcp import COMPLETE
from farsight.checkpoints.hub.download import belongs
from farsight.checkpoints.model_dir.api import check_tensors, is_adapter, read_config
from farsight.errors import UserError
from farsight.remote import LOG_IN, WEIGHTS, hub_errors


def check_model(folder: Path) -> str | None:
    """Checks that a folder is a whole model directory or adapter, with the tensors that its config asks for.

    Returns:
        The name on the hub of an adapter's base, if it has one that is known.

    Raises:
        ConfigError: files are missing, cut off or do not fit.
        UserError: a checkpoint.
    """
    if (folder / COMPLETE).is_file():
        raise UserError(f"{folder} is a checkpoint: make a model directory of it first, with farsight convert to-hf.")
    if not is_adapter(folder):
        check_tensors(folder, read_config(folder))
        return None
    adapter = read_adapter(folder)
    _ = adapter.lora_tensors, adapter.layer_tensors, adapter.config()  # each is checked as it is read
    return hub_name(adapter.base.path)


def files_of(folder: Path) -> tuple[list[Path], list[Path]]:
    """The files of a model directory or adapter that belong on the hub, and the others; both relative to the folder.

    Names that begin with a dot, such as the lock of a model that was copied from a store, are neither.
    """
    paths = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    paths = [path for path in paths if not path.name.startswith(".")]
    return [path for path in paths if belongs(path)], [path for path in paths if not belongs(path)]


def upload(
    folder: Path, files: list[Path], card: str, repository: str, public: bool, revision: str | None, message: str
) -> str:
    """Uploads files of a folder, making the repository if there is none, and returns its address.

    A file whose content is on the hub already, in this repository or from an interrupted upload, is not sent again. Weights that
    are in the repository and not among the files are removed from it, since loaders would take them for the model's.

    Args:
        files: paths relative to the folder.
        card: the text of README.md.
        repository: ORG/NAME.
        public: whether everyone may read the repository.
        revision: branch to write to, made if there is none; None for the main one.

    Raises:
        UserError: no token, or one that may not write there; a public repository without `public`; no connection.
    """
    from huggingface_hub import HfApi, errors, get_token

    if get_token() is None:
        raise UserError(f"Nobody is logged in to the hub: {LOG_IN}, with a token that may write to {repository}.")
    api = HfApi()
    with hub_errors(repository, repository, revision), tempfile.TemporaryDirectory() as staging:
        try:
            private = api.model_info(repository).private
        except errors.RepositoryNotFoundError:
            api.create_repo(repository, private=not public)
            private = not public
        if not private and not public:
            raise UserError(
                f"{repository} is public, and so would be this model: add --public, or name another repository."
            )
        if revision is not None:
            api.create_branch(repository, branch=revision, exist_ok=True)
        for path in files:
            (Path(staging) / path).parent.mkdir(exist_ok=True)
            (Path(staging) / path).symlink_to((folder / path).resolve())
        (Path(staging) / CARD).unlink(missing_ok=True)
        (Path(staging) / CARD).write_text(card, encoding="utf-8")
        api.upload_folder(
            repo_id=repository,
            folder_path=staging,
            commit_message=message,
            revision=revision,
            delete_patterns=list(WEIGHTS),
        )
    return f"{api.endpoint}/{repository}" + (f"/tree/{revision}" if revision else "")
