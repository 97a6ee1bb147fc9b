"""The rankings of layers that farsight layers compares."""

RANKINGS = {"delta": "delta", "absolute_rho": "|rho|", "rho": "signed rho"}
"""Their names in JSON, and in text."""
TOP = 10


def usual_top(n_layers: int) -> int:
    """Layers at the top of a ranking by default: ten, or a third of a small model's (as ten of 32 are)."""
    return min(TOP, max(1, n_layers // 3))
