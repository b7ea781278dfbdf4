"""Counts since a start as counts of an iteration: a restart, a value of now, a gateway that does not answer."""

from __future__ import annotations

from rl360.engine.gateway_counts import GatewayCounts
from rl360.errors import InfrastructureError


def test_each_row_has_what_happened_since_the_last():
    answers = iter(
        [
            {"engine_resends": 3, "engines_left_out_now": 1},
            {"engine_resends": 5, "engines_left_out_now": 1},
            InfrastructureError("proxy_timeout", "busy"),
            {"engine_resends": 9, "engines_left_out_now": 0},
            {"engine_resends": 2, "engines_left_out_now": 0},  # it started again
        ]
    )

    def ask():
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    counts = GatewayCounts(ask)
    rows = [counts() for _ in range(5)]
    assert [row.get("gateway/engine_resends") for row in rows] == [3.0, 2.0, None, 4.0, 2.0]
    assert [row.get("gateway/engines_left_out_now") for row in rows] == [1.0, 1.0, None, 0.0, 0.0]
