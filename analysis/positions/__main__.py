"""Shows how each layer of a model encodes position, before any training: as a table, a picture and figures.

    farsight positions lasp_llama3_8b --picture lasp.png
    farsight positions runs/my_run/model --length 32768 --json positions.json

Takes a config, a recipe (its last stage, or the one named by `--stage`) or a model directory. The picture has a panel for each
mechanism in use: wavelengths of RoPE, GARFA's factors, attention scopes, the weight ALiBi leaves at each distance, the sinusoidal
embedding.
"""

import argparse
from pathlib import Path

from farsight.cli import bounded, command
from farsight.outputs import add_output_options, check_outputs, write_outputs


@command
def main(arguments: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="farsight positions", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="config file, recipe (or a shipped one's name) or model directory")
    parser.add_argument("--tiny", action="store_true", help="the small form of a config file or recipe")
    parser.add_argument("--stage", help="stage of a recipe (default: the last)")
    parser.add_argument(
        "--length", type=bounded(int, least=1), help="sequence length in tokens (default: the trained one)"
    )
    add_output_options(parser)
    options = parser.parse_args(arguments)
    check_outputs(parser, options)

    from farsight.analysis.positions.figures import figures, pair_ratio
    from farsight.analysis.positions.picture import draw
    from farsight.model.position.layers import describe
    from farsight.training.stages import read_config

    config = read_config(options.model, options.stage, options.tiny)
    length = options.length or config.trained_length
    layers = config.layers(length)
    print(describe(layers))
    print(f"{length:,} tokens: {pair_ratio(layers, length):.2f} × fewer query-key pairs than dense causal attention")
    found = figures(config, length) if options.json else {}
    write_outputs(options, found, lambda path: draw(config, length, path))


if __name__ == "__main__":
    main()
