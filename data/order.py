"""Seeded permutations that need no memory: the order in which a source's documents are read.

Everything here is plain integer arithmetic, so that the order stays the same on every machine and under every
version of Python and NumPy: a run resumed years later must go on with the same documents.
"""

from collections.abc import Sequence

import numpy as np

_MASK_64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FEISTEL_ROUNDS = 4
_EPOCHS_KEPT = 4


def hash64(*values: int) -> int:
    """A 64-bit hash of a sequence of integers (chained splitmix64 finalisers): every random draw of the data comes from it."""
    state = _GOLDEN
    for value in values:
        state = _mix(state ^ _mix((value + _GOLDEN) & _MASK_64))
    return state


def shuffled(index: int, size: int, seed: int) -> int:
    """The image of `index` under a seeded permutation of 0 … size-1, without building the permutation.

    A Feistel network permutes the smallest even-bit range that holds `size`; results outside 0 … size-1 are permuted
    again, which keeps it a permutation and takes fewer than four rounds on average.
    """
    assert 0 <= index < size
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half_bits) - 1
    while True:
        left, right = index >> half_bits, index & mask
        for turn in range(_FEISTEL_ROUNDS):
            left, right = right, left ^ (_mix((seed ^ (right << 8 | turn)) & _MASK_64) & mask)
        index = left << half_bits | right
        if index < size:
            return index


def shuffled_all(indices: np.ndarray, sizes: np.ndarray | int, seeds: np.ndarray | int) -> np.ndarray:
    """`shuffled` of many indices, int64 [n], with one size and seed or one of each for every index."""
    image = indices.astype(np.uint64)
    sizes, seeds = (np.broadcast_to(np.asarray(x, dtype=np.uint64), image.shape) for x in (sizes, seeds))
    # frexp's exponent is bit_length, exact below 2^53, which no number of rows reaches.
    bits = np.frexp((sizes - np.uint64(1)).astype(np.float64))[1].astype(np.uint64)
    half_bits = np.maximum((bits + np.uint64(1)) >> np.uint64(1), np.uint64(1))
    masks = (np.uint64(1) << half_bits) - np.uint64(1)
    left_over = np.arange(len(image))
    while left_over.size:
        index, half, mask, seed = (x[left_over] for x in (image, half_bits, masks, seeds))
        left, right = index >> half, index & mask
        for turn in range(_FEISTEL_ROUNDS):
            left, right = right, left ^ (_mix_array(seed ^ (right << np.uint64(8) | np.uint64(turn))) & mask)
        image[left_over] = left << half | right
        left_over = left_over[image[left_over] >= sizes[left_over]]
    return image.astype(np.int64)


def permutation(size: int, seed: int) -> np.ndarray:
    """The numbers 0 … size-1 in the order of their hashes, int64 [size]: a whole seeded shuffle at once."""
    keys = _mix_array(np.arange(size, dtype=np.uint64) ^ np.uint64(hash64(seed)))
    return np.argsort(keys, kind="stable")


class EpochOrder:
    """The endless sequence of a source's rows: each epoch has every row once, in an order of its own.

    Rows come in blocks (Parquet row groups) that are expensive to open. Blocks are shuffled, and so are the rows within
    each, so readers that advance together need the same few blocks at a time. A source whose rows are cheap to reach
    is a single block, and its order a full shuffle.
    """

    def __init__(self, block_sizes: Sequence[int], seed: int):
        """`block_sizes`: rows of each block, none of them 0."""
        assert min(block_sizes, default=0) > 0
        self.block_sizes = np.asarray(block_sizes, dtype=np.int64)
        self._first_rows = np.concatenate([[0], np.cumsum(self.block_sizes)])
        self._seed = seed
        self._block_orders: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self.rows = int(self._first_rows[-1])

    def row(self, position: int) -> tuple[int, int]:
        """The (epoch, row) at a position of the sequence; both count from 0."""
        epoch, place = divmod(position, self.rows)
        epoch_seed = hash64(self._seed, epoch)
        if len(self.block_sizes) == 1:
            return epoch, shuffled(place, self.rows, epoch_seed)
        blocks, starts = self._block_order(epoch, epoch_seed)
        at = int(np.searchsorted(starts, place, side="right")) - 1
        block = int(blocks[at])
        within = shuffled(place - int(starts[at]), int(self.block_sizes[block]), hash64(epoch_seed, block))
        return epoch, int(self._first_rows[block]) + within

    def rows_of_epoch(self, epoch: int, places: np.ndarray) -> np.ndarray:
        """The rows at some places within an epoch, int64 [n]: `row` of many positions at once."""
        epoch_seed = hash64(self._seed, epoch)
        if len(self.block_sizes) == 1:
            return shuffled_all(places, self.rows, epoch_seed)
        blocks, starts = self._block_order(epoch, epoch_seed)
        at = np.searchsorted(starts, places, side="right") - 1
        block = blocks[at]
        seeds = np.array([hash64(epoch_seed, int(one)) for one in block], dtype=np.uint64)
        return self._first_rows[block] + shuffled_all(places - starts[at], self.block_sizes[block], seeds)

    def _block_order(self, epoch: int, epoch_seed: int) -> tuple[np.ndarray, np.ndarray]:
        """Blocks in the order of this epoch, and the place within the epoch at which each starts."""
        if epoch not in self._block_orders:
            count = len(self.block_sizes)
            blocks = shuffled_all(np.arange(count), count, epoch_seed)
            starts = np.concatenate([[0], np.cumsum(self.block_sizes[blocks])[:-1]])
            while len(self._block_orders) >= _EPOCHS_KEPT:
                self._block_orders.pop(next(iter(self._block_orders)))
            self._block_orders[epoch] = (blocks, starts)
        return self._block_orders[epoch]


def _mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return value ^ (value >> 31)


def _mix_array(values: np.ndarray) -> np.ndarray:
    """`_mix` of each element, uint64."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
