"""Choices and defaults of farsight plasticity's options."""

from typing import Literal

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
