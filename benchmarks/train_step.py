"""Speed of our trainer beside torchtitan's own, on the same model, weights and tokens.

    python -m benchmarks.train_step [--json F]

The model is torchtitan's llama3 `debugmodel` (256 wide, 6 layers, 16 heads, llama3-scaled RoPE, dense attention) at a
sequence length of 2048. Both trainers live in one process, start from the same weights and take the same steps in
turn; figures count only if their losses agree on every step.
"""

import argparse
import dataclasses
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torchtitan
from torchtitan.config import JobConfig as TitanConfig
from torchtitan.protocols.train_spec import get_train_spec, register_train_spec
from torchtitan.train import Trainer as TitanTrainer
from tqdm import tqdm

import train
from configs.load import build_config
from parallel.device import prepare_device

VOCAB = 2048
TOLERANCE = 1e-4
"""Relative; the two sum in different orders."""


class _Batches:
    """The same random tokens for both trainers, one document a row."""

    def __init__(self, rows: int, seq_len: int) -> None:
        self.rows, self.seq_len = rows, seq_len

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        generator = torch.Generator().manual_seed(0)
        while True:
            tokens = torch.randint(VOCAB, (self.rows, self.seq_len + 1), generator=generator)
            yield {"input": tokens[:, :-1].contiguous()}, tokens[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


class _OurBatches(_Batches):
    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        positions = torch.arange(self.seq_len, dtype=torch.int32)[None].expand(self.rows, -1)
        for inputs, labels in super().__iter__():
            yield {**inputs, "positions": positions, "document_starts": torch.zeros_like(positions)}, labels


def titan_trainer(rows: int, seq_len: int, folder: str, dtype: str) -> TitanTrainer:
    """torchtitan's trainer, as it comes but for the batches."""
    spec = get_train_spec("llama3")
    register_train_spec(
        "llama3_same_batches",
        dataclasses.replace(
            spec,
            build_dataloader_fn=lambda **_: _Batches(rows, seq_len),
            build_tokenizer_fn=None,
            build_validator_fn=None,
        ),
    )
    config = TitanConfig()
    config.model.name, config.model.flavor = "llama3_same_batches", "debugmodel"
    config.job.dump_folder = folder
    config.training.local_batch_size, config.training.seq_len, config.training.steps = rows, seq_len, 1000
    config.training.mixed_precision_param = dtype  # type: ignore[assignment]
    config.activation_checkpoint.mode = "none"
    config.lr_scheduler.warmup_steps = 2
    config.metrics.log_freq = 1
    config.debug.seed = 0
    return TitanTrainer(config)


def our_trainer(rows: int, seq_len: int, folder: str, dtype: str) -> train.Trainer:
    """Ours, with the same shape, optimizer and schedule."""
    values = {
        "architecture": {
            "vocab_size": VOCAB, "dim": 256, "n_layers": 6, "n_heads": 16, "n_kv_heads": 16, "head_dim": 16, "ffn_dim": 768,
        },
        "position": {"rotary": {"kind": "llama3", "theta": 500000.0}},
        "tokenizer": {"kind": "bytes"},
        "data": {"mask_documents": False},
        "job": {"dump_folder": folder},
        "training": {
            "local_batch_size": rows, "seq_len": seq_len, "steps": 1000, "mixed_precision_param": dtype,
        },
        "activation_checkpoint": {"mode": "none"},
        "lr_scheduler": {"warmup_steps": 2},
        "checkpoint": {"enable": False},
        "validation": {"enable": False},
        "metrics": {"log_freq": 1, "enable_tensorboard": False},
    }  # fmt: skip
    build_loader = train.build_loader
    train.build_loader = lambda *_: _OurBatches(rows, seq_len)  # type: ignore[assignment]
    try:
        return train.Trainer(build_config(values))
    finally:
        train.build_loader = build_loader


def copy_weights(source: TitanTrainer, target: train.Trainer) -> None:
    """Gives our model torchtitan's weights: it rotates neighbouring pairs where we rotate halves."""
    theirs = source.model_parts[0].state_dict()
    for name, parameter in target.model_parts[0].named_parameters():
        weight = theirs[name]
        if name.endswith(("wq.weight", "wk.weight")):
            weight = weight.unflatten(0, (-1, 8, 2)).transpose(1, 2).flatten(0, 2)
        with torch.no_grad():
            parameter.copy_(weight)


def measure(rounds: int, rows: int, seq_len: int, dtype: str) -> dict[str, Any]:
    """Takes `rounds` steps of each in turn, after one that counts for correctness only."""
    train.start_logging()
    prepare_device()
    tokens = rows * seq_len
    losses: dict[str, list[float]] = {"torchtitan": [], "farsight": []}
    with tempfile.TemporaryDirectory() as folder:
        trainers: dict[str, Any] = {
            "torchtitan": titan_trainer(rows, seq_len, folder, dtype),
            "farsight": our_trainer(rows, seq_len, folder, dtype),
        }
        copy_weights(trainers["torchtitan"], trainers["farsight"])
        iterators = {name: t.batch_generator(t.dataloader) for name, t in trainers.items()}
        for name, trainer in trainers.items():
            _record_losses(trainer, losses[name])
        speeds: dict[str, list[float]] = {name: [] for name in trainers}
        for step in tqdm(range(rounds + 1), unit="round", disable=not sys.stderr.isatty()):
            # Who goes first alternates: what one leaves in caches and allocator is the other's to find.
            for name, trainer in sorted(trainers.items(), reverse=step % 2 == 1):
                trainer.step += 1
                started = time.perf_counter()
                trainer.train_step(iterators[name])
                if step:
                    speeds[name].append(tokens / (time.perf_counter() - started))
            ours, theirs = losses["farsight"][-1], losses["torchtitan"][-1]
            if abs(ours - theirs) > TOLERANCE * abs(theirs):
                raise RuntimeError(
                    f"step {step}: losses {ours} and {theirs} differ by more than {TOLERANCE:g} relative"
                )
        for trainer in trainers.values():
            trainer.close()
        torch.distributed.destroy_process_group()
    rows_out = [
        {
            "what": name,
            "tokens_per_second": statistics.median(values),
            "spread": max(values) - min(values),
            "losses": losses[name],
        }
        for name, values in speeds.items()
    ]
    ratio = rows_out[1]["tokens_per_second"] / rows_out[0]["tokens_per_second"]
    # Of the two steps of one round: what slows the machine for a while slows both.
    paired = statistics.median(ours / theirs for theirs, ours in zip(*speeds.values(), strict=True))
    shape = {"seq_len": seq_len, "batch": rows, "dtype": dtype, "rounds": rounds}
    versions = {"torch": torch.__version__, "torchtitan": torchtitan.__version__, "threads": torch.get_num_threads()}
    return {"rows": rows_out, "ratio": ratio, "paired_ratio": paired, **shape, **versions}


def _record_losses(trainer: Any, losses: list[float]) -> None:
    run = trainer.forward_backward_step

    def recording(**arguments: Any) -> torch.Tensor:
        loss = run(**arguments)
        losses.append(float(loss.detach()))
        return loss

    trainer.forward_backward_step = recording


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.train_step",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=5, help="steps of each trainer that are timed (default: 5)")
    parser.add_argument("--rows", type=int, default=2, help="sequences in a batch (default: 2)")
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of the matrix products")
    parser.add_argument("--json", type=Path, metavar="F", help="write the figures here too")
    options = parser.parse_args(arguments)
    result = measure(options.rounds, options.rows, options.seq_len, options.dtype)
    for row in result["rows"]:
        print(f"{row['what']:<12}{row['tokens_per_second']:>12,.0f} tokens/s   spread {row['spread']:,.0f}")
    print(f"ratio {result['ratio']:.3f}   (medians of {options.rounds}, losses equal to {TOLERANCE:g})")
    print(f"ratio {result['paired_ratio']:.3f}   (median of the rounds' own ratios)")
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
