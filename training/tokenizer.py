"""The tokenizer of a run: the one its config names, or a sentencepiece model trained once on the run's own data."""

import logging
import os
import shutil
import socket
from dataclasses import replace
from pathlib import Path

from farsight.configs.load import ConfigError
from farsight.configs.schema import JobConfig, Tokenizer
from farsight.data.mixture import sample_texts
from farsight.data.tokenizers.tokenizer import find_tokenizer_dir, train_sentencepiece

logger = logging.getLogger("farsight")

TRAINING_BYTES = 4_000_000


def tokenizer_of(start: Path) -> Path:
    """The tokenizer that belongs to a model directory or a checkpoint of ours.

    Raises:
        ConfigError: there is none; weights mean nothing with another tokenizer's ids.
    """
    directory = find_tokenizer_dir(start)
    if directory is None:
        raise ConfigError(f"{start} has no tokenizer.json or tokenizer.model: name its tokenizer in tokenizer.path.")
    return directory


def chosen_tokenizer(config: JobConfig) -> Tokenizer:
    """The settings of a run's tokenizer: where they name none, of that which belongs to the weights it starts from.

    Raises:
        ConfigError: none belongs to them.
    """
    t, start = config.tokenizer, config.checkpoint.initial_load_path
    if t.path or t.kind == "bytes" or not start:
        return t
    return replace(t, path=str(tokenizer_of(Path(start))))


def prepare_tokenizer(config: JobConfig, directory: Path) -> None:
    """Trains the tokenizer into `directory` when the config names none (or this directory) and it is not there yet.

    One process calls it; the others wait.
    """
    t = config.tokenizer
    if t.kind in ("bytes", "huggingface") or (t.path and Path(t.path) != directory) or directory.is_dir():
        return
    logger.info(f"training a sentencepiece tokenizer of {t.vocab_size} pieces into {directory}")
    # An interrupted training leaves no half a tokenizer, and of several nodes that train the same one, one puts it there.
    part = directory.with_name(f"{directory.name}.{socket.gethostname()}.{os.getpid()}")
    train_sentencepiece(sample_texts(config.data, TRAINING_BYTES), t.vocab_size, part)
    try:
        part.rename(directory)
    except OSError:
        if not directory.is_dir():
            raise
        shutil.rmtree(part)
