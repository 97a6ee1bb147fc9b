"""Measures how much permutations of a sequence change the last position's hidden state, layer by layer.

Shapes: S sequences, B permuted sequences, L tokens of a sequence, D model.
"""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from farsight.analysis.order_awareness.options import PERMUTATIONS, TOLERANCE
from farsight.analysis.order_awareness.permutations import oldest_exchanged, reordered, spans
from farsight.analysis.sequences import sequences_from_options, text_settings
from farsight.errors import ConfigError
from farsight.inference.decoder import Decoder
from farsight.inference.loading import LoadedModel, load
from farsight.inference.model_options import reading_options
from farsight.model.llama import Llama
from farsight.progress import progress
from farsight.remote import shown

Kind = Literal["kept", "exchanged", "all"]
"""Kinds of permutations: random with the last token kept, the two oldest tokens exchanged, random of all tokens."""


@contextmanager
def last_states(model: Llama) -> Iterator[list[Tensor]]:
    """Collects the last position's hidden states [B, D] after every block that runs inside this context."""
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
    """Relative change of the last state after each block, from one sequence to each of the others: [layers, B].

    Sequences are read one at a time, in chunks, since double precision takes enough memory already.
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
    first: int = 0,
) -> dict[str, Any]:
    """Measures changes by span and layer.

    Args:
        first: tokens at a sequence's start that no span reaches, such as a start token.

    Returns:
        "spans": [{"tokens", "change", "exchange", "distinguished", "change_all", "distinguished_all"}], after the last block.
        "change" is the median over random permutations that keep the last token, "exchange" that over exchanges of the two
        oldest, "distinguished" the share of both that was noticed; "…_all" are for random permutations of all tokens.
        "horizon"; and "layers", with each layer's horizon and changes.

    Raises:
        ConfigError: an extension that caches and rotates keys itself.
    """
    decoder, length = loaded.decoder, tokens_SL.shape[1]
    if decoder.rotates_own_keys:
        raise ConfigError(
            "--extend: this method rotates the keys again for every query, which can't be measured here; use a method that "
            "changes frequencies (linear, ntk, yarn, …)."
        )
    decoder.model.double()
    layers = decoder.config.architecture.n_layers
    generator = torch.Generator().manual_seed(seed)
    widths = spans(length - first)
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
    """The largest span up to which every change exceeds the tolerance; 1 if there is none."""
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


def measure_model(options: argparse.Namespace) -> dict[str, Any]:
    """The figures of the model that the command line names."""
    options.dtype = "float32"  # how it is loaded; `measure` converts it to double precision
    loaded = load(options.model, options)
    length = options.length or loaded.trained_length
    tokens_SL = sequences_from_options(options, loaded.tokenizer, length)
    if length - options.bos < 2:
        raise ConfigError(f"--length {length}: one token of text has one order; set {2 + options.bos} or more.")
    return {
        "tool": "analysis.order_awareness",
        "model": shown(options.model),
        "data": str(options.data),
        **{name: getattr(options, name) for name in ("permutations", "tolerance", "seed")},
        **reading_options(options),
        **text_settings(options),
        **measure(loaded, tokens_SL, options.permutations, options.tolerance, options.seed, first=int(options.bos)),
    }
