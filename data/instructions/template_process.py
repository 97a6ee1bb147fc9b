"""Renders a chat template in a process of its own, with memory and time limited by the operating system.

A chat template comes with somebody's model, and is a program. Jinja's sandbox keeps it from reaching Python, but not from
running nested loops or doubling a text over and over, and no static check could find all such cases. So the process may use one
gigabyte, and a few CPU seconds per conversation, and the system kills it when it exceeds them.

This file imports nothing of Farsight and runs as a script. It reads one line of JSON, {"source"}, then one for each
conversation, {"cuts", "variables"}; it answers each with a line: {"texts"}, {"error"}, or {"limit"}.
"""

import json
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

MEMORY = 1 << 30
"""Bytes of address space; Python and Jinja take about 30 MB of it."""
SECONDS = 3.0
"""CPU seconds per conversation. Common templates take about 50 µs per message."""
LONGEST = 1 << 26
"""Most characters in a rendered text."""

_TODAY = datetime(2024, 7, 26)
"""The date that templates see (Llama 3.1's own default): rows must not change from day to day."""


class _GenerationBlocks(jinja2.ext.Extension):
    """`{% generation %} … {% endgeneration %}`: records the block's span in the output, and has no other effect."""

    tags = {"generation"}  # noqa: RUF012  jinja's own annotation

    def __init__(self, environment: jinja2.Environment):
        super().__init__(environment)
        environment.extend(generation_blocks=self)
        self.start()

    def start(self) -> None:
        """Resets the state before a text."""
        self.written = 0
        self.spans: list[tuple[int, int]] = []

    def parse(self, parser: Any) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_note"), [], [], body).set_lineno(line)

    def _note(self, caller: Callable[[], str]) -> str:
        text = caller()
        self.spans.append((self.written, self.written + len(text)))
        return text


def _environment() -> ImmutableSandboxedEnvironment:
    """Jinja as `transformers` sets it up for chat templates (utils/chat_template_utils.py)."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _TODAY.strftime
    return environment


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Plain JSON: Jinja's own filter escapes characters for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _render(template: jinja2.Template, variables: dict[str, Any]) -> dict[str, Any]:
    """The rendered text and the spans of its generation blocks, or an error."""
    blocks: _GenerationBlocks = template.environment.generation_blocks  # type: ignore[attr-defined]  # set by the extension
    parts: list[str] = []
    blocks.start()
    try:
        for part in template.generate(**variables):
            parts.append(part)
            blocks.written += len(part)
            if blocks.written > LONGEST:
                raise MemoryError
    except (MemoryError, RecursionError):
        raise
    except Exception as error:  # a template can raise anything; the user gets to read it
        return {"text": "", "blocks": [], "error": _said(error)}
    return {"text": "".join(parts), "blocks": blocks.spans, "error": None}


def _render_all(template: jinja2.Template, asked: dict[str, Any]) -> dict[str, Any]:
    messages = asked["variables"].pop("messages")
    texts = [
        _render(template, asked["variables"] | {"messages": messages[:upto], "add_generation_prompt": header})
        for upto, header in asked["cuts"]
    ]
    return {"texts": texts}


def _said(error: Exception) -> str:
    return str(error)[:1000] or type(error).__name__


def _serve(lines: Iterator[str]) -> None:
    with suppress(ValueError):  # macOS has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the parent, which closes this process's input
    template = None
    for line in lines:
        asked = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, SECONDS)  # its signal kills the process even inside C code
        try:
            if template is None:
                template = _environment().from_string(asked["source"])
                answer = json.dumps({"error": None})
            else:
                answer = json.dumps(_render_all(template, asked))
        except (MemoryError, RecursionError) as error:
            answer = json.dumps({"limit": type(error).__name__})
        except Exception as error:  # the source is no template, or one whose constants can't be computed
            answer = json.dumps({"error": _said(error)})
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(answer, flush=True)


if __name__ == "__main__":
    _serve(sys.stdin)
