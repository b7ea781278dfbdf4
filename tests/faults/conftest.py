"""Two rigs for the folder: starting trial workers takes seconds. After each test they must be as good as new."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from tests.faults.rig import PATIENT, Limits, Rig, wait_for


def _shared(tmp_path_factory: pytest.TempPathFactory, limits: Limits) -> Iterator[Rig]:
    rig = Rig(tmp_path_factory.mktemp("faults"), tmp_path_factory.mktemp("faults-cache"), limits)
    yield rig
    rig.close()
    assert list((rig.cache_dir / "owners").glob("*")) == []


def _as_good_as_new(rig: Rig) -> Iterator[Rig]:
    """After the fault: nothing is left over, the next attempt succeeds, and the records agree."""
    yield rig
    rig.engine.model.faults.clear()
    rig.engine.model.delay_s = rig.engine.model.token_s = 0.0
    rig.engine.model.script.clear()
    with contextlib.suppress(AssertionError):  # the next look names what is left
        wait_for(lambda: not rig.leaks(), 10.0)
    assert rig.leaks() == []
    (after,) = rig.run(rig.task("after", {"turns": 1}))
    assert (after.reward, after.spec.try_number) == (1.0, 0)
    assert rig.leaks() == []
    assert rig.books() == []


@pytest.fixture(scope="package")
def shared_rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    yield from _shared(tmp_path_factory, Limits())


@pytest.fixture(scope="package")
def shared_patient_rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    yield from _shared(tmp_path_factory, PATIENT)


@pytest.fixture
def rig(shared_rig: Rig) -> Iterator[Rig]:
    """Limits of seconds: what runs into one of them is soon seen."""
    yield from _as_good_as_new(shared_rig)


@pytest.fixture
def patient_rig(shared_patient_rig: Rig) -> Iterator[Rig]:
    """Limits far away: what the test does to an attempt comes before them."""
    yield from _as_good_as_new(shared_patient_rig)
