"""Sandboxes that are killed in each phase, verifiers that give no verdict, and a full disk: for real."""

from __future__ import annotations

import contextlib
from pathlib import Path

import psutil
import pytest

from rl360.types import Stop
from tests.faults.rig import PASSES, Rig, wait_for

pytestmark = [pytest.mark.sandbox, pytest.mark.slow]


def test_killed_while_it_starts(patient_rig: Rig) -> None:
    """The image's layer is built in a sandbox too: killed there, the start has failed."""
    task = patient_rig.task("killed-start", {"turns": 1}, dockerfile="FROM x\nRUN sleep 61.25\n")
    patient_rig.submit(task)
    wait_for(lambda: patient_rig.sandbox_with("sleep 61.25")).kill()
    patient_rig.task("killed-start", {"turns": 1})
    (attempt,) = patient_rig.next()
    assert patient_rig.causes(attempt) == ["sandbox_build"]
    assert (attempt.reward, attempt.spec.try_number) == (1.0, 1)


def test_killed_under_the_agent(patient_rig: Rig) -> None:
    patient_rig.submit(patient_rig.task("killed-agent", {"turns": 1, "first": ["sleep 62.25"]}))
    wait_for(lambda: patient_rig.sandbox_with("sleep 62.25")).kill()
    (attempt,) = patient_rig.next()
    assert patient_rig.causes(attempt) == ["sandbox_died"]
    assert (attempt.reward, attempt.stop) == (1.0, Stop.FINISHED)


def test_killed_under_the_verifier(patient_rig: Rig) -> None:
    test_sh = f"#!/bin/bash\nif [ -e /app/first ]; then sleep 63.25; fi\n{PASSES}"
    patient_rig.submit(patient_rig.task("killed-verifier", {"turns": 1, "first": ["touch /app/first"]}, test_sh))
    wait_for(lambda: patient_rig.sandbox_with("sleep 63.25")).kill()
    (attempt,) = patient_rig.next()
    assert patient_rig.causes(attempt) == ["sandbox_died"]
    assert attempt.reward == 1.0


def test_killed_every_time_is_masked_and_never_a_zero(patient_rig: Rig) -> None:
    patient_rig.submit(patient_rig.task("killed-always", {"turns": 1, "run": ["sleep 64.25"]}))
    killed = set()
    for _ in range(2):
        sandbox = wait_for(lambda: patient_rig.sandbox_with("sleep 64.25"))
        assert sandbox.pid not in killed
        killed.add(sandbox.pid)
        # All of it ends before the next look: its first process, a bwrap too, is the keeper's child for a moment.
        everything = [sandbox, *sandbox.children(recursive=True)]
        sandbox.kill()
        assert psutil.wait_procs(everything, 10)[1] == []
    (attempt,) = patient_rig.next()
    assert (attempt.valid, attempt.reward, attempt.cause) == (False, None, "sandbox_died")
    assert patient_rig.causes(attempt) == ["sandbox_died"]
    assert attempt.num_sampled_tokens > 0  # kept for the viewer, not trained on


@pytest.mark.parametrize("name", ["KeyError", "RecursionError", "RuntimeError", "NonZeroAgentExitCodeError"])
def test_an_agent_that_fails_in_a_sandbox_that_answers_is_graded(rig: Rig, name: str) -> None:
    """Whatever it is called: the policy can make an agent fail, and must not so escape its verdict."""
    done, not_done = PASSES, PASSES.replace("echo 1", "echo 0")
    for reward, test_sh in ((1.0, done), (0.0, not_done)):
        (attempt,) = rig.run(rig.task(f"agent-{name}-{reward:g}", {"turns": 2, "raise": name}, test_sh))
        assert (attempt.reward, attempt.stop, attempt.cause, rig.causes(attempt)) == (
            reward, Stop.AGENT_ERROR, None, [],
        )  # fmt: skip
        assert attempt.trial is not None
        assert attempt.trial.exception_type == name
        assert len(attempt.turns) == 2
        assert "as the instruction says" in (attempt.trial.trial_dir / "exception.txt").read_text()


def test_an_agent_that_fails_and_leaves_tests_without_a_verdict_scores_zero(rig: Rig) -> None:
    (attempt,) = rig.run(rig.task("agent-no-verdict", {"turns": 1, "raise": "KeyError"}, "#!/bin/bash\ntrue\n"))
    assert (attempt.reward, attempt.cause, rig.causes(attempt)) == (0.0, "KeyError", [])


def test_an_agent_that_fails_before_the_model_spoke_is_not_the_policys(rig: Rig) -> None:
    (attempt,) = rig.run(rig.task("agent-silent", {"turns": 0, "raise": "KeyError"}))
    assert (attempt.valid, attempt.cause) == (False, "unclassified_KeyError")
    assert rig.causes(attempt) == ["unclassified_KeyError"]


def test_an_agent_that_fails_because_its_sandbox_was_killed_is_not_the_policys(patient_rig: Rig) -> None:
    patient_rig.submit(
        patient_rig.task("agent-and-sandbox", {"turns": 1, "first": ["sleep 68.25"], "raise": "KeyError"})
    )
    wait_for(lambda: patient_rig.sandbox_with("sleep 68.25")).kill()
    (attempt,) = patient_rig.next()
    assert patient_rig.causes(attempt) == ["sandbox_died"]
    assert (attempt.reward, attempt.stop) == (1.0, Stop.AGENT_ERROR)


@pytest.mark.parametrize(
    ("name", "script", "cause"),
    [
        ("hangs", "sleep 65.25", "verifier_timeout"),
        ("writes-nothing", "true", "verifier_no_reward"),
        ("empty", ": > /logs/verifier/reward.txt", "verifier_no_reward"),
        ("nan", "echo nan > /logs/verifier/reward.txt", "verifier_garbage"),
        ("garbage", "echo '{]' > /logs/verifier/reward.json", "verifier_garbage"),
        ("two-keys", 'echo \'{"a": 1, "b": 0}\' > /logs/verifier/reward.json', "no_verdict"),
    ],
)
def test_a_verifier_without_a_verdict_is_masked_at_once(rig: Rig, name: str, script: str, cause: str) -> None:
    good, bad = rig.task(f"{name}-good", {"turns": 1}), rig.task(name, {"turns": 1}, f"#!/bin/bash\n{script}\n")
    (masked,) = rig.run(bad)
    assert (masked.valid, masked.reward, masked.cause) == (False, None, cause)
    assert rig.causes(masked) == []
    (trained,) = rig.run(good)
    assert trained.reward == 1.0


@pytest.mark.parametrize(
    ("name", "breaks", "cause"),
    [
        ("never-ends", "sleep 69.25", "verifier_timeout"),
        ("kills-the-tests", "kill -9 $$", "verifier_no_reward"),
        ("is-no-number", "echo nan > /logs/verifier/reward.txt; exit", "verifier_garbage"),
    ],
)
def test_a_solution_that_leaves_its_tests_without_a_verdict_scores_zero(
    rig: Rig, name: str, breaks: str, cause: str
) -> None:
    """The same tests judged the rest of the group, each in a sandbox of its own: it is the solution, not the tests."""
    test_sh = f"#!/bin/bash\nif [ -e /app/broken ]; then {breaks}; fi\n{PASSES}"
    attempts = rig.run(rig.task(name, {"turns": 1, "of": {"1": ["touch /app/broken"]}}, test_sh), size=3)
    assert [a.reward for a in attempts] == [1.0, 0.0, 1.0]
    assert (attempts[1].stop, attempts[1].cause, attempts[1].success) == (Stop.AGENT_ERROR, cause, False)
    assert [rig.causes(a) for a in attempts] == [[], [], []]


def test_two_keys_of_which_one_is_the_reward(rig: Rig) -> None:
    script = '#!/bin/bash\necho \'{"style": 0.25, "reward": 0.5}\' > /logs/verifier/reward.json\n'
    (attempt,) = rig.run(rig.task("two-keys-one-reward", {"turns": 1}, script))
    assert (attempt.reward, attempt.success) == (0.5, False)


def fill(path: Path) -> None:
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 4096)


def test_a_full_disk_under_the_trial_folders(rig: Rig) -> None:
    if not rig.has_small_disk:
        pytest.skip("mounting a small disk needs root")
    task = rig.task("disk-full", {"turns": 1})
    filler = rig.trials_dir / "filler"
    fill(filler)
    try:
        (attempt,) = rig.run(task)
    finally:
        filler.unlink()
    assert (attempt.valid, attempt.reward, attempt.cause) == (False, None, "disk_full")
    assert rig.causes(attempt) == ["disk_full"]
