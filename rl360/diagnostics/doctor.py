"""`rl360 doctor`: what this machine has, what is wrong with it, and what to do.

In: the machine. Out: printed lines and an exit code, 1 when something that a local run needs is missing. Packages are
looked up in their metadata, not imported.
"""

from __future__ import annotations

import importlib.metadata
import platform
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rl360.config.forecast import GIB
from rl360.config.locate import bundled_tasks, conf_folder
from rl360.config.resolvers import absolute, models_folder
from rl360.diagnostics.machine import free_disk_bytes, gpus, memory, usable_cores
from rl360.errors import ConfigError

PYTHON_OLDEST, PYTHON_TOO_NEW = (3, 12), (3, 14)
MEMORY_COMFORTABLE_GIB = 4  # the quickstart's own bound
DISK_COMFORTABLE_GIB = 10  # a model, a few checkpoints with Adam moments, the sandbox cache
QUICKSTART_MODEL = "smollm2_135m"
_LOCAL_EXTRA = "local"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line: what was found. `advice` is set when something is wrong; `needed` when a run cannot do without."""

    label: str
    text: str
    advice: str | None = None
    needed: bool = False


def examine_machine(show: Callable[[str], None]) -> int:
    """Print every finding, then what is wrong. Returns 1 when a needed thing is missing."""
    findings = [*_python(), *_installation(), *_packages(), *_model(), *_hardware(), *_sandbox(), *_room()]
    width = max(len(f.label) for f in findings)
    for finding in findings:
        mark = " " if finding.advice is None else ("x" if finding.needed else "!")
        show(f"{mark} {finding.label:<{width}}  {finding.text}")
    wrong = [f for f in findings if f.advice is not None]
    show("")
    for finding in wrong:
        show(f"{'wrong' if finding.needed else 'note'}: {finding.label}: {finding.advice}")
    failed = any(f.needed for f in wrong)
    show("something that a run needs is missing" if failed else "everything that a local run needs is here")
    return int(failed)


def _python() -> list[Finding]:
    version = sys.version_info[:2]
    fine = PYTHON_OLDEST <= version < PYTHON_TOO_NEW
    text = f"{platform.python_version()} ({sys.executable})"
    advice = None if fine else "expected Python 3.12 or 3.13; make a new virtual environment with one of them"
    return [Finding("python", text, advice, needed=True), Finding("system", platform.platform())]


def _installation() -> list[Finding]:
    findings = []
    for label, find in (("conf", conf_folder), ("bundled tasks", lambda: bundled_tasks("small_coding"))):
        try:
            findings.append(Finding(label, str(find())))
        except ConfigError as error:
            findings.append(Finding(label, "not found", str(error), needed=True))
    return findings


def _packages() -> list[Finding]:
    """The version matrix: what rl360 asks for, against what is installed."""
    try:
        requirements = importlib.metadata.requires("rl360") or []
    except importlib.metadata.PackageNotFoundError:
        return [Finding("rl360", "not installed", "install it: pip install -e '.[local]'", needed=True)]
    from packaging.requirements import Requirement

    findings = [Finding("rl360", importlib.metadata.version("rl360"))]
    for text in requirements:
        requirement = Requirement(text)
        extra = _extra_of(text)
        if extra not in (None, _LOCAL_EXTRA):
            continue
        label = requirement.name + (f" [{extra}]" if extra else "")
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            hint = "pip install 'rl360[local]'" if extra else "reinstall rl360"
            findings.append(Finding(label, "not installed", f"expected {requirement}; try: {hint}", needed=True))
            continue
        fits = requirement.specifier.contains(version, prereleases=True)
        advice = None if fits else f"expected {requirement.specifier}; try: make setup"
        findings.append(Finding(label, f"{version} (asked: {requirement.specifier or 'any'})", advice, needed=False))
    return findings


def _extra_of(requirement: str) -> str | None:
    found = re.search(r"""extra\s*==\s*['"]([^'"]+)['"]""", requirement)
    return found[1] if found else None


def _model() -> list[Finding]:
    """The quickstart's model. Any other is the experiment's own affair: `rl360 check` looks at that one."""
    from rl360.models.fetch import folder_problems

    folder = Path(models_folder()) / QUICKSTART_MODEL
    problems = folder_problems(folder)
    advice = f"{problems[0]}; for the quickstart: rl360 model fetch {QUICKSTART_MODEL}" if problems else None
    return [Finding("model", "none yet" if problems else str(folder), advice)]


def _hardware() -> list[Finding]:
    findings = [Finding("cpu", f"{_cpu_name()}, {usable_cores()} cores usable")]
    found = gpus()
    if not found:
        return [*findings, Finding("gpu", "none (not needed for a local run)")]
    return findings + [Finding("gpu", f"{gpu.name}, {gpu.memory_mib} MiB, driver {gpu.driver}") for gpu in found]


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _sandbox() -> list[Finding]:
    from rl360.sandboxes.abilities import probe

    return [
        Finding(f"sandbox: {a.name}", a.detail, None if a.ok else a.remedy, needed=a.required)
        for a in probe().abilities
    ]


def _room() -> list[Finding]:
    room = memory()
    findings = [
        Finding(
            "memory",
            f"{room.available / GIB:.1f} of {room.total / GIB:.1f} GiB free",
            None
            if room.available >= MEMORY_COMFORTABLE_GIB * GIB
            else f"the quickstart may take {MEMORY_COMFORTABLE_GIB} GiB",
        )
    ]
    for label, folder in (("outputs", absolute("outputs")), ("models", models_folder())):
        free = free_disk_bytes(Path(folder))
        low = free < DISK_COMFORTABLE_GIB * GIB
        advice = f"less than {DISK_COMFORTABLE_GIB} GiB free; checkpoints may not fit" if low else None
        findings.append(Finding(f"disk for {label}", f"{free / GIB:.1f} GiB free at {folder}", advice))
    return findings
