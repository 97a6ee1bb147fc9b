"""Tools that are asked for what they can't do: options out of range, files that are not there, places that can't be written."""

import re

from benchmarks.faults.hostile import MODEL_TOOLS
from benchmarks.faults.workshop import Case, fifo

_READING = tuple(tool for tool in MODEL_TOOLS if "{text}" in tool)

_OPTIONS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("evals.generate {model} --prompt x --device cuda", ("cuda",)),
    ("evals.generate {model} --prompt x --device gpu9", ("gpu9",)),
    ("evals.generate {model} --prompt x --new-tokens -4", ("--new-tokens", "-4")),
    ("evals.generate {model} --prompt x --temperature nan", ("--temperature", "nan")),
    ("evals.generate {model} --prompt x --temperature -1", ("--temperature",)),
    ("evals.generate {model} --prompt x --top-p 2", ("--top-p", "2")),
    ("evals.generate {model} --prompt x --chunk 0", ("--chunk", "0")),
    ("evals.generate {model} --prompt x --rows 0", ("--rows", "0")),
    ("evals.generate {model} --prompt x --extend nosuch", ("nosuch",)),
    ("evals.generate {model} --prompt x --extend yarn:x=2", ("yarn",)),
    ("evals.generate {model} --prompt-file {here}/gone.txt", ("gone.txt",)),
    ("evals.generate {model} --prompts {text}", ("text.txt",)),
    ("evals.generate {run} --prompt x", ("run/model",)),
    ("evals.generate {here} --prompt x", ("config.json",)),
    ("evals.generate {here}/gone --prompt x", ("gone",)),
    ("evals.generate {model} --prompt x --json {here}", ("json",)),
    ("evals.perplexity {model} --data {text} --lengths 0", ("--lengths", "0")),
    ("evals.perplexity {model} --data {text} --lengths -5", ("--lengths",)),
    ("evals.perplexity {model} --data {text} --lengths 99999999", ("99,999,999",)),
    ("evals.perplexity {model} --data {here}/gone.txt --lengths 32", ("gone.txt",)),
    ("evals.perplexity {model} --data {here} --lengths 32", ("file",)),
    ("evals.perplexity {model} --data {text} --lengths 32 --windows -1", ("--windows",)),
    ("evals.perplexity {model} --data {text} --lengths 32 --picture {here}/x.txt", ("x.txt",)),
    ("evals.needle {model} --lengths 0", ("--lengths",)),
    ("evals.needle {model} --lengths 64 --depths 0", ("depths",)),
    ("evals.needle {model} --lengths 64 --task nosuch", ("nosuch",)),
    ("evals.needle {model} --lengths 64 --trials -1", ("--trials",)),
    ("evals.needle {model} --lengths 4", ("4",)),
    ("evals.ripra {dense} --data {text} --length -3", ("--length",)),
    ("evals.ripra {dense} --passkeys 1 --evidence 9:3", ("evidence",)),
    ("evals.external {here}/gone.json", ("gone.json",)),
    ("evals.external {text}", ("text.txt",)),
    ("evals.report {here}/gone --out {here}/r.html", ("gone",)),
    ("evals.report {model} --out {here}", ("out",)),
    ("evals.harness {model} --tasks nosuch", ("nosuch",)),
    ("checkpoints.merge {model} --out {here}/out", ("adapter",)),
    ("checkpoints.merge {adapter} --out {dense}", ("dense",)),
    ("checkpoints.merge {adapter} --out {run}", ("run",)),
    ("checkpoints.merge {adapter} --out {text}", ("is a file",)),
    ("checkpoints.merge {adapter} --base {here}/gone --out {here}/out", ("gone",)),
    ("checkpoints.graft --front {model} --back {dense} --layers 9 --out {here}/out", ("9",)),
    ("checkpoints.graft --front {model} --back {dense} --layers 1 --out {run}/model", ("run/model",)),
    ("checkpoints.convert to-hf {checkpoint} {run}/model", ("run/model",)),
    ("checkpoints.convert to-hf {run} {here}/out", ("step-",)),
    ("checkpoints.convert to-hf {here}/gone {here}/out", ("gone",)),
    ("checkpoints.convert from-hf {checkpoint} {here}/out --dtype float8", ("float8",)),
    ("checkpoints.convert from-hf {model} {run}/checkpoint/step-12", ("step-12",)),
    ("analysis.positions {here}/gone.toml", ("gone.toml",)),
    ("analysis.positions {config} --length 0", ("--length",)),
    ("analysis.layers --profile {text}", ("text.txt",)),
    ("analysis.layers --profile {here}/gone.json", ("gone.json",)),
    ("analysis.loss_curves {here}/gone", ("gone",)),
    ("analysis.report {model} --out {here}/r.html --measure", ("--data",)),
    ("analysis.report {here}/gone --out {here}/r.html", ("gone",)),
    ("analysis.order_simulation --lengths 0", ("--lengths",)),
    ("analysis.order_simulation --seed -1", ("--seed",)),
    ("analysis.depth_sweep {here}/gone.toml --depths 1 --out {here}/out", ("gone.toml",)),
    ("analysis.graft_sweep --base {model} --long {here}/gone --data {text} --lengths 32", ("gone",)),
    ("launch.plan {here}/gone.toml", ("gone.toml",)),
    ("launch.plan {config} --gpus 0", ("--gpus",)),
    ("launch.plan {config} --gpu nosuch", ("nosuch",)),
    ("launch.plan {config} --matmul nan", ("--matmul",)),
    ("launch.plan {config} --json {here}", ("is a folder",)),
    ("launch.recipe {here}/gone.toml", ("gone.toml",)),
    ("launch.recipe {config}", ("stages",)),
    ("launch.recipe {config} --nproc 0", ("--nproc",)),
    ("data.tokenizer train --out {dense}", ("dense",)),
    ("data.tokenizer train --out {here}/t --vocab-size 3", ("3",)),
    ("data.tokenizer train --out {here}/t --text {here}/gone.txt", ("gone.txt",)),
    ("data.tokenizer show {here} --text x", ("tokenizer",)),
    ("data.needles --out {here}/x.jsonl --documents 0 --tokens 100", ("--documents",)),
    ("data.needles --out {here}/x.jsonl --documents 1 --tokens 3", ("165",)),
)


def _written(command: str) -> tuple[str, ...]:
    """The parts of the workshop that a command would write to: the case has copies of them."""
    targets = re.findall(r"--out (\S+)|^checkpoints.convert \S+ \S+ (\S+)", command)
    return tuple(name for pair in targets for name in re.findall(r"{(\w+)}", "".join(pair)) if name != "here")


def cases() -> list[Case]:
    found = [Case(command, command, says, copies=_written(command)) for command, says in _OPTIONS]
    for tool in _READING:
        name = tool.split()[0]
        good = tool.replace("{it}", "{dense}")
        if "convert" not in name and "train" not in name:
            found.append(Case(f"{name}: no GPU", f"{good} --device cuda", ("cuda",)))
        found.append(Case(f"{name}: data that are not there", good.replace("{text}", "{here}/gone.txt"), ("gone.txt",)))
        found.append(Case(f"{name}: a pipe", good.replace("{text}", "{here}/p.txt"), ("p.txt",), {"p.txt": fifo}))
        found.append(
            Case(
                f"{name}: bytes",
                good.replace("{text}", "{here}/b.txt"),
                ("b.txt", "UTF-8"),
                {"b.txt": bytes(range(256)) * 9},
            )
        )
    return found
