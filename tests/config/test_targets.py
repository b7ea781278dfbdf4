import sys
from pathlib import Path

import pytest

from rl360.config.targets import TargetError, allowed, argument_problems, constructor

SOURCE = """
import torch_that_is_not_installed
from dataclasses import dataclass
from .base import Base
from .base import Base as Renamed

class Plain:
    def __init__(self, name: str, threshold: float = 0.5, *, strict: bool, limit: int | None = None, extra=()):
        raise RuntimeError("never called")

class Child(Base):
    pass

class Grandchild(Child):
    pass

class Passes(Base):
    def __init__(self, *args, width: int = 2, **kwargs): ...

class PassesToAnything(Anything):
    def __init__(self, *args, width: int = 2, **kwargs): ...

class Anything:
    def __init__(self, **kwargs): ...

class Mixin(ABC): ...

class Both(Base, Mixin):
    def __init__(self, width: int = 2, **kwargs): ...

class AnyOfBoth(Mixin, Anything):
    def __init__(self, width: int = 2, **kwargs): ...

class HandsOn(Anything):
    def __new__(cls, **kwargs): ...
    def __init__(self, **kwargs): ...

class PassesElsewhere(torch_that_is_not_installed.Thing):
    def __init__(self, width: int = 2, **kwargs): ...

class NoInit: ...

class FromElsewhere(torch_that_is_not_installed.Thing): ...

@dataclass
class Data:
    rate: float
    steps: int = 3
"""
BASE = """
class Base:
    def __init__(self, root: str, depth: int = 1): ...
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package whose parts cannot be imported: only its source can be read."""
    folder = tmp_path / "site_rewards"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (folder / "parts.py").write_text(SOURCE)
    (folder / "base.py").write_text(BASE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "site_rewards"


def test_keywords_that_are_handed_on_are_the_bases(package):
    found = constructor(f"{package}.parts.Passes")
    assert (found.annotations, found.required) == ({"root": "str", "depth": "int", "width": "int"}, ("root",))
    assert argument_problems(found, {"widht": 1, "depth": "x"}, ["root"]) == [
        "widht: unknown key for Passes; did you mean width?",
        "depth: 'x'; expected int",
    ]
    assert constructor(f"{package}.parts.PassesToAnything").accepts_any


def test_keywords_of_several_bases_and_whether_all_of_them_were_read(package):
    """(keywords, takes any other, every class that could name one was read)"""
    found = {name: constructor(f"{package}.parts.{name}") for name in ("Both", "AnyOfBoth", "HandsOn")}
    found["PassesElsewhere"] = constructor(f"{package}.parts.PassesElsewhere")
    assert {name: (set(c.annotations), c.accepts_any, c.all_named) for name, c in found.items()} == {
        "Both": ({"root", "depth", "width"}, False, True),
        "AnyOfBoth": ({"width"}, True, True),
        "HandsOn": (set(), True, False),
        "PassesElsewhere": ({"width"}, True, False),
    }
    assert found["Both"].required == ("root",)


def test_packages_without_an_init_file(package, tmp_path):
    folder = tmp_path / "site_rewards" / "deep" / "er"
    folder.mkdir(parents=True)
    (folder / "parts.py").write_text(BASE)
    assert constructor(f"{package}.deep.er.parts:Base").required == ("root",)


def test_signatures_are_read_without_importing(package):
    found = constructor(f"{package}.parts.Plain")
    assert found.annotations == {
        "name": "str",
        "threshold": "float",
        "strict": "bool",
        "limit": "int | None",
        "extra": "",
    }
    assert found.required == ("name", "strict")
    assert package not in sys.modules


@pytest.mark.parametrize("name", ["Child", "Grandchild", "Renamed"])
def test_base_classes_and_re_exports_are_followed(package, name):
    found = constructor(f"{package}.parts:{name}")
    assert (dict(found.annotations), found.required) == ({"root": "str", "depth": "int"}, ("root",))


def test_what_takes_anything_is_known_as_such(package):
    assert constructor(f"{package}.parts.Anything").accepts_any
    assert constructor(f"{package}.parts.FromElsewhere").accepts_any
    assert not constructor(f"{package}.parts.NoInit").accepts_any
    assert constructor(f"{package}.parts.Data").required == ("rate",)


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("nodots", "is not module.Class"),
        ("no_such_package_xyz.a.B", "no module no_such_package_xyz"),
        ("site_rewards.partz.Plain", "no module site_rewards.partz; did you mean parts?"),
        ("site_rewards.parts.Plian", "no class Plian in site_rewards.parts; did you mean Plain?"),
        ("sys.Thing", "no Python source"),
    ],
)
def test_what_is_not_there_is_said_with_a_suggestion(package, target, text):
    with pytest.raises(TargetError, match=text.replace("?", r"\?")):
        constructor(target)


def test_arguments_are_compared_all_at_once(package):
    found = constructor(f"{package}.parts.Plain")
    problems = argument_problems(found, {"thresold": 1, "threshold": "x", "limit": None, "extra": 9}, ("name",))
    assert problems == [
        "thresold: unknown key for Plain; did you mean threshold?",
        "threshold: 'x'; expected float",
        "strict: Plain needs a value for it",
    ]
    assert argument_problems(found, {"threshold": 1, "strict": True}, ("name",)) == []


def test_only_ours_and_listed_modules_are_allowed():
    assert allowed("rl360.rewards.verifier.VerifierReward", ())
    assert allowed("launchers.local.LocalLauncher", ())
    assert not allowed("os.system", ())
    assert not allowed("rl360_evil.Thing", ())
    assert allowed("mine.rewards:Own", ("mine",))
    assert not allowed("mine_too.rewards.Own", ("mine",))
