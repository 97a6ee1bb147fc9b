"""Points huggingface_hub at a stand-in of the hub: in this process, or as a script that then runs a command of `farsight`.

The library reads its environment variables when it is imported, which a process of tests has done long before.
"""

import os
import sys
from pathlib import Path

from huggingface_hub import constants, hf_api

from farsight import remote
from tests.checkpoints.hub_server import TOKEN


def use(url: str, home: str | Path, token: str = TOKEN) -> None:
    """Does what HF_ENDPOINT, HF_HOME and HF_TOKEN do, without Xet, whose servers have another interface."""
    os.environ["HF_TOKEN"] = token
    constants.ENDPOINT = hf_api.api.endpoint = url
    constants.HUGGINGFACE_CO_URL_TEMPLATE = url + "/{repo_id}/resolve/{revision}/{filename}"
    constants.HF_HUB_CACHE = str(home)
    constants.HF_HUB_DISABLE_XET = True
    forget()


def forget() -> None:
    """Has this process look places up again, as a new one would."""
    for function in (remote._local, remote._pinned):
        function.cache_clear()
    remote._urls.clear()


if __name__ == "__main__":
    use(*sys.argv[1:3])
    from farsight.commands import main

    sys.exit(main(sys.argv[3:]))
