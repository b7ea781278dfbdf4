"""Admission: the verdict from the scores, reports that are used again, and real tasks that are fit and unfit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rl360.cli import main
from rl360.tasks.cheaters import CHEATERS, PROBES, Kind
from rl360.tasks.needs import needs_of
from rl360.tasks.probe_urls import probe_url, read_probe_url
from rl360.tasks.template import new_task
from rl360.tasks.validation import ProbeResult, ReportFile, TaskReport, Verdict, judge, report_key
from rl360.tasks.wiring import score_of
from rl360.types import Task, Timings, TrialResult
from tests.tasks.test_manifest import make_task, row, write_manifest

TEMPLATE = Path(__file__).parents[2] / "rl360" / "tasks" / "bundled" / "template" / "count-words"


def results(**scores: float | None) -> list[ProbeResult]:
    """Every probe as a fit task has it, but for those named (`no_op` for no-op)."""
    usual = {probe.name: 1.0 if probe.kind is Kind.ORACLE else 0.0 for probe in PROBES}
    changed = usual | {name.replace("no_op", "no-op"): score for name, score in scores.items()}
    return [ProbeResult(name, score, None if score is not None else "gone") for name, score in changed.items()]


@pytest.mark.parametrize(
    ("scores", "said"),
    [
        ({"oracle": 0.0}, "oracle: scores 0, expected 1"),
        ({"oracle": 0.5}, "oracle: scores 0.5, expected 1"),
        ({"oracle": None}, "oracle: no verdict (gone)"),
        ({"no_op": 1.0}, "no-op: doing nothing scores 1"),
        ({"early_reward": 1.0}, "early_reward: this cheater scores 1, expected 0"),
        ({"path_shims": 0.2}, "path_shims: this cheater scores 0.2, expected 0"),
        ({"links_out": None}, "links_out: no verdict (gone)"),
    ],
)
def test_one_fault_makes_a_task_invalid(scores: dict[str, float | None], said: str) -> None:
    verdict, (problem,) = judge(results(**scores))
    assert verdict is Verdict.INVALID
    assert problem.startswith(said)


def test_a_fit_task_and_one_with_part_of_the_reward_for_nothing() -> None:
    assert judge(results()) == (Verdict.VALID, ())
    assert judge(results(no_op=0.3, early_reward=0.3))[0] is Verdict.VALID
    assert judge(results(no_op=0.3, early_reward=0.4))[0] is Verdict.INVALID


def test_what_the_machine_failed_is_unknown_unless_something_else_is_wrong() -> None:
    failed = [replace(r, reward=None, infrastructure=True) if r.name == "links_out" else r for r in results()]
    assert judge(failed)[0] is Verdict.UNKNOWN
    failed[1] = replace(failed[1], reward=1.0)
    assert judge(failed)[0] is Verdict.INVALID


@pytest.mark.parametrize(
    ("rewards", "exception", "metadata", "want"),
    [
        ({"reward": 1.0}, None, {}, (1.0, False, None)),
        ({"correct": 0.5}, None, {}, (0.5, False, None)),
        ({"reward": 1.0, "style": 0.0}, None, {}, (1.0, False, None)),
        ({"correct": 1.0, "style": 0.0}, None, {}, (None, False, "verifier_no_reward")),
        (None, "RewardFileNotFoundError", {}, (None, False, "verifier_no_reward")),
        (None, "SandboxBuildFailedError", {}, (None, True, "sandbox_build")),
        (None, "RuntimeError", {"exhausted": "disk"}, (0.0, False, "exhausted_disk")),
        ({"reward": 1.0}, "AgentTimeoutError", {}, None),  # an oracle that is too slow for the agent's own limit
    ],
)
def test_a_trial_scores_as_in_training(
    rewards: dict[str, float] | None, exception: str | None, metadata: dict[str, object], want: object
) -> None:
    got = score_of(TrialResult("t", rewards, exception, None, metadata, Timings(agent_s=1.0), Path()))
    assert got == want if want is not None else got[0] != 1.0


def test_a_probe_travels_as_a_url() -> None:
    folder = Path("/a b/ü?&=#/solution")
    assert [read_probe_url(probe_url(probe.name, folder)) for probe in PROBES] == [(p.name, folder) for p in PROBES]


def test_reports_are_used_again_until_something_changes(tmp_path: Path) -> None:
    task = Task("a", make_task(tmp_path, "a"), (), "hash")
    key = report_key(task, {"memory_mib": 1})
    report = TaskReport("a", Verdict.VALID, (), key, "hash", needs_of(task.path), tuple(results()))
    ReportFile(tmp_path / "validation.json").add([report])
    again = ReportFile(tmp_path / "validation.json")
    found = again.known(task, key)
    assert found == report
    assert found is not None
    assert found.reused
    changed = replace(task, content_hash="other")
    assert len({key, report_key(task, {"memory_mib": 2}), report_key(changed, {"memory_mib": 1})}) == 3
    assert again.known(task, "another key") is None
    assert (again.last_verdict(task), again.last_verdict(changed)) == ("valid", "no")
    again.add([replace(report, verdict=Verdict.UNKNOWN)])
    assert again.known(task, key) is None  # the machine failed: it is run again
    (tmp_path / "validation.json").write_text("{")
    assert ReportFile(tmp_path / "validation.json").known(task, key) is None


def test_needs_are_what_the_task_says(tmp_path: Path) -> None:
    toml = '[environment]\nnetwork_mode = "public"\nmemory_mb = 2048\n[verifier]\nenvironment_mode = "shared"\n'
    needs = needs_of(make_task(tmp_path, "a", toml))
    assert (needs.image, needs.network, needs.memory_mib, needs.verifier) == (
        "python:3.12-slim",
        "public",
        2048,
        "shared",
    )
    assert needs.in_words == "python:3.12-slim, network public, 2048 MiB, shared verifier"


def test_new_makes_a_task_and_its_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tasks", "new", "leap-year", "--pool", str(tmp_path), "--tag", "dates", "--tag", "coding"]) == 0
    assert main(["tasks", "new", "second", "--pool", str(tmp_path)]) == 0
    assert "rl360 tasks validate" in capsys.readouterr().out
    assert main(["tasks", "new", "second", "--pool", str(tmp_path)]) == 1
    assert "exists already" in capsys.readouterr().err
    rows = [json.loads(line) for line in (tmp_path / "harbor_records.jsonl").read_text().splitlines()]
    assert [r["metadata"] for r in rows] == [
        {"instance_id": "leap-year", "tags": ["dates", "coding"]},
        {"instance_id": "second", "tags": ["coding"]},
    ]
    assert main(["tasks", "list", str(tmp_path)]) == 0
    assert "2 tasks in" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["validate"], ["validate", "/nowhere"], ["calibrate", "pool"], ["select", "/x"]])
def test_usage_is_said_without_a_traceback(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(["tasks", *arguments])
    except SystemExit as error:  # argparse's own
        code = int(error.code or 0)
    assert code in (1, 2)
    assert capsys.readouterr().err.strip()


@pytest.mark.parametrize("command", ["list", "new", "validate", "calibrate", "select"])
def test_every_command_answers_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["tasks", command, "--help"])
    assert caught.value.code == 0
    assert f"rl360 tasks {command}" in capsys.readouterr().out


# What is wrong with a task -> the script that grades it.
UNFIT = {
    "trusts the answer": "#!/bin/sh\necho 0 >/logs/verifier/reward.txt\nsh /app/answer.sh\n",
    "always right": "#!/bin/sh\necho 1 >/logs/verifier/reward.txt\n",
    "never right": "#!/bin/sh\necho 0 >/logs/verifier/reward.txt\n",
    "no verdict": "#!/bin/sh\ngrep -qs right /app/answer.txt && echo 1 >/logs/verifier/reward.txt\n",
}


@pytest.mark.sandbox
@pytest.mark.slow
def test_fit_and_unfit_tasks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pool = tmp_path / "pool"
    new_task("fit", pool, ["coding"], TEMPLATE)
    names = ["fit"]
    for name, script in UNFIT.items():
        task = make_task(pool, name.replace(" ", "-"), '[environment]\nnetwork_mode = "no-network"\n')
        (task / "environment" / "Dockerfile").write_text("FROM x\nWORKDIR /app\nRUN echo : >answer.sh\n")
        (task / "tests" / "test.sh").write_text(script)
        (task / "solution").mkdir()
        solve = "echo right >/app/answer.txt; echo 'echo 1 >/logs/verifier/reward.txt' >/app/answer.sh\n"
        (task / "solution" / "solve.sh").write_text(solve)
        names.append(task.name)
    names.append(make_task(pool, "without-a-solution").name)
    write_manifest(pool, *(row(name) for name in names))
    command = ["tasks", "validate", str(pool), "--jobs", "4", f"paths.cache={tmp_path / 'cache'}"]
    assert main(command) == 1
    out = capsys.readouterr().out
    reports = json.loads((pool / "validation.json").read_text())["tasks"]
    assert {name: report["verdict"] for name, report in reports.items()} == {
        name: "valid" if name == "fit" else "invalid" for name in names
    }
    assert all(len(report["probes"]) == len(PROBES) for name, report in reports.items() if name != "without-a-solution")
    problems = {name: " ".join(report["problems"]) for name, report in reports.items()}
    assert "hostile_answer: this cheater scores 1" in problems["trusts-the-answer"]
    assert "no-op: doing nothing scores 1" in problems["always-right"]
    assert "oracle: scores 0" in problems["never-right"]
    assert "no-op: no verdict (verifier_no_reward)" in problems["no-verdict"]
    assert "solve.sh: missing" in problems["without-a-solution"]
    assert "6 tasks: 1 valid, 5 invalid; 0 unchanged and not run" in out

    (pool / "always-right" / "tests" / "test.sh").write_text(UNFIT["never right"])
    assert main([*command, "--task", "fit", "--task", "always-right"]) == 1
    out = capsys.readouterr().out
    assert "2 tasks: 1 valid, 1 invalid; 1 unchanged and not run" in out
    assert "always-right: oracle: scores 0" in out


@pytest.mark.sandbox
def test_without_a_sandbox_nothing_is_said_of_the_task(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new_task("fit", tmp_path, ["coding"], TEMPLATE)
    dockerfile = tmp_path / "fit" / "environment" / "Dockerfile"
    dockerfile.write_text(dockerfile.read_text() + "RUN exit 7\n")
    assert main(["tasks", "validate", str(tmp_path), f"paths.cache={tmp_path / 'cache'}"]) == 1
    assert "1 tasks: 1 unknown" in capsys.readouterr().out
    (report,) = json.loads((tmp_path / "validation.json").read_text())["tasks"].values()
    assert [p["cause"] for p in report["probes"]] == ["sandbox_build"]


def test_there_are_cheaters_of_every_kind() -> None:
    assert len(CHEATERS) == len({probe.name for probe in CHEATERS}) == 11
    assert all(probe.script and probe.says for probe in CHEATERS)
