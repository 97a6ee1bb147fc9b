"""Defaults of farsight order-awareness' options."""

SEQUENCES = 2
PERMUTATIONS = 3
TOLERANCE = 1e-12
"""Relative, in fp64: states that differ only in the order in which terms were summed differ by about 1e-16."""
