"""A small run folder with one of everything that the viewer shows, some of it hostile."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
from aiohttp.test_utils import TestClient, TestServer

from rl360.engine.journal import Journal, Trajectories
from rl360.engine.ledger import Ledger
from rl360.types import (
    Attempt,
    AttemptSpec,
    Outcome,
    OutcomeKind,
    Purpose,
    Score,
    Segment,
    Stop,
    Turn,
    VersionSpan,
)
from rl360.viewer.server import make_app
from tests.engine.records import make_attempt, make_spec

SCRIPT = "<script>alert('stolen')</script>"
BREAKOUT = '"><img src=x onerror=alert(1)></pre></textarea><!--'


def write_run(run_dir: Path, model: Path | None = None) -> Path:
    """Iteration 0: groups a and b (tags coding, easy / tools) and an evaluation; 1: tries decided, finished and open.

    Group a has rewards 0, 1, 0.25 and a masked member that was requeued once before.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    path = "null" if model is None else str(model)
    (run_dir / "resolved.yaml").write_text(
        f"name: demo\nseed: 3\niterations: 5\ngroup_size: 4\nmodel:\n  name: tiny\n  path: {path}\n"
    )
    rows = [
        *[
            (make_attempt(make_spec(member=i), reward=r), OutcomeKind.TRAINED, None)
            for i, r in enumerate((0.0, 1.0, 0.25))
        ],
        (make_spec(member=3), OutcomeKind.REQUEUED, "worker_died"),
        (make_attempt(make_spec(member=3, try_number=1), reward=None), OutcomeKind.MASKED, "sandbox_died"),
        *[
            (make_attempt(_tools(make_spec(group="b", member=i)), reward=1.0), OutcomeKind.FILTERED, "equal_rewards")
            for i in range(2)
        ],
        (make_attempt(make_spec(purpose=Purpose.EVAL), reward=0.5), OutcomeKind.EVALUATED, None),
        (hostile(make_spec(iteration=1)), OutcomeKind.TRAINED, None),
    ]
    with Ledger(run_dir / "ledger.jsonl") as ledger:
        for what, kind, reason in rows:
            spec = what.spec if isinstance(what, Attempt) else what
            ledger.started(spec)
            ledger.record(_outcome(spec, kind, reason))
            Trajectories(run_dir).write([(what, _outcome(spec, kind, reason))])
        finished, running = make_spec(iteration=1, member=1), make_spec(iteration=1, member=2)
        ledger.started(finished)
        ledger.started(running)
    Journal(run_dir).append(make_attempt(finished, reward=0.75))
    metrics = [
        {"iteration": 0, "reward/unfiltered_mean": 0.4167, "reward/success_rate": 0.6, "train/loss": 0.125},
        {"iteration": 1, "reward/unfiltered_mean": 0.5, "reward/success_rate": 0.5, "train/loss": None},
    ]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
    return run_dir


def hostile(spec: AttemptSpec) -> Attempt:
    """Two segments, two versions, a tool call, and text that tries to be markup wherever a model or task can write."""
    ids = np.arange(12, dtype=np.int32)
    mask = np.array([False] * 4 + [True] * 8)
    logprobs = np.where(mask, np.linspace(0.0, -6.0, 12), 0.0).astype(np.float32)
    segment = Segment(ids, mask, logprobs, (VersionSpan(0, 4, 8), VersionSpan(1, 8, 12)))
    second = replace(segment, parent=0, fork_reason=f"history {SCRIPT}")
    call = {
        "id": "c1",
        "type": "function",
        "function": {"name": f"bash{SCRIPT}", "arguments": '{"command": "ls\\nid"}'},
    }
    answer = {"role": "assistant", "content": f"{SCRIPT}{BREAKOUT}", "reasoning_content": SCRIPT, "tool_calls": [call]}
    turns = (
        Turn(
            ({"role": f"user{SCRIPT}", "content": [{"type": "text", "text": SCRIPT}]},), answer, "length", 4, 4, 0.5, 0
        ),
        Turn(
            ({"role": "tool", "content": "a\x00\x1b[31m\u202eb", "tool_call_id": SCRIPT},),
            {"role": "assistant", "content": None, "odd": SCRIPT},
            "stop",
            8,
            4,
            0.25,
            1,
        ),
    )
    base = make_attempt(spec)
    assert base.trial is not None
    task = replace(spec.task, task_id=f"task {SCRIPT}", tags=(SCRIPT, "x"))
    return replace(
        base,
        spec=replace(spec, task=task),
        segments=(segment, second),
        turns=turns,
        scores={f"verifier{SCRIPT}": Score(1.0, 1.0, success=True), "brevity": Score(None, -0.125)},
        stop=Stop.TURNS,
        trial=replace(base.trial, exception_type=SCRIPT, exception_message=BREAKOUT, agent_metadata={"note": SCRIPT}),
    )


def client(run_dir: Path, **options: bool) -> TestClient:
    """A client of the viewer's app; use as `async with`."""
    return TestClient(TestServer(make_app(run_dir, **options)))


def _tools(spec: AttemptSpec) -> AttemptSpec:
    return replace(spec, task=replace(spec.task, tags=("tools",)))


def _outcome(spec: AttemptSpec, kind: OutcomeKind, reason: str | None) -> Outcome:
    return Outcome(spec.try_id, spec.attempt_id, spec.group_id, spec.iteration, spec.purpose, kind, reason)
