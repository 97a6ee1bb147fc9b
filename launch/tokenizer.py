"""The tokenizer of a run: the one its config names, or a sentencepiece model trained once on the run's own data."""

import itertools
import logging
from pathlib import Path

from configs.schema import JobConfig
from data.sources import open_source
from data.tokenizer import train_sentencepiece

logger = logging.getLogger("farsight")

TRAINING_BYTES = 4_000_000


def prepare_tokenizer(config: JobConfig, directory: Path) -> None:
    """Trains the tokenizer into `directory` when the config names none (or this directory) and it is not there yet.

    One process calls it; the others wait. The text is the sources' first documents, taken in turn.
    """
    t = config.tokenizer
    if (
        t.kind in ("bytes", "huggingface")
        or (t.path and Path(t.path) != directory)
        or any(directory.glob("tokenizer.*"))
    ):
        return
    logger.info(f"training a sentencepiece tokenizer of {t.vocab_size} pieces into {directory}")
    train_sentencepiece(itertools.islice(_texts(config), 20_000), t.vocab_size, directory)


def _texts(config: JobConfig):
    sources = [
        iter(open_source(s, config.data.held_out, "train", config.data.seed, config.data.on_bad_row).documents())
        for s in config.data.sources
    ]
    size = 0
    while sources:
        for source in list(sources):
            document = next(source, None)
            if document is None:
                sources.remove(source)
                continue
            size += len(document.text)
            yield document.text
            if size > TRAINING_BYTES:
                return
