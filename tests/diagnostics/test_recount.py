"""A second count of a run's attempts, and that it notices every kind of tampering."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from rl360.config.schemas import RootConfig
from rl360.diagnostics.recount import main, recount
from rl360.engine.frames import pack, scan
from rl360.engine.journal import Trajectories
from rl360.engine.ledger import Ledger
from rl360.engine.summary import summarize_run, write_summary
from rl360.types import Attempt, OutcomeKind, Purpose
from tests.engine.records import make_attempt, make_spec, outcome

EXPECTED = {
    "started": 10,
    "trained": 3,
    "filtered": 2,
    "masked": 2,
    "requeued": 1,
    "stale": 0,
    "evaluated": 1,
    "unused": 1,
}


def log_session(run_dir: Path, attempt: Attempt, discarded: bool = False) -> None:
    """What the proxy writes of a closed session."""
    segments = []
    for segment in attempt.segments:
        sampled = segment.token_ids_T[segment.loss_mask_T].astype("<i4")
        segments.append({"sampled_tokens": len(sampled), "sampled_sha256": hashlib.sha256(sampled).hexdigest()})
    row = {
        "try_id": attempt.spec.try_id,
        "segments": segments,
        "sampled_tokens": sum(s["sampled_tokens"] for s in segments),
        "discarded": discarded,
    }
    path = run_dir / "logs" / "sessions.jsonl"
    path.parent.mkdir(exist_ok=True)
    with open(path, "a") as file:
        file.write(json.dumps(row) + "\n")


def decide(run_dir: Path, ledger: Ledger, *pairs: tuple[Attempt, OutcomeKind, str | None]) -> None:
    outcomes = [outcome(attempt.spec, kind, reason) for attempt, kind, reason in pairs]
    ledger.record(outcomes)
    Trajectories(run_dir).write(zip((attempt for attempt, _, _ in pairs), outcomes, strict=True))


def start(run_dir: Path, ledger: Ledger, attempt: Attempt) -> Attempt:
    ledger.started(attempt.spec)
    log_session(run_dir, attempt)
    return attempt


@pytest.fixture
def run_dir(tmp_path):
    """Two groups of three: one kept, one equal; a requeue, two masked, an evaluation, one unused."""
    (tmp_path / "resolved.yaml").write_text("algorithm:\n  filter: differing_rewards\n")
    trained, filtered, masked = OutcomeKind.TRAINED, OutcomeKind.FILTERED, OutcomeKind.MASKED
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        kept = [start(tmp_path, ledger, make_attempt(make_spec(member=i), float(i % 2))) for i in range(3)]
        equal = [start(tmp_path, ledger, make_attempt(make_spec(group="b", member=i), 1.0)) for i in range(2)]
        lost = make_attempt(make_spec(group="b", member=2), None)
        ledger.started(lost.spec)
        log_session(tmp_path, lost, discarded=True)
        requeued = outcome(lost.spec, OutcomeKind.REQUEUED, "sandbox_died")
        ledger.record(requeued)
        Trajectories(tmp_path).write([(lost.spec, requeued)])
        again = start(tmp_path, ledger, make_attempt(make_spec(group="b", member=2, try_number=1), None))
        invalid = start(tmp_path, ledger, make_attempt(make_spec(group="c"), 1.0))
        invalid = replace(invalid, scores={"verifier": replace(invalid.scores["verifier"], valid=False)}, cause="nan")
        evaluation = start(tmp_path, ledger, make_attempt(make_spec(purpose=Purpose.EVAL), 0.0))
        unused = start(tmp_path, ledger, make_attempt(make_spec(iteration=1), 1.0))
        decide(tmp_path, ledger, *[(a, trained, None) for a in kept])
        decide(tmp_path, ledger, *[(a, filtered, "equal_rewards") for a in equal], (again, masked, "sandbox_died"))
        decide(tmp_path, ledger, (invalid, masked, "nan"))
        decide(
            tmp_path, ledger, (evaluation, OutcomeKind.EVALUATED, None), (unused, OutcomeKind.UNUSED, "run_finished")
        )
        summary = summarize_run(RootConfig(), tmp_path, ledger, "finished", wall_s=1.0)
    write_summary(tmp_path, summary)
    return tmp_path


def test_both_counts_agree(run_dir, capsys):
    result = recount(run_dir)
    assert result.problems == []
    assert result.counts == EXPECTED
    assert result.masked_by_cause == {"nan": 1, "sandbox_died": 1}
    assert result.claimed == {"ledger.jsonl": EXPECTED, "summary.json": EXPECTED}
    assert result.sampled_tokens == 3 * 9  # all tries but the requeued one
    assert main([str(run_dir)]) == 0
    assert "all records agree" in capsys.readouterr().out


def rewrite(run_dir: Path, change) -> None:
    """Apply `change` to each trajectory row of iteration 0; None drops it."""
    path = Trajectories(run_dir).path(0)
    rows = [changed for _, _, row in scan(path) if (changed := change(row)) is not None]
    path.write_bytes(b"".join(pack(row) for row in rows))


def disagreements(run_dir: Path, capsys) -> str:
    assert main([str(run_dir)]) == 1
    return capsys.readouterr().out


def test_a_lost_row_is_noticed(run_dir, capsys):
    rewrite(run_dir, lambda row: None if row["spec"]["try_id"] == "i0-a-1.t0" else row)
    text = disagreements(run_dir, capsys)
    assert "i0-a-1.t0: the proxy closed its session, but no trajectory row has it" in text
    assert "trained: 0 recounted, 3 in ledger.jsonl" in text  # the others' rewards no longer differ


def test_a_doubled_row_is_noticed(run_dir, capsys):
    path = Trajectories(run_dir).path(0)
    path.write_bytes(path.read_bytes() * 2)
    assert "i0-a-0.t0: two trajectory rows" in disagreements(run_dir, capsys)


def test_a_token_that_was_not_sampled_is_noticed(run_dir, capsys):
    def change(row):
        if row["spec"]["try_id"] == "i0-a-0.t0":
            row["segments"][0]["token_ids"][4] += 1
        return row

    rewrite(run_dir, change)
    assert "i0-a-0.t0: sampled tokens differ from the proxy's (3 here, 3 there)" in disagreements(run_dir, capsys)


def test_a_mask_of_another_length_is_noticed(run_dir, capsys):
    def change(row):
        if row["spec"]["try_id"] == "i0-a-0.t0":
            row["segments"][0]["sampled"] = [[2, 6]]
        return row

    rewrite(run_dir, change)
    assert "(4 here, 3 there)" in disagreements(run_dir, capsys)


@pytest.mark.parametrize(
    ("try_id", "said", "text"),
    [
        ("i0-b-0.t0", "trained", "recorded as trained, but the attempt itself is filtered"),
        ("i0-a-0.t0", "masked", "recorded as masked, but the attempt itself is trained"),
        ("i0-c-0.t0", "trained", "recorded as trained, but the attempt itself is masked"),
        ("e0-a-0.t0", "trained", "recorded as trained, but the attempt itself is evaluated"),
    ],
)
def test_an_outcome_that_the_attempt_contradicts_is_noticed(run_dir, capsys, try_id, said, text):
    def change(row):
        if row["spec"]["try_id"] == try_id:
            row["outcome"]["kind"] = said
        return row

    rewrite(run_dir, change)
    assert f"{try_id}: {text}" in disagreements(run_dir, capsys)


def test_a_reward_that_became_zero_is_noticed(run_dir, capsys):
    """A failed attempt that someone scored as zero would make an equal group look kept."""

    def change(row):
        if row["spec"]["try_id"] == "i0-b-1.t0":
            row["scores"]["verifier"]["shaped"] = 0.0
        return row

    rewrite(run_dir, change)
    assert "i0-b-0.t0: recorded as filtered, but the attempt itself is trained" in disagreements(run_dir, capsys)


def test_a_reward_that_is_not_its_scores_sum_is_noticed(run_dir, capsys):
    rewrite(run_dir, lambda row: {**row, "reward": row["reward"] + 0.5} if row.get("reward") is not None else row)
    assert "its scores are 1.0 in all, its reward is 1.5" in disagreements(run_dir, capsys)
    rewrite(run_dir, lambda row: {**row, "reward": 0.0} if row["outcome"]["kind"] == "masked" else row)
    assert "has the reward 0.0, and no valid score" in disagreements(run_dir, capsys)


def test_the_trial_of_another_try_is_noticed(run_dir, capsys):
    def swap(row):
        return {**row, "trial": {**row["trial"], "try_id": "another.t0"}} if row.get("trial") else row

    rewrite(run_dir, swap)
    assert "its trial is that of another.t0" in disagreements(run_dir, capsys)


def test_a_wrong_summary_is_noticed(run_dir, capsys):
    path = run_dir / "summary.json"
    summary = json.loads(path.read_text())
    summary["attempts"]["trained"] += 1
    summary["masked_by_cause"] = {"sandbox_died": 2}
    path.write_text(json.dumps(summary))
    text = disagreements(run_dir, capsys)
    assert "trained: 3 recounted, 4 in summary.json" in text
    assert "masked_by_cause: {'nan': 1, 'sandbox_died': 1} recounted, {'sandbox_died': 2} in summary.json" in text


def test_a_try_that_only_the_ledger_knows_is_noticed(run_dir, capsys):
    with Ledger(run_dir / "ledger.jsonl") as ledger:
        ledger.started(make_spec(group="z"))
        ledger.record(outcome(make_spec(group="z")))
    assert "started: 10 recounted, 11 in ledger.jsonl" in disagreements(run_dir, capsys)


def test_half_a_line_of_a_killed_proxy_is_read_over(run_dir):
    path = run_dir / "logs" / "sessions.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([lines[0], lines[1][:20], *lines[1:]]))
    assert recount(run_dir).agrees


def test_a_resume_that_goes_back_is_counted_once(tmp_path):
    """Iteration 1 is decided, then the run resumes there: one attempt is used again, one is made again."""
    (tmp_path / "resolved.yaml").write_text("algorithm: {filter: none}\n")
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        first, second, third = [
            start(tmp_path, ledger, make_attempt(make_spec(iteration, group=group)))
            for iteration, group in ((0, "a"), (1, "a"), (1, "b"))
        ]
        decide(tmp_path, ledger, *[(a, OutcomeKind.TRAINED, None) for a in (first, second, third)])
        assert len(ledger.rollback(1)) == 2
        Trajectories(tmp_path).cut(1)
        interrupted = recount(tmp_path)  # between the crash and the resume
        assert interrupted.agrees
        assert interrupted.undecided == 2
        lost = outcome(third.spec, OutcomeKind.REQUEUED, "run_ended")
        ledger.record(lost)
        Trajectories(tmp_path).write([(third.spec, lost)])
        again = start(tmp_path, ledger, make_attempt(make_spec(1, group="b", try_number=1)))
        decide(tmp_path, ledger, *[(a, OutcomeKind.TRAINED, None) for a in (second, again)])
        write_summary(tmp_path, summarize_run(RootConfig(), tmp_path, ledger, "finished", wall_s=1.0))
    result = recount(tmp_path)
    assert result.problems == []
    assert (result.counts["started"], result.counts["trained"], result.counts["requeued"]) == (4, 3, 1)


def test_an_open_try_in_a_finished_run_is_noticed(tmp_path):
    (tmp_path / "resolved.yaml").write_text("algorithm: {filter: none}\n")
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        start(tmp_path, ledger, make_attempt(make_spec()))
        write_summary(tmp_path, summarize_run(RootConfig(), tmp_path, ledger, "finished", wall_s=1.0))
    problems = recount(tmp_path).problems
    assert any("1 tries without an outcome" in problem for problem in problems)
    assert any("no trajectory row has it" in problem for problem in problems)


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="expected a run folder"):
        recount(tmp_path)


def test_it_shares_no_code_with_the_first_count(run_dir):
    code = "import sys; from rl360.diagnostics.recount import main; main(sys.argv[1:])\n"
    code += "print([name for name in sys.modules if name.startswith(('rl360.engine', 'torch'))])"
    env = {"PYTHONPATH": ":".join(sys.path)}
    command = [sys.executable, "-c", code, str(run_dir)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
