"""By which of its failures a trial is known, by hand."""

from types import SimpleNamespace as Record
from typing import Any

import pytest

from rl360.rollout.trial_failures import Failure, deciding, in_order

LATE, HUNG, DIED = "AgentTimeoutError", "VerifierTimeoutError", "RuntimeError"


def failures(*names: str) -> list[Failure]:
    return [Failure(name, "text") for name in names]


def harbors(exception: str | None = None, steps: list[Any] | None = None) -> Any:
    info = Record(exception_type=exception, exception_message="text") if exception else None
    return Record(exception_info=info, step_results=steps)


def step(exception: str | None, began: bool) -> Any:
    return Record(exception_info=harbors(exception).exception_info, agent_execution=Record() if began else None)


@pytest.mark.parametrize(
    ("names", "has_steps", "known", "later"),
    [
        ((), False, None, None),
        ((DIED,), False, DIED, None),
        ((LATE, HUNG), False, LATE, HUNG),
        ((LATE, HUNG, DIED), False, LATE, DIED),  # what failed under it, whatever came in between
        ((DIED, LATE), True, DIED, LATE),
        ((LATE, HUNG), True, LATE, HUNG),
        ((LATE, DIED), True, DIED, LATE),  # late in one step; in another the sandbox died, and its tests judged that
        ((LATE, LATE, DIED), True, DIED, LATE),
        (("ContextLengthExceededError", LATE), True, LATE, "ContextLengthExceededError"),  # its time is looked at
        (("ContextLengthExceededError", HUNG), True, "ContextLengthExceededError", HUNG),
        ((HUNG, DIED), True, HUNG, DIED),
    ],
)
def test_the_failure_that_decides(
    names: tuple[str, ...], has_steps: bool, known: str | None, later: str | None
) -> None:
    found = [one.name if one else None for one in deciding(failures(*names), has_steps)]
    assert found == [known, later]


def test_what_harbor_only_writes_down_comes_last() -> None:
    steps = [step(None, True), step("HealthcheckError", False)]
    assert [one.name for one in in_order(failures(LATE), harbors(steps=steps), None)] == [LATE, "HealthcheckError"]
    assert [one.name for one in in_order([], harbors("ValueError", [step(HUNG, True)]), None)] == ["ValueError"]
    assert in_order([], harbors(), None) == []


@pytest.mark.parametrize("tests", [HUNG, "RewardFileNotFoundError", "VerifierOutputParseError"])
def test_an_artifact_is_lost_before_its_tests_miss_it(tests: str) -> None:
    lost = Failure("SandboxDied", "an artifact")
    assert deciding(in_order(failures(tests), harbors(), lost), has_steps=False)[0] == lost
    assert [one.name for one in in_order(failures(LATE, tests), harbors(), lost)] == [LATE, "SandboxDied", tests]
    assert [one.name for one in in_order(failures("AuthenticationError"), harbors(), lost)][-1] == "SandboxDied"
