"""Needle in a haystack: the share of hidden facts that a model finds, by the context's length and the needle's depth.

    farsight needle MODEL_DIR [OTHER …] --lengths 1024 4096 --depths 10 --json F --picture F.png
    farsight needle MODEL_DIR --lengths 4096 --task variable_tracking:chains=2,hops=6 --trials 50
    torchrun --nproc_per_node 8 -m farsight needle MODEL_DIR --lengths 131072 --haystack BOOK.txt

Tasks: passkey and multikey, by length and depth; multi_passkey, multivalue, multiquery, variable_tracking, common_words and
frequent_words, by length. Prompts are generated from the seed, the length, the depth and the trial: all models with the same
tokenizer get the same ones, and adding a length changes none of the others. A prompt and its answer fill the length; the model
continues greedily for as many tokens as the answer takes.
Past the trained length, a model with scopes is measured as it was trained ("trained") and with scopes that grow with the
length ("length"). docs/evaluation/needle.md describes tasks, scores and the JSON file.
"""

from argparse import Namespace
from pathlib import Path

from farsight.cli import bounded, command, model_path, new_parser, positive
from farsight.inference.model_options import add_model_options
from farsight.outputs import add_output_options, write_figures, write_picture
from farsight.remote import shown

TASKS = (
    "passkey", "multikey", "multi_passkey", "multivalue", "multiquery", "variable_tracking", "common_words", "frequent_words",
)  # fmt: skip
"""The names in `data.retrieval.tasks.TASKS`, which imports too much for --help."""


def read_options(arguments: list[str] | None = None) -> Namespace:
    """Parses the command line."""
    parser = new_parser("farsight needle", __doc__)
    add = parser.add_argument
    add("model_dir", type=model_path, nargs="+", help="model directories, adapters or checkpoints")
    add("--lengths", type=positive, nargs="+", required=True, help="of prompt and answer together, in tokens")
    add(
        "--depths",
        nargs="+",
        default=["10"],
        metavar="D",
        help="how many, evenly spaced (default: 10), or a list of depths",
    )
    add("--task", default="passkey", metavar="TASK[:KEY=N,…]", help=f"{', '.join(TASKS)} (default: %(default)s)")
    add("--trials", type=positive, default=10, help="prompts at each length and depth (%(default)s)")
    add("--seed", type=bounded(int, least=0, most=2**62), default=0, help="of the generated prompts (%(default)s)")
    add("--haystack", type=Path, metavar="FILE", help="UTF-8 text or .jsonl to hide needles in")
    add("--rows", type=positive, default=8, help="prompts read together (%(default)s)")
    add("--new-tokens", type=positive, metavar="N", help="in an answer (default: as many as the right one takes)")
    add("--show", action="store_true", help="print the first prompt with its answer, and stop")
    add_model_options(parser, foreign=True)
    add_output_options(parser)
    return parser.parse_args(arguments)


@command
def main(arguments: list[str] | None = None) -> None:
    options = read_options(arguments)

    from farsight.evals.needle.measure import about, measure, read_grid, show, table
    from farsight.evals.needle.picture import draw
    from farsight.evals.ranks import sharing_processes
    from farsight.inference.loading import load

    grid = read_grid(options)
    if options.show:
        show(grid, options.model_dir[0])
        return
    with sharing_processes() as (rank, world):
        results = {}
        for folder in options.model_dir:
            loaded = load(folder, options)
            figures = measure(loaded, grid, options.rows, options.new_tokens, rank, world)
            results[shown(folder)] = {**about(loaded, grid, options), **figures}
    if rank:
        return
    for folder, figures in results.items():
        if len(results) > 1:
            print(folder)
        print(table(figures))
    write_figures(options.json, results)
    write_picture(options.picture, draw, results)


if __name__ == "__main__":
    main()
