"""Tokenises a config's data once, into shards that training reads in place.

    farsight prepare configs/X.toml --out shards/X          tokenise every source, or go on where it was stopped
    farsight prepare scope_llama3_8b --out shards/scope     a recipe: the sources of all its stages, each of them once
    farsight prepare shards/X --inspect 3                   counts, lengths, and the first three documents
    farsight prepare shards/X --verify                      compare every byte with its checksum

It reads every kind of source, compressed JSON lines (.gz, .bz2, .xz, .zst) too, and prints what to write in the config in place
of its sources. Weights, length filters, packing, held_out and the seed stay the run's own and can change afterwards; text, field
and tokenizer cannot. Batches are the same as from the source itself, bit for bit, for local sources; a streamed dataset is
read in a full shuffle of its rows instead. Preparing may be stopped at any time: the same command goes on with it.
"""

import dataclasses
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from farsight.cli import command, natural, new_parser, positive, refuse
from farsight.configs.shipped import find_config
from farsight.errors import ConfigError


@command
def main(arguments: list[str] | None = None) -> int:
    parser = new_parser("farsight prepare", __doc__, allow_abbrev=False)
    add = parser.add_argument
    add(
        "config",
        type=Path,
        help="TOML file or a shipped one's name, a config or a recipe; or a folder that was prepared",
    )
    add("--out", type=Path, metavar="DIR", help="folder to write, with a folder in it for each source")
    add("--stage", help="prepare only the sources of this stage of a recipe")
    add("--processes", type=positive, default=len(os.sched_getaffinity(0)), help="(default: the cores, %(default)s)")
    add(
        "--drop-duplicates", action="store_true", help="of documents of a source with the same text keep only the first"
    )
    add(
        "--inspect",
        type=natural,
        metavar="N",
        help="show counts, lengths, and the first N documents of a prepared folder",
    )
    add("--verify", action="store_true", help="check every byte of a prepared folder")
    options, rest = parser.parse_known_args(arguments)
    if options.verify or options.inspect is not None:
        if rest or options.out or options.stage or options.drop_duplicates:
            parser.error("--inspect and --verify take a prepared folder and no other options")
        return _look(options.config, options.inspect, options.verify)
    if options.out is None:
        parser.error("--out DIR is missing: name the folder for the shards")
    _prepare(options, rest)
    return 0


def _look(place: Path, documents: int | None, verify: bool) -> int:
    from farsight.data.prepare.check import damage_of, first_documents, summary_of
    from farsight.data.shards.layout import MANIFEST, folders_of, read_manifest

    folders = folders_of(place) or [place]
    wrong = [
        f"{folder} is not finished: prepare it again to go on"
        for folder in folders
        if not (folder / MANIFEST).is_file()
    ]
    if len(wrong) == len(folders):
        read_manifest(place)
    finished = [folder for folder in folders if (folder / MANIFEST).is_file()]
    for folder in finished:
        if documents is not None:
            print("\n".join([summary_of(folder), *first_documents(folder, documents)]), flush=True)
    for folder in finished if verify else []:
        if damage := list(damage_of(folder)):
            wrong += [*damage, f"Copy these files again, or remove {folder} and prepare it again"]
        else:
            print(f"{folder}: all {len(read_manifest(folder).shards) + 1} files are intact", flush=True)
    if wrong:
        refuse("\n".join(wrong))
    return 0


def _prepare(options: Any, rest: list[str]) -> None:
    from farsight.configs.finetuning import FinetuneConfig
    from farsight.configs.schema import SourceShare
    from farsight.data.prepare.check import summary_of
    from farsight.data.prepare.parts import parts_of
    from farsight.data.prepare.write import Job, prepare
    from farsight.data.tokenizers.tokenizer import load_tokenizer
    from farsight.launch.plan.read import read_configs
    from farsight.training.tokenizer import chosen_tokenizer

    if options.processes == 1:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the library would use every core
    _, configs = read_configs(find_config(options.config), rest, options.stage)
    jobs: dict[Any, Job] = {}
    lines: list[str] = []
    for name, config in configs.items():
        if isinstance(config, FinetuneConfig):
            raise ConfigError(
                f"{options.config} fine-tunes on conversations, which are tokenised by their chat template."
            )
        tokenizer = chosen_tokenizer(config)
        lines += [f"# {name}", "[data]", "sources = ["]
        for source in config.data.sources:
            if source.kind == "shards":
                raise ConfigError(f"{name}: {source.path} is tokenised already; leave it out.")
            of_a_run = dataclasses.asdict(SourceShare())
            own = {name: value for name in of_a_run if (value := getattr(source, name)) != of_a_run[name]}
            bare = dataclasses.replace(source, **of_a_run)
            key = (bare, tokenizer, config.data.on_bad_row)
            if key not in jobs:
                folder = options.out / f"source-{len(jobs)}"
                jobs[key] = Job(bare, folder, config.data.on_bad_row, options.drop_duplicates)
            line = {"kind": "shards", "path": str(jobs[key].out), **own}
            lines.append(f"    {{ {', '.join(_assignments(line))} }},")
        lines.append("]")
    for job in jobs.values():  # a source that can't be opened is found before another is tokenised
        parts_of(job.source, job.on_bad_row, job.shard_bytes)
    for number, ((_, tokenizer, _), job) in enumerate(jobs.items(), start=1):
        print(f"source {number} of {len(jobs)}: {job.source.kind} into {job.out}", flush=True)
        prepare(job, load_tokenizer(tokenizer), options.processes)
        print(summary_of(job.out), flush=True)
    print("\n".join(["", "To train on it:", "", *lines]))


def _assignments(values: dict[str, Any]) -> Iterator[str]:
    """Keys and values of a TOML table."""
    for key, value in values.items():
        yield f'{key} = "{value}"' if isinstance(value, str) else f"{key} = {value}"


if __name__ == "__main__":
    sys.exit(main())
