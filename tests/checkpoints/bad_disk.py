"""Runs `train.py` with a bad disk under rank 1; the first argument says what is wrong with it.

slow: writing and reading a checkpoint each take `SECONDS` longer than on rank 0.
lossy: what rank 1 saves at step 4 is not what it wrote.
"""

import os
import runpy
import sys
import time

from farsight.checkpoints.dcp import Reader, Writer

SECONDS = 4


def slow(work):
    def later(*arguments):
        time.sleep(SECONDS)
        return work(*arguments)

    return later


def lossy(write):
    def write_data(self, *arguments):
        written = write(self, *arguments)
        if self.folder.name == "step-4":
            os.truncate(self.folder / "__1_0.distcp", 1000)
        return written

    return write_data


kind = sys.argv.pop(1)
if os.environ["RANK"] == "1":
    if kind == "slow":
        Writer.write_data, Reader.read_data = slow(Writer.write_data), slow(Reader.read_data)
    else:
        Writer.write_data = lossy(Writer.write_data)
runpy.run_path("train.py", run_name="__main__")
