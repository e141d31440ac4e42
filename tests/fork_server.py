"""Runs scripts one after the other as ``python SCRIPT`` would, but forked from a process that has imported torch once.

Only what is not hemiola's is imported before: a script that forgets an import fails here as it does for a user.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

SERVER = """
import json, os, runpy, sys
import numpy, torch, torch._dynamo

for line in sys.stdin:
    script, folder = json.loads(line)
    if child := os.fork():
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    os.chdir(folder)
    for descriptor, name in enumerate((os.devnull, "stdout", "stderr")):
        os.dup2(os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC), descriptor)
    sys.argv, sys.path[0] = [script], os.path.dirname(script)
    runpy.run_path(script, run_name="__main__")
    break
"""


@dataclass
class Done:
    """How a script ended, and what it printed."""

    returncode: int
    stdout: str
    stderr: str


class ForkServer:
    """Has imported torch, and runs scripts."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, script: Path, folder: Path) -> Done:
        """Run a script in a folder, which keeps what it prints."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([str(script), str(folder)]), file=self._process.stdin, flush=True)
        code = int(self._process.stdout.readline())
        return Done(code, (folder / "stdout").read_text(), (folder / "stderr").read_text())

    def close(self) -> None:
        self._process.communicate()
