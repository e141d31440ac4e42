"""Verdicts on experiments whose truth is known."""

import itertools
import math

import numpy as np
import pytest

from hemiola.lab.report.conclusion import sentences
from hemiola.lab.report.read import folder_of
from hemiola.lab.report.seeds import COSTS, SeedCurve
from hemiola.lab.report.summary import Ended, RunSummary, summarise
from hemiola.lab.report.verdicts import compare, targets, verdicts


def made(runs, *, convex=True, status=None, settings=None):
    """A folder from the following, for every run, by seed: the (epochs, seconds, bytes, loss) of every evaluation."""
    rows, log = [], []
    for name, seeds in runs.items():
        for seed, points in seeds.items() if isinstance(seeds, dict) else enumerate(seeds):
            for updates, (epochs, seconds, sent, loss) in enumerate(points):
                log.append(
                    {
                        "run": name,
                        "seed": seed,
                        "updates": updates,
                        "epochs": epochs,
                        "seconds": seconds,
                        "bytes_per_worker": sent,
                        "train_loss": loss,
                        "train_gap": loss,
                    }
                )
            rows.append({**log[-1], "status": (status or {}).get((name, seed), "done")})
    experiment = {"run": [{"name": name, **(settings or {}).get(name, {})} for name in runs]}
    return folder_of({"experiment": experiment, "task": {"convex": convex}}, rows, log)


def verdict(runs, **more):
    folder = made(runs, **more)
    (found,) = verdicts(summarise(folder))
    return found


def said(runs, **more):
    folder = made(runs, **more)
    return sentences(summarise(folder))


def ways(verdict):
    return {name: aspect.verdict for name, aspect in verdict.aspects.items()}


def falling(rate=0.5, *, seconds=10.0, sent=100.0, floor=0.0, scale=1.0, evaluations=11):
    """A gap that falls geometrically to a floor."""
    return [(i, i * seconds, i * sent, scale * (rate**i + floor)) for i in range(evaluations)]


SCALES = (0.8, 1.0, 1.3, 0.9, 1.1)


def seeds(count=5, **more):
    return [falling(scale=scale, **more) for scale in SCALES[:count]]


# ------------------------------------------------------------------------------------------------ by hand


def test_twice_the_speed_is_found_with_its_number():
    found = verdict({"a": seeds(), "b": seeds(seconds=5.0)})
    assert ways(found) == {
        "end": "the same",
        "epochs": "the same",
        "seconds": "better",
        "bytes_per_worker": "the same",
    }
    assert found.aspects["seconds"].over.mean == pytest.approx(-math.log(2))
    assert found.word == "better"


def test_the_words_of_a_run_that_is_faster():
    first, base, other, method = said({"a": seeds(), "b": seeds(seconds=5.0)})
    assert first == "b beats a: the same gap takes 2x fewer seconds."
    assert base.startswith("a ends at a gap of 0.00141 ± 0.00027 after 10 epochs, 100 s of cluster time and 1 kB sent")
    assert base.endswith("(5 seeds).")
    assert other == (
        "b against a: better in time (5 seeds). It ends at a gap of 0.00141 ± 0.00027, the same. "
        "To reach the targets it needs as many epochs, 2x fewer seconds and as many bytes."
    )
    assert method.startswith("Targets: gaps of ")
    assert "95 % intervals" in method


def test_seeds_that_differ_much_among_themselves_do_not_hide_what_each_of_them_shows():
    noisy = [falling(scale=scale) for scale in (0.1, 1.0, 10.0)]
    faster = [falling(scale=scale * 1.01**i, seconds=5.0) for i, scale in enumerate((0.1, 1.0, 10.0))]
    found = verdict({"a": noisy, "b": faster})
    assert found.aspects["seconds"].verdict == "better"


def test_a_run_that_ends_worse_is_never_simply_faster():
    # Twice as fast, to a floor ten times as high as where the other ends.
    found = verdict({"a": seeds(), "b": seeds(seconds=5.0, floor=0.01)})
    assert found.aspects["end"].verdict == "worse"
    assert found.aspects["seconds"].verdict == "better"
    assert found.word == "better and worse"
    first, _, other, *_ = said({"a": seeds(), "b": seeds(seconds=5.0, floor=0.01)})
    assert first.startswith("b beats a: the same gap takes ")
    assert ", but takes " in first
    assert " and ends " in first
    assert other.startswith("b against a: better in time, worse at the end, in epochs and in bytes (5 seeds).")


def test_curves_that_cross_depend_on_the_target():
    # b is ten times as fast at first and then three times as slow.
    def crossing(scale):
        fast = [(i, i, i, scale * 0.5**i) for i in range(4)]
        return fast + [(i, 3 + (i - 3) * 30, i, scale * 0.5**i) for i in range(4, 11)]

    found = verdict({"a": seeds(), "b": [crossing(scale) for scale in SCALES]})
    assert found.aspects["seconds"].verdict == "mixed"
    _, _, other, _ = said({"a": seeds(), "b": [crossing(scale) for scale in SCALES]})
    assert "better or worse in time depending on the target" in other


def test_a_lucky_touch_is_not_an_arrival():
    # Both fall to 0.1 and no further, but at one seed b touches 0.001 once, where the first evaluations are.
    plain = seeds(floor=0.1)
    lucky = seeds(floor=0.1)
    lucky[0][3] = (*lucky[0][3][:3], 0.001)
    lucky[1][10] = (*lucky[1][10][:3], 0.001)
    found = verdict({"a": plain, "b": lucky})
    assert found.word == "no difference shown"
    assert targets(summarise(made({"a": plain, "b": lucky})).runs)[-1] > 0.08


def test_a_run_that_misses_the_lowest_target_says_so_and_by_how_much_it_was_sooner():
    # The one run of five that stays above the target which the others reach, but is six times sooner at the rest.
    runs = {name: seeds() for name in "acde"} | {"b": seeds(seconds=10 / 6, floor=1.5 * 0.5**10)}
    folder = made(runs)
    found = {one.run: one for one in verdicts(summarise(folder))}["b"]
    assert found.aspects["seconds"].verdict == "better"
    assert found.aspects["seconds"].over.mean == pytest.approx(-math.log(6), rel=0.1)
    assert found.aspects["end"].verdict == "worse"
    lowest = min(found.unreached)
    assert found.unreached[lowest] > 0
    text = " ".join(sentences(summarise(folder)))
    assert "b does not stay below" in text
    assert "fewer seconds" in text


def test_targets_are_few_apart_and_reached_by_most_runs():
    stuck = [falling(floor=0.5) for _ in range(3)]
    folder = made({name: seeds(3) for name in "abcd"} | {"stuck": stuck})
    runs = summarise(folder).runs
    aims = targets(runs)
    assert len(aims) == 4
    assert aims == tuple(sorted(aims, reverse=True))
    ratios = [high / low for high, low in itertools.pairwise(aims)]
    assert max(ratios) < 1.3 * min(ratios)
    assert aims[-1] < 0.01
    for run in runs[:4]:
        assert all(curve.smooth[-1] <= aims[-1] for curve in run.best.curves.values())


def test_losses_close_together_have_targets_that_are_told_apart():
    def loss(scale):
        return [(i, i, i, 2.2 + 0.1 * scale * 0.7**i) for i in range(12)]

    aims = targets(summarise(made({"a": [loss(1), loss(1.1), loss(0.9)]}, convex=False)).runs)
    assert len(set(aims)) == 4
    assert all(2.2 < aim < 2.3 for aim in aims)


def test_a_loss_is_compared_by_difference():
    def loss(offset):
        return [
            [(i, i, i, offset * (0.98 + seed / 50) + seed / 10 + 2.2 + 0.7**i) for i in range(12)] for seed in range(3)
        ]

    found = verdict({"a": loss(0.0), "b": loss(-0.03)}, convex=False)
    assert not found.aspects["end"].ratio
    assert found.aspects["end"].over.mean == pytest.approx(-0.03, rel=1e-5)
    assert "0.030 lower (0.027 to 0.033)" in said({"a": loss(0.0), "b": loss(-0.03)}, convex=False)[2]


def test_runs_that_are_evaluated_at_different_times_are_compared_by_what_lies_between():
    def coarse(scale):
        return [(i, i * 10.0, i * 100.0, scale * 0.5**i) for i in (0, 1, 3, 4.5, 7, 8.25, 10)]

    found = verdict({"a": seeds(), "b": [coarse(scale) for scale in SCALES]})
    assert set(ways(found).values()) == {"the same"}


# ------------------------------------------------------------------------------------------------ few seeds, lost seeds


def test_a_run_with_one_seed_does_not_hide_what_another_has_shown():
    first, *_ = said({"a": seeds(), "b": seeds(seconds=5.0), "c": seeds(1, seconds=2.0)})
    assert first == "b beats a: the same gap takes 2x fewer seconds."


@pytest.mark.parametrize("count", [1, 2])
def test_fewer_than_three_seeds_are_shown_and_not_ranked(count):
    found = verdict({"a": seeds(count), "b": seeds(count, seconds=5.0)})
    assert found.word == "not ranked"
    assert set(ways(found).values()) == {"not ranked"}
    first, _, other, *_ = said({"a": seeds(count), "b": seeds(count, seconds=5.0)})
    assert first.startswith(
        f"Nothing is shown yet: {'one seed is' if count == 1 else '2 seeds are'} too few to rank runs"
    )
    assert "b came out ahead, the same gap takes 2.0x fewer seconds" in first
    assert "not ranked" in other
    assert "ranking takes 3" in other
    assert "2.0x fewer seconds" in other


def test_only_common_seeds_are_paired():
    base = {seed: falling(scale=1 + seed / 10) for seed in (0, 1, 2, 3)}
    other = {seed: falling(scale=1 + seed / 10, seconds=5.0) for seed in (1, 2, 3, 9)}
    found = verdict({"a": base, "b": other})
    assert found.seeds == 3
    assert found.aspects["seconds"].verdict == "better"
    del other[3]
    assert verdict({"a": base, "b": other}).word == "not ranked"


def test_a_run_that_diverged_at_a_seed_is_not_called_better():
    runs = {"a": seeds(), "b": seeds(seconds=5.0)}
    found = verdict(runs, status={("b", 1): "diverged"})
    assert (found.seeds, found.lost) == (4, 1)
    assert found.word == "no difference shown"
    first, _, other, *_ = said(runs, status={("b", 1): "diverged"})
    assert first == "No run is shown to be better than a."
    assert "b diverged at 1 of 5 seeds: it is not called better." in other


def test_a_run_that_diverged_at_every_seed_is_worse():
    runs = {"a": seeds(), "b": seeds()}
    status = {("b", seed): "diverged" for seed in range(5)}
    assert verdict(runs, status=status).word == "worse"
    assert said(runs, status=status)[1] == "b diverged at every seed."
    assert said(runs, status=status)[0].startswith("a ends at a gap of")


def test_a_seed_that_ends_without_a_number_is_lost():
    broken = seeds()
    broken[2] = [*broken[2][:-1], (10, 100.0, 1000.0, math.nan)]
    found = verdict({"a": seeds(), "b": broken})
    assert (found.seeds, found.lost) == (4, 1)


def test_a_reference_without_results_leaves_the_others_alone():
    runs = {"a": seeds(3), "b": seeds(3)}
    status = {("a", seed): "diverged" for seed in range(3)}
    assert verdict(runs, status=status).word == "not ranked"
    first, second = said(runs, status=status)
    assert first.startswith("b ends at a gap of")
    assert second == "a diverged at every seed."


def test_predictions_and_measurements_are_not_ranked_against_each_other():
    runs = {name: seeds(3) for name in ("model", "also model", "real", "also real")}
    settings = {"real": {"cluster": {"name": "torch"}}, "also real": {"cluster": "ray"}}
    folder = made(runs, settings=settings)
    found = verdicts(summarise(folder))
    assert [(one.run, one.reference) for one in found] == [("also model", "model"), ("also real", "real")]
    text = sentences(summarise(folder))
    assert text[-1] == (
        "model and “also model”: virtual time, a prediction; real and “also real”: measured. The two stand beside each "
        "other and are not ranked."
    )


def test_different_tasks_are_not_ranked_against_each_other():
    folder = made({"a": seeds(3), "b": seeds(3)}, settings={"a": {"task": "x"}, "b": {"task": "y"}})
    assert verdicts(summarise(folder)) == []


def test_the_best_point_of_a_sweep_is_the_lowest_mean_of_the_last_evaluations():
    rows, log = [], []
    for lr, seed in itertools.product((0.1, 0.2, 0.4), range(3)):
        # 0.4 has the lowest single last evaluation, by luck; 0.2 the lowest end.
        ends = {0.1: [4.0, 4.0, 4.0], 0.2: [2.0, 2.0, 2.0], 0.4: [6.0, 6.0, 1.0]}[lr]
        for at, gap in enumerate([9.0] * 13 + ends):
            line = {"updates": at, "epochs": at, "seconds": at, "bytes_per_worker": at, "train_gap": gap}
            log.append({"run": "a", "seed": seed, "sweep": {"optimizer.lr": lr}, **line})
        rows.append({"run": "a", "seed": seed, "status": "done", "train_gap": ends[-1], "optimizer.lr": lr})
    about = {"experiment": {"run": [{"name": "a"}]}, "task": {"convex": True}}
    (run,) = summarise(folder_of(about, rows, log)).runs
    assert run.best.point == (("optimizer.lr", "0.2"),)


# ------------------------------------------------------------------------------------------------ noise


def noisy(rng, count, draw, *, speed=1.0, end=1.0):
    """Two runs, the second with the given effects: a part common to a seed, a part of each run, noise with memory."""
    epochs = np.arange(17)
    places = {cost: tuple(map(float, epochs * each)) for cost, each in zip(COSTS, (1, 5, 1000), strict=True)}
    common, runs = 0.5 * draw(rng, (count, 1)), []
    for name, fast, floor in (("a", 1.0, 1.0), ("b", speed, end)):
        wobble = 0.26 * draw(rng, (count, 17))
        for i in range(1, 17):
            wobble[:, i] += 0.5 * wobble[:, i - 1]
        gap = (2 / (1 + 2 * epochs * fast) ** 2 + 0.003 * floor) * np.exp(
            common + 0.15 * draw(rng, (count, 1)) + wobble
        )
        curves = {str(seed): SeedCurve(tuple(map(float, gap[seed])), places) for seed in range(count)}
        runs.append(RunSummary(name, (Ended((), {}, {}, {}, curves, ()),)))
    return compare(*runs, targets(runs), "train_gap")


DRAWS = {
    "normal": lambda rng, shape: rng.normal(size=shape),
    "heavy": lambda rng, shape: rng.standard_t(3, size=shape) / 1.7,
    "skewed": lambda rng, shape: rng.exponential(size=shape) - 1,
}


@pytest.mark.parametrize("count", [3, 5, 10])
def test_noise_alone_is_called_a_difference_in_one_of_twenty_experiments_at_most(count):
    words = [
        noisy(np.random.default_rng([number, count]), count, draw).word
        for draw in DRAWS.values()
        for number in range(100)
    ]
    # 300 experiments: 15 are one in twenty; 22 are two standard deviations more.
    assert len(words) - words.count("no difference shown") <= 22


@pytest.mark.parametrize(("count", "least"), [(5, 27), (10, 30)])
def test_a_run_that_is_twice_as_fast_and_ends_at_half_the_gap_is_found(count, least):
    words = [
        noisy(np.random.default_rng([number, count]), count, DRAWS["normal"], speed=2.0, end=0.5).word
        for number in range(30)
    ]
    assert words.count("better") >= least
    assert not {"worse", "better and worse"} & set(words)


def test_a_comparison_without_targets_is_by_the_end_alone():
    flat = [[(i, i, i, 1.0 + 0.1 * scale) for i in range(8)] for scale in SCALES]
    lower = [[(i, i, i, 0.5 + 0.1 * scale) for i in range(8)] for scale in SCALES]
    folder = made({"a": flat, "b": lower})
    first, second = summarise(folder).runs
    found = compare(first, second, targets([first, second]), "train_gap")
    assert ways(found) == {"end": "better"}
