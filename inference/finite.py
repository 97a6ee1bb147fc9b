"""Rejects logits that are not finite, naming the weights that cause them."""

from typing import NoReturn

from torch import Tensor

from farsight.checkpoints.model_dir.names import readable_name
from farsight.checkpoints.model_dir.safetensors_files import is_finite
from farsight.errors import ConfigError
from farsight.model.llama import Llama


def check_finite(values: Tensor, model: Llama, name: str) -> None:
    """Checks what a model has computed; only if that is not finite, its weights too.

    Args:
        values: logits, hidden states, or anything computed from them.
        name: the model's name, for the message.

    Raises:
        ConfigError: values are not finite; the message names the first such tensor of the weights.
    """
    if not is_finite(values):
        refuse_logits(model, name)


def refuse_logits(model: Llama, name: str) -> NoReturn:
    """Raises the ConfigError of `check_finite`."""
    for key, parameter in model.named_parameters():
        whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter  # gathers all ranks' parts
        if not is_finite(whole.detach()):
            tensor = readable_name(key, model.architecture.norm_placement)
            raise ConfigError(
                f"{name} gives logits that are infinite or not a number, and so are values in its tensor {tensor}. "
                "Take an earlier checkpoint, or copy the directory again."
            )
    raise ConfigError(
        f"{name} gives logits that are infinite or not a number, though its weights are finite: they overflow in "
        f"{str(next(model.parameters()).dtype).removeprefix('torch.')}. Use --dtype float32."
    )
