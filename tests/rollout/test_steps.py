"""Records of a trial's steps as those of one trial, by hand."""

from types import SimpleNamespace as Record

import pytest

from rl360.rollout.steps import all_judged, metadata_of, watch_steps


def step(rewards=None, metadata=None, judged=True, agent=True):
    return Record(
        verifier_result=Record(rewards=rewards) if judged else None,
        agent_result=Record(metadata=metadata) if agent else None,
    )


def test_a_trial_is_judged_when_each_of_its_steps_is():
    good = step({"reward": 1})
    assert all_judged([])
    assert all_judged([good, step({"reward": 0})])
    assert not all_judged([good, step(judged=False)])
    assert not all_judged([good, step({})])


@pytest.mark.parametrize(("forms", "expected"), [((True, False, True), False), ((True, None), True), ((None,), None)])
def test_a_form_is_right_if_it_was_in_every_step(forms, expected):
    steps = [step(metadata={"stop": n} | ({} if form is None else {"format_ok": form})) for n, form in enumerate(forms)]
    said = metadata_of([*steps, step(agent=False), step(metadata=None)])
    assert said.get("format_ok") is expected
    assert said["stop"] == len(forms) - 1


@pytest.mark.parametrize("has_steps", [True, False])
async def test_what_a_phase_raises_is_told_and_raised(has_steps):
    async def fails():
        raise OSError("gone")

    told = []
    trial = Record(task=Record(has_steps=has_steps), _run_agent_phase=fails, _run_separate_verifier=fails)
    watch_steps(trial, told.append)
    for phase in (trial._run_agent_phase, trial._run_separate_verifier):
        with pytest.raises(OSError, match="gone"):
            await phase()
    assert len(told) == (2 if has_steps else 0)
