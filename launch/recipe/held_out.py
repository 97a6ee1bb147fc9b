"""Held-out documents on which a recipe compares its stages."""

import logging
from pathlib import Path

from farsight.data.sample import Sample, sample_documents, write_samples
from farsight.data.tokenizers.tokenizer import load_tokenizer
from farsight.errors import ConfigError
from farsight.training.stages import Recipe, Stage

logger = logging.getLogger("farsight")

_MOST_READ = 64
"""Times recipe.perplexity_tokens that is read in search of documents that are long enough."""


def texts_of(recipe: Recipe, stages: list[Stage]) -> list[Path]:
    """The file that each stage's perplexity is measured on: recipe.perplexity_data, or held-out documents of the stage's own data.

    Held-out documents are gathered before anything is trained, so data that can't be read is found early. Empty if the recipe
    measures no perplexity.

    Raises:
        ConfigError: no bound on the held-out documents.
        DataError: data that can't be read.
    """
    if not recipe.perplexity_lengths:
        return []
    if recipe.perplexity_data:
        return [Path(recipe.perplexity_data)] * len(stages)
    if not recipe.perplexity_tokens:
        raise ConfigError(
            "recipe.perplexity_tokens = 0 needs recipe.perplexity_data: set how many held-out tokens to read."
        )
    return [_write_held_out(recipe, stage) for stage in stages]


def held_out_file(folder: Path) -> Path | None:
    """The held-out documents in a stage's folder; those of the newest settings."""
    return max(folder.glob("held_out-*.jsonl"), key=lambda path: path.stat().st_mtime, default=None)


def asked_lengths(recipe: Recipe, stage: Stage) -> list[int]:
    """The lengths in tokens at which a stage's perplexity is to be measured."""
    return [multiple * stage.config.training.seq_len for multiple in recipe.perplexity_lengths]


def _write_held_out(recipe: Recipe, stage: Stage) -> Path:
    """Writes held-out documents that pass the stage's own filters and are long enough for its longest length; returns their file.

    There are as many as recipe.perplexity_tokens allow at that length. If no document is that long, they are those for the
    longest length that any document reaches.
    """
    lengths = sorted(asked_lengths(recipe, stage), reverse=True)
    count = max(1, recipe.perplexity_tokens // lengths[0])
    path = stage.folder / f"held_out-{count}x{lengths[0]}.jsonl"
    if path.is_file():
        return path
    found: dict[int, list[Sample]] = {length: [] for length in lengths}
    read = 0
    for sample in sample_documents(stage.config.data, load_tokenizer(stage.config.tokenizer), "validation"):
        for length, samples in found.items():
            if sample.tokens >= length and len(samples) < count:
                samples.append(sample)
        read += sample.tokens
        if len(found[lengths[0]]) == count or read >= _MOST_READ * recipe.perplexity_tokens:
            break
    length, samples = next(((n, samples) for n, samples in found.items() if samples), (lengths[-1], []))
    if len(samples) < count:
        logger.warning(
            f"stage {stage.name}: {len(samples)} of {count} held-out documents with {length:,} tokens or more, among {read:,} tokens"
        )
    write_samples(path, samples)
    return path
