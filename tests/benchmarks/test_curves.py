"""The verdict on curves that are known to be the same or not, and its numbers by hand."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from benchmarks.curves import judge, main, permutation_p, reaches

ITERATIONS, ATTEMPTS = 16, 256


def arm(generator, speed=1.0, seeds=3, seed_noise=0.1, start=0.28):
    """Success of a policy that learns `speed` times as fast as the committed run: 0.28 at first, 0.9 at 19.

    Each seed learns by up to `seed_noise` faster or slower, and each iteration is 256 attempts.
    """
    curves = []
    for _ in range(seeds):
        rate = speed * (1 + seed_noise * generator.uniform(-1, 1))
        exact = [1 / (1 + math.exp(-(math.log(start / (1 - start)) + 0.165 * rate * i))) for i in range(ITERATIONS)]
        curves.append((generator.binomial(ATTEMPTS, exact) / ATTEMPTS).tolist())
    return curves


def verdicts(speed, runs=200):
    generator = np.random.default_rng(0)
    found = [judge(arm(generator), arm(generator, speed)).verdict for _ in range(runs)]
    return {name: found.count(name) / runs for name in ("same", "different", "undecided")}


def test_equal_arms_are_the_same_and_others_are_not():
    """How often each verdict is given, over 200 pairs of arms: false alarms at the 5 % that were set."""
    assert verdicts(1.0)["same"] > 0.9
    assert verdicts(1.0)["different"] < 0.08
    for speed in (0.25, 0.5, 2.0, 4.0):  # a learning rate that is off by so much
        assert verdicts(speed)["same"] == 0
        assert verdicts(speed)["different"] > 0.95


def test_a_broken_arm_is_different():
    generator = np.random.default_rng(1)
    assert judge(arm(generator), arm(generator, speed=0.0)).verdict == "different"  # weights never arrive
    assert judge(arm(generator), arm(generator, start=0.45)).verdict == "different"


def test_noise_leaves_it_undecided():
    noisy = [[0.2] * 16, [0.5] * 16, [0.8] * 16]
    shifted = [[value + 0.1 for value in curve] for curve in noisy]
    found = judge(noisy, shifted)
    assert found.verdict == "undecided"
    assert found.difference == pytest.approx(-0.1)


def test_few_iterations_leave_it_undecided():
    flat = [[0.5, 0.5 + 0.001 * seed] for seed in range(3)]
    assert judge(flat, flat).verdict == "undecided"


def test_the_numbers_by_hand():
    first = [[0.5] * 10, [0.52] * 10, [0.54] * 12]  # cut to ten iterations
    second = [[0.51] * 10, [0.53] * 10, [0.55] * 10]
    found = judge(first, second)
    # both arms have variance 0.0004: s = 0.02, e = 0.02 sqrt(2/3) = 0.016330
    assert found.iterations == 10
    assert found.difference == pytest.approx(-0.01)
    assert found.seed_std == pytest.approx(0.02)
    assert found.explained_below == pytest.approx(2.776 * 0.0163299, rel=1e-5)
    assert found.interval == pytest.approx((-0.01 - 2.132 * 0.0163299, -0.01 + 2.132 * 0.0163299), rel=1e-4)
    assert found.verdict == "same"
    assert found.share_of_iterations_apart == 0


def test_permutation_p_counts_splits():
    assert permutation_p([1, 2, 3], [4, 5, 6]) == pytest.approx(2 / 20)  # this split and its mirror image
    # means 1 apart; sums of three of 1..6 up to 9: 123, 124, 125, 134, 126, 135, 234, and as many from 12 on
    assert permutation_p([1, 2, 6], [3, 4, 5]) == pytest.approx(14 / 20)


def test_when_a_curve_passes_the_milestone():
    assert reaches([0.1, 0.6, 0.6, 0.6]) == 4
    assert reaches([0.9, 0.9, 0.0, 0.9, 0.2]) == 3
    assert reaches([0.5] * 9) is None


def test_files_of_two_arms(tmp_path, capsys):
    generator = np.random.default_rng(3)
    arguments = []
    for name in ("one", "other"):
        arguments += ["--arm", name]
        for seed, curve in enumerate(arm(generator)):
            folder = tmp_path / f"{name}-{seed}"
            folder.mkdir()
            rows = [
                {"reward/success_rate": value, "mismatch/kl": 0.001 * (i + 1), "rollout/forks": 0.0, "time/step_s": 2.0}
                for i, value in enumerate(curve)
            ]
            cut = '\n{"reward/succ' if seed == 0 else ""  # of a run that was ended while it wrote
            (folder / "metrics.jsonl").write_text("\n".join(json.dumps(row) for row in rows) + cut)
            arguments.append(str(folder))
    arguments.append(str(tmp_path / "other-9"))  # never started
    assert main([*arguments, "--out", str(tmp_path / "gate")]) == 0
    text = (tmp_path / "gate.md").read_text()
    assert capsys.readouterr().out == text
    assert text.startswith("Verdict over 16 iterations: **the same within seed noise**.")
    assert "| `mismatch/kl`, mean | 0.0085 | 0.0085 |" in text
    assert "| `mismatch/kl`, max | 0.016 | 0.016 |" in text
    assert json.loads((tmp_path / "gate.json").read_text())["verdict"] == "same"
    from PIL import Image

    with Image.open(tmp_path / "gate.png") as picture:
        assert picture.size == (700, 305)
        colors = {color for _, color in picture.getcolors(100_000)}
    assert {(31, 99, 177), (214, 96, 20)} <= colors
