"""Which checkpoints a loop leaves: between, at the end, and when it is interrupted."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from rl360.engine.loop import TrainingLoop
from rl360.engine.state import RunState
from rl360.errors import Interrupted
from tests.engine.test_loop import loop_with


class Leaving(TrainingLoop):
    """Iterations that do nothing; an interruption comes in the place of iteration `stops_at`."""

    stops_at: int | None = None

    def iterate(self) -> None:
        if self.state.iteration == self.stops_at:
            raise Interrupted("asked to stop")
        self.state = RunState(iteration=self.state.iteration + 1)
        if self.due(self.settings.checkpoint_every):
            self.checkpoint()


class Rollout:
    def drain(self):
        return []

    def state(self):
        return {"finished": []}


class Record:
    def abandoned(self, open_tries, finished_attempts, finished): ...


class Store:
    keep_best = True

    def __init__(self):
        self.saved = []

    def save(self, state, write, best=False):
        self.saved.append(state.iteration)

    def completed(self):
        return []

    def wait(self): ...


class Sync:
    def resident(self, last):
        return nullcontext()

    def check(self):
        pass


class Trainer:
    def save(self, folder): ...


def saved(stops_at: int | None = None, **settings) -> list[int]:
    """The iterations whose checkpoint a loop over 4 iterations writes."""
    kind = type("Stopping", (Leaving,), {"stops_at": stops_at})
    loop = loop_with(kind, evaluate_every=0, **settings)
    loop.rollout, loop.record, loop.checkpoints, loop.sync, loop.trainer = (
        Rollout(),
        Record(),
        Store(),
        Sync(),
        Trainer(),
    )
    if stops_at is None:
        loop.run()
    else:
        with pytest.raises(Interrupted):
            loop.run()
    return loop.checkpoints.saved


@pytest.mark.parametrize(
    ("every", "at_end", "whole", "interrupted_at_3"),
    [
        (0, True, [4], [3]),
        (3, True, [3, 4], [3]),
        (2, True, [2, 4], [2, 3]),
        (0, False, [], []),  # the disk may have no room for any
        (3, False, [3], [3]),
        (2, False, [2, 4], [2, 3]),
    ],
)
def test_the_last_one_is_written_unless_it_is_turned_off(every, at_end, whole, interrupted_at_3):
    settings = {"checkpoint_every": every, "checkpoint_at_end": at_end}
    assert saved(**settings) == whole
    assert saved(stops_at=3, **settings) == interrupted_at_3
