"""The commands of `farsight`: their names, their modules, and how one of them is started."""

import importlib
import sys
import textwrap
from dataclasses import dataclass

from farsight import cli, process
from farsight.errors import UserError, nearest


@dataclass(frozen=True)
class Command:
    """A command of `farsight`.

    Args:
        module: whose `main` takes the command's arguments.
        summary: what it does, in a line.
        stopped: for commands that start or run training, what they print when a signal ends them early.
    """

    module: str
    summary: str
    stopped: str | None = None


GROUPS: dict[str, dict[str, Command]] = {
    "train": {
        "train": Command("train", "pre-train one stage; without arguments, the quickstart recipe", process.BEFORE_TRAINING),
        "finetune": Command("train", "fine-tune adapters beside a base: LoRA, QLoRA, GARFA", process.BEFORE_TRAINING),
        "recipe": Command("launch.recipe.__main__", "run a recipe: stages in order, each from the last one's weights", process.BETWEEN_STEPS),
        "torchrun": Command("launch.torchrun", "torchrun whose last line says which rank failed, and why", process.BEFORE_TRAINING),
        "ablation": Command("launch.ablation.__main__", "fine-tune several configs, evaluate them, and compare", process.BETWEEN_STEPS),
        "depth-sweep": Command("launch.depth_sweep.__main__", "train recipes at several depths and probe each model's layers"),
    },
    "plan": {
        "plan": Command("launch.plan.__main__", "memory, FLOPs, traffic and time of a config, before it runs"),
        "positions": Command("analysis.positions.__main__", "what each layer of a config rotates, and who sees whom"),
    },
    "data": {
        "tokenizer": Command("data.tokenizer", "train a tokenizer, or show how one cuts a text"),
        "needles": Command("data.needles", "write documents with hidden facts, for training"),
    },
    "models and checkpoints": {
        "convert": Command("checkpoints.convert.__main__", "a checkpoint to a Hugging Face model directory, or back"),
        "merge": Command("checkpoints.merge.__main__", "merge an adapter into its base"),
        "graft": Command("checkpoints.graft.__main__", "put the first layers of one model before the last of another"),
        "intact": Command("checkpoints.intact.__main__", "check that a checkpoint is whole"),
    },
    "generate and evaluate": {
        "generate": Command("inference.generate.__main__", "continue a prompt with a cache of what heads can still see"),
        "perplexity": Command("evals.perplexity.__main__", "perplexity by context length"),
        "needle": Command("evals.needle.__main__", "passkeys and RULER's tasks, by length and depth"),
        "harness": Command("evals.harness.__main__", "lm-evaluation-harness, the papers' suites by name"),
        "loft": Command("evals.loft", "answers to LOFT's prompts"),
        "external": Command("evals.external", "results of HELMET, LOFT, L-Eval and LongBench-Pro as one table"),
        "ripra": Command("evals.ripra.__main__", "what RiPRA finds relevant in a text"),
        "report": Command("reports.report.__main__", "all of it on one page, models side by side"),
    },
    "look inside": {
        "capture": Command("analysis.capture.__main__", "write a model's queries and keys to files"),
        "plasticity": Command("analysis.plasticity.__main__", "how far into the context the query still decides"),
        "geometry": Command("analysis.geometry.__main__", "what varies with position in queries and keys"),
        "layers": Command("analysis.layers.__main__", "which layers to fine-tune: sensitivity and RoPE's influence"),
        "layer-probes": Command("analysis.layer_probes.__main__", "one layer's positions masked, coarsened or disturbed"),
        "probes": Command("analysis.probes.__main__", "which layers know positions"),
        "order-awareness": Command("analysis.order_awareness.__main__", "how far back a model knows who came first"),
        "order-simulation": Command("analysis.order_simulation.__main__", "how many positions a stack of windows keeps apart"),
        "graft-sweep": Command("analysis.graft_sweep.__main__", "grafts at every depth: whose layers carry a long context"),
        "loss-curves": Command("analysis.loss_curves.__main__", "losses of several runs over their tokens"),
        "inside": Command("reports.inside.__main__", "all of it on one page"),
    },
}  # fmt: skip
COMMANDS = {name: command for group in GROUPS.values() for name, command in group.items()}


def usage() -> str:
    """What `farsight --help` prints."""
    width = max(map(len, COMMANDS)) + 2
    lines = ["usage: farsight COMMAND …", "", "`farsight COMMAND --help` says what a command takes."]
    for title, group in GROUPS.items():
        lines += ["", f"{title}:"]
        for name, command in group.items():
            lines += textwrap.wrap(
                command.summary, 110, initial_indent=f"  {name:{width}}", subsequent_indent=" " * (width + 2)
            )
    return "\n".join(lines)


@cli.command
def main(arguments: list[str] | None = None) -> int | None:
    """Starts the command that the first argument names."""
    name, *rest = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name in ("-h", "--help"):
        print(usage())
        return 0
    if name not in COMMANDS:
        raise UserError(
            f"{name!r} is no command of farsight.{nearest(name, COMMANDS, say_known=False)} `farsight --help` lists them."
        )
    return run(name, rest)


def run(name: str, arguments: list[str]) -> int | None:
    """Imports a command's module and calls its main."""
    command = COMMANDS[name]
    if command.stopped:
        process.begin(command.stopped if arguments else process.BETWEEN_STEPS)
    if name == "finetune":
        arguments = ["finetune", *arguments]
    return importlib.import_module(f"farsight.{command.module}").main(arguments)
