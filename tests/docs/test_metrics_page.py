"""docs/guide/metrics.md, rl360/loggers/scalars.py and the code that logs name the same scalars."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import numpy as np

from rl360.engine.loop import throughput
from rl360.engine.metrics import outcome_metrics, rollout_metrics
from rl360.loggers.scalars import SCALARS, describe
from rl360.types import Group, GroupSpec, Outcome, OutcomeKind, Purpose
from tests.engine.records import make_attempt, make_spec

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "guide" / "metrics.md"
PREFIXES = ("reward/", "rollout/", "gateway/", "mismatch/", "train/", "time/", "perf/", "eval/")
SOURCES = (
    *sorted((ROOT / "rl360" / "algorithms").glob("*.py")),
    *sorted((ROOT / "rl360" / "trainers").rglob("*.py")),
    *(ROOT / "rl360" / "engine" / f"{name}.py" for name in ("gateway_counts", "loop", "metrics", "mismatch", "record")),
)


def page_rows(text: str) -> list[tuple[str, str, str]]:
    """(name, unit, meaning) of each row of the page's tables."""
    return re.findall(r"^\| `([^`]+)` \| ([^|]*?) ?\| (.+?) \|$", text, flags=re.MULTILINE)


def names_in_source(path: Path) -> set[str]:
    """Scalar names that a module writes; what an f-string fills in becomes `x`."""
    found = set()
    tree = ast.parse(path.read_text())
    inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            name = "".join(str(p.value) if isinstance(p, ast.Constant) else "x" for p in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            name = node.value
        else:
            continue
        if name.startswith(PREFIXES) and re.fullmatch(r"[\w/-]+", name):
            found.add(name)
    return found


def logged_names() -> set[str]:
    return set().union(*(names_in_source(path) for path in SOURCES))


def test_the_page_and_the_descriptions_have_the_same_names_and_units() -> None:
    rows = page_rows(PAGE.read_text())
    assert len({name for name, _, _ in rows}) == len(rows)
    assert {name: unit for name, unit, _ in rows} == {s.name: s.unit for s in SCALARS}
    assert all(len(meaning) > 10 for _, _, meaning in rows)


def test_every_logged_name_is_described() -> None:
    names = logged_names()
    assert {"reward/success_rate", "mismatch/kl", "train/grad_norm", "time/step_s", "eval/version"} <= names
    assert {name for name in names if not describe(name)} == set()


def test_no_described_name_is_logged_by_nobody() -> None:
    patterns = {s.name: re.compile(re.sub(r"<\w+>", "[^/]+", s.name)) for s in SCALARS}
    unlogged = set()
    for name, pattern in patterns.items():
        matching = {one for one in logged_names() if pattern.fullmatch(one)}
        if not matching and not name.startswith("final/"):
            unlogged.add(name)
    assert unlogged == set()


def test_names_made_from_a_groups_numbers_are_described() -> None:
    """What is computed, not only what stands in the source: domains, rewards by name and causes."""
    attempts = tuple(make_attempt(make_spec(member=i), reward=float(i)) for i in range(2))
    spec = attempts[0].spec
    one = Group(GroupSpec(spec.group_id, 0, spec.task, tuple(a.spec for a in attempts)), attempts)
    outcomes = [Outcome("a.t0", "a", "g", 0, Purpose.TRAIN, OutcomeKind.MASKED, "sandbox_died")]
    scalars = {**rollout_metrics([one], [one], 0), **outcome_metrics(outcomes)}
    scalars |= throughput({"time/step_s": 2.0}, [one])
    assert scalars["reward/domain/coding/mean"] == 0.5
    assert scalars["reward/verifier_mean"] == 0.5
    assert scalars["perf/tokens_per_s"] == 3.0  # 2 attempts of 3 sampled tokens in 2 s
    assert scalars["rollout/masked/sandbox_died"] == 1.0
    assert {name for name in scalars if not describe(name)} == set()
    assert all(np.isfinite(value) for value in scalars.values())
