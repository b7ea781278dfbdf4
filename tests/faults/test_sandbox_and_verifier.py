"""Sandboxes that are killed in each phase, verifiers that give no verdict, and a full disk: for real."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from rl360.types import Stop
from tests.faults.rig import PASSES, Rig, wait_for

pytestmark = [pytest.mark.sandbox, pytest.mark.slow]


def test_killed_while_it_starts(rig: Rig) -> None:
    """The image's layer is built in a sandbox too: killed there, the start has failed."""
    task = rig.task("killed-start", {"turns": 1}, dockerfile="FROM x\nRUN sleep 61.25\n")
    rig.submit(task)
    wait_for(lambda: rig.sandbox_with("sleep 61.25")).kill()
    rig.task("killed-start", {"turns": 1})
    (attempt,) = rig.next()
    assert rig.causes(attempt) == ["sandbox_build"]
    assert (attempt.reward, attempt.spec.try_number) == (1.0, 1)


def test_killed_under_the_agent(rig: Rig) -> None:
    rig.submit(rig.task("killed-agent", {"turns": 1, "first": ["sleep 62.25"]}))
    wait_for(lambda: rig.sandbox_with("sleep 62.25")).kill()
    (attempt,) = rig.next()
    assert rig.causes(attempt) == ["sandbox_died"]
    assert (attempt.reward, attempt.stop) == (1.0, Stop.FINISHED)


def test_killed_under_the_verifier(rig: Rig) -> None:
    test_sh = f"#!/bin/bash\nif [ -e /app/first ]; then sleep 63.25; fi\n{PASSES}"
    rig.submit(rig.task("killed-verifier", {"turns": 1, "first": ["touch /app/first"]}, test_sh))
    wait_for(lambda: rig.sandbox_with("sleep 63.25")).kill()
    (attempt,) = rig.next()
    assert rig.causes(attempt) == ["sandbox_died"]
    assert attempt.reward == 1.0


def test_killed_every_time_is_masked_and_never_a_zero(rig: Rig) -> None:
    rig.submit(rig.task("killed-always", {"turns": 1, "run": ["sleep 64.25"]}))
    killed = set()
    for _ in range(2):
        sandbox = wait_for(lambda: rig.sandbox_with("sleep 64.25"))
        assert sandbox.pid not in killed
        killed.add(sandbox.pid)
        sandbox.kill()
        sandbox.wait(10)
    (attempt,) = rig.next()
    assert (attempt.valid, attempt.reward, attempt.cause) == (False, None, "sandbox_died")
    assert rig.causes(attempt) == ["sandbox_died"]
    assert attempt.num_sampled_tokens > 0  # kept for the viewer, not trained on


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
