"""The options of every command that reads a model: the device, dtype, extension, growth of scopes and chunk size.

Parsing them imports no torch; `farsight.inference.loading` loads the model that they describe.
"""

import argparse
from typing import Any

from farsight.cli import add_device_option, positive

DTYPES = ("float32", "bfloat16", "float16")
CHUNK = 1024
"""Tokens of a prompt read at once, by default."""
EXTENSIONS = (
    "linear:factor=…",
    "ntk:factor=…",
    "dynamic:factor=…",
    "yarn:factor=…",
    "llama3:factor=…",
    "ripra:limit=0,limit_ratio=0.5,near=0,chunk=256,anchors=0+middle,relevance=on,isotonic=on,round=off,block=0",
    "self_extend:group=0,window=0,share=0.667",
    "chunk_llama:chunk=0,window=0",
    "adagrope:limit=0,ratio=0.25",
    "gali:chunk=0,local=0,noise=1,seed=0,limit=0",
)
"""The methods of `inference/extend`, each with its settings and their defaults."""

READING = ("extend", "scope_max", "quantization")
"""Options that change what a model computes, and that results name."""


def reading_options(options: argparse.Namespace) -> dict[str, Any]:
    """The settings of READING that a command has, for its JSON."""
    return {name: getattr(options, name) for name in READING if hasattr(options, name)}


def add_model_options(parser: argparse.ArgumentParser, foreign: bool = False) -> None:
    """Adds --device, --dtype, --extend, --scope-max and --chunk.

    Args:
        foreign: whether the command also takes models that only transformers builds; adds --quantization and
            --trust-remote-code.
    """
    add_device_option(parser)
    parser.add_argument("--dtype", choices=DTYPES, help="of weights and cache (default: float32 on a CPU)")
    if foreign:
        parser.add_argument(
            "--quantization",
            choices=("nf4", "fp4", "int8"),
            help="keep the blocks' linear layers in 4 or 8 bits, and compute in --dtype",
        )
        parser.add_argument(
            "--trust-remote-code",
            action="store_true",
            help="run the Python code in the model's directory, for types that transformers does not know",
        )
    parser.add_argument(
        "--extend",
        metavar="METHOD[:KEY=VALUE,…]",
        help="read further than the model was trained, without training it: one of the methods below "
        "(docs/inference/extensions.md)",
    )
    parser.add_argument(
        "--scope-max",
        choices=("trained", "length"),
        help="past the trained length, keep scopes as trained, or let them grow with the length (default: what the model "
        "says; needle and perplexity measure both)",
    )
    parser.epilog = "\n  ".join(
        (
            "methods of --extend, with their settings and defaults; METHOD:VALUE sets the first, and a 0 is worked out from the lengths:",
            *EXTENSIONS,
        )
    )
    parser.add_argument(
        "--chunk", type=positive, default=CHUNK, help="tokens of a prompt to read at once (%(default)s)"
    )
