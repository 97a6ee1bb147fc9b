"""`python -m evals.generate`: the command `farsight generate`."""

import sys

from farsight import commands

if __name__ == "__main__":
    sys.exit(commands.run("generate", sys.argv[1:]))
