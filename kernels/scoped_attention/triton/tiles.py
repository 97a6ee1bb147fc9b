"""Block sizes and launch options of the attention kernels, by head dim, element size and GPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Tiles:
    """Block sizes and launch options of one kernel."""

    block_m: int
    """Queries per block."""
    block_n: int
    """Keys per block."""
    warps: int
    stages: int
    descriptors: bool = False
    """Load the rows of the inner loop through tensor descriptors."""

    def options(self) -> dict[str, Any]:
        """The keyword arguments of a launch."""
        sizes = {"BLOCK_M": self.block_m, "BLOCK_N": self.block_n}
        return sizes | {"num_warps": self.warps, "num_stages": self.stages}

    def step(self, kernel: str) -> int:
        """Rows of a step of the inner loop: queries in "dkv", else keys."""
        return self.block_m if kernel == "dkv" else self.block_n


_FORWARD, _DQ = Tiles(128, 64, 8, 3, descriptors=True), Tiles(128, 64, 8, 2, descriptors=True)  # on sm_90 and sm_100
_TILES = {
    # (kernel, largest padded head dim, bytes per element): tiles by the GPU's major architecture; 0 is for all others.
    ("forward", 64, 2): {0: Tiles(128, 64, 8, 3), 9: _FORWARD, 10: _FORWARD},
    ("forward", 128, 2): {0: Tiles(128, 32, 8, 3), 9: _FORWARD, 10: _FORWARD},
    ("dq", 64, 2): {0: Tiles(128, 64, 8, 2), 9: _DQ, 10: _DQ},
    ("dq", 128, 2): {0: Tiles(64, 32, 4, 2), 9: _DQ, 10: _DQ},
    ("dkv", 64, 2): {0: Tiles(32, 128, 8, 2), 10: Tiles(32, 128, 8, 1)},
    ("dkv", 128, 2): {0: Tiles(16, 128, 8, 2), 9: Tiles(32, 128, 8, 2, descriptors=True), 10: Tiles(32, 128, 8, 1)},
    ("forward", 64, 4): {0: Tiles(32, 32, 4, 2)},
    ("forward", 128, 4): {0: Tiles(16, 32, 4, 1)},
    ("dq", 64, 4): {0: Tiles(16, 32, 4, 1)},
    ("dq", 128, 4): {0: Tiles(16, 32, 4, 1)},
    ("dkv", 64, 4): {0: Tiles(32, 16, 4, 1)},
    ("dkv", 128, 4): {0: Tiles(16, 16, 8, 1), 9: Tiles(16, 16, 4, 1), 10: Tiles(16, 16, 4, 1)},
}

_chosen: dict[str, Tiles] = {}


def tiles(kernel: str, head_dim: int, itemsize: int, major: int) -> Tiles:
    """The tiles of "forward", "dq" or "dkv" for a padded head dim, bytes per element and a GPU's major architecture.

    All compile for sm_80, sm_90 and sm_100 without register spills and within shared memory. The tensor cores compute no more
    than the kernel's products; only dk and dv of fp32 at head dim 128 take 1.5 times that, 2.5 on sm_80: of the tiles
    tried, those that take less spill. They are not tuned on a GPU yet.
    """
    if kernel in _chosen:
        return _chosen[kernel]
    by_architecture = _TILES[kernel, 64 if head_dim <= 64 else 128, itemsize]
    return by_architecture.get(major, by_architecture[0])


@contextmanager
def use_tiles(**by_kernel: Tiles) -> Iterator[None]:
    """Has the kernels named use other tiles, whatever the head dim and GPU: for a search, or a test."""
    before = dict(_chosen)
    _chosen.update(by_kernel)
    try:
        yield
    finally:
        _chosen.clear()
        _chosen.update(before)
