"""Grafts two models: the first layers of one in front of the other layers of the other (LASP paper, Algorithm 1).

    farsight graft --front BASE --back LONG --layers 4 --out OUT        # the paper's B-Front
    farsight graft --front LONG --back BASE --layers 4 --out OUT        # its L-Front
    farsight graft --front LONG --back BASE --layers 8 --rope LONG --out OUT        # with LONG's RoPE in all layers (Table 1)
    farsight graft --front BASE --back BASE --layers 0 --rope LONG --out OUT        # BASE "with long embedding"

The front model gives the embedding and layers 0 to K − 1, the back model layers K to N − 1, the final norm and the output head:
with K = 0 all layers are the back model's, with K = N the front model's. Layers keep their position mechanisms: RoPE and its
scaling, LASP, scopes, windows, ALiBi, GARFA, NoPE; with --rope MODEL they rotate as the layers of that model do. The models need the same shapes and the same vocabulary, as they have if one
was trained further from the other.

Both may be model directories or checkpoints. Weights are copied bit for bit, one at a time. OUT is an ordinary model directory,
written atomically. docs/analysis/graft.md explains what happens to tied embeddings, scopes and trained lengths; farsight
graft-sweep measures all depths without writing any graft.
"""

from pathlib import Path

from farsight.checkpoints.convert.dtypes import DTYPES
from farsight.cli import command, model_path, natural, new_parser
from farsight.outputs import add_json_option, write_json
from farsight.remote import shown


@command
def main(arguments: list[str] | None = None) -> None:
    parser = new_parser("farsight graft", __doc__)
    add = parser.add_argument
    add("--front", type=model_path, required=True, metavar="A", help="model of the embedding and the first layers")
    add("--back", type=model_path, required=True, metavar="B", help="model of the other layers, norm and head")
    add("--layers", type=natural, required=True, metavar="K", help="how many layers A gives: 0 to all of them")
    add("--out", type=Path, required=True, help="model directory to write; must not exist")
    add("--dtype", choices=DTYPES, help="of the weights written (default: that of both models)")
    add("--untie", action="store_true", help="where tied embeddings differ, write B's as a head of its own")
    add(
        "--rope",
        type=model_path,
        metavar="MODEL",
        help="give every layer the RoPE of this model (default: each keeps its own)",
    )
    add_json_option(parser, "what was done")
    options = parser.parse_args(arguments)

    import torch

    from farsight.checkpoints.graft.build import graft, parts
    from farsight.model.position.layers import describe

    dtype = None if options.dtype is None else getattr(torch, options.dtype)
    config, remarks = graft(
        options.front, options.back, options.layers, options.out, dtype, options.untie, options.rope
    )
    n_layers = config.architecture.n_layers
    said = parts(options.front, options.back, options.layers, n_layers, options.rope)
    print(describe(config.layers()), f"{said[0].upper()}{said[1:]}.", *remarks, options.out, sep="\n")
    figures = {
        "tool": "checkpoints.graft", "model": str(options.out), "front": shown(options.front), "back": shown(options.back),
        "layers": options.layers, "rope": options.rope and shown(options.rope), "n_layers": n_layers, "trained_length": config.trained_length,
        "tied": config.architecture.tie_embeddings, "remarks": remarks,
    }  # fmt: skip
    write_json(options.json, figures)


if __name__ == "__main__":
    main()
