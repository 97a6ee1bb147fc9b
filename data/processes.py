"""Reads a rank's lanes in processes of their own, where one thread would tokenise too slowly.

A process reads some of the rank's lanes as if it were a rank of a larger run, so rows and places in the data are the same.
"""

import multiprocessing
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

from farsight.data.prefetch import Prefetch
from farsight.errors import DataError

T = TypeVar("T")


def read_in_processes(work: Sequence[Callable[[], Iterator[T]]], turns: int) -> Generator[list[list[T]], None, None]:
    """The next `turns` items of each of several iterators, which are each made in a process of its own.

    Processes run a few items ahead. An error in one is raised here; the processes end with this iterator.

    Raises:
        DataError: a process was killed.
    """
    # Not forked from here, where threads run; from a process that has only imported what they need.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["farsight.data.loader"])
    started: list[tuple[BaseProcess, Connection, Prefetch[T]]] = []
    try:
        for read in work:
            ours, theirs = context.Pipe(duplex=False)
            process: BaseProcess = context.Process(target=_send, args=(read, theirs), daemon=True)
            process.start()
            theirs.close()
            # Taken as they come, or a process would stand still until it is its turn.
            started.append((process, ours, Prefetch(_received(ours), 2 * turns)))
        while True:
            yield [[next(items) for _ in range(turns)] for _, _, items in started]
    finally:
        for process, connection, items in started:
            process.terminate()  # which ends a wait for it
            process.join()
            items.close()
            connection.close()


def _received(connection: Connection) -> Iterator[Any]:
    while True:
        try:
            item, error = connection.recv()
        except EOFError:
            raise DataError(
                "a process that reads data was killed, perhaps because memory ran out: lower data.reader_processes."
            ) from None
        if error is not None:
            raise error
        yield item


def _send(items: Callable[[], Iterator[Any]], connection: Connection) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the library would start threads for every core
    try:
        for item in items():
            connection.send((item, None))
    except (BrokenPipeError, KeyboardInterrupt):
        return
    except Exception as error:
        connection.send((None, error))
