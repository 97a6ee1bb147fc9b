"""`python -m evals.report`: the command `farsight report`."""

import sys

from farsight import commands

if __name__ == "__main__":
    sys.exit(commands.run("report", sys.argv[1:]))
