"""Renders a chat template in a process of its own, whose memory and time the system limits.

A template comes with a model from somewhere else, and is a program. Jinja's sandbox keeps Python out of its reach, but
not loops over loops, or a text that doubles in each of them; and no check of ours could list all such ways. So the process is
given a gigabyte, and some seconds of the CPU for each conversation, and is ended by the system when it takes more.

This file imports nothing of ours, and is run as a script. It reads a line of JSON, {"source"}, and then one for each
conversation, {"cuts", "variables"}; each is answered by a line: {"texts"}, {"error"}, or {"limit"}.
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
"""Bytes of address space; Python and Jinja take some 30 MB of it."""
SECONDS = 3.0
"""CPU seconds allowed for one conversation. Common templates take some 50 µs for a message."""
LONGEST = 1 << 26
"""Characters of a text."""

_TODAY = datetime(2024, 7, 26)
"""What templates are told of the date (Llama 3.1's own where none is known): rows must not change from day to day."""


class _GenerationBlocks(jinja2.ext.Extension):
    """`{% generation %} … {% endgeneration %}`: notes where in the output the block is, and is nothing otherwise."""

    tags = {"generation"}  # noqa: RUF012  jinja's own annotation

    def __init__(self, environment: jinja2.Environment):
        super().__init__(environment)
        environment.extend(generation_blocks=self)
        self.start()

    def start(self) -> None:
        """At the beginning of a text."""
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
    """JSON as it is: Jinja's own filter escapes what HTML would misread."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _render(template: jinja2.Template, variables: dict[str, Any]) -> dict[str, Any]:
    """A text and the spans of it that are in generation blocks, or an error."""
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
    except Exception as error:  # a template can raise anything; what it is, is for the user to read
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
    with suppress(ValueError):  # macOS knows no such limit
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that asks, and ends this one's input
    template = None
    for line in lines:
        asked = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, SECONDS)  # its signal ends a process, in the midst of C code too
        try:
            if template is None:
                template = _environment().from_string(asked["source"])
                answer = json.dumps({"error": None})
            else:
                answer = json.dumps(_render_all(template, asked))
        except (MemoryError, RecursionError) as error:
            answer = json.dumps({"limit": type(error).__name__})
        except Exception as error:  # of the source: no template, or one whose constants can't be computed
            answer = json.dumps({"error": _said(error)})
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(answer, flush=True)


if __name__ == "__main__":
    _serve(sys.stdin)
