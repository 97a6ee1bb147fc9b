"""Shows rows of instruction data: which tokens are trained, which are not, and which are padding."""

import sys
from collections.abc import Iterator

import numpy as np

from farsight.configs.finetuning import FinetuneConfig
from farsight.data.instructions.loader import InstructionLoader, build_instruction_loader
from farsight.data.tokenizers.tokenizer import Tokenizer, load_tokenizer

_TRAINED, _MASKED, _PADDING, _END = "\x1b[32m", "\x1b[2m", "\x1b[2;31m", "\x1b[0m"
_OPEN, _CLOSE = "⟦", "⟧"


def show_rows(config: FinetuneConfig, count: int) -> str:
    """`inspect_rows` of the data that a config trains on."""
    tokenizer = load_tokenizer(config.tokenizer)
    return inspect_rows(build_instruction_loader(config, tokenizer, 0, 1), tokenizer, count)


def inspect_rows(loader: InstructionLoader, tokenizer: Tokenizer, count: int, colour: bool | None = None) -> str:
    """The first `count` rows of training as text, and a summary of all data; `--inspect` of fine-tuning prints it.

    In colour (None: if stdout is a terminal), trained tokens are green and others dim; otherwise trained ones are
    enclosed in ⟦ and ⟧. A token is trained if the model learns to predict it from those before it.
    """
    colour = sys.stdout.isatty() if colour is None else colour
    per_step, parts = loader.global_batch_size, []
    for first in range(0, count, per_step):
        rows = loader.sequence.rows(first, per_step)
        lengths = loader.layout.padded(loader.row_lengths(rows))
        parts += [
            _row(loader, tokenizer, number, items, length, colour)
            for number, items, length in zip(range(first, count), rows, lengths)  # noqa: B905  may end within a step
        ]
    return "\n\n".join([*parts, _summary(loader)])


def _row(
    loader: InstructionLoader, tokenizer: Tokenizer, number: int, items: np.ndarray, length: int, colour: bool
) -> str:
    conversations = loader.conversations
    of_row = [conversations.tokens(int(item)) for item in items]
    used = sum(len(tokens.ids) for tokens in of_row)
    trained = sum(int(tokens.trained[1:].sum()) for tokens in of_row)
    lines = [
        f"row {number}: {len(of_row)} conversations, {length} tokens, {trained} of them trained, {length - used} padding"
    ]
    for item, tokens in zip(items, of_row, strict=True):
        lines.append(f"── {conversations.keys[int(item)]}, {len(tokens.ids)} tokens")
        mask = tokens.trained.copy()
        mask[0] = False  # nothing precedes it
        lines.append("".join(_painted(tokenizer, tokens.ids, mask, colour)))
    if length > used:
        padding = f"── {length - used} tokens of padding"
        lines.append(f"{_PADDING}{padding}{_END}" if colour else padding)
    return "\n".join(lines)


def _painted(tokenizer: Tokenizer, ids: np.ndarray, trained: np.ndarray, colour: bool) -> Iterator[str]:
    """The text of the tokens, special ones by name, in one piece for each run of trained or untrained tokens."""
    edges = np.flatnonzero(np.diff(trained)) + 1
    for run in np.split(np.arange(len(ids)), edges):
        text = _text(tokenizer, ids[run].tolist())
        if colour:
            yield f"{_TRAINED if trained[run[0]] else _MASKED}{text}{_END}"
        else:
            yield f"{_OPEN}{text}{_CLOSE}" if trained[run[0]] else text


def _text(tokenizer: Tokenizer, ids: list[int]) -> str:
    """`decode`, but with the names of special tokens."""
    names = {token_id: token for token, token_id in tokenizer.special_tokens.items()}
    parts, begin = [], 0
    for at, token_id in enumerate(ids):
        if token_id in names:
            parts += [tokenizer.decode(ids[begin:at]), names[token_id]]
            begin = at + 1
    return "".join([*parts, tokenizer.decode(ids[begin:])])


def _summary(loader: InstructionLoader) -> str:
    tokens = sum(report.tokens for report in loader.reports)
    trained = sum(report.trained for report in loader.reports)
    return "\n".join(
        [
            *(str(report) for report in loader.reports),
            f"together: {len(loader.conversations.keys):,} conversations, {tokens:,} tokens, {trained / tokens:.1%} of them "
            f"trained; the first epoch: {len(loader.sequence.plan(0)):,} rows, {loader.padding():.1%} padding, "
            f"{loader.steps_for(1)} steps",
        ]
    )
