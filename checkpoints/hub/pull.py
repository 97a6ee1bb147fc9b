"""Downloads a model directory or an adapter from the Hugging Face Hub into a folder.

    farsight pull ORG/NAME              OUT
    farsight pull ORG/NAME@v2           OUT
    farsight pull ORG/NAME/step-1000    OUT        # a folder of the repository

Commands also take hf://ORG/NAME wherever they take a model's path, and keep what they download in the library's cache.

An interrupted download goes on where it stopped, with the same command. OUT appears when everything is there and every file has
the checksum that the hub keeps of it. Pickles are not downloaded. For private and gated repositories, log in with `hf auth login`
or set HF_TOKEN; HF_ENDPOINT names another hub.
"""

from pathlib import Path

from farsight.cli import command, new_parser
from farsight.files import check_new_folder


@command
def main(arguments: list[str] | None = None) -> None:
    parser = new_parser("farsight pull", __doc__)
    parser.add_argument("repo", metavar="REPO", help="ORG/NAME[@REVISION][/SUBFOLDER], with or without hf://")
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write; must not exist, or be empty")
    options = parser.parse_args(arguments)
    check_new_folder(options.out)

    from farsight.checkpoints.hub.download import download

    download(options.repo, options.out)
    print(options.out)


if __name__ == "__main__":
    main()
