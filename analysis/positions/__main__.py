"""Shows how each layer of a model encodes position, before any training: as a table, a picture and figures.

    farsight positions lasp_llama3_8b --picture lasp.png
    farsight positions runs/my_run/model --length 32768 --json positions.json

Takes a config, a recipe (its last stage, or the one named by `--stage`) or a model directory. The picture has a panel for each
mechanism in use: wavelengths of RoPE, GARFA's factors, attention scopes, the weight ALiBi leaves at each distance, the sinusoidal
embedding.
"""

import argparse
import json
from pathlib import Path

from farsight.cli import bounded, command
from farsight.errors import ConfigError
from farsight.files import prepare_file, write_text


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
    parser.add_argument("--picture", type=Path, help="PNG, SVG or PDF file to write")
    parser.add_argument("--json", type=Path, help="JSON file to write the figures to")
    options = parser.parse_args(arguments)
    for name in ("picture", "json"):
        if path := getattr(options, name):
            prepare_file(path)
    if options.picture and options.picture.suffix not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"--picture {options.picture} must end with .png, .svg or .pdf.")

    from farsight.analysis.positions.figures import figures, pair_ratio
    from farsight.analysis.positions.picture import draw
    from farsight.model.position.layers import describe
    from farsight.training.stages import read_config

    config = read_config(options.model, options.stage, options.tiny)
    length = options.length or config.trained_length
    layers = config.layers(length)
    print(describe(layers))
    print(f"{length:,} tokens: {pair_ratio(layers, length):.2f} × fewer query-key pairs than dense causal attention")
    if options.json:
        write_text(options.json, json.dumps(figures(config, length), indent=2) + "\n")
    if options.picture:
        draw(config, length, options.picture)
        print(options.picture)


if __name__ == "__main__":
    main()
