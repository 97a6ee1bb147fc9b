"""Divides the documents of a source among lanes, if there are fewer documents than lanes.

If every lane read whole documents, several lanes would read the same one, and rows of a batch would be equal. So the
concatenated documents of the split that pass the filters are cut into one part per lane, all of equal length, at nearby line
ends if there are any. Each lane reads one part per pass, and every pass deals the parts out in another order. A part may hold
the end of one document, whole ones, and the beginning of another.

    documents      aaaaaaaaaaaaaa bbbb           6 lanes
    parts          aaa aaa aaa aaa aab bbb       pass 0: lane 0 reads part 4, lane 1 part 2, …; another pass, another deal

No token is lost or read twice. A cut only costs context: the first token after it is not predicted, and attention does not
reach back across it.
"""

from collections.abc import Callable
from functools import cached_property
from itertools import accumulate

from farsight.data.order import hash64, shuffled
from farsight.data.sources.documents import AnyDocument, DocumentSource
from farsight.progress import progress

Piece = tuple[int, int, int]
"""Row, and the characters (or tokens) begin … end-1 of its document, before both ends move to better places for a cut."""

_NEAR = 4096
"""Characters or tokens before a nominal cut that are searched for a better place."""


class SharedDocuments:
    """A source's documents, divided into one part per lane; `lane` gives a lane's reader."""

    def __init__(self, source: DocumentSource, rows: int, lanes: int, seed: int, wanted: Callable[[AnyDocument], bool]):
        """`rows`: number of rows in the source. `seed`: deals out the parts. `wanted`: whether a whole document passes the filters."""
        self.lanes = lanes
        self._source, self._rows, self._seed, self._wanted = source, rows, seed, wanted
        self._last: tuple[int, AnyDocument | None] = (-1, None)

    def lane(self, lane: int) -> "SharingLane":
        """A new reading position for a lane."""
        return SharingLane(self, lane)

    def pieces(self, lane: int, epoch: int) -> list[Piece]:
        """The pieces that lane `lane` reads in a pass; possibly none, if there are fewer characters than lanes."""
        part = shuffled(lane, self.lanes, hash64(self._seed, epoch))
        total = sum(self._lengths.values())
        begin, end = part * total // self.lanes, (part + 1) * total // self.lanes
        found = []
        ends = accumulate(self._lengths.values())
        for (row, length), after in zip(self._lengths.items(), ends, strict=True):
            before = after - length
            if max(begin, before) < min(end, after):
                found.append((row, max(begin, before) - before, min(end, after) - before))
        return found

    def read(self, piece: Piece) -> AnyDocument | None:
        """Reads a piece of a document; None if moving its ends to better places left nothing."""
        row, begin, end = piece
        if self._last[0] != row:  # the lanes of a rank read the same few documents
            self._last = (row, self._source.read_row(row))
        document = self._last[1]
        if document is None:
            return None
        begin, end = self._cut(document, begin), self._cut(document, end)
        return document.piece(begin, end) if begin < end else None

    @cached_property
    def _lengths(self) -> dict[int, int]:
        """Length of each row that is in the split and passes the filters."""
        found = {}
        with progress(
            desc=f"{self._source.name}: measuring documents", total=self._rows, unit="document", unit_scale=True
        ) as shown:
            for row, document in enumerate(self._source.read_rows()):
                if document is not None and self._wanted(document):
                    found[row] = document.length
                shown.update()
        return found

    def _cut(self, document: AnyDocument, place: int) -> int:
        """The best place for a cut shortly before `place`; never so far that parts change order."""
        if place in (0, document.length):
            return place
        part = sum(self._lengths.values()) // self.lanes
        return document.place_to_cut(max(0, place - min(_NEAR, part // 2)), place)


class SharingLane:
    """A lane's position in divided documents: the pass, and the number of pieces read in it."""

    def __init__(self, shared: SharedDocuments, lane: int):
        self._shared, self._lane = shared, lane
        self.load_state([0, 0])

    def load_state(self, state: list[int]) -> None:
        self.epoch, self._read = state
        self._pieces: list[Piece] | None = None

    def state(self) -> list[int]:
        return [self.epoch, self._read]

    def read(self) -> AnyDocument | None:
        if self._pieces is None:
            self._pieces = self._shared.pieces(self._lane, self.epoch)
        if self._read == len(self._pieces):
            self.load_state([self.epoch + 1, 0])
            return None
        self._read += 1
        return self._shared.read(self._pieces[self._read - 1])
