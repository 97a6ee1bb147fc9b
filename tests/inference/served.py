"""A server in a thread, a plain HTTP client for it, and a model whose answers are text."""

import asyncio
import dataclasses
import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from aiohttp import web

from farsight.checkpoints.model_dir.api import write_model_dir
from farsight.configs.schema import Position
from farsight.data.tokenizers.tokenizer import BytesTokenizer
from farsight.inference.decoder import Decoder
from farsight.inference.extend import parse_extension
from farsight.inference.loading import LoadedModel
from farsight.inference.serve.app import LARGEST_REQUEST, make_app
from farsight.inference.serve.engine import Engine
from farsight.inference.serve.run import describe
from farsight.model.build import ModelConfig
from tests.evals.harness_models import ascii_model
from tests.model.test_model import SMALL

TEMPLATE = (
    "{% for m in messages %}<|bos|>{{ m['role'] }}: {{ m['content'] }}<|eos|>{% endfor %}"
    "{% if add_generation_prompt %}<|bos|>assistant: {% endif %}"
)


def small_model(extend: str = "", trained: int = 96, template: str | None = TEMPLATE, **position) -> LoadedModel:
    """An `ascii_model` with far-apart logits."""
    tokenizer = BytesTokenizer()
    tokenizer.chat_template = template
    config = ModelConfig(dataclasses.replace(SMALL, vocab_size=320), Position(**position), trained)
    extension = parse_extension(extend) if extend else None
    if extension is not None:
        config = extension.change(config)
    model = ascii_model(config, std=0.2)
    return LoadedModel(Path("small"), Decoder(model.eval(), config, extension, chunk=16), tokenizer, trained)


def write(loaded: LoadedModel, folder: Path) -> Path:
    """The model as a directory that `transformers` reads too."""
    loaded.tokenizer.save(folder / "tokenizer")
    write_model_dir(
        folder / "model", loaded.config, loaded.decoder.model.state_dict(), tokenizer_dir=folder / "tokenizer"
    )
    return folder / "model"


@dataclasses.dataclass
class Client:
    """Plain HTTP requests to a server on this machine."""

    port: int
    engine: Engine

    def send(self, method: str, path: str, body: object = None) -> http.client.HTTPResponse:
        """The response; its connection is its attribute `connection`."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        raw = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        connection.request(method, path, raw, {"Content-Type": "application/json"})
        response = connection.getresponse()
        response.connection = connection
        return response

    def __call__(self, path: str, body: object = None, status: int = 200) -> dict:
        """The JSON of a response with this status."""
        response = self.send("GET" if body is None else "POST", path, body)
        content = json.loads(response.read())
        assert response.status == status, content
        return content

    def complete(self, prompt: object, **fields) -> dict:
        """The answer to a completion, greedy unless `fields` say otherwise."""
        return self("/v1/completions", {"prompt": prompt, "temperature": 0, **fields})

    def events(self, path: str, body: dict) -> list[dict]:
        """The events of a stream, which ends with [DONE]."""
        response = self.send("POST", path, {**body, "stream": True})
        assert response.headers["Content-Type"] == "text/event-stream"
        *events, done, rest = response.read().decode().split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        return [json.loads(event.removeprefix("data: ")) for event in events]


@contextmanager
def serving(
    loaded: LoadedModel,
    rows: int = 4,
    queue: int = 32,
    max_length: int | None = None,
    largest_request: int = LARGEST_REQUEST,
) -> Iterator[Client]:
    """A server that runs inside the context."""
    engine = Engine(loaded.decoder, loaded.tokenizer, rows, queue)
    served = describe(loaded, None, max_length, queue)
    loop, started, ports = asyncio.new_event_loop(), threading.Event(), []

    async def start() -> web.AppRunner:
        runner = web.AppRunner(make_app(engine, served, largest_request), handler_cancellation=True, shutdown_timeout=1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        ports.append(runner.addresses[0][1])
        started.set()
        return runner

    def run() -> None:
        runner = loop.run_until_complete(start())
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        engine.close()

    thread = threading.Thread(target=run)
    thread.start()
    assert started.wait(30)
    try:
        yield Client(ports[0], engine)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
