"""`rl360 simulate`: a table from medians, and from what a run wrote down."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import replace

import pytest

from rl360.cli import main as rl360
from rl360.diagnostics.simulate_cli import log_normal, main
from rl360.engine.journal import Trajectories
from rl360.errors import ConfigError, RL360Error
from rl360.types import OutcomeKind, Timings
from tests.engine.records import make_attempt, make_spec, outcome

# 300 tokens at 100/s in 3 s; 1 s of sandbox, 2 s of tools, 0.5 s of verifier, 0.25 s that nobody names: 6.75 s
TIMES = Timings(queue_s=9.0, sandbox_s=1.0, agent_s=5.0, engine_wait_s=3.0, verify_s=0.5, total_s=6.75)


def make_run(folder, iterations=4, step_s=8.0, train_s=1.0, max_staleness=0):
    folder.mkdir(exist_ok=True)
    trajectories = Trajectories(folder)
    for iteration in range(iterations):
        rows = []
        for member in range(2):
            spec = make_spec(iteration, member=member)
            attempt = replace(make_attempt(spec, sampled=tuple(range(300))), timings=TIMES)
            rows.append((attempt, outcome(spec, OutcomeKind.TRAINED)))
        trajectories.write(rows)
    lines = [
        {"iteration": i, "time/step_s": step_s, "time/train_s": train_s, "time/publish_s": 0.25}
        for i in range(iterations)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "resolved.yaml").write_text(
        "tasks_per_iteration: 1\ngroup_size: 2\n"
        f"rollout: {{engine: external, engine_urls: [http://a:1], max_staleness: {max_staleness}, concurrency: 64}}\n"
    )
    return folder


def test_the_table_and_the_runs_own_step(tmp_path):
    lines = []
    folder = make_run(tmp_path / "run")
    other = make_run(tmp_path / "other", max_staleness=1, step_s=4.0)
    assert main([str(folder), "--max-staleness", "0", "1", "--against", str(other)], lines.append) == 0
    head, on_policy, ahead, fit, own, against = lines
    assert head.split()[:2] == ["max_staleness", "step_s"]
    # 1.25 + 3 + 2 + 0.5 = 6.75 s of rollout, 1 s of training, 0.25 s of publishing
    assert on_policy.split()[:2] == ["0", "8.00"]
    assert on_policy.split()[-2:] == ["0.00", "0"]
    assert float(ahead.split()[1]) < 8.0
    assert fit == "its engines, fitted: 100 tokens/s of a request alone, as many beside others, and 0 ms a call"
    assert own == "the run itself: 8.00 s an iteration measured, 8.00 s simulated (+0 %)"
    # 6.75 s of attempts and 1.25 s of training, two iterations at once
    assert against == f"{other}: 4.00 s measured, 4.00 s predicted (+0 %), 4.00 to 4.00 over 8 draws of the attempts"


def test_turns_of_a_run_are_its_own(tmp_path):
    with pytest.raises(ConfigError, match="--turns with a run"):
        main([str(make_run(tmp_path / "run")), "--turns", "4"])


def test_a_key_replaces_what_the_run_says(tmp_path):
    lines = []
    main([str(make_run(tmp_path / "run")), "--train-s", "3"], lines.append)
    assert lines[1].split()[1] == "10.00"


def test_log_normal_times_have_their_median_and_their_ninetieth_percentile():
    work = log_normal({"tokens": (100.0, 500.0), "tools_s": (0.0, 0.0)}, turns=2, seed=0)
    drawn = sorted(work(i, 0, 0).tokens for i in range(4000))
    assert drawn[2000] == pytest.approx(100.0, rel=0.06)
    assert drawn[3600] == pytest.approx(500.0, rel=0.1)
    assert statistics.stdev(map(math.log, drawn)) == pytest.approx(math.log(5) / 1.2816, rel=0.05)
    assert work(3, 1, 2) == work(3, 1, 2)
    assert work(3, 1, 2).tools_s == 0.0


def test_the_command_without_a_run(capsys):
    plain = ["--request-tokens-per-s", "100", "--tokens", "200", "--train-s", "2", "--concurrency", "256"]
    assert rl360(["simulate", *plain, "--max-staleness", "0"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[:2] == ["0", "4.00"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--request-tokens-per-s and --tokens missing"),
        (["--request-tokens-per-s", "1", "--tokens", "5", "2"], "--tokens 5 2: the 90 % point is 2; .* the median 5"),
        (["--request-tokens-per-s", "1", "--tokens", "1", "1e308"], "--tokens 1 1e\\+308: the 90 % point"),
        (["--request-tokens-per-s", "1", "--tokens", "5", "--tools-s", "1", "2", "3"], "--tools-s 1 2 3: 3 numbers"),
        (["--request-tokens-per-s", "1", "--tokens", "-5"], "--tokens -5: the median is -5; expected 0 or more"),
        (["--request-tokens-per-s", "1", "--tokens", "nan"], "--tokens nan: the median is nan"),
        (["--request-tokens-per-s", "1", "--tokens", "inf"], "--tokens inf: the median is inf"),
        (["--request-tokens-per-s", "1", "--tokens", "1e12", "1e14"], "an attempt's tokens: .*at most 1e\\+12"),
        (["--request-tokens-per-s", "inf", "--tokens", "5"], "request_tokens_per_s: inf; expected at most"),
        (["--request-tokens-per-s", "1", "--tokens", "5", "--turns", "0"], "--turns 0; expected at least 1"),
        (["--request-tokens-per-s", "1", "--tokens", "5", "--train-s", "nan"], "train_s: nan; expected 0 or more"),
        (["--request-tokens-per-s", "1", "--tokens", "5", "--publish-s", "inf"], "publish_s: inf; .*at most"),
        (["--request-tokens-per-s", "1", "--tokens", "5", "--engines", "0"], "engines: 0"),
    ],
)
def test_what_is_wrong_is_said(arguments, message):
    with pytest.raises(ConfigError, match=message):
        main(arguments)


def test_a_folder_without_an_iteration_is_refused(tmp_path):
    with pytest.raises(RL360Error, match="metrics"):
        main([str(tmp_path)])
