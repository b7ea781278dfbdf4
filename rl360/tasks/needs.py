"""What a task asks of the sandbox that runs it, read from its task.toml and Dockerfile.

In: a task folder whose layout is right. Out: `Needs`. Harbor is not imported.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_NO_NETWORK = "no-network"


@dataclass(frozen=True, slots=True)
class Needs:
    """None and null: the task does not say."""

    image: str  # FROM of the Dockerfile, or docker_image
    network: str  # Harbor's network_mode
    memory_mib: int | None
    disk_mib: int | None
    cpus: float | None
    agent_timeout_s: float | None
    verifier_timeout_s: float | None
    agent_user: str | int | None  # null: the image's own, usually root
    verifier: str  # environment_mode: separate | shared | default, which is the sandbox's safest

    @property
    def in_words(self) -> str:
        """What is out of the ordinary, for a table."""
        words = [self.image]
        if self.network != _NO_NETWORK:
            words.append(f"network {self.network}")
        if self.memory_mib:
            words.append(f"{self.memory_mib} MiB")
        if self.verifier != "default":
            words.append(f"{self.verifier} verifier")
        return ", ".join(words)


def needs_of(folder: Path) -> Needs:
    """Raises OSError or tomllib.TOMLDecodeError for a folder that validate_layout refuses."""
    config = tomllib.loads((folder / "task.toml").read_text(encoding="utf-8"))
    environment, verifier = _table(config, "environment"), _table(config, "verifier")
    where = verifier.get("environment_mode") or ("separate" if "environment" in verifier else "default")
    return Needs(
        image=str(environment.get("docker_image") or _base_image(folder / "environment" / "Dockerfile")),
        network=str(environment.get("network_mode", "unsaid")),
        memory_mib=environment.get("memory_mb"),
        disk_mib=environment.get("storage_mb"),
        cpus=environment.get("cpus"),
        agent_timeout_s=_table(config, "agent").get("timeout_sec"),
        verifier_timeout_s=verifier.get("timeout_sec"),
        agent_user=_table(config, "agent").get("user"),
        verifier=str(where),
    )


def _base_image(dockerfile: Path) -> str:
    for line in dockerfile.read_text(encoding="utf-8").splitlines():
        words = line.split()
        if len(words) > 1 and words[0].upper() == "FROM":
            return words[1]
    return "?"


def _table(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    table = config.get(name)
    return table if isinstance(table, dict) else {}
