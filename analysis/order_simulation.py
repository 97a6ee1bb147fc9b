"""How many positions a stack of top-1 attention layers keeps apart, by the heads' windows: SCOPE's simulation (appendix A.3).

    farsight order-simulation --json F --picture F
    farsight order-simulation --lengths 32768 --heads 16 --gammas 1.5 1.8 2 4 8 --picture F

Every head of every layer adds one token, drawn uniformly from its window, to each token's own. Layers are then matrices M of
whole numbers with H + 1 entries a row, and the last token's state after l layers is v = e M_1 … M_l: how often each token of the
sequence is in it. Tokens that are in it equally often can be exchanged without a trace. The ratio is the number of distinct
values of v over T, 0 among them; 1 is order awareness of the whole sequence (lemma A.1).

Windows of H heads, of T tokens each or of:
    scope      2, 4, 8 … 2^H, no more than T
    uniform    ⌈T / i⌉ for head i = 1 … H, as the paper defines it: harmonic, for all its name
    nope-1     T, and 1 for one head
    nope       T
    gamma=G    ⌈G^i⌉, no more than T: one for each of --gammas

H is the least with 2^H ≥ T. The captions of the paper's Figure 10 have a head more; --heads is for that.
"""

import argparse
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from farsight.cli import bounded, command, positive
from farsight.configs.check import ConfigError
from farsight.files import write_text
from farsight.outputs import add_output_options, check_outputs, model_style
from farsight.progress import progress

MOST = 2**63 - 1
"""Of an int64. The largest coefficient is no more than the sum of all, which is (H + 1)^layers."""


def heads_for(length: int) -> int:
    """The least H with 2^H ≥ T, and no less than 1."""
    return max(1, (length - 1).bit_length())


def window_sizes(length: int, heads: int, gammas: Iterable[float] = ()) -> dict[str, list[int]]:
    """Tokens that each head sees, itself included, by the name of the configuration."""
    every = range(1, heads + 1)
    sizes = {
        "scope": [min(2**i, length) for i in every],
        "uniform": [-(-length // i) for i in every],
        "nope-1": [length] * (heads - 1) + [1],
        "nope": [length] * heads,
    }
    for gamma in gammas:
        # A logarithm first: powers of a large ratio overflow.
        sizes[f"gamma={gamma:g}"] = [
            length if i * math.log(gamma) >= math.log(length) else math.ceil(gamma**i) for i in every
        ]
    return sizes


def draw_picks(length: int, windows: Sequence[int], generator: np.random.Generator) -> np.ndarray:
    """int64 [H, T]: the token that each head adds to each token, uniform on max(0, t − w + 1) … t (the paper's Figure 24)."""
    rows = np.arange(length)
    return np.stack([generator.integers(np.maximum(rows - w + 1, 0), rows + 1) for w in windows])


def through_layer(v_T: np.ndarray, picks_HT: np.ndarray) -> np.ndarray:
    """int64 [T]: v M, where row t of M has 1 at t and 1 more at each head's pick."""
    out_T = v_T.copy()
    used = np.flatnonzero(v_T)
    for picks_T in picks_HT:
        np.add.at(out_T, picks_T[used], v_T[used])
    return out_T


def unique_ratios(length: int, windows: Sequence[int], layers: int, generator: np.random.Generator) -> list[float]:
    """Distinct coefficients over T after each layer, of one draw of all layers.

    Raises:
        ConfigError: so many layers that a coefficient may not fit 64 bits.
    """
    if (len(windows) + 1) ** layers > MOST:
        most = int(math.log(MOST) / math.log(len(windows) + 1))
        raise ConfigError(
            f"--layers {layers}: with {len(windows)} heads coefficients may pass 2^63 after {most}; set {most} or fewer."
        )
    v_T = np.zeros(length, dtype=np.int64)
    v_T[-1] = 1
    ratios = []
    for _ in range(layers):
        v_T = through_layer(v_T, draw_picks(length, windows, generator))
        ratios.append(len(np.unique(v_T)) / length)
    return ratios


def simulate(
    lengths: Sequence[int],
    layers: int,
    trials: int,
    *,
    heads: int | None = None,
    gammas: Sequence[float] = (),
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Mean and standard deviation of the ratio after each layer, of every length and configuration.

    Raises:
        ConfigError: as `unique_ratios`.
    """
    results = []
    todo = [
        (length, heads or heads_for(length), name, windows)
        for length in lengths
        for name, windows in window_sizes(length, heads or heads_for(length), gammas).items()
    ]
    with progress(total=len(todo) * trials, unit="trial", desc="simulation") as bar:
        for number, (length, n_heads, name, windows) in enumerate(todo):
            found = []
            for trial in range(trials):
                found.append(unique_ratios(length, windows, layers, np.random.default_rng([seed, number, trial])))
                bar.update()
            results.append(
                {
                    "length": length,
                    "heads": n_heads,
                    "windows": name,
                    "sizes": windows,
                    "ratio": np.mean(found, axis=0).tolist(),
                    "spread": np.std(found, axis=0).tolist(),
                }
            )
    return results


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """The mean ratio after each layer, a line a configuration."""
    layers = len(results[0]["ratio"])
    lines = []
    for number, row in enumerate(results):
        if number == 0 or row["length"] != results[number - 1]["length"]:
            lines.append(f"\nT = {row['length']:,}, {row['heads']} heads; distinct coefficients / T after layer")
            lines.append(f"{'':<14}" + "".join(f"{layer:>7}" for layer in range(1, layers + 1)))
        lines.append(f"{row['windows']:<14}" + "".join(f"{ratio:>7.3f}" for ratio in row["ratio"]))
    return "\n".join(lines).lstrip()


def draw(results: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Writes the picture (PNG, SVG or PDF): a panel a length, a line a configuration (the paper's Figures 10 and 11)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    lengths = list(dict.fromkeys(row["length"] for row in results))
    names = list(dict.fromkeys(row["windows"] for row in results))
    figure, panels = plt.subplots(
        1, len(lengths), figsize=(1.4 + 4.2 * len(lengths), 4.4), layout="constrained", squeeze=False, sharey=True
    )
    for axes, length in zip(panels[0], lengths, strict=True):
        rows = [row for row in results if row["length"] == length]
        for row in rows:
            style = model_style(names.index(row["windows"]))
            layers = range(1, len(row["ratio"]) + 1)
            axes.errorbar(layers, row["ratio"], yerr=row["spread"], capsize=2, label=row["windows"], **style)
        axes.set(xlabel="layers", title=f"T = {length:,}, {rows[0]['heads']} heads", ylim=(0, 1.03))
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
    panels[0, 0].set_ylabel("distinct coefficients / T")
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=min(len(labels), 6), fontsize="small", frameon=False
    )
    figure.savefig(path, dpi=120)
    plt.close(figure)


@command
def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    assert __doc__
    parser = argparse.ArgumentParser(
        prog="farsight order-simulation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--lengths", type=positive, nargs="+", default=[512, 4096], metavar="T", help="(512 4096)")
    parser.add_argument("--layers", type=positive, default=10, metavar="N", help="(%(default)s)")
    parser.add_argument("--trials", type=positive, default=10, metavar="N", help="that are averaged (%(default)s)")
    parser.add_argument("--heads", type=positive, metavar="H", help="of every length (default: log2 T, rounded up)")
    parser.add_argument(
        "--gammas", type=bounded(float, above=1), nargs="+", default=[], metavar="G", help="growth factors to try too"
    )
    parser.add_argument("--seed", type=bounded(int, least=0), default=0, help="of all that is drawn (%(default)s)")
    add_output_options(parser)
    options = parser.parse_args(arguments)
    check_outputs(parser, options)
    settings = {key: getattr(options, key) for key in ("lengths", "layers", "trials", "heads", "gammas", "seed")}
    results = simulate(**settings)
    print(table(results))
    if options.json:
        figures = {"tool": "analysis.order_simulation", "model": None, **settings, "configurations": results}
        write_text(options.json, json.dumps(figures, indent=2) + "\n")
    if options.picture:
        draw(results, options.picture)
        print(options.picture)


if __name__ == "__main__":
    main()
