"""The cost of measuring plasticity, compared with the training steps between two measurements.

    python -m benchmarks.plasticity_metrics [--json F]

Real trainers alternate steps and measurements, in the shapes of the quickstart's stages and of one of nano's 16 layers (with a
vocabulary of bytes: per layer, training and measuring grow alike, and a larger vocabulary only adds to a step). Nano's batch is
a sixth of the recipe's; with the whole batch the share is smaller. The share of the time is for the recipes' own
`metrics.plasticity_freq`. Figures are medians.
"""

import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from farsight.analysis.plasticity.live import PlasticityMetrics
from farsight.cli import command, new_parser, positive
from farsight.configs.load import build_config, read_toml
from farsight.outputs import add_json_option, write_json
from farsight.parallel.device import prepare_device
from farsight.training.logs import start_logging
from farsight.training.trainer import Trainer

CONFIGS = Path(__file__).parent.parent / "configs"


@dataclass(frozen=True)
class Shape:
    name: str
    architecture: dict[str, Any]
    seq_len: int
    rows: int
    metrics: dict[str, Any]
    """The recipe's value."""


def shapes() -> list[Shape]:
    """The quickstart's stages, and one layer of nano."""
    quickstart, gpu = read_toml(CONFIGS / "quickstart.toml"), read_toml(CONFIGS / "recipes" / "parts" / "gpu.toml")
    tiny, layer = (read_toml(CONFIGS / "sizes" / f"{size}.toml")["architecture"] for size in ("tiny", "nano"))
    found = [
        Shape(
            f"quickstart, {stage['name']}",
            tiny,
            stage["training"]["seq_len"],
            stage["training"]["local_batch_size"],
            quickstart["metrics"],
        )
        for stage in quickstart["stages"]
    ]
    return [*found, Shape("nano, a layer", {**layer, "n_layers": 1, "vocab_size": 512}, 1024, 2, gpu["metrics"])]


def measure(shape: Shape, rounds: int) -> dict[str, Any]:
    """Seconds of a step and of a measurement, and the measurements' share of the time."""
    with tempfile.TemporaryDirectory() as folder:
        config = build_config(
            {
                "architecture": shape.architecture,
                "position": {"heads": {"kind": "scope"}},
                "tokenizer": {"kind": "bytes"},
                "data": {"held_out": 0.03},
                "job": {"dump_folder": folder},
                "training": {
                    "seq_len": shape.seq_len,
                    "local_batch_size": shape.rows,
                    "steps": 1000,
                    "mixed_precision_param": "bfloat16" if torch.cuda.is_available() else "float32",
                },
                "activation_checkpoint": {"mode": "none"},
                "lr_scheduler": {"warmup_steps": 2},
                "checkpoint": {"enable": False},
                "validation": {"enable": False},
                "metrics": {**shape.metrics, "log_freq": 1000, "trackers": []},
            }
        )
        trainer = Trainer(config, PlasticityMetrics)
        assert trainer.plasticity is not None
        batches = trainer.micro_batches()
        steps, measurements = [], []
        for number in tqdm(range(rounds + 1), desc=shape.name, unit="round", disable=not sys.stderr.isatty()):
            trainer.step += 1
            started = time.perf_counter()
            trainer.train_step(batches)
            between = time.perf_counter()
            trainer.plasticity.measure(trainer.model_parts, trainer.around_forward)
            if number:  # the first fills caches
                steps.append(between - started)
                measurements.append(time.perf_counter() - between)
        trainer.close()
        torch.distributed.destroy_process_group()
    step, once, n = statistics.median(steps), statistics.median(measurements), shape.metrics["plasticity_freq"]
    return {"shape": shape.name, "step_s": step, "measurement_s": once, "freq": n, "share": once / (n * step + once)}


@command
def main(arguments: list[str] | None = None) -> None:
    parser = new_parser("python -m benchmarks.plasticity_metrics", __doc__)
    parser.add_argument("--rounds", type=positive, default=5, help="steps and measurements of each shape (default: 5)")
    add_json_option(parser)
    options = parser.parse_args(arguments)
    start_logging()
    prepare_device()
    rows = [measure(shape, options.rounds) for shape in shapes()]
    print(f"{'':<28}{'step':>10}{'measured':>10}{'n':>6}{'share':>9}")
    for row in rows:
        print(
            f"{row['shape']:<28}{row['step_s']:>8.2f} s{row['measurement_s']:>8.2f} s{row['freq']:>6}{row['share']:>9.2%}"
        )
    print(f"medians of {options.rounds}, {torch.get_num_threads()} threads")
    result = {
        "rows": rows,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "rounds": options.rounds,
    }
    write_json(options.json, result)


if __name__ == "__main__":
    main()
