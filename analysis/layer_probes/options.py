"""Choices and defaults of farsight layer-probes' options."""

PROBES = ("mask", "coarsen", "noise")
FACTORS = (2, 8, 64, 512)
NOISE = (0.1,)
DEPTHS = 10
"""Depths at which passkeys are hidden."""
SEQUENCES = 16
