"""The page in a real browser, without a network."""

import json
import re
import shutil
import subprocess
from html import unescape

import pytest

from hemiola.lab.report import write_report

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the PATH; on Debian: apt-get install chromium"),
]
FLAGS = """
    --headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
    --disable-component-update --disable-sync --host-resolver-rules=MAP~*~~NOTFOUND --enable-logging=stderr
    --virtual-time-budget=30000 --dump-dom
"""

# Runs in the page once the charts are there; what it returns is left in the page for the test to read.
PROBE = """
<script type="module">
const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
while (!document.documentElement.dataset.drawn) await pause(20);
const click = async (selector) => { document.querySelector(selector).click(); await pause(500); };
const count = (chart, marks) => document.querySelectorAll(`#${chart} ${marks} path[d]`).length;
const texts = (selector) => [...document.querySelectorAll(selector)].map((found) => found.textContent);
const labels = (chart) => texts(`#${chart} .role-axis-label text`);
const lines = (chart) => [...document.querySelectorAll(`#${chart} .mark-line path`)];
const seen = await (async () => { SCRIPT })();
const place = document.body.appendChild(document.createElement("pre"));
place.id = "seen";
place.textContent = JSON.stringify(seen);
</script>
"""


@pytest.fixture(scope="module")
def report(demo, tmp_path_factory):
    return write_report(shutil.copytree(demo, tmp_path_factory.mktemp("browser") / "demo")).read_text()


@pytest.fixture
def visit(report, tmp_path):
    """Open the page, run a piece of script in it; returns what it saw. Fails on any message on the console."""

    def opened(script, html=report, width=1280):
        path = tmp_path / "page.html"
        inner = json.dumps(html).replace("</", "<\\/")  # the page itself, for a frame of another size
        script = script.replace("PAGE_HTML", inner) if "PAGE_HTML" in script else script
        path.write_text(html.replace("</body>", PROBE.replace("SCRIPT", script) + "</body>"))
        flags = [flag.replace("~", " ", 2) for flag in FLAGS.split()]
        profile = [f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={width},900"]
        done = subprocess.run([CHROMIUM, *flags, *profile, path.as_uri()], capture_output=True, text=True, timeout=120)
        said = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
        assert said == []
        found = re.search(r'<pre id="seen">(.*?)</pre>', done.stdout, re.DOTALL)
        assert found, done.stderr[-2000:]
        return json.loads(unescape(found[1]))

    return opened


def test_every_chart_has_its_marks(visit):
    seen = visit(
        """
        const charts = [...document.querySelectorAll(".chart")].map((place) => place.id);
        const kinds = [".mark-line", ".mark-area", ".mark-rect", ".mark-symbol"];
        return Object.fromEntries(charts.map((id) => [id, kinds.map((kind) => count(id, kind))]));
        """
    )
    assert seen.pop("target-0")[2:] == [5, 15]
    for x in ("epochs", "seconds", "bytes"):
        assert seen.pop(f"against-{x}")[:2] == [5, 5]
    for monitor in ("herding-0", "herding-1", "period-over-time-0", "spread-over-time-0"):
        assert seen.pop(monitor)[:2] == [2, 2]
    for run in (0, 1):
        assert seen.pop(f"staleness-{run}")[2] == 14
        assert seen.pop(f"ledger-{run}")[2] == 8 * 2 + 1
    assert seen == {}


def test_the_scale_switch_acts_on_all_charts(visit):
    before, after = visit(
        """
        const ids = ["against-epochs", "against-seconds", "against-bytes"];
        const look = () => [ids.map((id) => lines(id)[0].getAttribute("d")), labels("against-epochs")];
        const before = look();
        await click('[data-value="linear"]');
        return [before, look()];
        """
    )
    assert "0.001" in before[1]
    assert "0.001" not in after[1]
    assert not [label for label in before[1] + after[1] if "e" in label]
    assert all(one != other for one, other in zip(before[0], after[0], strict=True))


def test_the_measure_switch_redraws_the_three_curves(visit):
    captions, drawn = visit(
        """
        await click('[data-value="test_metric"]');
        const ids = ["against-epochs", "against-seconds", "against-bytes"];
        return [ids.map((id) => texts(`figure:has(#${id}) figcaption b`)[0]), ids.map((id) => lines(id).length)];
        """
    )
    assert captions == ["test accuracy"] * 3
    assert drawn == [5, 5, 5]


def test_a_click_on_the_legend_highlights_a_run_everywhere(visit):
    seen = visit(
        """
        await click('.legend [data-run="1"]');
        const faded = (id) => lines(id).map((line) => Number(line.getAttribute("opacity") ?? line.style.opacity ?? 1));
        const lit = ["against-epochs", "against-bytes"].map(faded);
        await click('.legend [data-run="1"]');
        return [...lit, faded("against-epochs")];
        """
    )
    assert seen[0] == seen[1]
    assert sorted(seen[0]) == [0.15, 0.15, 0.15, 0.15, 1]
    assert seen[2] == [1] * 5


def test_the_pointer_finds_the_nearest_point(visit):
    shown = visit(
        """
        const plot = document.querySelector("#against-epochs svg");
        const cell = plot.querySelectorAll('[aria-roledescription="cell"], .voronoi path, .mark-path path')[40];
        const box = cell.getBoundingClientRect();
        const at = { clientX: box.left + box.width / 2, clientY: box.top + box.height / 2, bubbles: true };
        for (const kind of ["pointermove", "pointerover"]) cell.dispatchEvent(new PointerEvent(kind, at));
        await pause(300);
        const tip = document.getElementById("tip");
        return [tip.hidden, tip.textContent];
        """
    )
    assert shown[0] is False
    assert re.search(r"epochs: [\d.]+gap f − f\*: [\d.e-]+lowest to highest: ", shown[1])


def test_the_picture_can_show_another_cost(visit):
    before, after = visit(
        """
        const look = () => [texts("figure:has(#target-0) figcaption b")[0], count("target-0", ".mark-rect")];
        const before = look();
        await click('[data-value="bytes_per_worker"]');
        return [before, look()];
        """
    )
    assert before[0].startswith("Cluster time to a gap of ")
    assert after[0].startswith("Sent per worker to a gap of ")
    assert after[1] == 5


def test_the_conclusion_and_the_picture_are_on_the_first_screen(visit):
    assert visit("return document.querySelector('#target-0 svg').getBoundingClientRect().bottom") < 900


def test_nothing_is_wider_than_a_phone(visit):
    # Chromium's window has a least width; a frame of a phone's width does not.
    script = """
        const frame = document.body.appendChild(document.createElement("iframe"));
        frame.style.cssText = "width: 390px; height: 844px; border: 0";
        const drawn = new Promise((resolve) => frame.addEventListener("load", resolve));
        frame.srcdoc = PAGE_HTML;
        await drawn;
        while (!frame.contentDocument.documentElement.dataset.drawn) await pause(20);
        const inside = frame.contentDocument;
        const cells = [...inside.querySelectorAll("td")].filter((cell) => cell.textContent);
        return [
          inside.documentElement.scrollWidth,
          Math.max(...[...inside.querySelectorAll(".chart svg")].map((svg) => svg.getBoundingClientRect().right)),
          inside.querySelector("#target-0 svg").getBoundingClientRect().bottom,
          cells.every((cell) => frame.contentWindow.getComputedStyle(cell, "::before").content.length > 2),
        ];
    """
    page, charts, picture, labelled = visit(script)
    assert page <= 390
    assert charts <= 390
    assert picture < 844
    assert labelled


def test_a_page_of_an_unfinished_run_has_no_error_either(visit, tmp_path, folders):
    status = {("b", 0): "running", ("c", 0): "diverged"}
    runs = {
        "a": [[(0, 0, 0, 1.0), (1, 10, 10, 0.0), (2, 20, 20, -1e-9)]],
        "b": [[(0, 0, 0, 1.0)]],
        "c": [[(0, 0, 0, 1.0), (1, 1, 1, float("inf"))]],
    }
    folder = folders.small(tmp_path / "unfinished", runs, status=status)
    assert visit("return lines('against-epochs').length", write_report(folder).read_text()) == 3
