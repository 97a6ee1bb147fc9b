"""`python -m farsight COMMAND …`, the same as the installed command `farsight`."""

import sys

from farsight.commands import main

if __name__ == "__main__":
    sys.exit(main())
