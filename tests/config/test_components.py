"""Classes that a config names: found, called and used as the run will, read from source before anything starts."""

from __future__ import annotations

import ast
import copy
import inspect
from pathlib import Path

import pytest

from rl360 import protocols
from rl360.config.check import load
from rl360.config.components import AWAITED, METHODS, PROVIDED, ROLLOUT_KEYWORDS
from rl360.config.compose import Request, compose
from rl360.engine import build, engines


def problems(*overrides: str, **sections: dict) -> tuple[str, ...]:
    composed = compose(Request(overrides))
    assert composed.problems == ()
    values = copy.deepcopy(dict(composed.values))
    for name, section in sections.items():
        values[name] = {**values[name], **section}
    return load(values).problems


@pytest.mark.parametrize(
    "override",
    [
        "trainer=torch",
        "agent=bash_text",
        "agent=repair_text",
        "agent=terminus_2",
        "agent=harbor",
        "sandbox=docker",
        "sandbox=daytona",
        "gateway=smg",
    ],
)
def test_every_option_of_ours_passes(override):
    assert problems(override) == ()


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (
            "reward.verifier._target_=rl360.rewards.verifier:VerifierReward",
            "reward.verifier._target_: rl360.rewards.verifier:VerifierReward; expected "
            "rl360.rewards.verifier.VerifierReward",
        ),
        (
            "cluster._target_=launchers.local:LocalLauncher",
            "cluster._target_: launchers.local:LocalLauncher; expected launchers.local.LocalLauncher",
        ),
        (
            "agent.import_path=rl360.agents.single_turn.SingleTurnAgent",
            "agent.import_path: rl360.agents.single_turn.SingleTurnAgent; expected "
            "rl360.agents.single_turn:SingleTurnAgent",
        ),
        (
            "sandbox.import_path=rl360.sandboxes.local.LocalSandbox",
            "sandbox.import_path: rl360.sandboxes.local.LocalSandbox; expected rl360.sandboxes.local:LocalSandbox",
        ),
    ],
)
def test_each_name_in_its_own_notation(override, expected):
    """Both were accepted, and the run then looked for a class of another name."""
    assert problems(override) == (expected,)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (
            "trainer._target_=rl360.loggers.console.ConsoleLogger",
            "trainer._target_: ConsoleLogger has no step, publish",
        ),
        ("rollout._target_=rl360.rollout.queue.RolloutEvents", "rollout._target_: RolloutEvents has no start, submit"),
        ("gateway._target_=rl360.loggers.console.ConsoleLogger", "gateway._target_: ConsoleLogger has no verify, open"),
        ("cluster._target_=rl360.loggers.console.ConsoleLogger", "cluster._target_: ConsoleLogger has no plan, submit"),
        ("agent.import_path=rl360.sandboxes.local:LocalSandbox", "agent.import_path: LocalSandbox has no setup, run"),
        (
            "sandbox.import_path=rl360.agents.single_turn:SingleTurnAgent",
            "sandbox.import_path: SingleTurnAgent has no start, stop, exec",
        ),
        (
            "logger.console._target_=rl360.rewards.verifier.VerifierReward",
            "logger.console._target_: VerifierReward has no start, log, log_text, finish",
        ),
    ],
)
def test_a_class_of_another_kind_is_named(override, expected):
    assert problems(override)[0].startswith(expected)


def test_classes_of_ones_own(tmp_path, monkeypatch):
    (tmp_path / "lab_parts.py").write_text(
        "from rl360.rewards.verifier import VerifierReward\n"
        "def wrapped(f): return f\n"
        "class Base:\n"
        "    async def score(self, task, attempts, deadline_s): ...\n"
        "class Inherits(Base):\n    def __init__(self, name: str): ...\n"
        "class FromOurs(VerifierReward): ...\n"
        "class Assigned:\n    score = Base.score\n    def __init__(self, name: str): ...\n"
        "class Decorated:\n    @wrapped\n    def score(self, task, attempts, deadline_s): ...\n"
        "class Unreadable(object().__class__): ...\n"
        "class NotAwaited:\n    def __init__(self, name): ...\n    def score(self, task, attempts, deadline_s): ...\n"
        "class Misspelt:\n    def __init__(self, name): ...\n    async def scor(self, task, attempts): ...\n"
        "class Narrow:\n"
        "    def __init__(self, learning_rate: float, teacher, *, model_dir): ...\n"
        "    def start(self): ...\n    def step(self, batch): ...\n    def publish(self, folder): ...\n"
        "    def save(self, folder): ...\n    def restore(self, folder): ...\n    def close(self): ...\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    allow = "allow_targets=[lab_parts]"
    for fine in ("Inherits", "FromOurs", "Assigned", "Decorated", "Unreadable"):
        assert problems(allow, reward={"mine": {"_target_": f"lab_parts.{fine}"}}) == ()
    assert problems(allow, reward={"mine": {"_target_": "lab_parts.NotAwaited"}}) == (
        "reward.mine._target_: NotAwaited.score: no `async def`; expected one, because the run awaits it",
    )
    assert problems(allow, reward={"mine": {"_target_": "lab_parts.Misspelt"}}) == (
        "reward.mine._target_: Misspelt has no score; expected a class for reward, with score",
    )
    narrow = problems(allow, trainer={"_target_": "lab_parts.Narrow"})
    assert len(narrow) == 2
    assert narrow[0].startswith("trainer._target_: Narrow takes no warmup_steps, betas")
    assert narrow[1] == "trainer._target_: Narrow needs teacher, which nothing gives; expected a default"


def test_what_the_run_gives_itself_cannot_be_given_again():
    found = problems(
        "+agent.kwargs.model_name=x",
        "+agent.kwargs.base_url=http://127.0.0.1:1/v1",
        "+sandbox.kwargs.memory_mib=5",
        "+sandbox.kwargs.base=host",
        "+sandbox.kwargs.run_id=x",
    )
    assert found == (
        "agent.kwargs.model_name: is given by the run; expected none",
        "agent.kwargs.base_url: is given by the run; expected none",
        "sandbox.kwargs.memory_mib: would stand beside sandbox.memory_mib and win over it; expected sandbox.memory_mib",
        "sandbox.kwargs.base: would stand beside sandbox.base and win over it; expected sandbox.base",
        "sandbox.kwargs.run_id: is given by the run; expected none",
    )
    (unknown,) = problems("+sandbox.kwargs.foo=1")
    assert "artifacts_mib" in unknown
    assert "trial_paths" not in unknown
    assert "memory_mib" not in unknown


def test_the_methods_are_those_of_the_protocols():
    optional = {"algorithm": {"sequence_correction"}}
    for group, methods in METHODS.items():
        protocol = getattr(protocols, group.capitalize(), None)
        if group in ("cluster", "agent", "sandbox") or protocol is None:
            continue
        own = {name: value for name, value in vars(protocol).items() if inspect.isfunction(value)}
        own = {name: value for name, value in own.items() if not name.startswith("_")}
        assert set(methods) == set(own) - optional.get(group, set()), group
        awaited = {name for name, value in own.items() if inspect.iscoroutinefunction(value)}
        assert set(AWAITED.get(group, ())) == awaited, group
    assert METHODS["trainer"] == engines.TRAINER_METHODS


def test_the_keywords_are_those_of_build():
    tree = ast.parse(Path(build.__file__).read_text(encoding="utf-8"))
    given = {}
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call) or ast.unparse(call.func) != "_make":
            if isinstance(call, ast.Call) and {"gateway", "workers", "rewards"} <= {k.arg for k in call.keywords}:
                given["rollout"] = tuple(k.arg for k in call.keywords)
            continue
        given[ast.unparse(call.args[1])] = tuple(k.arg for k in call.keywords if k.arg is not None)
    assert set(given["config.trainer"]) == set(PROVIDED["trainer"])
    assert set(given["config.gateway"]) == set(PROVIDED["gateway"])
    assert given["rollout"] == ROLLOUT_KEYWORDS


def test_classes_that_source_alone_does_not_tell_pass(tmp_path, monkeypatch):
    """Each is usable, and was refused: methods from elsewhere, another name, awaited though not `async def`."""
    (tmp_path / "lab_star.py").write_text(
        "class Starred:\n    def __init__(self, name: str, x: int = 1): ...\n    async def score(self, *a): ...\n"
    )
    (tmp_path / "lab_made.py").write_text(
        "import functools\n"
        "import lab_star as star\n"
        "from lab_star import *\n"
        "async def score(self, task, attempts, deadline_s): ...\n"
        "def adds(cls): return cls\n"
        "class Named:\n    def __init__(self, name: str, x: int = 1): ...\n"
        "class Plain:\n    def score(self): ...\n"
        "class Later(Named): ...\n"
        "Later.score = score\n"
        "class Handed(Named): ...\n"
        "adds(Handed)\n"
        "class Meta(Named, metaclass=type): ...\n"
        "class Branches(Named):\n"
        "    if True:\n        async def score(self, *a): ...\n"
        "    else:\n        def score(self, *a): ...\n"
        "class UnreadFirst(star.Starred, Plain): ...\n"
        "class Mixin:\n    def helps(self): ...\n"
        "class Mixed(Mixin, Starred): ...\n"
        "class Together(Named):\n    score, other = score, None\n"
        "@adds\nclass Init: ...\n"
        "class InitInIf:\n"
        "    if True:\n        def __init__(self, name, x=1): ...\n"
        "    async def score(self, *a): ...\n"
        "Alias = Starred\n"
        "Partial = functools.partial(Alias)\n"
        "try:\n    from lab_fast import Fast\n"
        "except ImportError:\n    class Fast(Starred): ...\n"
        "class Passes:\n"
        "    def __init__(self, inner=None, cache_dir=None, **kw): self.inner = inner\n"
        "    def setup(self, *a): return self.inner.setup(*a)\n"
        "    def run(self, *a): return self.inner.run(*a)\n"
        "    def start(self, *a): return self.inner.start(*a)\n"
        "    def stop(self, *a): return self.inner.stop(*a)\n"
        "    def exec(self, *a): return self.inner.exec(*a)\n"
        "    def upload_file(self, *a): return self.inner.upload_file(*a)\n"
        "    def download_file(self, *a): return self.inner.download_file(*a)\n"
        "class Gives(Passes):\n    def exec(self, *a): return Result(1)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    allow = "allow_targets=[lab_made]"
    names = "Later Handed Meta Branches UnreadFirst Mixed Together Init InitInIf Starred Alias Partial Fast"
    for fine in names.split():
        assert problems(allow, reward={"mine": {"_target_": f"lab_made.{fine}", "x": 2}}) == (), fine
    assert problems(allow, reward={"mine": {"_target_": "lab_made.Alias", "y": 2}}) == (
        "reward.mine.y: unknown key for Starred; there are: x",
    )
    assert problems(allow, agent={"import_path": "lab_made:Passes"}) == ()
    theirs = {"import_path": "lab_made:Passes", "kwargs": {"cache_dir": "/x", "run_id": "r"}}  # nobody else gives these
    assert problems(allow, sandbox=theirs) == ()
    assert problems(allow, sandbox={"import_path": "lab_made:Gives"}) == (
        "sandbox.import_path: Gives.exec: no `async def`; expected one, because the run awaits it",
    )
