"""``python -m hemiola.lab.rank_process MEETING``: what the launcher starts, once for every rank."""

import os
import sys
from pathlib import Path

import torch

from hemiola.lab.ranks import main

if __name__ == "__main__":
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    sys.exit(main(Path(sys.argv[1])))
