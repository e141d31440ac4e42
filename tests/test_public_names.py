"""Public names are there, and loading the package is light."""

import subprocess
import sys

import pytest

import hemiola


@pytest.mark.parametrize("name", [name for name in hemiola.__all__ if name != "__version__"])
def test_every_public_name_can_be_had(name):
    assert getattr(hemiola, name) is not None
    assert name in dir(hemiola)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Avarager'"):
        _ = hemiola.Avarager


def test_importing_hemiola_does_not_import_torch():
    code = "import sys, hemiola; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
