"""The ranks of a data-parallel replica, one of which reads and tokenises for all.

Tensor-, context- and pipeline-parallel ranks train on the same rows. The first of them reads; each of the others has a TCP
connection to it for everything that is shared, and takes what comes in the thread that reads ahead.

Not a gloo group: a rank can't leave an operation that the others have not joined, neither by aborting nor by destroying the
group, and the rank that reads may look for a long document for hours. A connection that is shut down ends all waits at once.
"""

import ipaddress
import os
import pickle
import secrets
import socket
import struct
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from farsight.data.replica import ALONE, Replica, Shared
from farsight.parallel.meshes import ParallelDims
from farsight.parallel.ranks import on_every_rank, portable

T = TypeVar("T")

_ITEM, _ERROR, _END = range(3)
_GREETING = struct.Struct("!16sQ")
"""Token, number of the items."""
_SIZES = struct.Struct("!QQ")
"""Bytes of the pickle, number of its buffers; the buffers' sizes follow, then the pickle, then the buffers."""
_POLL_SECONDS = 0.1
_CONNECT_SECONDS = 60.0
_KEEPALIVE = (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 6))
"""Finds a machine that has vanished within two minutes."""


def replica_of(dims: ParallelDims) -> Replica:
    """This rank's replica. Collective."""
    if dims.batch == dims.world_size or dist.get_backend() == "fake":  # with a fake group there is no other process
        return ALONE
    return SharingReplica(next(ranks for ranks in ranks_by_replica(dims) if dist.get_rank() in ranks))


def ranks_by_replica(dims: ParallelDims) -> list[list[int]]:
    """The ranks of each replica, in order; pipeline stages are the outermost dimension of ranks, the rows' the next."""
    return torch.arange(dims.world_size).view(dims.pp, dims.batch, -1).transpose(0, 1).flatten(1).tolist()  # type: ignore[no-any-return]  # torch has no types here


class SharingReplica(Replica):
    """A replica of several ranks. Making one is collective over all ranks of the run.

    Args:
        ranks: its ranks; the first one reads.
    """

    def __init__(self, ranks: list[int]) -> None:
        self.ranks, self.rank = ranks, dist.get_rank()
        self.reads = self.rank == ranks[0]
        self._numbers = 0
        self._lock = threading.Lock()
        self._arrived: dict[int, list[socket.socket]] = defaultdict(list)
        """Connections of other ranks, by the number of the items that they wait for."""
        self._address, self._token = on_every_rank(self._listen)[ranks[0]]

    def _listen(self) -> tuple[tuple[str, int], bytes]:
        if not self.reads:
            return ("", 0), b""
        everywhere: dict[str, Any] = {"backlog": 16 * len(self.ranks)}
        if socket.has_dualstack_ipv6():
            everywhere |= {"family": socket.AF_INET6, "dualstack_ipv6": True}
        self._listener = socket.create_server(("", 0), **everywhere)
        self._listener.settimeout(_POLL_SECONDS)
        return (_own_host(), self._listener.getsockname()[1]), secrets.token_bytes(16)

    def share(self, items: Callable[[], Iterator[T]]) -> Shared[T]:
        self._numbers += 1
        connections = _Connections()
        if self.reads:
            return Shared(self._hand_out(items, self._numbers, connections), connections.close)
        return Shared(self._take(self._numbers, connections), connections.close)

    def _hand_out(self, items: Callable[[], Iterator[T]], number: int, others: "_Connections") -> Iterator[T]:
        """The items, each sent to the other ranks first."""
        with others:
            for kind, value in _outcomes(items):
                try:
                    if not others.open:
                        self._accept(number, others)
                    others.send((kind, portable(value) if kind == _ERROR else value))
                except OSError as lost:
                    raise dist.DistNetworkError(f"a rank that rank {self.rank} reads for has ended: {lost}") from lost
                if kind == _ERROR:
                    raise value
                if kind == _ITEM:
                    yield value

    def _take(self, number: int, reader: "_Connections") -> Iterator[T]:
        """The items, received from the rank that reads."""
        with reader:
            try:
                connection = socket.create_connection(self._address, timeout=_CONNECT_SECONDS)
                connection.settimeout(None)
                reader.add(connection)
                connection.sendall(_GREETING.pack(self._token, number))
                while (message := _received(connection))[0] == _ITEM:
                    yield message[1]
            except OSError as lost:
                raise dist.DistNetworkError(
                    f"rank {self.ranks[0]}, which reads for rank {self.rank}, has ended: {lost}"
                ) from lost
            if message[0] == _ERROR:
                raise message[1]

    def _accept(self, number: int, others: "_Connections") -> None:
        """Waits for all other ranks to ask for the items of a number; keeps those who ask for others."""
        while len(self._arrived[number]) < len(self.ranks) - 1:
            others.check()
            with self._lock:
                try:
                    connection, _ = self._listener.accept()
                except TimeoutError:
                    continue
                connection.settimeout(_CONNECT_SECONDS)
                try:
                    token, asked = _GREETING.unpack(_exactly(connection, _GREETING.size))
                except OSError:
                    token = b""
                if not secrets.compare_digest(token, self._token):
                    connection.close()  # not a rank of this run
                    continue
                connection.settimeout(None)
                self._arrived[asked].append(connection)
        for connection in self._arrived.pop(number):
            others.add(connection)


def _outcomes(items: Callable[[], Iterator[Any]]) -> Iterator[tuple[int, Any]]:
    """The messages for the other ranks: all items, and then their error or their end."""
    try:
        for item in items():
            yield _ITEM, item
    except Exception as error:
        yield _ERROR, error
    else:
        yield _END, None


class _Connections:
    """The open connections of one sequence of items. `close` may be called from any thread, and more than once."""

    def __init__(self) -> None:
        self.open: list[socket.socket] = []
        self._closed, self._lock = False, threading.Lock()

    def __enter__(self) -> None:
        return

    def __exit__(self, *error: object) -> None:
        self.close()
        for connection in self.open:
            connection.close()

    def close(self) -> None:
        """Ends waits of another thread, in which the connections are then freed."""
        with self._lock:
            self._closed = True
            for connection in self.open:
                try:
                    connection.shutdown(socket.SHUT_RDWR)
                except OSError:  # the other side was faster
                    continue

    def check(self) -> None:
        """Raises ConnectionError after `close`."""
        if self._closed:
            raise ConnectionError("closed")

    def add(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            if hasattr(socket, option):  # not everywhere
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        with self._lock:
            self.open.append(connection)
            self.check()

    def send(self, message: tuple[int, Any]) -> None:
        """Sends a message to all; arrays are not copied."""
        buffers: list[pickle.PickleBuffer] = []
        pickled = pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
        parts: list[memoryview] = [part.raw() for part in buffers]
        sizes = _SIZES.pack(len(pickled), len(parts)) + struct.pack(f"!{len(parts)}Q", *(part.nbytes for part in parts))
        for connection in self.open:
            for part in (memoryview(sizes + pickled), *parts):
                connection.sendall(part)


def _received(connection: socket.socket) -> tuple[int, Any]:
    pickled, count = _SIZES.unpack(_exactly(connection, _SIZES.size))
    sizes = struct.unpack(f"!{count}Q", _exactly(connection, 8 * count))
    content = _exactly(connection, pickled)
    return pickle.loads(content, buffers=[_exactly(connection, size) for size in sizes])


def _exactly(connection: socket.socket, size: int) -> memoryview:
    """The next bytes. Raises ConnectionError if the connection ends before."""
    content, at = np.empty(size, np.uint8).data, 0  # a bytearray would be filled with zeros first, which holds the GIL
    while at < size:
        got = connection.recv_into(content[at:])
        if not got:
            raise ConnectionError("the connection was closed")
        at += got
    return content


def _own_host() -> str:
    """A name or address of this machine that all ranks of the run can reach."""
    master = os.environ.get("MASTER_ADDR", "localhost")
    family, kind, _, _, address = socket.getaddrinfo(master, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # chooses a route, sends nothing
        own = probe.getsockname()[0]
    # The master's own machine may know its name as 127.0.1.1, which means something else on the others.
    return master if ipaddress.ip_address(own).is_loopback else own
