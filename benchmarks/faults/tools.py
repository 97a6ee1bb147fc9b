"""Commands that can't do what they are asked: options out of range, missing files, folders that can't be written."""

import re

from farsight.benchmarks.faults.hostile import MODEL_TOOLS
from farsight.benchmarks.faults.workshop import Case, fifo

_READING = tuple(tool for tool in MODEL_TOOLS if "{text}" in tool)

_OPTIONS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("generate {model} --prompt x --device cuda", ("cuda",)),
    ("generate {model} --prompt x --device gpu9", ("gpu9",)),
    ("generate {model} --prompt x --new-tokens -4", ("--new-tokens", "-4")),
    ("generate {model} --prompt x --temperature nan", ("--temperature", "nan")),
    ("generate {model} --prompt x --temperature -1", ("--temperature",)),
    ("generate {model} --prompt x --top-p 2", ("--top-p", "2")),
    ("generate {model} --prompt x --chunk 0", ("--chunk", "0")),
    ("generate {model} --prompt x --rows 0", ("--rows", "0")),
    ("generate {model} --prompt x --extend nosuch", ("nosuch",)),
    ("generate {model} --prompt x --extend yarn:x=2", ("yarn",)),
    ("generate {model} --prompt-file {here}/gone.txt", ("gone.txt",)),
    ("generate {model} --prompts {text}", ("text.txt",)),
    ("generate {run} --prompt x", ("run/model",)),
    ("generate {here} --prompt x", ("config.json",)),
    ("generate {here}/gone --prompt x", ("gone",)),
    ("generate {model} --prompt x --json {here}", ("json",)),
    ("perplexity {model} --data {text} --lengths 0", ("--lengths", "0")),
    ("perplexity {model} --data {text} --lengths -5", ("--lengths",)),
    ("perplexity {model} --data {text} --lengths 99999999", ("99,999,999",)),
    ("perplexity {model} --data {here}/gone.txt --lengths 32", ("gone.txt",)),
    ("perplexity {model} --data {here} --lengths 32", ("file",)),
    ("perplexity {model} --data {text} --lengths 32 --windows -1", ("--windows",)),
    ("perplexity {model} --data {text} --lengths 32 --picture {here}/x.txt", ("x.txt",)),
    ("needle {model} --lengths 0", ("--lengths",)),
    ("needle {model} --lengths 64 --depths 0", ("depths",)),
    ("needle {model} --lengths 64 --task nosuch", ("nosuch",)),
    ("needle {model} --lengths 64 --trials -1", ("--trials",)),
    ("needle {model} --lengths 4", ("4",)),
    ("ripra {dense} --data {text} --length -3", ("--length",)),
    ("ripra {dense} --passkeys 1 --evidence 9:3", ("evidence",)),
    ("external {here}/gone.json", ("gone.json",)),
    ("external {text}", ("text.txt",)),
    ("report {here}/gone --out {here}/r.html", ("gone",)),
    ("report {model} --out {here}", ("out",)),
    ("harness {model} --tasks nosuch", ("nosuch",)),
    ("merge {model} --out {here}/out", ("adapter",)),
    ("merge {adapter} --out {dense}", ("dense",)),
    ("merge {adapter} --out {run}", ("run",)),
    ("merge {adapter} --out {text}", ("is a file",)),
    ("merge {adapter} --base {here}/gone --out {here}/out", ("gone",)),
    ("graft --front {model} --back {dense} --layers 9 --out {here}/out", ("9",)),
    ("graft --front {model} --back {dense} --layers 1 --out {run}/model", ("run/model",)),
    ("convert to-hf {checkpoint} {run}/model", ("run/model",)),
    ("convert to-hf {run} {here}/out", ("step-",)),
    ("convert to-hf {here}/gone {here}/out", ("gone",)),
    ("convert from-hf {checkpoint} {here}/out --dtype float8", ("float8",)),
    ("convert from-hf {model} {run}/checkpoint/step-12", ("step-12",)),
    ("positions {here}/gone.toml", ("gone.toml",)),
    ("positions {config} --length 0", ("--length",)),
    ("layers --profile {text}", ("text.txt",)),
    ("layers --profile {here}/gone.json", ("gone.json",)),
    ("loss-curves {here}/gone", ("gone",)),
    ("inside {model} --out {here}/r.html --measure", ("--data",)),
    ("inside {here}/gone --out {here}/r.html", ("gone",)),
    ("order-simulation --lengths 0", ("--lengths",)),
    ("order-simulation --seed -1", ("--seed",)),
    ("depth-sweep {here}/gone.toml --depths 1 --out {here}/out", ("gone.toml",)),
    ("graft-sweep --base {model} --long {here}/gone --data {text} --lengths 32", ("gone",)),
    ("plan {here}/gone.toml", ("gone.toml",)),
    ("plan {config} --gpus 0", ("--gpus",)),
    ("plan {config} --gpu nosuch", ("nosuch",)),
    ("plan {config} --matmul nan", ("--matmul",)),
    ("plan {config} --json {here}", ("is a folder",)),
    ("recipe {here}/gone.toml", ("gone.toml",)),
    ("recipe {config}", ("stages",)),
    ("recipe {config} --nproc 0", ("--nproc",)),
    ("tokenizer train --out {dense}", ("dense",)),
    ("tokenizer train --out {here}/t --vocab-size 3", ("3",)),
    ("tokenizer train --out {here}/t --text {here}/gone.txt", ("gone.txt",)),
    ("tokenizer show {here} --text x", ("tokenizer",)),
    ("needles --out {here}/x.jsonl --documents 0 --tokens 100", ("--documents",)),
    ("needles --out {here}/x.jsonl --documents 1 --tokens 3", ("165",)),
)


def _written(command: str) -> tuple[str, ...]:
    """The parts of the workshop that a command would write to; the case gets copies of them."""
    targets = re.findall(r"--out (\S+)|^convert \S+ \S+ (\S+)", command)
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
