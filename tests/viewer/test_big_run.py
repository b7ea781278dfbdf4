"""A run is opened without being loaded: memory stays far below its size, and pages come at once."""

from __future__ import annotations

import pytest

from benchmarks.viewer import make_run, measure


@pytest.mark.slow
def test_a_large_run_opens_in_little_memory(tmp_path):
    total = make_run(tmp_path / "run", iterations=4, groups=8)
    mib = total / 2**20
    assert mib > 100
    found = measure(tmp_path / "run", 4)
    # With 2 GiB the memory grows by as much as with this: 15 MiB. Room here for a busy machine.
    assert found["first page"] < 3
    assert found["attempt"] < 3
    assert found["peak, MiB"] - found["peak before the first page, MiB"] < 50
