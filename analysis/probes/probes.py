"""How well a token's position in its sequence can be read off each layer of a model (SCOPE, appendix B.1).

    farsight probes MODEL_DIR --data held_out.txt --length 1024
    farsight probes runs/scope/model runs/rope/model --data held_out.txt --json probes.json --picture probes.png
    farsight probes MODEL_DIR --data held_out.txt --probe linear

A probe is trained on the hidden states of each layer, and of the embedding, which is layer -1: a 2-layer MLP, or a linear map.
It learns from most of the sequences; what is reported is the mean absolute distance in tokens, on the others, of the position
that it says from where the token is. Beside it: the error of always saying the same position, near the middle.

Low errors in early layers and higher ones after them are what the paper finds in most models. A probe finds what it can learn
from so many tokens: a layer may hold more than its probe reads.
"""

import argparse
import dataclasses
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from farsight.analysis.probes.position_probe import (
    Kind,
    ProbeSettings,
    Target,
    bucket_edges,
    draw_positions,
    guess_error,
    mean_by_bucket,
    split_sequences,
    train_probes,
)
from farsight.analysis.sequences import add_text_options, read_sequences
from farsight.cli import bounded, command, positive
from farsight.configs.load import ConfigError
from farsight.inference.loading import LoadedModel, load
from farsight.inference.model_options import add_model_options
from farsight.model.llama import Llama
from farsight.outputs import add_output_options, check_outputs, short_names, write_figures
from farsight.progress import progress

SEQUENCES = 100


@contextmanager
def layer_outputs(model: Llama) -> Iterator[list[list[Tensor]]]:
    """What the first block is given and what each block returns meanwhile, appended call by call: a list for each of them."""
    blocks = list(model.layers.values())
    found: list[list[Tensor]] = [[] for _ in range(len(blocks) + 1)]
    hooks = [blocks[0].register_forward_pre_hook(lambda _, inputs: found[0].append(inputs[0]))]
    for kept, block in zip(found[1:], blocks, strict=True):
        hooks.append(block.register_forward_hook(lambda _, inputs, output, kept=kept: kept.append(output)))
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def read_layers(loaded: LoadedModel, tokens_L: Tensor, positions_t: Tensor) -> Tensor:
    """Hidden states of some tokens of a sequence, in order, [layers + 1, t, D]: the embedding's first."""
    kept, first = [], 0
    with torch.no_grad(), layer_outputs(loaded.decoder.model) as found:
        # Chunk by chunk, so that no layer's output is held for longer than it takes to pick from it.
        for h_BLD in loaded.decoder.start([len(tokens_L)]).chunks(tokens_L[None]):
            stop = first + h_BLD.shape[1]
            here_t = positions_t[(positions_t >= first) & (positions_t < stop)] - first
            kept.append(torch.stack([outputs.pop()[0, here_t] for outputs in found]))
            first = stop
    return torch.cat(kept, dim=1)


def probe_model(loaded: LoadedModel, tokens_SL: Tensor, settings: ProbeSettings) -> dict[str, Any]:
    """Trains and tests the probes of a model's layers.

    Args:
        tokens_SL: sequences of `settings.length` tokens.

    Returns:
        What `--json` writes for it.

    Raises:
        ConfigError: fewer than two sequences.
    """
    assert tokens_SL.shape[1] == settings.length
    sequences = len(tokens_SL)
    trained, tested = split_sequences(sequences, settings.held_out, settings.seed)
    device = next(loaded.decoder.model.parameters()).device
    positions_St = draw_positions(sequences, settings).to(device)
    hidden = [
        read_layers(loaded, tokens_L.to(device), positions_t)
        for tokens_L, positions_t in zip(progress(tokens_SL, unit="sequence", desc="read"), positions_St, strict=True)
    ]
    learnt_ATD = torch.cat([hidden[number] for number in trained.tolist()], dim=1)
    unseen_ATD = torch.cat([hidden[number] for number in tested.tolist()], dim=1)
    del hidden
    learnt_T, unseen_T = positions_St[trained.to(device)].flatten(), positions_St[tested.to(device)].flatten()
    total = settings.epochs * len(learnt_T)
    with progress(total=total, unit="token", desc="train") as bar:
        probes = train_probes(learnt_ATD, learnt_T, settings, bar.update)
    distance_AT = (probes.predict(unseen_ATD) - unseen_T).abs()
    errors = distance_AT.double().mean(dim=1).tolist()
    map_AB = mean_by_bucket(distance_AT, unseen_T, settings).tolist()
    return {
        "tool": "analysis.probes",
        "model": str(loaded.path),
        **dataclasses.asdict(settings),
        "trained_length": loaded.trained_length,
        "sequences": sequences,
        "sequences_held_out": len(tested),
        "guess": guess_error(learnt_T, unseen_T),
        "positions": bucket_edges(settings.length, settings.buckets),
        "layers": [
            {"layer": layer, "error": error, "by_position": [None if math.isnan(value) else value for value in row]}
            for layer, (error, row) in enumerate(zip(errors, map_AB, strict=True), start=-1)
        ],
    }


def table(results: dict[str, dict[str, Any]]) -> str:
    """The errors as text: a line a layer, a column a model."""
    names = short_names(results)
    width = max(10, *map(len, names))
    depth = max(len(figures["layers"]) for figures in results.values())
    lines = [" ".join(["layer".rjust(9), *(name.rjust(width) for name in names)])]
    for row in range(depth):
        cells = [f["layers"][row]["error"] if row < len(f["layers"]) else None for f in results.values()]
        shown = ["" if cell is None else f"{cell:.1f}" for cell in cells]
        lines.append(" ".join([("embedding" if row == 0 else str(row - 1)).rjust(9), *(s.rjust(width) for s in shown)]))
    guesses = [f"{figures['guess']:.1f}".rjust(width) for figures in results.values()]
    return "\n".join([*lines, " ".join(["guess".rjust(9), *guesses])])


def probe_from_options(path: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Loads the model directory `path` and probes it, as the command line says."""
    loaded = load(path, options)
    settings = ProbeSettings(
        length=options.length or loaded.trained_length,
        probe=options.probe,
        target=options.target,
        epochs=options.epochs,
        width=options.width,
        learning_rate=options.learning_rate,
        batch=options.batch,
        held_out=options.held_out,
        tokens_per_sequence=options.tokens_per_sequence,
        buckets=options.buckets,
        seed=options.seed,
    )
    tokens_SL = read_sequences(options.data, loaded.tokenizer, settings.length, options.sequences)
    return {**probe_model(loaded, tokens_SL, settings), "extend": options.extend}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="farsight probes", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "models", nargs="+", type=Path, metavar="MODEL_DIR", help="directories, adapters or checkpoints"
    )
    add_text_options(parser, SEQUENCES)
    default = ProbeSettings(length=1024)
    parser.add_argument(
        "--tokens-per-sequence",
        type=positive,
        default=default.tokens_per_sequence,
        metavar="N",
        help="at most so many, drawn uniformly (%(default)s)",
    )
    parser.add_argument(
        "--held-out",
        type=bounded(float, above=0, below=1),
        default=default.held_out,
        metavar="SHARE",
        help="of the sequences (%(default)g)",
    )
    parser.add_argument(
        "--probe", choices=get_args(Kind), default=default.probe, help="2-layer MLP or linear (%(default)s)"
    )
    parser.add_argument(
        "--target",
        choices=get_args(Target),
        default=default.target,
        help="one class a position, of which the likeliest counts, or the position as a number (%(default)s)",
    )
    parser.add_argument("--epochs", type=positive, default=default.epochs, help="over the tokens (%(default)s)")
    parser.add_argument("--width", type=positive, default=default.width, help="of the MLP's hidden layer (%(default)s)")
    parser.add_argument("--batch", type=positive, default=default.batch, metavar="TOKENS", help="a step (%(default)s)")
    parser.add_argument(
        "--learning-rate",
        type=bounded(float, above=0),
        default=default.learning_rate,
        metavar="X",
        help="of Adam at first; it falls to 0 (%(default)g)",
    )
    parser.add_argument(
        "--buckets", type=positive, default=default.buckets, help="of positions in the map (%(default)s)"
    )
    add_model_options(parser)
    add_output_options(parser)
    return parser


@command
def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = _parser()
    options = parser.parse_args(arguments)
    check_outputs(parser, options)
    if options.data is None:
        parser.error("the following arguments are required: --data")
    results: dict[str, dict[str, Any]] = {}
    for path in options.models:
        results[str(path)] = probe_from_options(path, options)
    first = next(iter(results.values()))
    lengths = {figures["length"] for figures in results.values()}
    if len(lengths) > 1:
        raise ConfigError(
            f"The models were trained at {' and '.join(map(str, sorted(lengths)))} tokens: set --length to compare them."
        )
    print(
        f"mean absolute distance in tokens: {first['sequences_held_out']} of {first['sequences']} sequences of "
        f"{first['length']:,} held out, {first['probe']} probes, target {first['target']}"
    )
    print(table(results))
    if options.json:
        write_figures(options.json, results)
    if options.picture:
        from farsight.analysis.probes.picture import draw

        draw(results, options.picture)
        print(options.picture)


if __name__ == "__main__":
    main()
