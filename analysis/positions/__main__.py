"""Shows how each layer of a model encodes position, before any training: as a table, a picture and figures.

    farsight positions lasp_llama3_8b --picture lasp.png
    farsight positions runs/my_run/model --length 32768 --json positions.json
    farsight positions lasp_llama3_8b --position.lasp.s_max 4
    farsight positions Qwen2.5-7B/ --toml qwen.toml

Takes a config, a recipe (its last stage, or the one named by `--stage`) or a model directory. Options of the form --section.key
value change the config, or every stage of the recipe. The picture has a panel for each mechanism in use: wavelengths of RoPE,
GARFA's factors, attention scopes, the weight ALiBi leaves at each distance, the sinusoidal embedding. The TOML file is for a run
that starts from the model's weights: name it as `base` in the run's config.
"""

from pathlib import Path

from farsight.cli import command, new_parser, positive
from farsight.files import write_text
from farsight.outputs import add_output_options, output_file, write_json, write_picture
from farsight.remote import local


@command
def main(arguments: list[str] | None = None) -> None:
    parser = new_parser("farsight positions", __doc__, allow_abbrev=False)
    parser.add_argument("model", type=Path, help="config file, recipe (or a shipped one's name) or model directory")
    parser.add_argument("--tiny", action="store_true", help="the small form of a config file or recipe")
    parser.add_argument("--stage", help="stage of a recipe (default: the last)")
    parser.add_argument("--length", type=positive, help="sequence length in tokens (default: the trained one)")
    add_output_options(parser)
    parser.add_argument(
        "--toml",
        type=output_file,
        metavar="F",
        help="write the model's [architecture], [position] and trained length here, as a config to start from its weights",
    )
    options, rest = parser.parse_known_args(arguments)
    if unknown := [word for word in rest if word.startswith("--") and "." not in word.partition("=")[0]]:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")

    from farsight.analysis.positions.figures import as_toml, figures, pair_ratio
    from farsight.analysis.positions.picture import draw
    from farsight.model.position.layers import describe
    from farsight.training.stages import read_config

    config = read_config(local(options.model, weights=False), options.stage, [*rest, *["--tiny"] * options.tiny])
    length = options.length or config.trained_length
    layers = config.layers(length)
    print(describe(layers))
    print(f"{length:,} tokens: {pair_ratio(layers, length):.2f} × fewer query-key pairs than dense causal attention")
    if options.json:
        write_json(options.json, figures(config, length))
    if options.toml:
        write_text(options.toml, as_toml(config))
    write_picture(options.picture, draw, config, length)


if __name__ == "__main__":
    main()
