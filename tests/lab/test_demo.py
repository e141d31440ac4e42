"""The demo: its files, and what it says of curves whose gains are known by hand."""

import math
import tomllib
from importlib.resources import files
from types import SimpleNamespace

import pytest

from hemiola.lab.demo.gains import cost_gain, end_gain, ordinary_end
from hemiola.lab.demo.scenes import SCENES, headline, play_real
from hemiola.lab.experiment import Experiment
from hemiola.lab.progress import Display
from hemiola.lab.report.seeds import SeedCurve

pytestmark = pytest.mark.slow


def falling(speed: float, bytes_per_second: float = 1.0) -> SeedCurve:
    """A gap of exp(-speed * t), evaluated at t = 0, 1, ... 40."""
    times = range(41)
    places = {cost: tuple(map(float, times)) for cost in ("epochs", "seconds")}
    places["bytes_per_worker"] = tuple(bytes_per_second * time for time in times)
    return SeedCurve(tuple(math.exp(-speed * time) for time in times), places)


def summary(**runs: list[SeedCurve]) -> SimpleNamespace:
    made = [
        SimpleNamespace(name=name, best=SimpleNamespace(curves={str(seed): one for seed, one in enumerate(curves)}))
        for name, curves in runs.items()
    ]
    return SimpleNamespace(runs=made)


def test_gains_by_hand():
    told = summary(
        ordinary=[falling(0.1), falling(0.1), falling(0.1)],
        everything=[falling(0.4, 0.5), falling(0.5, 0.5), falling(0.625, 0.5)],
    )
    target = ordinary_end(told)
    assert target == pytest.approx(math.exp(-3.6), rel=0.04)
    assert target >= math.exp(-3.6)
    sooner = cost_gain(told, "everything", "seconds", target)
    assert sooner.mean == pytest.approx(5.0, rel=1e-6)  # 4, 5 and 6.25 times
    # Student's interval of three: 4.303 standard errors of the logarithms.
    reach = 4.3027 * math.log(1.25) / math.sqrt(3)
    assert (sooner.low, sooner.high) == pytest.approx((5 * math.exp(-reach), 5 * math.exp(reach)), rel=1e-3)
    assert cost_gain(told, "everything", "bytes_per_worker", target).mean == pytest.approx(10.0)
    assert "5 times (2.9 to 8.7) sooner" in headline(told)
    assert end_gain(told, "everything").mean > 1e5


def test_what_is_not_shown_is_not_said():
    slow = [falling(0.02), falling(0.02), falling(0.02)]
    told = summary(ordinary=[falling(0.1)] * 3, everything=slow)
    assert cost_gain(told, "everything", "seconds", ordinary_end(told)) is None
    assert "not shown" in headline(told)
    lucky = summary(ordinary=[falling(0.1)] * 3, everything=[falling(0.05), falling(0.1), falling(0.9)])
    assert "not shown" in headline(lucky)


def test_what_takes_longer_is_told_as_that():
    def told(*speeds):
        ordinary = [falling(0.1)] * 3
        return SCENES[1].tell(summary(ordinary=ordinary, ADPSGD=[falling(speed) for speed in speeds]))

    assert told(0.2, 0.2, 0.2) == ["ADPSGD reaches a gap of 0.028 2 times (2 to 2) sooner"]
    assert told(0.1, 0.2, 0.4)[0].endswith(" sooner: no gain is shown")
    assert told(0.095, 0.095, 0.095) == [
        "ADPSGD takes 1.1 times (1.1 to 1.1) as long as the ordinary way to a gap of 0.028"
    ]
    assert told(0.09, 0.09, 0.11)[0].endswith("to a gap of 0.028: no difference is shown")


def test_the_combination_that_does_not_work_is_told_against_the_part_that_does():
    def told(speed):
        return SCENES[-1].tell(
            summary(**{"ordinary": [falling(0.1)] * 3, "period alone": [falling(0.4)] * 3, "order + period": speed})
        )

    assert told([falling(0.2)] * 3) == [
        "period alone reaches a gap of 0.028 4 times (4 to 4) sooner",
        "order + period, waiting for all, takes 2 times (2 to 2) as long as period alone: the combination that does "
        "not work",
    ]
    assert told([falling(0.05)] * 3)[1].endswith("does not reach that gap: the combination that does not work")
    assert told([falling(0.8)] * 3)[1].endswith("nothing is shown to be gained or lost")


def test_every_scene_compares_paired_seeds_cut_at_the_same_second():
    for scene in SCENES:
        given = tomllib.loads(files("hemiola.lab.demo").joinpath(f"{scene.name}.toml").read_text())
        assert given["run"][0]["name"] == "ordinary"
        assert len(given["seeds"]) >= 3
        assert set(given["stop"]) == {"seconds"}
        assert not any("stop" in run or "seeds" in run for run in given["run"])
        assert Experiment(given).cells
    assert SCENES[-1].name == "together"


@pytest.mark.real
def test_the_small_version_on_real_processes(tmp_path):
    lines: list[str] = []
    assert play_real(tmp_path, lines.append, Display.silent, seeds=[0])
    assert any("local steps: gap" in line for line in lines)
    assert (tmp_path / "real" / "report.html").stat().st_size > 100_000
