"""The machine an experiment runs on, for whoever wants to know how a number was made."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch


def machine() -> dict[str, str]:
    """Facts that a reader of a report can use; nothing that names the machine or its user."""
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else ""
    facts = {
        "processor": _processor(),
        "cores": str(os.cpu_count() or ""),
        "GPU": gpu,
        "system": f"{platform.system()} {platform.machine()}",
        "Python": platform.python_version(),
        "PyTorch": torch.__version__,
    }
    return {name: fact for name, fact in facts.items() if fact}


def _processor() -> str:
    """The name of the processor, where the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
