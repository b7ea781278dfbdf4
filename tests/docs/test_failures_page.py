"""docs/guide/failures.md has every cause of rl360/rollout/failures.py, with its action."""

from __future__ import annotations

import re
from pathlib import Path

from rl360.rollout.failures import CAUSES, EXCEPTIONS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guide" / "failures.md"
CODE = re.compile(r"`([^`]+)`")
# Told in a sentence of its own, above that table.
IN_WORDS = {"no_model_call"}


def actions_by_cause() -> dict[str, set[str]]:
    """What the table does for each cause of a failure under the policy."""
    found: dict[str, set[str]] = {}
    for row in (*EXCEPTIONS.values(), *CAUSES.values()):
        if row.policy is None:
            found.setdefault(row.cause, set()).add(row.action.value)
    return found


def actions_on_the_page() -> dict[str, set[str]]:
    """The same, from the table below the heading."""
    section = PAGE.read_text().split("## What failed under it\n")[1].split("\n## ")[0].split("\n### ")[0]
    found: dict[str, set[str]] = {}
    for causes, action in re.findall(r"^\| (.+) \| (\w+) \|$", section, flags=re.MULTILINE):
        for cause in CODE.findall(causes):
            found.setdefault(cause, set()).add(action)
    return found


def test_the_page_has_every_cause_with_its_action() -> None:
    page, table = actions_on_the_page(), actions_by_cause()
    assert "sandbox_died" in table
    missing = {cause: actions for cause, actions in table.items() if page.get(cause) != actions}
    assert missing.keys() == IN_WORDS
    assert all(f"`{cause}`" in PAGE.read_text() for cause in IN_WORDS)
