"""Silences lines that libraries log about parts of them that Farsight does not use, and about each of their requests."""

import logging
from collections.abc import Callable

EXPECTED = {
    "torchao": "Failed to load ",  # its kernels for other GPUs, which PEFT and transformers import with it
    "torch.utils._pytree": "is an Enum subclass",  # about torchao's own classes
    "bitsandbytes.backends.cpu.ops": "Failed to load CPU gemm_4bit_forward",  # a kernel of Hugging Face's package `kernels`
    "httpx2": "HTTP Request: ",  # of huggingface_hub, where a command logs at the level of information
}
"""Words that mark each line to drop, by the logger that writes it."""


def _without(words: str) -> Callable[[logging.LogRecord], bool]:
    return lambda record: words not in record.getMessage()


_FILTERS = {name: _without(words) for name, words in EXPECTED.items()}


def silence_expected_warnings() -> None:
    """Drops these lines, and no others of the same loggers; a second call changes nothing."""
    for name, drop in _FILTERS.items():
        logging.getLogger(name).addFilter(drop)
