"""Benchmarks run seldom, some on a GPU alone: what they take from our own modules must be there."""

import ast
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "benchmarks").rglob("*.py"))
OPTIONAL = ("sglang", "flash_attn", "triton", "transformer_engine", "trl")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_what_is_imported_from_our_modules_exists(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if not (isinstance(node, ast.ImportFrom) and node.module and node.level == 0):
            continue
        if node.module.split(".")[0] not in ("rl360", "benchmarks", "tests"):
            continue
        try:
            module = importlib.import_module(node.module)
        except ModuleNotFoundError as error:
            if error.name and error.name.split(".")[0] in OPTIONAL:
                continue
            raise
        for alias in node.names:
            if not hasattr(module, alias.name):
                importlib.import_module(f"{node.module}.{alias.name}")  # a submodule, or this fails


def test_it_looks_at_something():
    assert len(FILES) > 20
