"""``python -m hemiola.lab.rank_process RENDEZVOUS``: what the launcher starts, once for every rank."""

import os
import sys
import warnings
from pathlib import Path

import torch

from hemiola.lab.output import in_one_line
from hemiola.lab.ranks import main

if __name__ == "__main__":
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    warnings.formatwarning = in_one_line
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.exit(main(Path(sys.argv[1])))
