"""Starting, joining and leaving Ray.

A Ray that is started here is for one run: it listens on the loopback interface only, has no dashboard, sends no usage
statistics, and ends with the run. A Ray that was there before, in this process or at an address, stays as it was.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import torch

from hemiola.errors import FailedElsewhere, InputError

# Read by Ray when it is imported and by the processes it starts. The second keeps every port on the loopback interface:
# it is what Ray itself does on systems where it does not support clusters.
_LOCAL_ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
_VITAL = ("gcs_server", "raylet")
_PROBE_SECONDS = 5.0
_ATTEMPTS = 3


def require_ray() -> None:
    """Raise unless Ray is installed."""
    if find_spec("ray") is None:
        raise InputError("the cluster 'ray' needs the package ray, which is not installed: pip install 'hemiola[ray]'")


class Engine:
    """A connection to Ray.

    Args:
        address: None for a Ray of our own on this machine; ``"auto"``, ``"host:port"`` or ``"ray://host:port"`` to
            join one.
        workers: How many workers will be asked for.

    Attributes:
        ray: The module.
        dead: Whether this Ray has died; then nothing may be asked of it any more.
        cpus: CPUs of all nodes, the real ones.
        gpus: GPUs of all nodes.
    """

    def __init__(self, address: str | None, workers: int) -> None:
        require_ray()
        self.local = address is None
        self.dead = False
        self._threads = torch.get_num_threads()
        if self.local:
            # Torch's idle threads spin for a while after every operation, on cores that are the workers'.
            torch.set_num_threads(1)
        with _quiet(self.local):
            import ray

            self.ray: ModuleType = ray
            self._owned = not ray.is_initialized()
            self._handler = signal.getsignal(signal.SIGTERM)
            if self._owned:
                _start_local(ray, workers) if address is None else _join(ray, address)
                if callable(self._handler):  # Ray put its own in place, which ends the process at once.
                    self._restore_handler()
        resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
        self.cpus = len(os.sched_getaffinity(0)) if self.local else int(resources.get("CPU", 0))
        self.gpus = float(resources.get("GPU", 0))

    def check(self) -> None:
        """Raise if a process that this Ray cannot do without has ended; Ray itself would wait for it for a minute."""
        if not (self.local and self._owned):
            return
        node = self.ray._private.worker._global_node
        gone = [kind for kind, _ in node.dead_processes() if kind in _VITAL]
        if gone:
            self.dead = True
            node.kill_all_processes(check_alive=False, allow_graceful=False)
            raise FailedElsewhere(f"Ray died: its {gone[0]} has ended")

    def close(self) -> None:
        """Leave Ray, and torch, as they were found."""
        torch.set_num_threads(self._threads)
        if self._owned and self.ray.is_initialized() and not self.dead:
            self.ray.shutdown()
            self._restore_handler()

    def _restore_handler(self) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._handler)


def _start_local(ray: ModuleType, workers: int) -> None:
    """Start Ray on this machine. Ray gives itself half a minute, which a busy machine may exceed: then try again."""
    from ray._private import ray_constants

    before, ray_constants.ENABLE_RAY_CLUSTER = ray_constants.ENABLE_RAY_CLUSTER, False  # Ray may be imported already.
    try:
        for attempts_left in reversed(range(_ATTEMPTS)):
            known = _children()
            try:
                ray.init(
                    address="local",
                    num_cpus=workers,
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                )
                return
            except Exception as error:  # Ray raises just that
                for pid in _children() - known:  # what was started of it would stay as long as this process
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                if "timed out during startup" not in str(error) or not attempts_left:
                    raise RuntimeError(f"Ray did not start: {' '.join(str(error).split())}") from None
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


def _children() -> set[int]:
    """Processes this one has started, where the system tells."""
    lists = Path("/proc/self/task").glob("*/children")
    return {int(pid) for path in lists for pid in path.read_text().split()}


def _join(ray: ModuleType, address: str) -> None:
    missing = f"address: no Ray cluster at {address!r}; start one with 'ray start --head', or leave address out"
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if address != "auto":
        if not colon or not port.isdigit():
            raise InputError(f"address must be 'auto', 'host:port' or 'ray://host:port', got {address!r}")
        try:  # Ray itself ends the process, after a minute, when nobody answers.
            socket.create_connection((host.strip("[]"), int(port)), _PROBE_SECONDS).close()
        except OSError as error:
            raise InputError(f"{missing} ({error.strerror or error})") from None
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        if _asks_for_a_token(error):
            raise InputError(
                f"address: the Ray cluster at {address!r} asks for a token; set RAY_AUTH_MODE=token, and "
                "RAY_AUTH_TOKEN to what `ray get-auth-token` prints on its head node"
            ) from None
        if isinstance(error, ConnectionError):
            raise InputError(missing) from None
        # Other versions of Ray or Python on the nodes.
        raise InputError(
            f"address: cannot join the Ray cluster at {address!r}: {' '.join(str(error).split())}"
        ) from None


def _asks_for_a_token(error: BaseException | None) -> bool:
    """Whether Ray was let in by nobody: from 2.59 on it may ask for a token without having been told to."""
    while error is not None:
        if type(error).__name__ == "AuthenticationError" or "AuthenticationError" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


@contextmanager
def _quiet(local: bool) -> Iterator[None]:
    """Ray warns about its own future while it is imported and started; none of it is news to the user."""
    before = dict(os.environ)
    if local:
        os.environ.update(_LOCAL_ENVIRONMENT)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=DeprecationWarning)
            warnings.filterwarnings("ignore", category=FutureWarning)
            warnings.filterwarnings("ignore", category=ResourceWarning)
            yield
    finally:
        for key in _LOCAL_ENVIRONMENT if local else ():
            os.environ.pop(key) if key not in before else os.environ.update({key: before[key]})
