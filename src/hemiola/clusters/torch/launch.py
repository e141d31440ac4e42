"""Local processes of a torch cluster, started and started again by torch's own elastic launcher.

What torchrun does on one machine, without a socket that other machines could reach: the launcher keeps its state in a
file, the ranks find each other through a file, and gloo binds to the loopback interface.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from hemiola.errors import FailedElsewhere

# How long ranks that were told to stop may take to end their update and write a checkpoint.
SHUTDOWN_SECONDS = 50


class RanksFailed(FailedElsewhere):
    """A rank has failed more often than it may; the message says which and how."""


def launch(module: str, arguments: Sequence[str], workers: int, max_restarts: int, rendezvous: Path) -> bool:
    """Run ``python -m module arguments`` in so many processes until all have ended well.

    When one of them dies, the others are ended as well and all are started again.

    Args:
        module: What every process runs; it finds its place in RANK, WORLD_SIZE and TORCHELASTIC_RESTART_COUNT.
        arguments: Of every process.
        workers: How many processes.
        max_restarts: How often all may be started again.
        rendezvous: An empty folder of this launch's own, for the launcher's state.

    Returns:
        False if SIGTERM told this process to end them; they got SIGTERM, too, and time to react.

    Raises:
        RanksFailed: One has died again after the last restart.
    """
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=workers,
        run_id=rendezvous.name,
        rdzv_backend="c10d",
        rdzv_endpoint=str(rendezvous / "launcher"),
        rdzv_configs={"store_type": "file"},
        local_addr="127.0.0.1",
        max_restarts=max_restarts,
        logs_specs=DefaultLogsSpecs(log_dir=str(rendezvous)),
    )
    # Not arguments in every torch since 2.6; those that do not know them handle SIGINT like SIGTERM and wait 30 s.
    config.signals_to_handle = "SIGTERM"
    config.shutdown_timeout = SHUTDOWN_SECONDS
    with _environment(workers), _own_signals():
        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # It is all said in RanksFailed.
        try:
            elastic_launch(config, sys.executable)("-m", module, *arguments)
        except SignalException:
            return False
        except ChildFailedError as error:
            raise RanksFailed(_describe(error.failures, max_restarts)) from None
    return True


@contextmanager
def _own_signals() -> Iterator[None]:
    """The launcher takes SIGTERM over and does not give it back."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def end_with_parent() -> None:
    """Called by a rank: whatever happens to the launcher, even SIGKILL, it does not outlive it. Linux only."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


def _describe(failures: dict[int, ProcessFailure], max_restarts: int) -> str:
    """Who died: a signal says more than the broken connections that it left the others with."""
    rank, failure = min(failures.items(), key=lambda pair: (pair[1].exitcode > 0, pair[1].timestamp))
    code = failure.exitcode
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    return f"rank {rank} {how}, and max_restarts = {max_restarts} leaves no further try"


@contextmanager
def _environment(workers: int) -> Iterator[None]:
    """What the ranks inherit, unless the user has said otherwise."""
    loopback = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    wanted = {
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // workers)),
        **({"GLOO_SOCKET_IFNAME": loopback[0]} if loopback else {}),
    }
    added = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]
