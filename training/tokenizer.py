"""The tokenizer of a run: the one its config names, or a sentencepiece model trained once on the run's own data."""

import logging
import os
import shutil
import socket
from dataclasses import replace
from pathlib import Path

from farsight.configs.schema import JobConfig, Tokenizer
from farsight.data.sample import sample_texts
from farsight.data.tokenizers.tokenizer import Tokenizer as LoadedTokenizer
from farsight.data.tokenizers.tokenizer import find_tokenizer_dir, load_tokenizer, train_sentencepiece
from farsight.errors import ConfigError
from farsight.parallel.ranks import on_rank_zero
from farsight.remote import local, shown

logger = logging.getLogger("farsight")

TRAINING_BYTES = 4_000_000
"""Text that a tokenizer is trained on."""


def tokenizer_of(start: Path) -> Path:
    """The folder with the tokenizer of a model directory or checkpoint.

    Raises:
        ConfigError: it has none; weights are useless with another tokenizer's ids.
    """
    directory = find_tokenizer_dir(start)
    if directory is None:
        raise ConfigError(f"{start} has no tokenizer.json or tokenizer.model: name its tokenizer in tokenizer.path.")
    return directory


def chosen_tokenizer(config: JobConfig) -> Tokenizer:
    """The run's tokenizer settings; if they name none, the tokenizer of the weights that the run starts from.

    Raises:
        ConfigError: those weights have no tokenizer.
    """
    t, start = config.tokenizer, config.checkpoint.initial_load_path
    if t.path or t.kind == "bytes" or not start:
        return t
    return replace(t, path=shown(tokenizer_of(local(start, weights=False))))


def build_tokenizer(config: JobConfig) -> LoadedTokenizer:
    """Loads the run's tokenizer, or trains it if the config names none, and sets the vocabulary size in `config`.

    Raises:
        ConfigError: the tokenizer has more ids than the embedding.
    """
    trained = Path(config.job.dump_folder) / "tokenizer"
    config.tokenizer = chosen_tokenizer(config)
    on_rank_zero(lambda: prepare_tokenizer(config, trained))
    if not config.tokenizer.path and config.tokenizer.kind != "bytes":
        config.tokenizer = replace(config.tokenizer, path=str(trained))
    tokenizer = load_tokenizer(config.tokenizer)
    config.architecture = replace(config.architecture, vocab_size=vocabulary_of(config, tokenizer))
    return tokenizer


def vocabulary_of(config: JobConfig, tokenizer: LoadedTokenizer) -> int:
    """Rows of the embedding: as the config says, or as many as the tokenizer needs.

    Raises:
        ConfigError: the tokenizer has more ids than the embedding.
    """
    vocab_size = config.architecture.vocab_size
    if not vocab_size:
        # A multiple of 64 divides evenly over tensor-parallel ranks and suits the matrix units.
        return -(-tokenizer.vocab_size // 64) * 64
    if tokenizer.vocab_size > vocab_size:
        raise ConfigError(
            f"architecture.vocab_size = {vocab_size} is less than the tokenizer's {tokenizer.vocab_size}; "
            "set it to 0 to take the tokenizer's."
        )
    return vocab_size


def prepare_tokenizer(config: JobConfig, directory: Path) -> None:
    """Trains a tokenizer into `directory` if the config names none (or this directory) and it does not exist yet.

    Only one process calls it; the others wait.
    """
    t = config.tokenizer
    if t.kind in ("bytes", "huggingface") or (t.path and Path(t.path) != directory) or directory.is_dir():
        return
    logger.info(f"training a sentencepiece tokenizer of {t.vocab_size} pieces into {directory}")
    # Trained in a temporary folder: an interrupted training leaves nothing behind, and of several nodes only one moves its
    # tokenizer into place.
    part = directory.with_name(f"{directory.name}.{socket.gethostname()}.{os.getpid()}")
    train_sentencepiece(sample_texts(config.data, TRAINING_BYTES), t.vocab_size, part)
    try:
        part.rename(directory)
    except OSError:
        if not directory.is_dir():
            raise
        shutil.rmtree(part)
