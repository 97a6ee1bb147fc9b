"""The commands of `farsight`: their names and modules, and the entry point that starts one."""

import importlib
import sys
import textwrap
from dataclasses import dataclass

import farsight
from farsight import cli, process
from farsight.errors import UserError, nearest


@dataclass(frozen=True)
class Command:
    """A command of `farsight`.

    Args:
        module: module below `farsight` whose `main` takes the command's arguments.
        summary: one line for `farsight --help`.
        stopped: for commands that start or run training, the message printed when a signal ends them early.
    """

    module: str
    summary: str
    stopped: str | None = None


GROUPS: dict[str, dict[str, Command]] = {
    "train": {
        "train": Command("train", "pre-train one stage; without arguments, the quickstart recipe", process.BEFORE_TRAINING),
        "finetune": Command("train", "fine-tune adapters on a base model: LoRA, QLoRA, GARFA", process.BEFORE_TRAINING),
        "recipe": Command("launch.recipe.__main__", "run a recipe: stages in order, each from the weights of the one before", process.BETWEEN_STEPS),
        "torchrun": Command("launch.torchrun", "torchrun that ends by saying which rank failed, and why", process.BEFORE_TRAINING),
        "watch": Command("reports.watch.__main__", "show runs while they train, on the terminal and as a page that refreshes itself"),
        "ablation": Command("launch.ablation.__main__", "fine-tune several configs, evaluate them, and compare", process.BETWEEN_STEPS),
        "depth-sweep": Command("launch.depth_sweep.__main__", "train recipes at several depths and probe each model's layers"),
        "hang": Command("training.hangs.__main__", "say which ranks of a run did not reach which collective"),
    },
    "plan": {
        "plan": Command("launch.plan.__main__", "estimate a config's memory, FLOPs, traffic and time before it runs"),
        "positions": Command("analysis.positions.__main__", "show each layer's rotation, scopes and which tokens see which"),
    },
    "data": {
        "prepare": Command("launch.prepare", "tokenise a config's data once, into shards that training reads in place", process.BETWEEN_STEPS),
        "tokenizer": Command("data.tokenizer", "train a tokenizer, or show how one splits a text"),
        "needles": Command("data.needles", "write training documents with hidden facts"),
        "corpus": Command("evals.corpus", "gather documents of given lengths to evaluate on, such as SCOPE's 100 long ones"),
    },
    "models and checkpoints": {
        "convert": Command("checkpoints.convert.__main__", "convert a checkpoint to a Hugging Face model directory, or back"),
        "merge": Command("checkpoints.merge.__main__", "merge an adapter into its base"),
        "graft": Command("checkpoints.graft.__main__", "join the first layers of one model to the last layers of another"),
        "push": Command("reports.push", "upload a model directory, an adapter or a run's model to the Hugging Face Hub"),
        "pull": Command("checkpoints.hub.pull", "download a model from the Hugging Face Hub into a folder"),
        "intact": Command("checkpoints.intact.__main__", "check that a checkpoint is complete and undamaged"),
    },
    "generate and evaluate": {
        "generate": Command("inference.generate.__main__", "continue a prompt, caching only what heads can still see"),
        "serve": Command("inference.serve.__main__", "serve a model to other programs through OpenAI's API"),
        "perplexity": Command("evals.perplexity.__main__", "measure perplexity by context length"),
        "needle": Command("evals.needle.__main__", "run passkey and RULER tasks, by length and depth"),
        "harness": Command("evals.harness.__main__", "run lm-evaluation-harness, with the papers' suites by name"),
        "loft": Command("evals.loft", "answer LOFT's prompts"),
        "external": Command("evals.external", "show results of HELMET, LOFT, L-Eval and LongBench-Pro in one table"),
        "ripra": Command("evals.ripra.__main__", "show what RiPRA finds relevant in a text"),
        "report": Command("reports.report", "write all results to one page, models side by side"),
    },
    "look inside": {
        "capture": Command("analysis.capture.__main__", "write a model's queries and keys to files"),
        "plasticity": Command("analysis.plasticity.__main__", "measure how far into the context attention still depends on the query"),
        "plasticity-scores": Command("analysis.plasticity_scores.__main__", "set models' plasticity against their scores on a benchmark"),
        "geometry": Command("analysis.geometry.__main__", "measure how queries and keys vary with position"),
        "layers": Command("analysis.layers.__main__", "find layers to fine-tune: sensitivity and RoPE's influence"),
        "layer-probes": Command("analysis.layer_probes.__main__", "mask or coarsen one layer's positions, or add noise to its output"),
        "probes": Command("analysis.probes.__main__", "find the layers that encode position"),
        "order-awareness": Command("analysis.order_awareness.__main__", "measure how far back a model can tell the order of tokens"),
        "order-simulation": Command("analysis.order_simulation.__main__", "simulate how many positions a stack of windows can tell apart"),
        "graft-sweep": Command("analysis.graft_sweep.__main__", "graft two models at every depth, to find the layers that carry long context"),
        "loss-curves": Command("analysis.loss_curves.__main__", "plot the losses of several runs against tokens"),
        "inside": Command("reports.inside", "measure with all of these, and write the page of farsight report"),
    },
}  # fmt: skip
COMMANDS = {name: command for group in GROUPS.values() for name, command in group.items()}


def usage() -> str:
    """The text of `farsight --help`."""
    width = max(map(len, COMMANDS)) + 2
    lines = [
        "usage: farsight COMMAND …",
        "",
        "`farsight COMMAND --help` shows a command's options, `farsight --version` the version.",
    ]
    for title, group in GROUPS.items():
        lines += ["", f"{title}:"]
        for name, command in group.items():
            lines += textwrap.wrap(
                command.summary, 110, initial_indent=f"  {name:{width}}", subsequent_indent=" " * (width + 2)
            )
    return "\n".join(lines)


@cli.command
def main(arguments: list[str] | None = None) -> int | None:
    """Runs the command named by the first argument; returns its exit status."""
    name, *rest = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name in ("-h", "--help"):
        print(usage())
        return 0
    if name == "--version":
        print(f"farsight {farsight.__version__}")
        return 0
    if name not in COMMANDS:
        raise UserError(
            f"{name!r} is not a farsight command.{nearest(name, COMMANDS, say_known=False)} `farsight --help` lists them."
        )
    return run(name, rest)


def run(name: str, arguments: list[str]) -> int | None:
    """Imports a command's module and calls its `main`; returns its exit status."""
    command = COMMANDS[name]
    if command.stopped:
        process.begin(command.stopped if arguments else process.BETWEEN_STEPS)
    if name == "finetune":
        arguments = ["finetune", *arguments]
    return importlib.import_module(f"farsight.{command.module}").main(arguments)
