"""Global batches of instruction data; their order depends only on the data, the seed and the global batch size.

All conversations are read and tokenised at the start. The rows of all epochs, as `plan.py` lays them out, are one endless
sequence: step n takes rows n·G … (n+1)·G - 1 of it. Of packed rows, which are equally long, data-parallel rank r of W takes rows
r·G/W … (r+1)·G/W - 1 of these; others are sorted by length, so that a micro-batch, which is padded to its longest row, has little
padding. So the state is the number of steps, and a run can resume on another number of ranks.

    conversations    a b c d | e f g | h i          L = 8, packed
    trained          · · T T | · T T | · T
    inputs           a b c d e f g ∅
    labels           · c d · f g · ·                · is IGNORE; the first token of a conversation is never a label
    positions        0 1 2 3 0 1 2 0                padding (∅) is a document of its own
    starts           0 0 0 0 4 4 4 7
"""

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from farsight.configs.finetuning import FinetuneConfig, InstructionData
from farsight.data.instructions.chat import ChatTemplate, chat_template
from farsight.data.instructions.plan import RowSequence, micro_batches, plan_epoch
from farsight.data.instructions.rows import Conversations, SourceReport, read_conversations
from farsight.data.loader import ValidationLoader, global_batch_size, rows_of_rank
from farsight.data.packing import IGNORE, Packed, Rows
from farsight.data.read_ahead import LoaderFacts, Place, ReadAheadLoader, to_batch
from farsight.data.replica import ALONE, Replica
from farsight.data.saved_order import source_settings
from farsight.data.tokenizers.tokenizer import Tokenizer, padding_id
from farsight.errors import DataError

logger = logging.getLogger(__name__)

_STEPS_KEY = "steps"


class RowFiller:
    """Writes conversations into rows, in the model's format."""

    def __init__(self, conversations: Conversations, padding_id: int, mask_documents: bool):
        self._conversations, self._padding_id, self._mask_documents = conversations, padding_id, mask_documents

    def batch(self, items: Sequence[np.ndarray], length: int) -> Rows:
        """Rows [len(items), length] of conversations, then padding; `items` has the numbers of those in each row."""
        rows = Rows.empty(len(items), length)
        for number, of_row in enumerate(items):
            self._fill(rows, number, of_row)
        return rows

    def _fill(self, rows: Rows, row: int, items: np.ndarray) -> None:
        inputs, labels = rows.inputs[row], rows.labels[row]
        positions, starts = rows.positions[row], rows.document_starts[row]
        inputs[:], labels[:] = self._padding_id, IGNORE
        begin = 0
        for item in items:
            tokens = self._conversations.tokens(int(item))
            end = begin + len(tokens.ids)
            inputs[begin:end] = tokens.ids
            labels[begin : end - 1] = np.where(tokens.trained[1:], tokens.ids[1:], IGNORE)
            positions[begin:end] = np.arange(end - begin)
            starts[begin:end] = begin
            begin = end
        if not self._mask_documents:
            positions[:begin], starts[:begin] = np.arange(begin), 0
        positions[begin:] = np.arange(len(inputs) - begin)
        starts[begin:] = begin


@dataclass(frozen=True)
class Layout:
    """The division of a global batch into micro-batches, and the length of their rows.

    Packed rows stay in order, and all have `seq_len` tokens. Others are arranged by `micro_batches`, and each micro-batch has the
    length of its longest row, rounded up to `multiple`.
    """

    packed: bool
    seq_len: int
    multiple: int
    size: int
    """Rows of a micro-batch, b."""
    ranks: int = 1

    def rows(self, lengths: np.ndarray) -> np.ndarray:
        """The rows of each micro-batch, int64 [ranks, G / (ranks · b), b], for rows of these lengths in tokens, int64 [G]."""
        if self.packed:
            return np.arange(len(lengths)).reshape(self.ranks, -1, self.size)
        return micro_batches(lengths, self.size, self.ranks)

    def length(self, lengths: np.ndarray) -> int:
        """L of a micro-batch with rows of these lengths."""
        longest = max(1, int(lengths.max()))
        return self.seq_len if self.packed else min(-(-longest // self.multiple) * self.multiple, self.seq_len)

    def padded(self, lengths: np.ndarray) -> np.ndarray:
        """Tokens of each row of a global batch with its padding, int64 [G]."""
        padded = np.empty_like(lengths)
        for of_batch in self.rows(lengths).reshape(-1, self.size):
            padded[of_batch] = self.length(lengths[of_batch])
        return padded


class InstructionLoader(ReadAheadLoader):
    """Rows of conversations.

    Yields ({"input": int64 [b, L], "positions": int64 [b, L], "document_starts": int32 [b, L]}, labels: int64 [b, L]),
    G/(W·b) of them per step; labels are IGNORE (-100) for tokens that are not trained. L is `seq_len` if conversations are
    packed, otherwise the length of the micro-batch's longest conversation, rounded up to `multiple`. `epochs` are passes over
    the data, as a fraction; the state is the number of steps.
    """

    def __init__(
        self,
        config: InstructionData,
        template: ChatTemplate,
        tokenizer: Tokenizer,
        *,
        seq_len: int,
        vocab_size: int,
        global_batch_size: int,
        micro_batch_size: int,
        dp_rank: int,
        dp_world_size: int,
        multiple: int = 8,
    ):
        """`vocab_size`: the model's; larger ids are refused. `global_batch_size` G and `micro_batch_size` b: in rows.
        `multiple`: unpacked rows have a multiple of this length, as context parallelism may need.

        Raises `DataError` for sizes that don't divide, and for data that can't be read.
        """
        _check_length(seq_len, "training.seq_len")
        rows = rows_of_rank(global_batch_size, micro_batch_size, dp_rank, dp_world_size)
        self._config, self._rank, self.global_batch_size = config, dp_rank, global_batch_size
        self.layout = Layout(config.packing, seq_len, multiple, micro_batch_size, dp_world_size)
        self.template = template
        self.conversations = read_conversations(
            config, template, tokenizer, split="train", seq_len=seq_len, vocab_size=vocab_size
        )
        self._filler = RowFiller(self.conversations, padding_id(tokenizer), config.mask_documents)
        self.sequence = RowSequence(
            self.conversations.lengths,
            self.conversations.sizes,
            [source.weight for source in config.sources],
            seed=config.seed,
            packed_length=seq_len if config.packing else None,
        )
        facts = LoaderFacts(self._describe_order(tokenizer), self._place_after(0), len(rows) // micro_batch_size)
        super().__init__(facts)
        if dp_rank == 0:
            for report in self.conversations.reports:
                logger.info("%s", report)
            logger.info(
                "an epoch: %s rows of %s tokens, %.1f %% of them padding",
                f"{len(self.sequence.plan(0)):,}",
                f"{seq_len:,}" if config.packing else f"up to {seq_len:,}",
                100 * self.padding(),
            )

    def _place_after(self, steps: int, padding: int = 0) -> Place:
        skipped = {report.name: dict(report.skipped) for report in self.reports if report.skipped}
        return Place(
            {_STEPS_KEY: steps}, self.sequence.epochs(steps * self.global_batch_size), skipped, Packed(padding)
        )

    @property
    def reports(self) -> list[SourceReport]:
        """Rows read and left out, one report per source."""
        return self.conversations.reports

    def steps_for(self, epochs: float) -> int:
        """Optimizer steps that cover all rows of the first `epochs` epochs; the last one is filled from the next epoch."""
        return max(1, math.ceil(self.sequence.rows_in(epochs) / self.global_batch_size))

    def padding(self) -> float:
        """Share of padding in the rows of the first epoch; in those of its steps, if they are not packed."""
        plan, lengths = self.sequence.plan(0), self.conversations.lengths
        if self.layout.packed:
            return 1 - int(lengths[plan.items].sum()) / max(1, len(plan) * self.layout.seq_len)
        size = self.global_batch_size
        used = self.row_lengths(self.sequence.rows(0, self.steps_for(1) * size)).reshape(-1, size)
        return 1 - used.sum() / sum(self.layout.padded(of_step).sum() for of_step in used)

    def row_lengths(self, rows: Sequence[np.ndarray]) -> np.ndarray:
        """Tokens of each row without padding, int64 [rows]; `rows` has the conversations of each."""
        lengths = self.conversations.lengths
        return np.array([lengths[items].sum() for items in rows], dtype=np.int64)

    def _read(self, state: dict[str, int]) -> Iterator[tuple[Rows, Place | None]]:
        step = state[_STEPS_KEY]
        while True:
            rows = self.sequence.rows(step * self.global_batch_size, self.global_batch_size)
            lengths = self.row_lengths(rows)
            own = self.layout.rows(lengths)[self._rank]
            padding = int((self.layout.padded(lengths) - lengths)[own].sum())
            step += 1
            for number, of_batch in enumerate(own, start=1):
                batch = self._filler.batch([rows[row] for row in of_batch], self.layout.length(lengths[of_batch]))
                yield batch, self._place_after(step, padding) if number == len(own) else None

    def _describe_order(self, tokenizer: Tokenizer) -> dict[str, Any]:
        config, conversations = self._config, self.conversations
        order: dict[str, Any] = {
            "training.global_batch_size": self.global_batch_size,
            "training.seq_len": self.layout.seq_len,
            **{f"data.{name}": getattr(config, name) for name in _ORDER_SETTINGS},
            "the tokenizer (fingerprint)": tokenizer.fingerprint,
            "the chat template (fingerprint)": self.template.fingerprint,
            "the number of data.sources": len(config.sources),
        }
        for i, source in enumerate(config.sources):
            order |= {f"data.sources[{i}].{name}": value for name, value in source_settings(source).items()}
            order[f"the conversations of data.sources[{i}]"] = conversations.sizes[i]
        return order | {"the conversations' tokens (fingerprint)": conversations.fingerprint}


_ORDER_SETTINGS = ("seed", "held_out", "packing", "mask_documents", "overlong", "train_on")


class InstructionValidationLoader(ValidationLoader):
    """The rows of held-out conversations, each once per iteration, the same on any number of ranks.

    Yields as `InstructionLoader` does.
    """

    def __init__(
        self,
        config: InstructionData,
        template: ChatTemplate,
        tokenizer: Tokenizer,
        *,
        seq_len: int,
        vocab_size: int,
        rows: int | None,
        micro_batch_size: int,
        dp_rank: int,
        dp_world_size: int,
        multiple: int = 8,
    ):
        """`rows`: limit on the rows of an iteration; None takes all. Rows of padding make all ranks' shares equal."""
        _check_length(seq_len, "validation.seq_len")
        self.conversations = read_conversations(
            config, template, tokenizer, split="validation", seq_len=seq_len, vocab_size=vocab_size
        )
        lengths, sizes = self.conversations.lengths, self.conversations.sizes
        plan = plan_epoch(
            lengths,
            sizes,
            [1.0] * len(sizes),
            seed=config.seed,
            epoch=0,
            packed_length=seq_len if config.packing else None,
        )
        items = [plan.row(number) for number in range(len(plan))][:rows]
        micro_batch_size = max(1, min(micro_batch_size, -(-len(items) // dp_world_size)))
        items += [plan.items[:0]] * (-len(items) % (micro_batch_size * dp_world_size))
        layout = Layout(config.packing, seq_len, multiple, micro_batch_size, dp_world_size)
        filler = RowFiller(self.conversations, padding_id(tokenizer), config.mask_documents)
        used = np.array([lengths[of_row].sum() for of_row in items], dtype=np.int64)
        self.rows: list[Rows] = [
            filler.batch([items[row] for row in of_batch], layout.length(used[of_batch]))
            for of_batch in layout.rows(used)[dp_rank]
        ]
        """This rank's micro-batches."""
        super().__init__(len(self.rows), lambda: map(to_batch, self.rows))


def build_instruction_loader(
    config: FinetuneConfig, tokenizer: Tokenizer, dp_rank: int, dp_world_size: int, multiple: int = 8
) -> InstructionLoader:
    """The training loader of a fine-tuning config for one data-parallel rank."""
    return InstructionLoader(
        config.data,
        chat_template(config.data, tokenizer),
        tokenizer,
        seq_len=config.training.seq_len,
        vocab_size=config.architecture.vocab_size or tokenizer.vocab_size,
        global_batch_size=global_batch_size(config, dp_world_size),
        micro_batch_size=config.training.local_batch_size,
        dp_rank=dp_rank,
        dp_world_size=dp_world_size,
        multiple=multiple,
    )


def build_instruction_validation_loader(
    config: FinetuneConfig,
    tokenizer: Tokenizer,
    dp_rank: int,
    dp_world_size: int,
    multiple: int = 8,
    replica: Replica = ALONE,
) -> ValidationLoader:
    """The validation loader of a fine-tuning config for one data-parallel rank.

    It has `validation.steps` batches of a training batch's size, so the rows don't depend on the number of ranks; -1 takes
    all rows. Micro-batches have `validation.local_batch_size` rows, or fewer if there are not enough.
    """
    steps = config.validation.steps
    if steps < 1 and steps != -1:
        raise DataError(f"validation.steps = {steps}: set the number of batches, or -1 to take all that is held out.")

    def build() -> InstructionValidationLoader:
        return InstructionValidationLoader(
            config.data,
            chat_template(config.data, tokenizer),
            tokenizer,
            seq_len=config.validation.seq_len,
            vocab_size=config.architecture.vocab_size or tokenizer.vocab_size,
            rows=None if steps == -1 else steps * global_batch_size(config, dp_world_size),
            micro_batch_size=config.validation.local_batch_size,
            dp_rank=dp_rank,
            dp_world_size=dp_world_size,
            multiple=multiple,
        )

    return replica.build(
        build, lambda built: built.rows, lambda rows: ValidationLoader(len(rows), lambda: map(to_batch, rows))
    )


def _check_length(seq_len: int, name: str) -> None:
    if seq_len < 2:
        raise DataError(f"{name} = {seq_len}; set at least 2.")
