"""Processes for work that is no cell of an experiment: an advisor's laps, the runs behind a function of a claim."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from itertools import islice
from multiprocessing import connection, parent_process
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from hemiola.lab.fork_server import fork_context, start_fork_server

Result = TypeVar("Result")


class Pool:
    """Runs calls side by side; `pool_of` makes it.

    Args:
        jobs: How many at a time.
        executor: Their processes; without it, they run in this one.
    """

    def __init__(self, jobs: int, executor: ProcessPoolExecutor | None):
        self.jobs = jobs
        self._executor = executor

    def each(self, calls: Iterable[Callable[[], Result]]) -> Iterator[Result]:
        """The results as they come. The next call is asked for when a process is free."""
        if self._executor is None:
            for call in calls:
                yield call()
            return
        coming = iter(calls)
        running: set[Future[Any]] = set()
        while True:
            for call in islice(coming, self.jobs - len(running)):
                running.add(self._executor.submit(call))
            if not running:
                return
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                yield future.result()


@contextmanager
def pool_of(jobs: int) -> Iterator[Pool]:
    """Processes that end with the block, with what they are doing where it is left by an error or by Ctrl-C.

    Args:
        jobs: How many; one is this process itself.
    """
    if jobs == 1:
        yield Pool(1, None)
        return
    start_fork_server()
    context = fork_context()
    until, held = context.Pipe(duplex=False)
    with until, ProcessPoolExecutor(jobs, mp_context=context, initializer=_prepare, initargs=(until,)) as executor:
        try:
            yield Pool(jobs, executor)
        except BaseException:
            held.close()
            raise
    held.close()


def _prepare(until: Connection) -> None:
    """In a process: end with the parent, however that ends, or when it lets go of the pipe; Ctrl-C is its to answer."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the fork server ignores it
    parent = parent_process()
    assert parent is not None
    sentinel = parent.sentinel

    def watch() -> None:
        connection.wait([sentinel, until])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
