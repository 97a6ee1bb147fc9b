"""Mixes the documents of several sources by weight, and applies the length filters, for one lane.

A weight is a share of *tokens*, not of documents: a lane takes its next document from the source that is furthest
behind its share. Every lane counts separately and starts as if in mid-stream: each source begins with credit for a fraction
of a document, which differs between lanes. So the first global batches are mixed like all later ones.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from farsight.configs import schema
from farsight.data.order import hash64
from farsight.data.packing import CHANGED, Drawn
from farsight.data.sources.documents import AnyDocument, DocumentLane, DocumentSource, TokenDocument
from farsight.data.sources.shared import SharedDocuments
from farsight.data.tokenizers.tokenizer import Tokenizer
from farsight.errors import DataError
from farsight.progress import progress

_CREDIT = 0x637265646974
_PARTS = 0x7061727473
"""Separate the random draws for credits and for shared documents from others of the same seed."""


class MixedSource:
    """A source with its weight and filters; all lanes of a loader share one."""

    def __init__(self, config: schema.Source, source: DocumentSource, tokenizer: Tokenizer, vocab_size: int):
        self.weight = config.weight
        self.best_fit = config.packing == "best_fit"
        self.source = source
        self._config = config
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._document_tokens = max(source.mean_size * tokenizer.tokens_a_byte, config.min_tokens)
        self._shared: SharedDocuments | None = None
        # The cheapest test comes first: most rows are too short for a filter of long documents.
        source.least_bytes = max(1, tokenizer.least_bytes(config.min_tokens))

    def typical_tokens(self, lanes: int) -> float:
        """Very rough number of tokens in one draw of a lane from this source."""
        rows = self.source.rows_if_fewer(lanes)
        return self._document_tokens * (1 if rows is None else rows / lanes)

    def lane(self, lane: int, lanes: int, seed: int) -> DocumentLane:
        """A new reading position for lane `lane` of `lanes`; `seed` deals out the parts of shared documents."""
        rows = self.source.rows_if_fewer(lanes)
        if rows is None:
            return self.source.lane(lane, lanes)
        if self._shared is None or self._shared.lanes != lanes:
            self._shared = SharedDocuments(self.source, rows, lanes, seed, self._passes)
        return self._shared.lane(lane)

    def tokens(self, document: AnyDocument) -> np.ndarray | None:
        """[bos] text [eos] of a document, int64 [n]; None if the length filters exclude it.

        A piece of a document has bos and eos only where the document begins and ends, and is not filtered again.

        Raises `DataError` for an id outside the model's vocabulary.
        """
        text = self.text_tokens(document)
        if text is None or not len(text):
            return None
        bos = [] if self._tokenizer.bos_id is None or not document.begins else [self._tokenizer.bos_id]
        eos = [] if self._tokenizer.eos_id is None or not document.ends else [self._tokenizer.eos_id]
        ids = np.concatenate([np.array(bos, np.int64), text, np.array(eos, np.int64)], dtype=np.int64)
        check_vocabulary(ids, self._vocab_size, self._tokenizer, document.key)
        return ids

    def text_tokens(self, document: AnyDocument) -> np.ndarray | None:
        """Tokens of a document's text; None if it is a whole document that the filters exclude."""
        least, most = self._config.min_tokens, self._config.max_tokens
        if isinstance(document, TokenDocument):
            text = document.ids
            return text if not document.whole or least <= len(text) <= (most or len(text)) else None
        try:
            if document.whole and (least or most):
                return self._tokenizer.encode_between(document.text, least, most)
            return self._tokenizer.encode_array(document.text)
        except ValueError as error:
            raise DataError(f"{document.key}: {error}") from error

    def _passes(self, document: AnyDocument) -> bool:
        """Whether a whole document passes the filters; only tokenised if there are any."""
        filtered = self._config.min_tokens or self._config.max_tokens
        return not filtered or self.text_tokens(document) is not None

    def check_possible(self) -> None:
        """Raises `DataError` if no document of the source passes the filters."""
        with progress(
            desc=f"{self.source.name}: looking for a document that passes", total=None, unit="document", unit_scale=True
        ) as shown:
            for document in self.source.documents():
                if self.tokens(document) is not None:
                    return
                shown.update()
        least, most = self._config.min_tokens, self._config.max_tokens
        skipped = f" Skipped: {dict(self.source.skipped)}." if self.source.skipped else ""
        if least or most:
            wanted = f"min_tokens = {least}" + (f" and max_tokens = {most}" if most else "")
            raise DataError(
                f"{self.source.name}: no document of the {self.source.split} split passes {wanted}. Widen the filter or "
                f"remove the source.{skipped}"
            )
        remedy = "add documents or lower data.held_out"
        if self.source.split == "validation":
            remedy = (
                "raise data.held_out, add documents, or set validation.enable = false (documents are held out whole: one "
                "alone can't be trained on and held out)"
            )
        raise DataError(f"{self.source.name}: no document is in the {self.source.split} split; {remedy}.{skipped}")


def check_vocabulary(ids: np.ndarray, vocab_size: int, tokenizer: Tokenizer, key: str) -> None:
    """Raises `DataError` if one of the ids [n] is outside a model's vocabulary; `key` names the document in the message."""
    if ids.min() < 0 or ids.max() >= vocab_size:
        wrong = ids[(ids < 0) | (ids >= vocab_size)][0]
        raise DataError(
            f"{key}: token id {wrong} is outside the model's vocabulary of {vocab_size}. Use the tokenizer that the "
            f"model was made for, or set architecture.vocab_size to at least {tokenizer.vocab_size}."
        )


class Mixture:
    """The endless sequence of one lane's documents; `state` and `load_state` save and restore the position."""

    def __init__(self, sources: Sequence[MixedSource], seed: int, lane: int, lanes: int):
        self._sources = sources
        self._readers = [mixed.lane(lane, lanes, hash64(_PARTS, seed, i)) for i, mixed in enumerate(sources)]
        self._drawn = [0] * len(sources)
        self._credit = [
            mixed.typical_tokens(lanes) * hash64(_CREDIT, seed, lane, i) / 2**64 for i, mixed in enumerate(sources)
        ]

    @property
    def epochs(self) -> list[int]:
        """Completed passes over each source."""
        return [reader.epoch for reader in self._readers]

    def draw(self) -> Drawn:
        """The next document."""
        choice = min(range(len(self._sources)), key=self._progress)
        mixed, reader = self._sources[choice], self._readers[choice]
        place, tokens = self._try(choice)
        if tokens is None:
            since = reader.epoch
            with progress(
                desc=f"{mixed.source.name}: looking for a document that passes",
                total=None,
                unit="document",
                unit_scale=True,
            ) as shown:
                while tokens is None:
                    if reader.epoch >= since + 2:
                        mixed.check_possible()
                        since = reader.epoch
                    place, tokens = self._try(choice)
                    shown.update()
        self._drawn[choice] += len(tokens)
        return Drawn(tokens, [choice, *place], mixed.best_fit)

    def _try(self, source: int) -> tuple[list[int], np.ndarray | None]:
        """The next row's position and tokens; no tokens if the row is skipped."""
        place = self._readers[source].state()
        document = self._readers[source].read()
        return place, None if document is None else self._sources[source].tokens(document)

    def state(self) -> dict[str, Any]:
        """The position after the last drawn document, in JSON values."""
        return {"drawn": self._drawn.copy(), "readers": [reader.state() for reader in self._readers]}

    def load_state(self, state: dict[str, Any], places: Sequence[list[int]] = ()) -> list[Drawn]:
        """Continues from a state of `state`; returns the documents at `places`, which were drawn before it, in their order.

        Raises `DataError` if there is no document any more.
        """
        again = {tuple(place): self._read_again(*place) for place in sorted(places)}  # streams are read forwards
        self._drawn = list(state["drawn"])
        for reader, place in zip(self._readers, state["readers"], strict=True):
            reader.load_state(place)
        return [again[tuple(place)] for place in places]

    def _read_again(self, source: int, *place: int) -> Drawn:
        self._readers[source].load_state([*place])
        _, tokens = self._try(source)
        mixed = self._sources[source]
        if tokens is None:
            raise DataError(f"{mixed.source.name}: a document that was being packed is gone: {CHANGED}")
        return Drawn(tokens, [source, *place], mixed.best_fit)

    def _progress(self, source: int) -> float:
        return (self._drawn[source] + self._credit[source]) / self._sources[source].weight
