"""Runs a script as the ranks of a group, as torchrun would, but forked from a server that has imported torch once.

Importing torch in every rank and in torchrun is most of the time such a test would take. What torchrun itself does is
tested in `adapters/test_frameworks_real.py` and `clusters/test_torch_real.py`.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
import warnings
from multiprocessing.connection import Connection
from pathlib import Path

from torch.distributed import TCPStore


def run_on_ranks(script: Path, folder: Path, count: int) -> str:
    """Run ``script FOLDER`` on so many ranks of a group; return what they wrote to stderr. All of them must end well.

    Args:
        script: Calls ``init_process_group`` as under torchrun.
        folder: The script's argument, and its folder of temporary files; what ranks say is written there.
        count: Of ranks.
    """
    # As torchrun's agent does, this process holds the store that ranks meet at, so nobody has to guess a free port.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(folder),
    }
    ranks = [
        _context().Process(
            target=runpy.run_path,
            args=(__file__, {"RANK": (script, folder, environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)})}),
            kwargs={"run_name": "__rank__"},
        )
        for rank in range(count)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    said = [(folder / f"stderr-{rank}").read_text() for rank in range(count)]
    assert [rank.exitcode for rank in ranks] == [0] * count, "\n".join(text[-3000:] for text in said)
    return "".join(said)


class Forked:
    """``python SCRIPT ARGUMENTS``, forked from the server, with its stdout to be read."""

    def __init__(self, script: Path, *arguments: str) -> None:
        reader, writer = multiprocessing.Pipe(duplex=False)
        self._process = _context().Process(
            target=runpy.run_path,
            args=(__file__, {"SCRIPT": ([str(script), *arguments], writer)}),
            kwargs={"run_name": "__script__"},
            daemon=True,
        )
        self._process.start()
        writer.close()
        with reader:
            self.stdout = os.fdopen(os.dup(reader.fileno()))

    def send_signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def close(self) -> None:
        """End it, whatever it does."""
        self._process.kill()
        self._process.join()
        self.stdout.close()


def _context() -> multiprocessing.context.ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["hemiola.lab.ranks", "torch._dynamo"])
    return context


def _become_rank(script: Path, folder: Path, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    with open(folder / f"stderr-{environment['RANK']}", "w") as stderr:
        os.dup2(stderr.fileno(), sys.stderr.fileno())
    warnings.simplefilter("error", FutureWarning)
    sys.argv = [str(script), str(folder)]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")


def _become_script(arguments: list[str], writer: Connection) -> None:
    os.dup2(writer.fileno(), sys.stdout.fileno())
    writer.close()
    sys.argv = arguments
    sys.path.insert(0, str(Path(arguments[0]).parent))
    runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__rank__":
    _become_rank(*RANK)  # type: ignore[name-defined]  # noqa: F821 - given by run_on_ranks
elif __name__ == "__script__":
    _become_script(*SCRIPT)  # type: ignore[name-defined]  # noqa: F821 - given by Forked
