"""Trainers under the same cases: the torch one in this process, Megatron's in four of its own that stay."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.trainers.helpers import tiny_folder
from tests.trainers.megatron.group import Ranks

NUM_RANKS = 4


@pytest.fixture(scope="session")
def ranks(tmp_path_factory) -> Iterator[Ranks]:
    """Four Megatron ranks on the CPU, started once; a test calls `again` first."""
    group = Ranks(NUM_RANKS, tiny_folder(tmp_path_factory.mktemp("ranks") / "model"))
    yield group
    group.close()
