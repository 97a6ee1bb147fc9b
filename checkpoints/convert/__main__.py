"""Converts between checkpoints and model directories.

    farsight convert to-hf   runs/my_run/checkpoint/step-1000  OUT
    farsight convert from-hf MODEL_DIR                         OUT

`to-hf` writes a Hugging Face model directory from a training checkpoint of any parallel layout. `from-hf` writes a
checkpoint that a run can start from (`--checkpoint.initial_load_path OUT`); a run can also start from MODEL_DIR itself.
"""

from pathlib import Path

from farsight.checkpoints.convert.dtypes import DTYPES
from farsight.cli import command, model_path, new_parser
from farsight.files import check_new_folder


@command
def main(arguments: list[str] | None = None) -> None:
    parser = new_parser("farsight convert", __doc__)
    parser.add_argument("direction", choices=["to-hf", "from-hf"])
    parser.add_argument(
        "source", type=model_path, help="a step-N checkpoint folder (to-hf) or a model directory (from-hf)"
    )
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        help="dtype of the weights written (default: to-hf keeps the checkpoint's, from-hf float32)",
    )
    options = parser.parse_args(arguments)
    check_new_folder(options.out)

    import torch

    from farsight.checkpoints.convert.from_hf import model_dir_to_checkpoint
    from farsight.checkpoints.convert.to_hf import checkpoint_to_model_dir

    dtype = None if options.dtype is None else getattr(torch, options.dtype)
    if options.direction == "to-hf":
        checkpoint_to_model_dir(options.source, options.out, dtype)
    else:
        model_dir_to_checkpoint(options.source, options.out, dtype or torch.float32)
    print(options.out)


if __name__ == "__main__":
    main()
