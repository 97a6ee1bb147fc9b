"""`python -m farsight COMMAND …`, as the installed command `farsight`."""

import sys

from farsight.commands import main

if __name__ == "__main__":
    sys.exit(main())
