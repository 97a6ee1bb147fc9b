"""`train.py` with environment variables of its own: arguments of the form NAME=VALUE set them."""

import os
import runpy
import sys
from pathlib import Path

given = [argument for argument in sys.argv if not argument.startswith("-") and argument.partition("=")[0].isupper()]
os.environ |= dict(argument.split("=", 1) for argument in given)
sys.argv = [argument for argument in sys.argv if argument not in given]
runpy.run_path(str(Path(__file__).parent.parent / "train.py"), run_name="__main__")
