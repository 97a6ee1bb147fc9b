"""Attention in which every head sees its own number of tokens, at the cost of what it sees."""

from .api import BACKENDS, scoped_attention, scoped_decode, scoped_prefill
from .rolling_cache import RollingCache
from .semantics import visible_pairs, visible_pairs_in_documents

__all__ = [
    "BACKENDS",
    "RollingCache",
    "scoped_attention",
    "scoped_decode",
    "scoped_prefill",
    "visible_pairs",
    "visible_pairs_in_documents",
]
