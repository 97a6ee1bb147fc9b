"""An S3-compatible store on this machine (moto), behind a proxy that counts what passes and can fail on purpose."""

import http.client
import logging
import re
import threading
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Literal
from urllib.parse import unquote

BUCKET = "bucket"
PIECE = 2**16

Fault = Literal["", "403", "503", "drop", "cut"]
"""Faults of a store on purpose: none, refuse it for good or for now, close the connection, or send half of the answer."""


class LocalStore:
    """A store with an empty bucket, for as long as the `with` block lasts; `environment` has clients find it.

    Attributes:
        fault: called with method and path of each request, returns what to do to it.
        on_piece: called with method, path and the bytes of a request that have arrived, after each `PIECE` of them.
        requests: requests by what they are about, as in `about`.
        up, down: bytes of bodies by the same.
        seen: method, path and headers of all requests, in order.
    """

    def __init__(self) -> None:
        self.fault: Callable[[str, str], Fault] = lambda method, path: ""
        self.on_piece: Callable[[str, str, int], None] = lambda method, path, size: None
        self.requests: Counter[str] = Counter()
        self.up: Counter[str] = Counter()
        self.down: Counter[str] = Counter()
        self.seen: list[tuple[str, str, dict[str, str]]] = []
        self.lock = threading.Lock()

    def __enter__(self) -> "LocalStore":
        from moto.server import ThreadedMotoServer

        logging.getLogger("werkzeug").setLevel(logging.WARNING)  # it logs every request
        self.moto = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
        self.moto.start()
        self.port = self.moto.get_host_and_port()[1]
        handler = type("Handler", (_Handler,), {"store": self})
        self.proxy = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.proxy.daemon_threads = True
        threading.Thread(target=self.proxy.serve_forever, daemon=True).start()
        self.address = f"http://127.0.0.1:{self.proxy.server_address[1]}"
        self.environment = {
            "AWS_ENDPOINT_URL": self.address, "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
        }  # fmt: skip
        self.ask("PUT", f"/{BUCKET}")
        self.forget()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.proxy.shutdown()
        self.proxy.server_close()
        self.moto.stop()

    def ask(self, method: str, path: str) -> bytes:
        """The answer of the server itself, not counted."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request(method, path, headers={"Host": "127.0.0.1"})
        answer = connection.getresponse()
        data = answer.read()
        connection.close()
        assert answer.status < 300, (method, path, answer.status, data)
        return data

    def keys(self) -> list[str]:
        """The names of all objects."""
        return re.findall(r"<Key>(.*?)</Key>", self.ask("GET", f"/{BUCKET}?list-type=2").decode())

    def uploads(self) -> list[str]:
        """The names of objects whose upload in parts has begun and not ended."""
        return re.findall(r"<Key>(.*?)</Key>", self.ask("GET", f"/{BUCKET}?uploads").decode())

    def forget(self) -> None:
        """Counts from zero again."""
        with self.lock:
            self.requests, self.up, self.down, self.seen = Counter(), Counter(), Counter(), []


def about(path: str) -> str:
    """The subject of a request: "checkpoints", "model", "lease", or "other files"."""
    path = unquote(path)
    for what, pattern in {"checkpoints": "checkpoint", "model": r"/model/|/model$", "lease": r"lease\.json"}.items():
        if re.search(pattern, path):
            return what
    return "other files"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    store: LocalStore

    def handle_any(self) -> None:
        store, what = self.store, about(self.path)
        with store.lock:
            store.requests[what] += 1
            store.seen.append((self.command, self.path, dict(self.headers)))
            fault = store.fault(self.command, self.path)
        body = bytearray()
        length = int(self.headers.get("Content-Length") or 0)
        if self.headers.get("Expect", "").lower() == "100-continue":
            self.send_response_only(100)
            self.end_headers()
        while len(body) < length:
            piece = self.rfile.read(min(PIECE, length - len(body)))
            if not piece:  # the client is gone
                self.close_connection = True
                return
            body += piece
            with store.lock:
                store.up[what] += len(piece)
            store.on_piece(self.command, self.path, len(body))
        if fault in ("403", "503"):
            code = {"403": "AccessDenied", "503": "SlowDown"}[fault]
            text = (
                b""
                if self.command == "HEAD"
                else f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()
            )
            self._send(int(fault), {}, text)
            return
        if fault == "drop":
            self.close_connection = True
            return
        connection = http.client.HTTPConnection("127.0.0.1", store.port, timeout=60)
        headers = {name: value for name, value in self.headers.items() if name.lower() not in ("connection", "expect")}
        headers = {"Authorization": "AWS test:public", **headers}  # without credentials too, as on a web server
        connection.request(self.command, self.path, bytes(body), headers)
        answer = connection.getresponse()
        data = answer.read()
        connection.close()
        kept = {name: value for name, value in answer.getheaders() if name.lower() not in _OWN}
        if self.command == "HEAD":
            kept["Content-Length"] = answer.getheader("Content-Length") or "0"
        self._send(answer.status, kept, data, cut=fault == "cut")

    def _send(self, status: int, headers: dict[str, str], data: bytes, cut: bool = False) -> None:
        with self.store.lock:
            self.store.down[about(self.path)] += len(data)
        self.send_response_only(status)
        for name, value in ({"Content-Length": str(len(data))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data[: len(data) // 2] if cut else data)
        if cut:
            self.close_connection = True

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_any

    def log_message(self, format: str, *arguments: Any) -> None:
        """Nothing."""


_OWN = ("content-length", "transfer-encoding", "connection", "date", "server")
"""Headers of the answer that the proxy sets itself."""
