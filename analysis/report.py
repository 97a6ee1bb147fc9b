"""`python -m analysis.report`: the command `farsight inside`."""

import sys

from farsight import commands

if __name__ == "__main__":
    sys.exit(commands.run("inside", sys.argv[1:]))
