"""README, docs and examples: snippets run, links lead somewhere."""

import re
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from fork_server import ForkServer
from hemiola.lab.experiment import Experiment

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), flags=re.DOTALL)


PYTHON = [(page, block) for page in PAGES for block in blocks(page, "python")]
TOML = [(page, block) for page in PAGES for block in blocks(page, "toml")]


@pytest.fixture(scope="module")
def server():
    started = ForkServer()
    yield started
    started.close()


@pytest.mark.parametrize(("page", "code"), PYTHON, ids=[f"{page.name}-{i}" for i, (page, _) in enumerate(PYTHON)])
def test_python_snippets_run(page, code, server, tmp_path):
    snippet = tmp_path / "snippet.py"
    snippet.write_text(code)
    done = server.run(snippet, tmp_path)
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


@pytest.fixture(scope="module")
def example(server, tmp_path_factory):
    """Called with a script of the examples: how it ended and what it printed; each is run once."""
    return cache(lambda script: server.run(script, tmp_path_factory.mktemp(script.stem)))


@pytest.mark.parametrize("script", sorted((ROOT / "examples").glob("*.py")), ids=lambda script: script.stem)
def test_examples_run(script, example):
    done = example(script)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip()


def test_in_the_example_of_a_sampler_cd_grab_ends_nearer_to_the_minimum(example):
    done = example(ROOT / "examples" / "ordered_sampler.py")
    assert done.stderr == ""
    rows = [[float(x) for x in line.split()] for line in done.stdout.splitlines() if re.match(r" +\d", line)]
    assert len(rows) == 12
    random, ordered = (sum(row[column] for row in rows[-4:]) for column in (1, 2))
    assert random > 2 * ordered
