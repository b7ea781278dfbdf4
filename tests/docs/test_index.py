"""Every page can be found from its index, code names real pages. (tests/packaging/test_tree.py follows the links.)"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"\]\(([^)\s#]+)(#[^)]*)?\)")
CODE = [*(ROOT / "rl360").rglob("*.py"), *(ROOT / "launchers").rglob("*.py"), *(ROOT / "scripts").rglob("*.sh")]


def targets(page: Path) -> list[Path]:
    """Files that a page links to; addresses on the web are left out."""
    found = [match[1] for match in LINK.finditer(page.read_text())]
    return [(page.parent / name).resolve() for name in found if "://" not in name]


@pytest.mark.parametrize(
    ("index", "folder"), [("docs/README.md", "docs/guide"), ("docs/decisions/README.md", "docs/decisions")]
)
def test_the_index_has_every_page(index: str, folder: str) -> None:
    pages = {page for page in (ROOT / folder).glob("*.md") if page.name != "README.md"}
    assert {page.name for page in pages - set(targets(ROOT / index))} == set()


def test_pages_that_code_names_exist() -> None:
    named = {
        name
        for path in CODE
        if "bundled" not in path.parts
        for name in re.findall(r"docs/[\w/-]+\.md", path.read_text())
    }
    assert "docs/guide/tokens.md" in named
    assert {name for name in named if not (ROOT / name).exists()} == set()


def test_decisions_are_numbered_without_gaps_and_say_what_would_change_them() -> None:
    pages = sorted(page for page in (ROOT / "docs" / "decisions").glob("*.md") if page.name != "README.md")
    assert [page.name[:5] for page in pages] == [f"{number:04d}-" for number in range(1, len(pages) + 1)]
    for page in pages:
        assert "## What would change our mind" in page.read_text(), page.name
