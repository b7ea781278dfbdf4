"""What this machine can sandbox with: bubblewrap, user namespaces, overlayfs, control groups. For check and doctor.

In: whether unprivileged sandboxes are wanted. Out: a `Report`: each ability with the reason when it lacks and what to
do about it. Left to others: using them. Imports neither Harbor nor torch and takes less than 0.3 s: one probe process
tries the real calls, because version numbers and sysctls say little about containers and security modules.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from rl360.sandboxes.local import cgroups

_PROBE_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Ability:
    """One thing that sandboxes use. `required`: without it no sandbox starts."""

    name: str
    ok: bool
    required: bool
    detail: str
    remedy: str = ""  # what to do when it lacks


@dataclass(frozen=True)
class Report:
    """All abilities, and how sandboxes would be made."""

    abilities: tuple[Ability, ...]
    userns: bool  # sandboxes are made in user namespaces
    root_mode: str  # overlay | copy

    @property
    def problems(self) -> list[str]:
        """What keeps sandboxes from starting, one line each."""
        return [f"sandbox: {a.name}: {a.detail}; {a.remedy}" for a in self.abilities if a.required and not a.ok]

    @property
    def warnings(self) -> list[str]:
        """What works in a weaker way."""
        return [f"sandbox: {a.name}: {a.detail}; {a.remedy}" for a in self.abilities if not a.required and not a.ok]


def probe(unprivileged: bool = False) -> Report:
    """Try everything once, without leaving anything behind."""
    if platform.system() != "Linux":
        missing = Ability("linux", False, True, f"this is {platform.system()}", "use Linux, or sandbox=docker")
        return Report((missing,), False, "copy")
    userns = unprivileged or os.geteuid() != 0
    bwrap = _bwrap_present()
    tried = _try_calls(userns, bwrap.ok)
    found = [bwrap]
    if userns:
        found.append(
            Ability(
                "user namespaces", not tried["userns"], True, tried["userns"] or "usable",
                "allow them (sysctl kernel.unprivileged_userns_clone=1, or "
                "kernel.apparmor_restrict_unprivileged_userns=0 on Ubuntu), or run as root",
            )
        )  # fmt: skip
    found.append(
        Ability(
            "overlayfs", not tried["overlay"], False, tried["overlay"] or "usable",
            "the root file system is copied for each sandbox, which is slower; "
            + ("Linux 5.11 or newer mounts it in user namespaces" if userns else "load the overlay module"),
        )
    )  # fmt: skip
    if bwrap.ok and not tried["userns"]:
        found.append(
            Ability(
                "bubblewrap runs", not tried["bwrap"], True, tried["bwrap"] or "a sandbox started",
                "in a container, allow mounts and namespaces (for Docker: --privileged, or --security-opt "
                "seccomp=unconfined --security-opt apparmor=unconfined --cap-add SYS_ADMIN)",
            )
        )  # fmt: skip
    hierarchy = cgroups.find()
    lacking = hierarchy.missing(cgroups.Limits(1, 1.0, 1))
    found.append(
        Ability(
            "control groups", not lacking, False,
            f"v{hierarchy.version}: {', '.join(hierarchy.parents)}" if not lacking
            else f"no limit for {', '.join(lacking)}: {hierarchy.reason}",
            "limits then hold for each process (prlimit) and not for the sandbox; run as root or in a delegated group",
        )
    )  # fmt: skip
    bash = Path("/usr/bin/bash").exists()
    python = Path("/usr/bin/python3").exists() or (Path(sys.base_prefix) / "bin/python3").exists()
    found.append(
        Ability(
            "host root file system", bash and python, False,
            "usable" if bash and python else f"/usr lacks {'bash' if not bash else 'python3'}",
            "sandbox.base=auto then makes one with debootstrap, which needs root and the network once",
        )
    )  # fmt: skip
    return Report(tuple(found), userns, "copy" if tried["overlay"] else "overlay")


def _bwrap_present() -> Ability:
    path = shutil.which("bwrap")
    remedy = "install it: apt-get install bubblewrap (or dnf, apk add)"
    return Ability("bubblewrap", path is not None, True, path or "bwrap is not on the PATH", remedy)


def _try_calls(userns: bool, run_bwrap: bool) -> dict[str, str]:
    """Run the probe process. Each value is empty when the thing works, else the reason."""
    package_root = str(Path(__file__).resolve().parents[2])
    code = (
        f"import sys; sys.path.insert(0, {package_root!r}); from rl360.sandboxes.local import probe; "
        f"probe.main({userns}, {run_bwrap})"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", code],
            capture_output=True,
            text=True,
            timeout=_PROBE_TIMEOUT_S,
            check=False,
        )
        return dict(json.loads(done.stdout))
    except (subprocess.TimeoutExpired, ValueError) as error:
        reason = f"the probe failed: {error}"
        return {"userns": reason if userns else "", "overlay": reason, "bwrap": reason}
