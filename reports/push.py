"""Uploads a model directory, an adapter or the model of a run to the Hugging Face Hub.

    farsight push runs/my_run/model     ORG/NAME
    farsight push runs/my_finetune      ORG/NAME --license apache-2.0      # a run folder: its model/ or adapter/
    farsight push runs/my_run           ORG/NAME --dry-run                 # show what would be uploaded

A new repository is private; --public makes it one that everyone can read. The card (README.md) gets the results of farsight
perplexity, needle and harness as the hub's own metadata: those in evals/ of the model or its run, and those that --results names.
MODEL itself is not changed. Read the card before publishing: it names the data and the paths of the runs.

An interrupted upload goes on with the same command: what the hub has already is not sent again. Log in with `hf auth login`, or
set HF_TOKEN; the token is never shown. HF_ENDPOINT names another hub.
"""

from pathlib import Path

from farsight.cli import command, model_path, new_parser
from farsight.errors import ConfigError


@command
def main(arguments: list[str] | None = None) -> None:
    parser = new_parser("farsight push", __doc__)
    add = parser.add_argument
    add("model", type=model_path, metavar="MODEL", help="model directory, adapter or run folder")
    add("repo", metavar="REPO", help="ORG/NAME on the hub; made if it is not there")
    add("--public", action="store_true", help="for everyone to read (default: a new repository is private)")
    add("--revision", metavar="BRANCH", help="branch to write to, made if it is not there (default: the main one)")
    add("--message", metavar="TEXT", help="of the commit (default: the model's name)")
    add("--license", metavar="NAME", help="the hub's name of the license, such as apache-2.0, for the card")
    add("--results", type=Path, nargs="+", default=[], metavar="FILE", help="JSON files with results of this model")
    add("--dry-run", action="store_true", help="show the files and the card's metadata, and stop")
    options = parser.parse_args(arguments)

    from farsight.checkpoints.cards.model import CARD
    from farsight.checkpoints.cards.results import eval_results, with_metadata
    from farsight.checkpoints.hub.upload import check_model, files_of, upload
    from farsight.remote import parse_hub
    from farsight.reports.collect import collect_results
    from farsight.reports.sections.benchmarks import HARNESS
    from farsight.reports.sections.needles import NEEDLE
    from farsight.reports.sections.perplexity import PERPLEXITY
    from farsight.training.runs import find_models

    repository = parse_hub(f"hf://{options.repo.removeprefix('hf://')}")
    if repository.revision is not None or repository.path_in_repo:
        parser.error(f"{options.repo}: write ORG/NAME alone; --revision names a branch")
    (found,) = find_models([options.model])
    folder = found.weights
    if folder is None:
        raise ConfigError(f"{options.model} has no model yet; wait for the run's end, or name another folder.")
    base = check_model(folder)
    files, others = files_of(folder)
    if Path(CARD) not in files:
        raise ConfigError(f"{folder} has no {CARD}, which hubs show as the model's page: write one first.")
    results = collect_results((PERPLEXITY, NEEDLE, HARNESS), (found,), options.results)
    name = repository.id.rpartition("/")[2]
    entries = [entry for result in results for entry in eval_results(result.kind, result.values)]
    card = with_metadata((folder / CARD).read_text(encoding="utf-8"), name, entries, options.license, base)
    total = sum((folder / path).stat().st_size for path in files)
    for path in files if options.dry_run else []:
        print(f"{(folder / path).stat().st_size:>18,}  {path}")
    if others:
        print(f"left out: {', '.join(map(str, others))}")
    access = "" if options.public else " (private if it is new)"
    print(f"{len(files)} files, {total:,} bytes, {len(entries)} results → {repository.id}{access}", flush=True)
    if options.dry_run:
        print(card.partition("\n---\n")[0] + "\n---")
        return
    message = options.message or f"Upload {name}"
    print(upload(folder, files, card, repository.id, options.public, options.revision, message))


if __name__ == "__main__":
    main()
