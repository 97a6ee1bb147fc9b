"""Speed of our trainer compared with torchtitan's own, on the same model, weights and tokens.

    python -m benchmarks.train_step [--json F]

The model is torchtitan's llama3 `debugmodel` (256 wide, 6 layers, 16 heads, llama3-scaled RoPE, dense attention) at a
sequence length of 2048. Each trainer runs in its own process, as for its users. They alternate steps, the others waiting,
and start from the same weights. Figures count only if the losses agree on every step.

On a CPU, ours makes the C library keep freed memory for the next step. A second torchtitan does so too, to separate that
effect from the rest.
"""

import contextlib
import dataclasses
import multiprocessing
import statistics
import sys
import tempfile
import time
import types
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
import torchtitan
from safetensors.torch import load_file, save_file
from torchtitan.config import JobConfig as TitanConfig
from torchtitan.protocols.train_spec import get_train_spec, register_train_spec
from torchtitan.train import Trainer as TitanTrainer
from tqdm import tqdm

from farsight.cli import command, new_parser, positive
from farsight.configs.load import build_config
from farsight.data.packing import Packed
from farsight.outputs import add_json_option, write_json
from farsight.parallel.device import prepare_device, total_memory
from farsight.training.logs import start_logging
from farsight.training.trainer import Trainer

TITAN, TITAN_KEEPING, FARSIGHT = "torchtitan", "torchtitan, keeping memory", "farsight"
VOCAB = 2048
WARM_UP = 2
TOLERANCE = 1e-4
"""Relative. The two sum in different orders."""


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
    skipped: ClassVar[dict[str, Any]] = {}
    packed: ClassVar[Packed] = Packed()
    micro_batches_per_step = 1

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        positions = torch.arange(self.seq_len, dtype=torch.int32)[None].expand(self.rows, -1)
        for inputs, labels in super().__iter__():
            yield {**inputs, "positions": positions, "document_starts": torch.zeros_like(positions)}, labels

    def close(self) -> None:
        pass


class _OnSameBatches(Trainer):
    """Ours, unchanged except for its batches."""

    def _build_loader(self) -> _OurBatches:
        t = self.config.training
        return _OurBatches(t.local_batch_size, t.seq_len)


def _recorded(trainer: Any, name: str, losses: list[float], batches: Iterator[Any]) -> Iterator[Any]:
    run = getattr(trainer, name)

    def recording(*arguments: Any, **named: Any) -> torch.Tensor:
        loss = run(*arguments, **named)
        losses.append(float(loss.detach()))
        return loss

    setattr(trainer, name, recording)
    return batches


def _titan_on_a_cpu() -> None:
    """Without an accelerator torchtitan 0.2.2 assumes "cuda", in names that each of its modules has imported. In this process,
    which runs nothing else, they get the CPU, and the functions of a device module that `torch.cpu` lacks."""
    device = types.SimpleNamespace(
        **{name: getattr(torch.cpu, name) for name in dir(torch.cpu) if not name.startswith("_")}
        | {
            "set_device": lambda device: None,
            "current_device": lambda: 0,
            "get_device_name": lambda device=None: "CPU",
            "get_device_properties": lambda device=None: types.SimpleNamespace(total_memory=total_memory()),
            "memory_stats": lambda device=None: {},
            "reset_peak_memory_stats": lambda device=None: None,
            "empty_cache": lambda: None,
            "synchronize": lambda device=None: None,
        }
    )
    for name, module in list(sys.modules.items()):
        if name.startswith("torchtitan.") and hasattr(module, "device_type"):
            vars(module).update({"device_type": "cpu", "device_module": device})


def titan_trainer(rows: int, seq_len: int, folder: str, dtype: Literal["float32", "bfloat16"]) -> TitanTrainer:
    """torchtitan's trainer, unchanged except for its batches."""
    if not torch.accelerator.is_available():
        _titan_on_a_cpu()
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
    config.training.mixed_precision_param = dtype
    config.activation_checkpoint.mode = "none"
    config.lr_scheduler.warmup_steps = 2
    config.metrics.log_freq = 1
    config.debug.seed = 0
    return TitanTrainer(config)


def our_trainer(rows: int, seq_len: int, folder: str, dtype: Literal["float32", "bfloat16"]) -> Trainer:
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
        "metrics": {"log_freq": 1, "trackers": []},
    }  # fmt: skip
    return _OnSameBatches(build_config(values))


def load_titan_weights(model: torch.nn.Module, file: Path) -> None:
    """Gives our model torchtitan's weights, reordered: torchtitan rotates neighbouring pairs where we rotate halves."""
    theirs = load_file(file)
    for name, parameter in model.named_parameters():
        weight = theirs[name]
        if name.endswith(("wq.weight", "wk.weight")):
            weight = weight.unflatten(0, (-1, 8, 2)).transpose(1, 2).flatten(0, 2)
        with torch.no_grad():
            parameter.copy_(weight)


def work(
    name: str, rows: int, seq_len: int, folder: str, dtype: Literal["float32", "bfloat16"], pipe: Connection
) -> None:
    """One trainer's process. For every True that arrives, it takes a step and answers with its seconds and loss."""
    start_logging()
    prepare_device(keep_memory=name != TITAN)
    weights = Path(folder, "weights.safetensors")
    trainer: Any
    if name == FARSIGHT:
        trainer = our_trainer(rows, seq_len, folder, dtype)
        load_titan_weights(trainer.model_parts[0], weights)
    else:
        trainer = titan_trainer(rows, seq_len, folder, dtype)
        if not weights.exists():
            save_file(dict(trainer.model_parts[0].named_parameters()), weights)
    losses: list[float] = []
    if name == FARSIGHT:
        batches = _recorded(trainer, "forward_backward", losses, trainer.micro_batches())
    else:
        batches = trainer.batch_generator(trainer.dataloader)
        batches = _recorded(trainer, "forward_backward_step", losses, batches)
    pipe.send(torch.get_num_threads())
    while pipe.recv():
        trainer.step += 1
        started = time.perf_counter()
        trainer.train_step(batches)
        pipe.send((time.perf_counter() - started, losses[-1]))
    trainer.close()
    torch.distributed.destroy_process_group()


def measure(rounds: int, rows: int, seq_len: int, dtype: Literal["float32", "bfloat16"]) -> dict[str, Any]:
    """Alternates `rounds` steps of each. The first ones fill the allocators; their losses are compared but they are not timed."""
    names = (TITAN, TITAN_KEEPING, FARSIGHT)
    speeds: dict[str, list[float]] = {name: [] for name in names}
    losses: dict[str, list[float]] = {name: [] for name in names}
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        pipes, threads = {}, 0
        for name in names:  # one after the other: ours reads the weights that the first has written
            pipes[name], theirs = context.Pipe()
            worker = context.Process(target=work, args=(name, rows, seq_len, folder, dtype, theirs), daemon=True)
            worker.start()
            stack.callback(worker.join, 30)
            theirs.close()
            threads = pipes[name].recv()
        for step in tqdm(range(WARM_UP + rounds), unit="round", disable=not sys.stderr.isatty()):
            for name in sorted(names, reverse=step % 2 == 1):
                pipes[name].send(True)
                seconds, loss = pipes[name].recv()
                losses[name].append(loss)
                if step >= WARM_UP:
                    speeds[name].append(rows * seq_len / seconds)
            expected = losses[TITAN][-1]
            for name in names:
                if abs(losses[name][-1] - expected) > TOLERANCE * abs(expected):
                    raise RuntimeError(
                        f"step {step + 1}: the losses of {TITAN} and {name} are {expected} and {losses[name][-1]}, "
                        f"which differ by more than {TOLERANCE:g} relative"
                    )
        for pipe in pipes.values():
            pipe.send(False)
    results = [
        {
            "what": name,
            "tokens_per_second": statistics.median(speeds[name]),
            "spread": max(speeds[name]) - min(speeds[name]),
            "ratio": statistics.median(speeds[FARSIGHT]) / statistics.median(speeds[name]),
            # Within a round: a slowdown of the machine affects both steps.
            "paired_ratio": statistics.median(a / b for a, b in zip(speeds[FARSIGHT], speeds[name], strict=True)),
            "losses": losses[name],
        }
        for name in names
    ]
    shape = {"seq_len": seq_len, "batch": rows, "dtype": dtype, "rounds": rounds}
    versions = {"torch": torch.__version__, "torchtitan": torchtitan.__version__, "threads": threads}
    return {"rows": results, "ratio": results[0]["ratio"], **shape, **versions}


@command
def main(arguments: list[str] | None = None) -> None:
    parser = new_parser("python -m benchmarks.train_step", __doc__)
    parser.add_argument("--rounds", type=positive, default=5, help="steps of each trainer that are timed (default: 5)")
    parser.add_argument("--rows", type=positive, default=2, help="sequences in a batch (default: 2)")
    parser.add_argument("--seq-len", type=positive, default=2048)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of the matrix products")
    add_json_option(parser)
    options = parser.parse_args(arguments)
    result = measure(options.rounds, options.rows, options.seq_len, options.dtype)
    print(f"{'':<32}tokens/s   spread   Farsight is   round by round")
    for row in result["rows"]:
        print(
            f"{row['what']:<28}{row['tokens_per_second']:>12,.0f}{row['spread']:>9,.0f}"
            f"{row['ratio']:>13.3f}x{row['paired_ratio']:>15.3f}x"
        )
    print(f"medians of {options.rounds}; losses equal to {TOLERANCE:g}")
    write_json(options.json, result)


if __name__ == "__main__":
    main()
