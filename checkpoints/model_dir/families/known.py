"""The families that we read and write, and directories that hold one of them beside a vision model."""

from dataclasses import dataclass

from farsight.checkpoints.model_dir.families import (
    gemma3,
    llama,
    ministral3,
    mistral,
    olmo2,
    olmo3,
    phi3,
    qwen2,
    qwen3,
    smollm3,
)
from farsight.checkpoints.model_dir.families.family import Family

_ALL = (llama, qwen3, mistral, qwen2, smollm3, olmo2, olmo3, phi3, ministral3, gemma3)
FAMILIES: dict[str, Family] = {module.FAMILY.model_type: module.FAMILY for module in _ALL}
"""By model type, in the order in which a model without an origin looks for a class that can express it."""


@dataclass(frozen=True)
class VisionModel:
    """A model type whose directories hold a language model as `text_config`, beside a vision model that we leave out."""

    text: str
    """Model type of a `text_config` that does not name its own."""


VISION = {"mistral3": VisionModel("mistral"), "gemma3": VisionModel("gemma3_text")}
