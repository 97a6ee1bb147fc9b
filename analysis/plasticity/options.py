"""Choices and defaults of farsight plasticity's options, and the names of its figures."""

from typing import Any, Literal

Covariance = Literal["diagonal", "full"]
"""Covariance of the queries around their mean: only its diagonal (equation 4.12), or all of it (Lemma A.1, including the
covariance between the positional residual and the other coordinates). The diagonal depends on the basis that the reflection
happens to give."""
Pairs = Literal["pooled", "prefix"]
"""Which keys compete: those of all sequences in earlier buckets (section 4.4.5), or those of a random prefix of one sequence
(Definition 4.3), which are half as far apart on average."""
DRAWS = 2000
"""Pairs of keys to draw per bucket."""
TARGET_DROP = 0.10
"""The thesis recommends training for an AP_drop below this."""
AP = ("ap_overall", "ap_first", "ap_last", "ap_drop")
"""Keys of the aggregate figures (section 4.4.5) in JSON files and logged metrics."""


def with_ap_names(values: Any) -> Any:
    """A result of farsight plasticity with the keys of AP, which older files have without "ap_"."""
    if isinstance(values, list):
        return [with_ap_names(value) for value in values]
    if isinstance(values, dict):
        return {f"ap_{key}" if f"ap_{key}" in AP else key: with_ap_names(value) for key, value in values.items()}
    return values
