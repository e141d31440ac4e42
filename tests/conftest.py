"""What every test shares: one thread per process (tests run side by side), a cache of its own, no user settings.

Hypothesis draws the same examples on every run, so that a green commit stays green; `HYPOTHESIS_PROFILE=explore`
looks for new ones (CONTRIBUTING.md).
"""

import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import pytest
import torch

torch.set_num_threads(1)
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
hypothesis.settings.register_profile("explore", derandomize=False, deadline=None)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


# Files that take longest, the longest first, measured by `pytest --durations=0`; what is not here fills the end.
LONGEST = [
    "clusters/test_ray_real.py",
    "loops/test_averager_real.py",
    "clusters/test_torch_real.py",
    "clusters/test_ray.py",
    "conformance/test_policies.py",
    "lab/test_runs.py",
    "lab/test_models.py",
    "test_docs.py",
    "adapters/test_frameworks_real.py",
    "test_public_names.py",
    "loops/test_sampler_resume.py",
    "lab/test_experiment.py",
    "timing/test_predict.py",
    "timing/test_timing.py",
    "test_own_policy_example.py",
    "lab/test_demo.py",
]


def pytest_xdist_auto_num_workers() -> int:
    """One process more than there are cores: real clusters wait for each other half of the time."""
    return len(os.sched_getaffinity(0)) + 1


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take longest come first, then those with real clusters and other slow tests: short ones fill the end.

    That is what ``--dist loadfile --no-loadscope-reorder`` keeps to; the tests of a file run in one process, and what
    they share is made once. (``--dist loadgroup`` of pytest-xdist 3.8 sees no groups under pytest 9.2.)
    """
    folder = Path(__file__).parent
    slowest = {folder / name: place - len(LONGEST) for place, name in enumerate(LONGEST)}
    for item in items:
        rank = 0 if item.get_closest_marker("real") else 1 if item.get_closest_marker("slow") else 2
        slowest[item.path] = min(rank, slowest.get(item.path, rank))
    items.sort(key=lambda item: slowest[item.path])


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    os.environ["HEMIOLA_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """The large public data sets, for tests marked `data`."""
    folder = os.environ.get("HEMIOLA_DATA")
    if not folder:
        pytest.skip("needs the public data sets: set HEMIOLA_DATA to a folder that `hemiola data fetch` filled")
    return Path(folder)
