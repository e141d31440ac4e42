"""What is said when Ray asks for a token, or dies."""

import socket
import subprocess
import sys

import pytest

pytest.importorskip("ray")

import ray
import ray.exceptions

from hemiola.clusters.ray.engine import Engine
from hemiola.errors import InputError


def test_a_cluster_that_asks_for_a_token_is_one_line(monkeypatch):
    """Ray raises this error itself, or another one because of it."""

    def refuse(**_):
        try:
            raise ray.exceptions.AuthenticationError("no token")
        except ray.exceptions.AuthenticationError as error:
            raise ConnectionError("could not connect") from error

    monkeypatch.setattr(ray, "init", refuse)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(
            InputError, match="asks for a token; set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN to"
        ) as told:
            Engine(address, 1)
    assert "\n" not in str(told.value)


# Ray ends a driver that has lost it, sooner or later: whoever tries this in the tests' own process may be gone with it.
DIES = """
import os, signal
from hemiola.clusters.ray.engine import Engine
from hemiola.errors import FailedElsewhere
engine = Engine(None, 1)
engine.check()
import ray
(server,) = ray._private.worker._global_node.all_processes["gcs_server"]
os.kill(server.process.pid, signal.SIGKILL)
server.process.wait()
try:
    engine.check()
except FailedElsewhere as error:
    print(error, engine.dead, flush=True)
engine.close()
os._exit(0)
"""


@pytest.mark.real
def test_a_ray_that_died_is_one_line_and_nothing_waits_for_it():
    done = subprocess.run([sys.executable, "-c", DIES], stdout=subprocess.PIPE, text=True, check=False)
    assert done.stdout == "Ray died: its gcs_server has ended True\n"
