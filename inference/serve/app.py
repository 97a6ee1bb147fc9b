"""The HTTP side of the server: routes, streams, errors. Needs `aiohttp`, so import it only where it is used."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import web

from farsight.inference.serve.answers import Answers
from farsight.inference.serve.engine import Engine, Piece, Row
from farsight.inference.serve.errors import RequestError, reported
from farsight.inference.serve.requests import Asked, Served, read_chat, read_completion

LARGEST_REQUEST = 64 * 2**20
"""Bytes of a request's body."""
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_app(engine: Engine, served: Served, largest_request: int = LARGEST_REQUEST) -> web.Application:
    """The application that answers on one model."""
    return _Server(engine, served, largest_request).app


class _Server:
    """The handlers of all routes."""

    def __init__(self, engine: Engine, served: Served, largest_request: int) -> None:
        self.engine, self.served, self.largest, self.started = engine, served, largest_request, int(time.time())
        self.app = web.Application(middlewares=[_errors_as_json], client_max_size=largest_request)
        self.app.add_routes(
            [
                web.get("/health", self.health),
                web.get("/v1/models", self.models),
                web.get("/v1/models/{name:.+}", self.model),
                web.post("/v1/completions", self.completions),
                web.post("/v1/chat/completions", self.chat),
            ]
        )

    async def health(self, request: web.Request) -> web.Response:
        """200 as long as requests are answered."""
        if not self.engine.alive:
            raise RequestError("The server has stopped answering; its output says why.", 503)
        return web.json_response({"status": "ok"})

    async def models(self, request: web.Request) -> web.Response:
        """The list of the one model."""
        return web.json_response({"object": "list", "data": [self._described()]})

    async def model(self, request: web.Request) -> web.Response:
        """The model by its name."""
        name = request.match_info["name"]
        if name != self.served.name:
            raise RequestError(
                f"There is no model {name!r} here; this server has {self.served.name!r}.", 404, "model_not_found"
            )
        return web.json_response(self._described())

    def _described(self) -> dict[str, Any]:
        return {
            "id": self.served.name,
            "object": "model",
            "created": self.started,
            "owned_by": "farsight",
            "max_model_len": self.served.max_length,
        }

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """Continues prompts."""
        return await self._answer(request, read_completion)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """Answers a conversation."""
        return await self._answer(request, read_chat)

    async def _answer(self, request: web.Request, read: Callable[[Any, Served], Asked]) -> web.StreamResponse:
        try:
            body = await request.read()
        except web.HTTPRequestEntityTooLarge:
            raise RequestError(
                f"The request has more than {self.largest:,} bytes; send fewer prompts at a time.", 413
            ) from None
        # A long prompt takes a while to encode, and others are answered meanwhile.
        asked = await asyncio.to_thread(_read, body, read, self.served)
        answers = Answers(asked, self.served.tokenizer, self.served.name)
        with self._submitted(asked) as pieces:
            if asked.stream:
                return await self._stream(request, asked, answers, pieces)
            choices: list[list[Piece]] = [[] for _ in range(len(asked.prompts) * asked.answers)]
            for _ in choices:
                ended = False
                while not ended:
                    number, piece = await pieces.get()
                    choices[number].append(_whole(piece))
                    ended = piece.ended is not None
            return web.json_response(answers.whole(choices))

    @contextmanager
    def _submitted(self, asked: Asked) -> Iterator["asyncio.Queue[tuple[int, Piece]]"]:
        """Submits the rows of a request; at the end of the context nobody waits for them any more."""
        loop, pieces = asyncio.get_running_loop(), asyncio.Queue[tuple[int, Piece]]()

        def deliver_to(number: int) -> Callable[[Piece], object]:
            return lambda piece: loop.call_soon_threadsafe(pieces.put_nowait, (number, piece))

        rows = []
        for number in range(len(asked.prompts) * asked.answers):
            prompt = number // asked.answers
            rows.append(
                Row(
                    asked.prompts[prompt],
                    asked.new_tokens[prompt],
                    asked.sampling.of_row(number),
                    deliver_to(number),
                    asked.stop,
                    asked.end_tokens,
                    asked.top,
                    asked.echo,
                )
            )
        self.engine.submit(rows)
        try:
            yield pieces
        finally:
            for row in rows:
                row.cancelled = True

    async def _stream(
        self, request: web.Request, asked: Asked, answers: Answers, pieces: "asyncio.Queue[tuple[int, Piece]]"
    ) -> web.StreamResponse:
        """Sends pieces as server-sent events. An error after the first piece is an event too: the status was sent."""
        number, piece = await pieces.get()
        _whole(piece)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        begun, left = set[int](), len(asked.prompts) * asked.answers
        while True:
            if piece.error is not None:
                await _send(response, RequestError(piece.error, 500).body)
                break
            await _send(response, answers.piece(number, piece, number not in begun))
            begun.add(number)
            left -= piece.ended is not None
            if not left:
                break
            number, piece = await pieces.get()
        if asked.usage and not left:
            await _send(response, answers.last())
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response


def _read(body: bytes, read: Callable[[Any, Served], Asked], served: Served) -> Asked:
    try:
        content = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"The request is not JSON: {error}.") from None
    return read(content, served)


def _whole(piece: Piece) -> Piece:
    """The piece, unless it is an error, which is raised."""
    if piece.error is not None:
        raise RequestError(piece.error, 500)
    return piece


async def _send(response: web.StreamResponse, content: dict[str, Any]) -> None:
    await response.write(f"data: {json.dumps(content)}\n\n".encode())


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Errors in the form of OpenAI's API, for routes that do not exist too."""
    try:
        return await handler(request)
    except RequestError as error:
        headers = {"Retry-After": "1"} if error.status == 429 else None
        return web.json_response(error.body, status=error.status, headers=headers)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        sentence = f"{request.method} {request.path}: {error.reason}."
        if error.status in (404, 405):
            routes = (
                f"{r.method} {r.resource.canonical}"
                for r in request.app.router.routes()
                if r.resource and r.method != "HEAD"
            )
            sentence += f" This server has {', '.join(routes)}."
        refused = RequestError(sentence, error.status)
        return web.json_response(refused.body, status=error.status)
    except ConnectionError:  # the client is gone
        raise
    except Exception as error:
        return web.json_response(RequestError(reported(error), 500).body, status=500)
