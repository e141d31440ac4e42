"""docs/architecture.md names every file of src and nothing else, and no two classes share a name."""

import ast
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "hemiola"
PAGE = ROOT / "docs" / "architecture.md"

# Names that classes share on purpose: the same thing for each framework.
SHARED = {"LocalSGD", "LocalSteps"}


def test_every_file_is_on_the_page_and_nothing_else():
    listed = re.findall(r"^\| `([\w/]+\.py)` \| .+ \|$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert sorted(listed) == sorted(str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py"))


def test_files_named_in_the_text_exist():
    text = PAGE.read_text(encoding="utf-8").partition("## Every file")[0]
    for name in re.findall(r"`([\w/]+\.py)`", text):
        assert (SOURCE / name).exists(), name


def test_no_two_public_classes_share_a_name():
    places = defaultdict(list)
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(path.relative_to(SOURCE)))
    shared = {name: files for name, files in places.items() if len(files) > 1}
    assert set(shared) <= SHARED, {name: files for name, files in shared.items() if name not in SHARED}
