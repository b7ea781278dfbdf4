"""Random faults under tasks of known reward. The seeds decide what is done in which order; where it hits, the machine.

Longer, with a line of JSON for each seed: python -m tests.faults.chaos FOLDER FIRST_SEED NUM_SEEDS NUM_GROUPS
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults import chaos
from tests.faults.rig import PATIENT, Rig

pytestmark = [pytest.mark.sandbox, pytest.mark.slow]

SANDBOXES = ("kill_bwrap", "kill_first", "kill_keeper", "stop_bwrap", "stop_first", "behind_keeper", "behind_worker")


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    rig = Rig(tmp_path_factory.mktemp("chaos"), tmp_path_factory.mktemp("c"), PATIENT, max_tries=chaos.MAX_TRIES)
    yield rig
    rig.close()
    assert list((rig.cache_dir / "owners").glob("*")) == []


@pytest.mark.parametrize(("seed", "kinds"), [(1, SANDBOXES), (2, ())], ids=["of sandboxes", "of all kinds"])
def test_no_fault_gives_a_wrong_reward_or_leaves_anything(rig: Rig, seed: int, kinds: tuple[str, ...]) -> None:
    outcome = chaos.run(rig, seed, num_groups=20, kinds=kinds)
    assert outcome.wrong == []
    assert sum(outcome.hits.values()) >= 3
    assert sum(attempt.valid for attempt in outcome.attempts) >= 5
