"""The pool of processes: results, errors, and that nothing outlives it."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from hemiola.lab.pool import pool_of


@pytest.fixture
def pool_calls(monkeypatch):
    """Their module, to be found by this process, and so by those of a pool."""
    monkeypatch.syspath_prepend(Path(__file__).parent)
    return importlib.import_module("pool_calls")


@pytest.mark.parametrize("jobs", [1, 2])
def test_every_call_is_answered(jobs):
    with pool_of(jobs) as pool:
        assert sorted(pool.each(partial(pow, number, 2) for number in range(7))) == [0, 1, 4, 9, 16, 25, 36]
        assert list(pool.each([])) == []
        assert (os.getpid() in pool.each([os.getpid] * 4)) == (jobs == 1)


def test_calls_are_asked_for_when_a_process_is_free(pool_calls, tmp_path):
    asked = []

    def calls():
        for number in range(4):
            asked.append(number)
            yield partial(pool_calls.wait_for, tmp_path / str(number), number)

    with pool_of(2) as pool:
        answers = pool.each(calls())
        (tmp_path / "1").touch()
        assert next(answers) == 1
        assert asked == [0, 1]
        for number in (0, 2, 3):
            (tmp_path / str(number)).touch()
        assert sorted(answers) == [0, 2, 3]


def test_an_error_reaches_the_caller_and_ends_what_runs(pool_calls, tmp_path):
    with pytest.raises(ZeroDivisionError), pool_of(2) as pool:
        _run_beside(pool, pool_calls, tmp_path, partial(divmod, 1, 0))
    _wait_until_ended(tmp_path)


def test_ctrl_c_is_answered_here(pool_calls, tmp_path):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a worker of pytest-xdist ignores it
    try:
        with pytest.raises(KeyboardInterrupt), pool_of(2) as pool:
            _run_beside(pool, pool_calls, tmp_path, partial(os.kill, os.getpid(), signal.SIGINT))
    finally:
        signal.signal(signal.SIGINT, before)
    _wait_until_ended(tmp_path)


def test_no_process_outlives_one_that_is_killed():
    """What it prints ends when nobody is left who could print."""
    code = (
        "import sys; from hemiola.lab.pool import pool_of\n"
        "with pool_of(2) as pool: print(*pool.each([int] * 2), flush=True), sys.stdin.read()"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout.readline() == "0 0\n"
        process.kill()
        assert process.stdout.read() == ""


def _run_beside(pool, pool_calls, folder: Path, call) -> None:
    """A call that never ends, and beside it another, which is made once the first one runs."""
    stuck = partial(pool_calls.stick, folder / "process", folder / "never")
    for _ in pool.each([stuck, partial(pool_calls.after, folder / "process", call)]):
        pass


def _wait_until_ended(folder: Path) -> None:
    """The process that is stuck is gone; its own parent, the fork server, may take a moment to notice."""
    process = int((folder / "process").read_text())
    with contextlib.suppress(ProcessLookupError):
        while True:
            os.kill(process, 0)
            time.sleep(0.01)
