"""What the engine hands to the components that it makes of a config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import rl360.engine.build
from rl360.config.schemas import RootConfig, SmgGatewayConfig
from rl360.engine.build import make_gateway


@pytest.mark.parametrize("gateway", ["direct", "smg"])
@pytest.mark.parametrize(
    ("engine", "sync_mode", "split_above"),
    [
        ("sglang", "interrupt", 256),
        ("external", "interrupt", 256),
        ("sglang", "drain", None),
        ("embedded", "interrupt", None),
    ],
)
def test_where_long_turns_are_several_requests(
    gateway: str, engine: str, sync_mode: str, split_above: int | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Draining promises one version a turn, and a turn in several requests meets new weights between two of them. The
    embedded engine looks for a block at the cost of a string."""
    groups: dict[str, Any] = {}

    def make_group(target: str, size: int, kwargs: Any, **_: Any) -> None:
        groups[target.rpartition(":")[2]] = kwargs

    monkeypatch.setattr(rl360.engine.build, "LocalWorkerGroup", make_group)
    config = RootConfig()
    if gateway == "smg":
        config.gateway = SmgGatewayConfig()
    config.rollout.engine = engine
    config.rollout.sync_mode = sync_mode
    make_gateway(config, tmp_path, ["http://127.0.0.1:1"])
    assert groups["ProxyWorker"]["split_above"] == split_above
