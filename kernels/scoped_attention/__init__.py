"""Attention in which every head sees its own number of tokens, at the cost of what it sees."""

from .api import BACKENDS, scoped_attention
from .semantics import visible_pairs, visible_pairs_in_documents

__all__ = ["BACKENDS", "scoped_attention", "visible_pairs", "visible_pairs_in_documents"]
