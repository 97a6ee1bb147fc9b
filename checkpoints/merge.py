"""Merges an adapter into its base: a model directory that needs no adapter.

    farsight merge runs/my_finetune/adapter --out merged
    farsight merge runs/my_finetune/adapter --out merged --drop-garfa --data text.txt --json merge.json

LoRA was trained beside the base as it was kept: quantised. So it is added to the weights that quantising and reading back
leaves ("dequantized", the default), which gives the model that was trained; "original" adds it to the base's own weights,
which are not those it was trained beside. What GARFA learned goes into config.json, and the directory carries its modelling
file; --drop-garfa leaves it out, for programs that know no such model, and says what that changed.

The weights pass one at a time. Afterwards the merged model is compared with the adapter on its base, on a few sequences.
"""

import argparse
import gc
import json
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from farsight.checkpoints.adapter import load_adapter, read_adapter
from farsight.checkpoints.cards.model import CARD
from farsight.checkpoints.model_dir.api import check_model_out, load_model, write_model_dir
from farsight.checkpoints.model_dir.safetensors_files import TensorReader
from farsight.cli import add_device_option, command
from farsight.configs.json_files import read_object
from farsight.configs.load import ConfigError
from farsight.data.sources.files import stdlib_files
from farsight.data.texts import encode_file, read_texts
from farsight.data.tokenizers.tokenizer import load_tokenizer_dir
from farsight.files import check_new_folder, prepare_file, write_text
from farsight.model.adapt.lora import ADAPTER, merged_weight
from farsight.model.adapt.quantized import dequantize
from farsight.model.build import build_model
from farsight.model.llama import Llama
from farsight.parallel.device import default_device
from farsight.progress import progress

Into = Literal["dequantized", "original"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SEQUENCES, LENGTH, DROP_LENGTH = 4, 256, 2048
"""What models are compared on; the last is the most where GARFA is dropped."""


def merge_adapter(
    directory: Path,
    out: Path,
    base: Path | None = None,
    into: Into = "dequantized",
    dtype: torch.dtype | None = None,
    drop_garfa: bool = False,
    device: torch.device | str = "cpu",
    other_base: bool = False,
) -> None:
    """Writes the model directory; it appears whole or not at all, in place of an older one of ours.

    Args:
        base: the base's directory, in place of the one that the adapter was trained beside.
        into: what LoRA is added to: the weights as training kept them, or the base's own.
        dtype: of the weights written; None takes that of the training.
        drop_garfa: leave out GARFA, the base's own too, which makes it another model.
        device: where weights are quantised; bitsandbytes may round otherwise on another.
        other_base: take a base that it was not trained beside, too.

    Raises:
        ConfigError: an adapter or base that does not fit, or weights that are not finite.
        UserError: as `check_model_out`.
    """
    check_model_out(out)
    adapter = read_adapter(directory)
    if out.resolve() in (directory.resolve(), Path(base or adapter.base.path).resolve()):
        raise ConfigError(f"{out} is what is read here; name a new folder.")
    whole = adapter.config().position.garfa
    has_garfa = whole is not None and bool(whole.layers)
    if drop_garfa and not has_garfa:
        raise ConfigError(f"--drop-garfa: {directory} has no GARFA, nor has its base; leave it out.")
    config, read_base = adapter.config(garfa=not drop_garfa), TensorReader(adapter.base_files(base, other_base))
    lora: dict[str, dict[str, Tensor]] = {}
    for name, tensor in adapter.lora_tensors.items():
        linear, _, part = name.removesuffix(f".{ADAPTER}.weight").partition(".lora_")
        lora.setdefault(linear, {})["magnitude" if part == "magnitude_vector" else part] = tensor

    def read(name: str) -> Tensor:
        if name in adapter.layer_tensors:
            return adapter.layer_tensors[name]
        weight = read_base(name)
        if into == "dequantized":
            quantized = name.startswith("layers.") and weight.dim() == 2
            kept = getattr(torch, adapter.base.dtype)
            weight = dequantize(weight.to(device), adapter.base).cpu() if quantized else weight.to(kept)
        linear = name.removesuffix(".weight")
        return merged_weight(weight, lora[linear], adapter.scaling(linear)) if linear in lora else weight

    with torch.device("meta"):
        tensors = dict(build_model(config).named_parameters())
    # A file of the base is opened once: they are written in the order in which they lie there.
    order = sorted(tensors, key=lambda name: str(read_base.files[name]))
    history = [dict(entry) for entry in adapter.history]
    if history:
        garfa = {True: "dropped", False: "kept"}[drop_garfa] if has_garfa else "none"
        history[-1]["merged"] = {"into": into, "garfa": garfa}
    with tempfile.TemporaryDirectory() as tokenizer:
        load_tokenizer_dir(directory).save(tokenizer)
        write_model_dir(
            out, config, {name: tensors[name] for name in order}, read, Path(tokenizer),
            dtype or getattr(torch, adapter.base.dtype), history=history,
        )  # fmt: skip
    read_base.close()


# ── What it changed ───────────────────────────────────────────────────────────────────────────────────


def sample(directory: Path, data: Path | None, length: int) -> Tensor:
    """[rows, tokens] ids to compare models on: of a file, or of the standard library's sources.

    Raises:
        ConfigError: a file without a sequence of that length.
    """
    tokenizer = load_tokenizer_dir(directory)
    if data is not None:
        documents = encode_file(data, tokenizer)
    else:
        # Every twelfth of the files large enough, read no further than needed.
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
    """fp32 [B, L, V] of a model that is loaded for it and let go."""
    model, _ = load()
    device = next(model.parameters()).device
    with torch.no_grad():
        rows = progress(rows_BL, desc="compare", unit="sequence")
        logits = torch.cat([model(row[None].to(device)).float().cpu() for row in rows])
    del model
    gc.collect()
    return logits


def difference(found: Tensor, expected: Tensor, rows_BL: Tensor) -> dict[str, float]:
    """What another model's logits [B, L, V] are off by: ‖Δ‖ / ‖expected‖, KL(expected ‖ found) in nats a token, and the
    mean losses of both."""
    kl, nll = 0.0, [0.0, 0.0]
    for row_L, p_LV, q_LV in zip(rows_BL, expected, found, strict=True):
        # Few tokens at a time: a vocabulary's logits in fp64 are large.
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
    """The merged model against the adapter on its base, and where GARFA was dropped, what that changed."""
    adapter = read_adapter(directory)
    dtype = torch.float32 if torch.device(device).type == "cpu" else None  # bf16 is slow there
    length = min(LENGTH, adapter.trained_length)
    if drop_garfa:  # which turns keys the farther, the later they stand: so on what was trained on
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


@command
def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="farsight merge", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("adapter", type=Path, help="adapter directory of a fine-tuning run")
    parser.add_argument("--out", type=Path, required=True, help="model directory to write")
    parser.add_argument("--base", type=Path, metavar="DIR", help="the base's directory (default: as the adapter says)")
    parser.add_argument(
        "--other-base", action="store_true", help="take a base that the adapter was not trained beside, too"
    )
    parser.add_argument(
        "--into",
        choices=["dequantized", "original"],
        default="dequantized",
        help="weights that LoRA is added to: as training kept them, or the base's own",
    )
    parser.add_argument("--dtype", choices=DTYPES, help="of the weights written (default: that of the training)")
    parser.add_argument("--drop-garfa", action="store_true", help="leave out GARFA, the base's own too: another model")
    parser.add_argument("--data", type=Path, metavar="FILE", help="text to compare on (default: the standard library)")
    parser.add_argument("--no-check", action="store_true", help="do not compare")
    add_device_option(parser)
    parser.add_argument("--json", type=Path, metavar="F", help="write the figures here too")
    options = parser.parse_args(arguments)
    device = options.device or default_device()
    if options.no_check and (options.data or options.drop_garfa):
        parser.error("--no-check does not go with --data, and --drop-garfa has to say what it changed")
    check_new_folder(options.out)
    if options.json:
        prepare_file(options.json)
    if options.data is not None:
        read_texts(options.data)  # before the weights are
    figures: dict[str, Any] = {
        "adapter": str(options.adapter), "out": str(options.out), "into": options.into,
        "garfa": "dropped" if options.drop_garfa else "kept",
    }  # fmt: skip
    merge_adapter(
        options.adapter, options.out, options.base, options.into, DTYPES.get(options.dtype), options.drop_garfa, device,
        options.other_base,
    )  # fmt: skip
    if not options.no_check:
        figures |= compare(
            options.adapter, options.out, options.base, options.data, options.drop_garfa, device, options.other_base
        )
    said = report(figures)
    if said:
        with (options.out / CARD).open("a", encoding="utf-8") as card:
            card.write("\n## What merging changed\n\n" + "\n\n".join(said) + "\n")
    print(*said, options.out, sep="\n")
    if options.json:
        write_text(options.json, json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
