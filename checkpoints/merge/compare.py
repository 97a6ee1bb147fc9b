"""Compares a merged model with the adapter on its base."""

import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from farsight.checkpoints.adapter.config import read_adapter
from farsight.checkpoints.adapter.load import load_adapter
from farsight.checkpoints.load import load_model
from farsight.data.sources.files import stdlib_files
from farsight.data.texts import encode_file
from farsight.data.tokenizers.tokenizer import load_tokenizer_dir
from farsight.errors import ConfigError
from farsight.json_files import read_object
from farsight.model.llama import Llama
from farsight.progress import progress

SEQUENCES, LENGTH, DROP_LENGTH = 4, 256, 2048
"""Size of the comparison; `DROP_LENGTH` is the longest sequence when GARFA is dropped."""


def sample(directory: Path, data: Path | None, length: int) -> Tensor:
    """Token ids [rows, length] to compare models on: from a file, or from the standard library's sources.

    Raises:
        ConfigError: the file has no document of that length.
    """
    tokenizer = load_tokenizer_dir(directory)
    if data is not None:
        documents = encode_file(data, tokenizer)
    else:
        # Large files among every twelfth one, each read only as far as needed.
        texts = (path.read_text(encoding="utf-8", errors="replace") for _, path in stdlib_files()[::12])
        large = (text[: 40 * length] for text in texts if len(text) >= 40 * length)
        documents = [torch.tensor(tokenizer.encode(text)) for _, text in zip(range(SEQUENCES), large, strict=False)]
    rows = [document[:length] for document in documents if len(document) >= length][:SEQUENCES]
    if not rows:
        raise ConfigError(
            f"{data or 'the sample'} has no document of {length} tokens or more; name a longer text in --data."
        )
    return torch.stack(rows)


def logits_of(load: Callable[[], tuple[Llama, Any]], rows_BL: Tensor) -> Tensor:
    """Logits fp32 [B, L, V] of a model that is loaded for this call and released."""
    model, _ = load()
    device = next(model.parameters()).device
    with torch.no_grad():
        rows = progress(rows_BL, desc="compare", unit="sequence")
        logits = torch.cat([model(row[None].to(device)).float().cpu() for row in rows])
    del model
    gc.collect()
    return logits


def difference(found: Tensor, expected: Tensor, rows_BL: Tensor) -> dict[str, float]:
    """Deviation of a model's logits [B, L, V]: ‖Δ‖ / ‖expected‖, KL(expected ‖ found) in nats per token, and both models'
    mean losses."""
    kl, nll = 0.0, [0.0, 0.0]
    for row_L, p_LV, q_LV in zip(rows_BL, expected, found, strict=True):
        # A few tokens at a time: fp64 logits over the vocabulary are large.
        parts = zip(*(x.split(LENGTH) for x in (row_L[1:], p_LV[:-1], q_LV[:-1])), strict=True)
        for following, p, q in parts:
            log_p, log_q = p.double().log_softmax(-1), q.double().log_softmax(-1)
            kl += float((log_p.exp() * (log_p - log_q)).sum())
            nll = [n - float(x.gather(-1, following[:, None]).sum()) for n, x in zip(nll, (log_p, log_q), strict=True)]
    tokens = rows_BL[:, 1:].numel()
    return {
        "relative_logit_change": float((found - expected).norm() / expected.norm()),
        "kl": kl / tokens,
        "loss_before": nll[0] / tokens,
        "loss_after": nll[1] / tokens,
    }


def compare(
    directory: Path,
    out: Path,
    base: Path | None,
    data: Path | None,
    drop_garfa: bool,
    device: torch.device | str,
    other_base: bool = False,
) -> dict[str, Any]:
    """Compares the merged model with the adapter on its base, and with GARFA dropped also the effect of that."""
    adapter = read_adapter(directory)
    dtype = torch.float32 if torch.device(device).type == "cpu" else None  # bf16 is slow there
    length = min(LENGTH, adapter.trained_length)
    if drop_garfa:  # its effect grows with position, so compare at the length of training
        trained = adapter.history[-1]["seq_len"] if adapter.history else adapter.trained_length
        length = min(DROP_LENGTH, trained, adapter.trained_length)
    rows = sample(directory, data, length)
    figures: dict[str, Any] = {"tokens": rows.numel(), "length": length, "text": str(data or "standard library")}
    load = partial(load_adapter, directory, base, device, dtype=dtype, other_base=other_base)
    same = logits_of(partial(load, garfa=not drop_garfa), rows)
    merged = logits_of(lambda: load_model(out, device=device, dtype=dtype or _written(out)), rows)
    figures["merge"] = difference(merged, same, rows)
    del merged
    if drop_garfa:
        figures["drop_garfa"] = difference(same, logits_of(load, rows), rows)
    return figures


def _written(out: Path) -> torch.dtype:
    return getattr(torch, read_object(out / "config.json")["dtype"])


def report(figures: dict[str, Any]) -> list[str]:
    """The figures in sentences."""
    lines = []
    for name, what in (("merge", "Merging"), ("drop_garfa", "Leaving out GARFA")):
        if name in figures:
            f = figures[name]
            lines.append(
                f"{what} changed logits by {f['relative_logit_change']:.2g} of their norm, KL {f['kl']:.2g} nats a token, "
                f"mean loss {f['loss_before']:.4f} → {f['loss_after']:.4f} ({figures['tokens']:,} tokens in sequences of "
                f"{figures['length']:,}, {figures['text']})."
            )
    return lines
