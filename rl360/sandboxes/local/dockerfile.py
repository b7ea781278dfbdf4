"""The subset of Dockerfiles that a local sandbox builds: FROM, ENV, WORKDIR, COPY, RUN and USER.

In: a Dockerfile and its folder. Out: an `Image`: steps to run in order, and the environment, working directory and user
of what runs later. Left to others: running the steps and caching the result (layers.py). Standard library only.

Anything else raises `DockerfileError` with every problem at once, so that a task never runs in another environment than
it asked for. CMD, EXPOSE and LABEL are accepted, because they change no file and Harbor runs its own commands.
ENTRYPOINT, ARG, ADD, SHELL, HEALTHCHECK, VOLUME and ONBUILD are refused: what they do would be missing.
"""

from __future__ import annotations

import json
import posixpath
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

_NO_EFFECT = ("CMD", "EXPOSE", "LABEL")
_VARIABLE = re.compile(r"\\\$|\$(?:\{(\w+)(?::-([^}]*))?\}|(\w+))")


class DockerfileError(ValueError):
    """The Dockerfile asks for something outside the subset, or is malformed. Holds every problem."""

    def __init__(self, path: Path, problems: list[str]):
        self.problems = problems
        super().__init__(f"{path}: " + "; ".join(problems))


@dataclass(frozen=True)
class Step:
    """One change to the file system. `kind`: run | copy | mkdir."""

    kind: str
    command: str = ""  # run: for bash
    sources: tuple[str, ...] = ()  # copy: relative to the folder
    target: str = ""  # copy: absolute; ends in "/" when it must be a folder. mkdir: absolute
    chown: str = ""  # copy
    chmod: str = ""  # copy
    workdir: str = "/"
    user: str | None = None
    env: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Image:
    """What a Dockerfile says."""

    base: str = ""
    steps: tuple[Step, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    workdir: str = "/"
    user: str | None = None


def parse(path: Path) -> Image:
    """Read `path`. Raises DockerfileError or OSError."""
    problems: list[str] = []
    base, workdir, user = "", "/", None
    env: dict[str, str] = {}
    steps: list[Step] = []
    for number, name, value in _instructions(path.read_text()):
        where = f"line {number}"
        if name == "FROM":
            if base:
                problems.append(f"{where}: a second FROM (multi-stage builds are not supported)")
            words = value.split()
            if not words or words[0].startswith("--") or "$" in value:
                problems.append(f"{where}: FROM {value}: expected a plain image name")
            base = words[0] if words else "?"
            continue
        if not base:
            problems.append(f"{where}: {name} before FROM")
        if name == "ENV":
            try:
                env.update(_env(value, env))
            except ValueError as error:
                problems.append(f"{where}: ENV {value}: {error}")
        elif name == "WORKDIR":
            try:
                workdir = posixpath.normpath(posixpath.join(workdir, _unquote(_expand(value, env))))
                steps.append(Step("mkdir", target=workdir, user=user))
            except ValueError as error:
                problems.append(f"{where}: WORKDIR {value}: {error}")
        elif name == "USER":
            user = _expand(value, env).strip() or None
        elif name == "RUN":
            command = _run_command(value)
            if command is None:
                problems.append(f"{where}: RUN {value.split()[0]}: options of RUN and here-documents are not supported")
            else:
                steps.append(Step("run", command, workdir=workdir, user=user, env=tuple(env.items())))
        elif name == "COPY":
            try:
                steps.append(_copy(_expand(value, env), workdir, path.parent))
            except ValueError as error:
                problems.append(f"{where}: COPY {value}: {error}")
        elif name not in _NO_EFFECT:
            problems.append(
                f"{where}: {name} is not supported by the local sandbox; expected FROM, ENV, WORKDIR, COPY, RUN or USER"
            )
    if not base:
        problems.append("no FROM")
    if problems:
        raise DockerfileError(path, problems)
    return Image(base, tuple(steps), env, workdir, user)


def _instructions(text: str) -> list[tuple[int, str, str]]:
    """(line, NAME, rest) with continued lines joined, comments and parser directives dropped."""
    found: list[tuple[int, str, str]] = []
    parts: list[str] = []
    start = 0
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            continue
        if not parts:
            start = number
        continued = stripped.endswith("\\")
        parts.append(line.rstrip()[:-1] if continued else line.rstrip())
        if not continued:
            name, _, rest = " ".join(parts).strip().partition(" ")
            found.append((start, name.upper(), rest.strip()))
            parts = []
    if parts:
        name, _, rest = " ".join(parts).strip().partition(" ")
        found.append((start, name.upper(), rest.strip()))
    return found


def _expand(text: str, env: dict[str, str]) -> str:
    """`$NAME`, `${NAME}` and `${NAME:-default}`, as Docker does outside RUN."""

    def value(match: re.Match[str]) -> str:
        if match.group(0) == "\\$":
            return "$"
        return env.get(match.group(1) or match.group(3), "") or (match.group(2) or "")

    return _VARIABLE.sub(value, text)


def _unquote(text: str) -> str:
    words = shlex.split(text)
    if len(words) != 1:
        raise ValueError(f"expected one path, got {text!r}")
    return words[0]


def _env(value: str, env: dict[str, str]) -> dict[str, str]:
    first = value.split(None, 1)
    if len(first) == 2 and "=" not in first[0]:
        return {first[0]: _expand(first[1], env)}
    pairs = {}
    for word in shlex.split(value):
        key, equals, rest = word.partition("=")
        if not equals or not key:
            raise ValueError("expected NAME=value")
        pairs[key] = _expand(rest, env)
    if not pairs:
        raise ValueError("expected NAME=value")
    return pairs


def _run_command(value: str) -> str | None:
    if value.startswith("--") or re.search(r"<<-?\s*['\"]?\w", value):
        return None
    if value.startswith("["):
        try:
            words = json.loads(value)
        except ValueError:
            return value  # Docker takes what is not JSON as a shell command
        if isinstance(words, list) and all(isinstance(word, str) for word in words):
            return shlex.join(words)
    return value


def _copy(value: str, workdir: str, folder: Path) -> Step:
    options: dict[str, str] = {}
    rest = value
    while rest.startswith("--"):
        word, _, rest = rest.partition(" ")
        name, _, setting = word[2:].partition("=")
        if name not in ("chown", "chmod"):
            raise ValueError(f"--{name} is not supported")
        options[name] = setting
        rest = rest.strip()
    words = json.loads(rest) if rest.startswith("[") else shlex.split(rest)
    if not all(isinstance(word, str) and "\0" not in word for word in words):
        raise ValueError("expected a list of paths")
    if len(words) < 2:
        raise ValueError("expected one or more sources and a target")
    *sources, target = words
    if target.startswith("<<") or any(s.startswith("<<") for s in sources):
        raise ValueError("here-documents are not supported")
    found: list[str] = []
    for source in sources:
        relative = posixpath.normpath(source.lstrip("/"))
        if relative.startswith(".."):
            raise ValueError(f"{source} is outside the task's environment folder")
        if any(c in relative for c in "*?["):
            matches = sorted(p.relative_to(folder).as_posix() for p in folder.glob(relative))
            if not matches:
                raise ValueError(f"{source} matches nothing")
            found += matches
        elif not (folder / relative).exists():
            raise ValueError(f"{source} does not exist in {folder}")
        else:
            found.append(relative)
    for relative in found:
        if folder.resolve() not in [(folder / relative).resolve(), *(folder / relative).resolve().parents]:
            raise ValueError(f"{relative} leads outside the task's environment folder")
    if (folder / ".dockerignore").exists() and any((folder / f).is_dir() for f in found):
        raise ValueError("a .dockerignore is not supported; remove it or name the files")
    is_folder = target.endswith("/") or target in (".", "./") or len(found) > 1
    absolute = posixpath.normpath(posixpath.join(workdir, target))
    if len(found) > 1 and not (target.endswith("/") or target in (".", "./")):
        raise ValueError("with several sources the target must end in /")
    return Step(
        "copy",
        sources=tuple(found),
        target=absolute.rstrip("/") + "/" if is_folder else absolute,
        chown=options.get("chown", ""),
        chmod=options.get("chmod", ""),
    )
