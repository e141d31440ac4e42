"""The one fork server of a process, for the cells of experiments and for the pool: whoever comes first starts it."""

from __future__ import annotations

import multiprocessing
import signal
import threading
from multiprocessing import forkserver
from typing import Any


def fork_context() -> Any:
    """A fork server that has imported torch once: starting a cell takes milliseconds, and no thread is forked."""
    methods = multiprocessing.get_all_start_methods()
    return multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")


def start_fork_server() -> None:
    """Signals that reach the whole group of processes must not end the server: this process decides."""
    context = fork_context()
    if context.get_start_method() != "forkserver":
        return
    # The second is what torch's optimizers import when they are first used, and takes as long as all of a small cell.
    context.set_forkserver_preload(["hemiola.lab.worker", "torch._dynamo"])
    if threading.current_thread() is not threading.main_thread():
        return  # Only the main thread may set signals; the first cell starts the server.
    # A process starts with what its parent ignores.
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        forkserver.ensure_running()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
