"""Renders untrusted Jinja chat templates as `transformers` does, with hard limits on memory and time.

`template_process.py` does the work in a process of its own, started on first use.
"""

import json
import signal
import subprocess
import sys
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from farsight.data.instructions.template_process import LONGEST, MEMORY, SECONDS
from farsight.errors import DataError

Span = tuple[int, int]
"""Characters begin … end-1 of a text."""

_SCRIPT = Path(__file__).with_name("template_process.py")


Cut = tuple[int, bool]
"""The number of messages to render, and whether the header of an answer follows them."""


@dataclass(frozen=True)
class Rendered:
    """A template's output for some messages."""

    text: str = ""
    blocks: tuple[Span, ...] = ()
    """The spans of `{% generation %}` blocks."""
    error: str | None = None
    """Why there is no text: the template raised an error, or an expression in it failed."""


class JinjaTemplate:
    """A template. It can't reach Python objects, run for long, or take much memory."""

    def __init__(self, source: str, name: str):
        """`name`: its origin, for errors. Raises `DataError` if `source` is not a Jinja template."""
        self._source, self._name = source, name
        self._process: subprocess.Popen[str] | None = None
        self._start()

    def render(self, cuts: Sequence[Cut], **variables: Any) -> list[Rendered]:
        """Renders `variables["messages"]` up to each of several cuts.

        Args:
            variables: JSON values; others are converted to strings.

        Raises:
            DataError: the template takes more time or memory than any chat template needs.
        """
        if self._process is None:
            self._start()
        found = self._ask({"cuts": cuts, "variables": variables})["texts"]
        return [Rendered(one["text"], tuple(map(tuple, one["blocks"])), one["error"]) for one in found]

    def _start(self) -> None:
        command = [sys.executable, "-P", str(_SCRIPT)]  # -P: the script must not import the files beside it
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._end = weakref.finalize(self, _end, self._process)
        if error := self._ask({"source": self._source}).get("error"):
            self._end()
            raise DataError(f"{self._name}: not a Jinja template: {error}. Correct it, or set data.chat_template.")

    def _ask(self, asked: dict[str, Any]) -> dict[str, Any]:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(asked, default=str) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        answer = json.loads(line) if line else {"limit": None}
        if "limit" not in answer:
            return answer
        self._end()
        self._process = None
        raise DataError(
            f"{self._name}: {_why(answer['limit'], process.returncode)} Correct it, or set data.chat_template."
        )


def _why(limit: str | None, status: int) -> str:
    """The reason why the process gave no answer."""
    if limit == "RecursionError":
        return "the chat template calls itself without end, or is nested too deeply."
    if limit == "MemoryError":
        return f"the chat template takes more than {MEMORY >> 20:,} MiB of memory, or writes more than {LONGEST:,} characters."
    if status == -signal.SIGPROF:
        return f"the chat template takes more than {SECONDS:g} seconds for a conversation."
    return f"the process that renders the chat template ended with status {status}."


def _end(process: "subprocess.Popen[str]") -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdout.close()
    with suppress(BrokenPipeError):  # it was killed while working
        process.stdin.close()
    process.wait()
