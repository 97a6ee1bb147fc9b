"""Trains and tests position probes on the layers of a model."""

import argparse
import dataclasses
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from farsight.analysis.probes.position_probe import (
    bucket_edges,
    draw_positions,
    guess_error,
    mean_by_bucket,
    split_sequences,
    train_probes,
)
from farsight.analysis.probes.settings import ProbeSettings
from farsight.analysis.sequences import sequences_from_options, text_settings
from farsight.inference.loading import LoadedModel, load
from farsight.inference.model_options import reading_options
from farsight.model.llama import Llama
from farsight.progress import progress
from farsight.remote import shown


@contextmanager
def layer_outputs(model: Llama) -> Iterator[list[list[Tensor]]]:
    """Collects the first block's input and each block's output inside this context: a list for each, with one entry per call."""
    blocks = list(model.layers.values())
    found: list[list[Tensor]] = [[] for _ in range(len(blocks) + 1)]

    def keep_input(_: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        found[0].append(inputs[0] if inputs else named["hidden_states"])

    hooks = [blocks[0].register_forward_pre_hook(keep_input, with_kwargs=True)]
    for kept, block in zip(found[1:], blocks, strict=True):
        hooks.append(block.register_forward_hook(lambda _, inputs, output, kept=kept: kept.append(_hidden(output))))
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _hidden(output: Tensor | tuple[Tensor, ...]) -> Tensor:
    """A block's hidden states; some blocks of transformers return attention weights beside them."""
    return output if isinstance(output, Tensor) else output[0]


def read_layers(loaded: LoadedModel, tokens_L: Tensor, positions_t: Tensor) -> Tensor:
    """Hidden states of some tokens of a sequence, in order: [layers + 1, t, D], starting with the embedding."""
    kept, first = [], 0
    with torch.no_grad(), layer_outputs(loaded.decoder.model) as found:
        # Chunk by chunk, so that full layer outputs are held for one chunk only.
        for h_BLD in loaded.decoder.start([len(tokens_L)]).chunks(tokens_L[None]):
            stop = first + h_BLD.shape[1]
            here_t = positions_t[(positions_t >= first) & (positions_t < stop)] - first
            kept.append(torch.stack([outputs.pop()[0].to(here_t.device)[here_t] for outputs in found]))
            first = stop
    return torch.cat(kept, dim=1)


def probe_model(loaded: LoadedModel, tokens_SL: Tensor, settings: ProbeSettings) -> dict[str, Any]:
    """Trains and tests the probes of a model's layers.

    Args:
        tokens_SL: sequences of `settings.length` tokens.

    Returns:
        The model's entry in `--json`.

    Raises:
        ConfigError: fewer than two sequences.
    """
    assert tokens_SL.shape[1] == settings.length
    sequences = len(tokens_SL)
    trained, tested = split_sequences(sequences, settings.held_out, settings.seed)
    device = next(loaded.decoder.model.parameters()).device
    positions_St = draw_positions(sequences, settings).to(device)
    kept = positions_St.shape[1]
    every_ATD = torch.empty(0)
    for place, number in enumerate(progress([*trained.tolist(), *tested.tolist()], unit="sequence", desc="read")):
        h_AtD = read_layers(loaded, tokens_SL[number].to(device), positions_St[number])
        if not place:  # one tensor from the start, as joining parts would take their memory twice
            every_ATD = h_AtD.new_empty(len(h_AtD), sequences * kept, h_AtD.shape[-1])
        every_ATD[:, place * kept : (place + 1) * kept] = h_AtD
    learnt_ATD, unseen_ATD = every_ATD.split([len(trained) * kept, len(tested) * kept], dim=1)
    learnt_T, unseen_T = positions_St[trained.to(device)].flatten(), positions_St[tested.to(device)].flatten()
    total = settings.epochs * len(learnt_T)
    with progress(total=total, unit="token", desc="train") as bar:
        probes = train_probes(learnt_ATD, learnt_T, settings, bar.update)
    distance_AT = (probes.predict(unseen_ATD) - unseen_T).abs()
    errors = distance_AT.double().mean(dim=1).tolist()
    map_AB = mean_by_bucket(distance_AT, unseen_T, settings).tolist()
    return {
        "tool": "analysis.probes",
        "model": shown(loaded.path),
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


def probe_from_options(path: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Loads the model directory `path` and probes it with the command line's options."""
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
    tokens_SL = sequences_from_options(options, loaded.tokenizer, settings.length)
    return {
        **probe_model(loaded, tokens_SL, settings),
        **reading_options(options),
        **text_settings(options),
    }
