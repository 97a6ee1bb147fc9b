"""Attention in which every head sees its own number of tokens, at a cost in proportion to what it sees."""

from farsight.kernels.scoped_attention.api import (
    BACKENDS,
    DECODE_BACKENDS,
    scoped_attention,
    scoped_decode,
    scoped_prefill,
    segmented_attention,
)
from farsight.kernels.scoped_attention.bias import ScoreBias
from farsight.kernels.scoped_attention.documents import remember_documents
from farsight.kernels.scoped_attention.host import remember_scopes
from farsight.kernels.scoped_attention.rolling_cache import RollingCache
from farsight.kernels.scoped_attention.segments import Segments
from farsight.kernels.scoped_attention.semantics import visible_pairs, visible_pairs_in_documents
from farsight.kernels.scoped_attention.visibility import Visibility

__all__ = [
    "BACKENDS",
    "DECODE_BACKENDS",
    "RollingCache",
    "ScoreBias",
    "Segments",
    "Visibility",
    "remember_documents",
    "remember_scopes",
    "scoped_attention",
    "scoped_decode",
    "scoped_prefill",
    "segmented_attention",
    "visible_pairs",
    "visible_pairs_in_documents",
]
