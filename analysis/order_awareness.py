"""How far back a model can tell in which order tokens came: Definition 2.1 of SCOPE, on a real model.

    farsight order-awareness MODEL_DIR --data FILE --json F --picture F
    farsight order-awareness MODEL_DIR --data FILE --length 4096 --permutations 16

The last t tokens of a sequence are put into another order, for t = 2, 4, 8 … the length, and the last position's hidden state is
compared with what it was: ‖f(x) − f(πx)‖ / ‖f(x)‖, after each block. Three kinds of permutations are tried. Random ones of all t tokens
nearly always change the last token itself, which any model sees. Random ones that keep it in place ask whether the model knows the order of what
came before. They move near tokens too, so that a model that sees only those notices them; the third kind therefore exchanges the two
tokens that are furthest back. The horizon is the widest span such that every permutation of the last two kinds, of it and of all narrower ones, changed
the state by more than --tolerance. Permutations that leave the same tokens at the same places are drawn again; where there is no other, a
span counts for nothing.

The model is read in double precision: what order changes in an untrained model is less than single precision rounds off. A horizon says that
order is in the state, not that the model uses it, nor that 16 bits would keep it.
"""

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from farsight.analysis.sequences import add_text_options, read_sequences
from farsight.cli import bounded, command, positive
from farsight.configs.load import ConfigError
from farsight.inference.decoder import Decoder
from farsight.inference.loading import LoadedModel, load
from farsight.inference.model_options import add_model_options
from farsight.model.llama import Llama
from farsight.outputs import add_output_options, check_outputs, write_figures
from farsight.progress import progress

SEQUENCES, PERMUTATIONS = 2, 3
Kind = Literal["kept", "exchanged", "all"]
"""Of permutations: random ones that keep the last token, the two oldest tokens exchanged, random ones of all."""
TOLERANCE = 1e-12
"""Relative, in fp64: states that are equal but for the order in which their terms were summed differ by some 1e-16."""
DRAWS = 50
"""Of a permutation, before a span is taken to have no other order."""


def spans(length: int) -> list[int]:
    """2, 4, 8 … and the length itself."""
    return [*(2**power for power in range(1, length.bit_length()) if 2**power < length), length]


def reordered(tokens_L: Tensor, span: int, keep_last: bool, generator: torch.Generator) -> Tensor | None:
    """The sequence with its last `span` tokens in another random order, int64 [L]; None where they have no other.

    Args:
        keep_last: permutes the span − 1 tokens before the last.
    """
    stop = len(tokens_L) - keep_last
    start = len(tokens_L) - span
    for _ in range(DRAWS):
        out_L = tokens_L.clone()
        out_L[start:stop] = tokens_L[start:stop][torch.randperm(stop - start, generator=generator)]
        if not torch.equal(out_L, tokens_L):
            return out_L
    return None


def oldest_exchanged(tokens_L: Tensor, span: int) -> Tensor | None:
    """The sequence with the first of its last `span` tokens and the next other token after it exchanged, int64 [L]; the last
    stays in place. None where no token between differs."""
    start = len(tokens_L) - span
    others = torch.nonzero(tokens_L[start:-1] != tokens_L[start])[:, 0]
    if not len(others):
        return None
    out_L, other = tokens_L.clone(), start + int(others[0])
    out_L[start], out_L[other] = tokens_L[other], tokens_L[start]
    return out_L


@contextmanager
def last_states(model: Llama) -> Iterator[list[Tensor]]:
    """Collects, block by block, the last position's hidden states [B, D] of what the model reads meanwhile."""
    found: list[Tensor] = []

    def keep(_: nn.Module, __: tuple[Any, ...], h_BLD: Tensor) -> None:
        found.append(h_BLD[:, -1])

    handles = [block.register_forward_hook(keep) for block in model.layers.values()]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def changes(decoder: Decoder, tokens_L: Tensor, others_BL: Tensor) -> Tensor:
    """Relative change of the last state after each block, [layers, B], from one sequence to others.

    Each is read by itself, chunk by chunk: double precision takes memory enough.
    """
    device, layers = next(decoder.model.parameters()).device, len(decoder.model.layers)
    states = []
    for row_L in (tokens_L, *others_BL):
        with last_states(decoder.model) as found:
            decoder.hidden_states(row_L.to(device))
        states.append(torch.cat(found[-layers:]))  # of the last chunk
    first, *rest = states
    return torch.stack([(state - first).norm(dim=-1) / first.norm(dim=-1) for state in rest], dim=1).cpu()


def measure(
    loaded: LoadedModel,
    tokens_SL: Tensor,
    permutations: int = PERMUTATIONS,
    tolerance: float = TOLERANCE,
    seed: int = 0,
) -> dict[str, Any]:
    """Changes by span and layer.

    Returns:
        "spans": [{"tokens", "change", "exchange", "distinguished", "change_all", "distinguished_all"}], after the last block: medians
        over random permutations that keep the last token, over exchanges of the two oldest, the share of both that was told apart, and
        the same of random permutations of all; "horizon"; and "layers", with a horizon and the changes of each.

    Raises:
        ConfigError: an extension that keeps keys itself, which reading whole sequences does without.
    """
    decoder, length = loaded.decoder, tokens_SL.shape[1]
    if decoder.turns_own_keys:
        raise ConfigError(
            "--extend: this method turns keys anew for every query, and sequences are read whole here; methods that change "
            "frequencies (linear, ntk, yarn, …) do."
        )
    decoder.model.double()
    layers = decoder.config.architecture.n_layers
    generator = torch.Generator().manual_seed(seed)
    widths = spans(length)
    found: dict[tuple[int, Kind], list[Tensor]] = {(span, kind): [] for span in widths for kind in get_args(Kind)}
    bar = progress(total=len(tokens_SL) * len(widths), unit="span", desc="order")
    for tokens_L in tokens_SL:
        for span in widths:
            drawn: list[tuple[Kind, Tensor | None]] = [("exchanged", oldest_exchanged(tokens_L, span))]
            for _ in range(permutations):
                drawn.append(("kept", reordered(tokens_L, span, True, generator)))
                drawn.append(("all", reordered(tokens_L, span, False, generator)))
            others = [(kind, other) for kind, other in drawn if other is not None]
            if others:
                change = changes(decoder, tokens_L, torch.stack([other for _, other in others]))
                for number, (kind, _) in enumerate(others):
                    found[span, kind].append(change[:, number])
            bar.update()
    bar.close()
    empty = torch.empty(layers, 0)
    of = {place: torch.stack(columns, dim=1) if columns else empty for place, columns in found.items()}  # [layers, n]
    judged = {span: torch.cat([of[span, "kept"], of[span, "exchanged"]], dim=1) for span in widths}
    by_layer = {
        str(layer): {
            "horizon": _horizon({span: change[layer] for span, change in judged.items()}, tolerance),
            "change": [_median(of[span, "kept"][layer]) for span in widths],
            "exchange": [_median(of[span, "exchanged"][layer]) for span in widths],
        }
        for layer in range(layers)
    }
    rows = [
        {
            "tokens": span,
            "change": _median(of[span, "kept"][-1]),
            "exchange": _median(of[span, "exchanged"][-1]),
            "distinguished": _share(judged[span][-1], tolerance),
            "change_all": _median(of[span, "all"][-1]),
            "distinguished_all": _share(of[span, "all"][-1], tolerance),
        }
        for span in widths
    ]
    last = by_layer[str(layers - 1)]
    return {
        "length": length,
        "sequences": len(tokens_SL),
        "spans": rows,
        "horizon": last["horizon"],
        "layers": by_layer,
    }


def _horizon(by_span: dict[int, Tensor], tolerance: float) -> int:
    """1 is none: a token by itself has one order."""
    horizon = 1
    for span, change in by_span.items():
        if len(change) and not bool((change > tolerance).all()):
            break
        horizon = span if len(change) else horizon
    return horizon


def _median(change: Tensor) -> float | None:
    return float(change.median()) if len(change) else None


def _share(change: Tensor, tolerance: float) -> float | None:
    return float((change > tolerance).float().mean()) if len(change) else None


def table(figures: dict[str, Any]) -> str:
    """A line a span, and the horizon of each layer."""
    columns = {
        "last tokens": ("tokens", "{:,}"),
        "change": ("change", "{:.3g}"),
        "oldest two exchanged": ("exchange", "{:.3g}"),
        "told apart": ("distinguished", "{:.0%}"),
        "last moved too": ("change_all", "{:.3g}"),
        "told apart ": ("distinguished_all", "{:.0%}"),
    }
    lines = ["  ".join(f"{title:>11}" for title in columns)]
    for row in figures["spans"]:
        cells = ("–" if row[key] is None else form.format(row[key]) for key, form in columns.values())
        lines.append("  ".join(f"{cell:>{max(11, len(title))}}" for title, cell in zip(columns, cells, strict=True)))
    by_layer = ", ".join(f"{layer}: {values['horizon']:,}" for layer, values in figures["layers"].items())
    lines.append(f"horizon in tokens, after each layer: {by_layer}")
    return "\n".join(lines)


def draw(figures: dict[str, Any], path: Path) -> None:
    """Writes the picture (PNG, SVG or PDF): the change by span, a line a layer, and each layer's horizon."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    tokens = [row["tokens"] for row in figures["spans"]]
    colours = plt.get_cmap("viridis")
    count = len(figures["layers"])
    for layer, values in figures["layers"].items():
        points = [(x, y) for x, y in zip(tokens, values["exchange"], strict=True) if y]  # 0 has no logarithm
        shade = colours(0.9 * int(layer) / max(1, count - 1))
        if points:
            left.plot(*zip(*points, strict=True), marker="o", markersize=3, color=shade, label=f"after layer {layer}")
    left.axhline(figures["tolerance"], color="grey", linestyle=":", label="tolerance")
    left.set_xscale("log", base=2)
    left.set_yscale("log")
    left.set(xlabel="tokens back at which two are exchanged", ylabel="relative change of the last state, median")
    left.grid(alpha=0.3)
    left.legend(fontsize="x-small", ncols=2)
    horizons = [values["horizon"] for values in figures["layers"].values()]
    right.plot(range(count), horizons, marker="o", color="#0072B2")
    right.set_yscale("log", base=2)
    right.set(xlabel="layer", ylabel="order horizon in tokens", ylim=(0.9, 1.15 * figures["length"]))
    right.xaxis.get_major_locator().set_params(integer=True)
    right.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)


@command
def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    assert __doc__
    parser = argparse.ArgumentParser(
        prog="farsight order-awareness",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", type=Path, help="model directory, adapter or checkpoint")
    add_text_options(parser, SEQUENCES)
    parser.add_argument(
        "--permutations",
        type=positive,
        default=PERMUTATIONS,
        metavar="N",
        help="of each kind, span and sequence (%(default)s)",
    )
    parser.add_argument(
        "--tolerance", type=bounded(float, above=0), default=TOLERANCE, metavar="X", help="relative (%(default)g)"
    )
    add_model_options(parser)
    add_output_options(parser)
    options = parser.parse_args(arguments)
    check_outputs(parser, options)
    if options.data is None:
        parser.error("the following arguments are required: --data")
    if options.dtype is not None:
        parser.error(
            f"--dtype {options.dtype}: the model is read in double precision whatever it was kept in; leave it out"
        )
    options.dtype = "float32"  # as it is kept, to be read in double precision
    loaded = load(options.model, options)
    length = options.length or loaded.trained_length
    if length < 2:
        raise ConfigError(f"--length {length}: a sequence of one token has one order; set 2 or more.")
    tokens_SL = read_sequences(options.data, loaded.tokenizer, length, options.sequences)
    figures = {
        "tool": "analysis.order_awareness",
        "model": str(options.model),
        "data": str(options.data),
        **{name: getattr(options, name) for name in ("permutations", "tolerance", "seed", "extend")},
        **measure(loaded, tokens_SL, options.permutations, options.tolerance, options.seed),
    }
    print(table(figures))
    if options.json:
        write_figures(options.json, {str(options.model): figures})
    if options.picture:
        draw(figures, options.picture)
        print(options.picture)


if __name__ == "__main__":
    main()
