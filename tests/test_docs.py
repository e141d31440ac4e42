"""README, docs and examples: snippets run, links lead somewhere."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from hemiola.lab.experiment import Experiment

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), flags=re.DOTALL)


PYTHON = [(page, block) for page in PAGES for block in blocks(page, "python")]
TOML = [(page, block) for page in PAGES for block in blocks(page, "toml")]


@pytest.mark.parametrize(("page", "code"), PYTHON, ids=[f"{page.name}-{i}" for i, (page, _) in enumerate(PYTHON)])
def test_python_snippets_run(page, code, tmp_path):
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize(("page", "text"), TOML, ids=[f"{page.name}-{i}" for i, (page, _) in enumerate(TOML)])
def test_toml_snippets_are_good_experiments(page, text):
    given = tomllib.loads(text)
    assert Experiment({"task": "digits-logistic", **given}).cells


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("script", sorted((ROOT / "examples").glob("*.py")), ids=lambda script: script.stem)
def test_examples_run(script, tmp_path):
    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip()
