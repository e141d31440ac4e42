"""The documentation site builds without a warning: every page is in it, every link and anchor leads somewhere."""

import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest

pytestmark = pytest.mark.slow

pytest.importorskip("mkdocs", reason="the extra docs is not installed")

ROOT = Path(__file__).parents[1]


class _Page(HTMLParser):
    """What a page links to, and the anchors it has."""

    def __init__(self, text: str):
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        told = dict(attrs)
        self.links += [value for key in ("href", "src") if (value := told.get(key)) is not None]
        if told.get("id"):
            self.anchors.add(told["id"])


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "mkdocs", "build", "--strict", "-d", str(folder)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def test_every_page_is_in_the_navigation_and_every_link_leads_somewhere(site):
    pages = {path: _Page(path.read_text(encoding="utf-8")) for path in site.rglob("*.html") if path.name != "404.html"}
    missing = [
        page.relative_to(ROOT / "docs")
        for page in (ROOT / "docs").rglob("*.md")
        if not (site / page.relative_to(ROOT / "docs").with_suffix("") / "index.html").exists() and page.stem != "index"
    ]
    assert not missing
    for path, page in pages.items():
        for link in page.links:
            target, anchor = urldefrag(link)
            if "://" in target or target.startswith(("data:", "mailto:")):
                continue
            found = (path.parent / unquote(target)).resolve() if target else path
            found = found / "index.html" if found.is_dir() else found
            assert found.exists(), f"{path.relative_to(site)} links to {link}"
            if anchor and found in pages:
                assert unquote(anchor) in pages[found].anchors, f"{path.relative_to(site)} links to {link}"


def test_pages_load_nothing_from_elsewhere(site):
    front = _Page((site / "index.html").read_text(encoding="utf-8"))
    assert not [link for link in front.links if link.startswith(("http:", "//")) or "fonts.g" in link]


def test_llms_txt_names_every_page(site):
    text = (site / "llms.txt").read_text(encoding="utf-8")
    for page in (ROOT / "docs").rglob("*.md"):
        assert page.relative_to(ROOT / "docs").as_posix() in text, f"llms.txt does not name {page.name}"
