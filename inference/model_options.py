"""The options of every command that reads a model: the device, dtype, extension and chunk size.

Parsing them imports no torch; `farsight.inference.loading` loads the model that they describe.
"""

import argparse

from farsight.cli import add_device_option, positive

DTYPES = ("float32", "bfloat16", "float16")
QUANTIZED = ("int8", "nf4")
"""Weights in 8 and 4 bits, for models that transformers builds; the rest computes in the device's default dtype."""
CHUNK = 1024
"""Tokens of a prompt read at once, by default."""
EXTENSIONS = (
    "linear:factor=…",
    "ntk:factor=…",
    "dynamic:factor=…",
    "yarn:factor=…",
    "ripra:limit=0,limit_ratio=0.5,near=0,chunk=256,anchors=0+middle,relevance=on,isotonic=on,round=off,block=0",
    "self_extend:group=0,window=0,share=0.667",
    "chunk_llama:chunk=0,window=0",
    "adagrope:limit=0,ratio=0.25",
    "gali:chunk=0,local=0,noise=1,seed=0",
)
"""The methods of `inference/extend`, each with its settings and their defaults."""


def add_model_options(parser: argparse.ArgumentParser, foreign: bool = False) -> None:
    """Adds --device, --dtype, --extend and --chunk.

    Args:
        foreign: whether the command also takes models that only transformers builds; adds --trust-remote-code, and to
            --dtype what is for them alone.
    """
    add_device_option(parser)
    dtypes: tuple[str, ...] = DTYPES
    about = "of weights and cache (default: float32 on a CPU)"
    if foreign:
        dtypes, about = DTYPES + QUANTIZED, about + "; int8 and nf4 are for models that transformers builds"
        parser.add_argument(
            "--trust-remote-code",
            action="store_true",
            help="run the Python code in the model's directory, for types that transformers does not know",
        )
    parser.add_argument("--dtype", choices=dtypes, help=about)
    parser.add_argument(
        "--extend",
        metavar="METHOD[:KEY=VALUE,…]",
        help="read further than the model was trained, without training it: one of the methods below "
        "(docs/inference/extensions.md)",
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
