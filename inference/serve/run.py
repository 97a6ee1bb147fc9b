"""The work of `farsight serve`: loads the model, opens the port, and ends when asked to."""

import argparse
import asyncio
import os
import signal
import sys
from pathlib import Path

from aiohttp import web

from farsight.data.instructions.chat import ChatTemplate
from farsight.data.instructions.conversations import UnusableRow
from farsight.errors import ConfigError
from farsight.inference.generate.completions import warn_of_length
from farsight.inference.loading import LoadedModel, load
from farsight.inference.serve.app import make_app
from farsight.inference.serve.engine import Engine
from farsight.inference.serve.requests import Served
from farsight.remote import shown

GRACE = 60.0
"""Seconds that running answers have after a signal."""
LOCAL = ("127.0.0.1", "localhost", "::1")


def run(options: argparse.Namespace) -> None:
    """Serves until SIGTERM or Ctrl-C."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("farsight serve runs as one process: start it without torchrun.")
    loaded = load(options.model_dir, options)
    if options.max_length is not None:
        warn_of_length(loaded, f"--max-length is {options.max_length:,}", options.max_length)
    served = describe(loaded, options.name, options.max_length, options.queue, options.chat_template)
    engine = Engine(loaded.decoder, loaded.tokenizer, options.rows, options.queue)
    asyncio.run(_serve(engine, served, options.host, options.port))


def describe(
    loaded: LoadedModel, name: str | None, max_length: int | None, queue: int, template_file: Path | None = None
) -> Served:
    """The served model and its limits, from a loaded model and the command's options.

    Raises:
        ConfigError: a chat template that can't be used, or a length that the model has no positions for.
    """
    loaded.decoder.check_length(max_length or loaded.trained_length)
    source, origin = loaded.tokenizer.chat_template, f"the chat template of {loaded.path}"
    if template_file is not None:
        origin = f"--chat-template {template_file}"
        try:
            source = template_file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{origin}: it can't be read: {error}.") from error
    template = turn_end = None
    if source is not None:
        template = ChatTemplate(source, origin, loaded.tokenizer)
        try:
            turn_end = template.turn_end()
        except UnusableRow as error:
            raise ConfigError(
                f"{origin} takes no question with its answer ({error}); set another --chat-template."
            ) from error
    return Served(
        name or shown(loaded.path),
        loaded.tokenizer,
        frozenset(loaded.end_tokens),
        template,
        max_length or loaded.trained_length,
        queue,
        turn_end,
    )


async def _serve(engine: Engine, served: Served, host: str, port: int) -> None:
    """Serves until a signal; then running answers are completed, unless a second signal comes."""
    # A client that goes away cancels its handler, and that its rows.
    runner = web.AppRunner(make_app(engine, served), handler_cancellation=True, shutdown_timeout=GRACE, access_log=None)
    await runner.setup()
    loop, stop = asyncio.get_running_loop(), asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            engine.cancel_all()
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    try:
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            raise ConfigError(f"--host {host} --port {port}: {error.strerror}. --port 0 takes a free port.") from error
        port = runner.addresses[0][1]
        shown = f"[{host}]" if ":" in host else host
        _say(f"{served.name} answers at http://{shown}:{port}/v1, up to {served.max_length:,} tokens a request")
        if host not in LOCAL:
            _say(f"warning: anyone who reaches {host} can use it; there are no keys")
        await stop.wait()
        _say("stopping: running answers are completed; a second signal ends them")
    finally:
        await runner.cleanup()
        await asyncio.to_thread(engine.close)  # it delivers into this loop


def _say(line: str) -> None:
    print(f"farsight serve: {line}", file=sys.stderr, flush=True)
