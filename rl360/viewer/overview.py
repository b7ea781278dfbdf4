"""The first page: how the run went, and its iterations.

In: a run. Out: markup. Curves come from metrics.jsonl; counts, and means where that file has none, from the indexes of
the iterations on this page of the list.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from rl360.types import OutcomeKind
from rl360.viewer.chart import line_chart
from rl360.viewer.html import Html, el, join, number, seconds, url
from rl360.viewer.layout import facts, kind_mark, section, table
from rl360.viewer.metrics import EVALUATED, REWARD, SUCCESS, Metrics
from rl360.viewer.source import Source, Totals

ITERATIONS_A_PAGE = 50
SCAN_BUDGET_S = 0.5  # of one page, for rows that no index knows
KINDS = (*[kind.value for kind in OutcomeKind], "open")


def read_resolved(run_dir: Path) -> dict[str, Any]:
    """resolved.yaml as plain values; empty when it is not there or cannot be read."""
    try:
        found = OmegaConf.to_container(OmegaConf.load(run_dir / "resolved.yaml"), resolve=False)
    except Exception:  # YAML's and OmegaConf's own errors of many types; the page then says less
        return {}
    return {str(key): value for key, value in found.items()} if isinstance(found, dict) else {}


def overview(source: Source, metrics: Metrics, resolved: Mapping[str, Any], page: int) -> Html:
    """Page 0 of the list of iterations has the latest ones."""
    columns = metrics.columns()
    iterations = source.iterations()[::-1]
    known = sorted({*iterations, *columns}, reverse=True)
    shown = known[page * ITERATIONS_A_PAGE : (page + 1) * ITERATIONS_A_PAGE]
    charts = [
        line_chart("Reward", {"mean over attempts": {i: row.get(REWARD) for i, row in columns.items()}}),
        line_chart(
            "Success rate",
            {
                "training": {i: row.get(SUCCESS) for i, row in columns.items()},
                "evaluation": {i: row.get(EVALUATED) for i, row in columns.items()},
            },
            top=1.0,
        ),
    ]
    open_tries = source.progress.open_tries()
    return join(
        _summary(source, resolved, sum(REWARD in row for row in columns.values()) or len(known)),
        el("div", *charts, class_="charts") if any(charts) else None,
        section(
            "In hand",
            el(
                "p",
                f"{len(open_tries)} tries have started and have no outcome yet. ",
                el("a", "Show them", href=url("attempts", query={"kind": "open"})),
            ),
        )
        if open_tries
        else None,
        section(
            "Iterations",
            _table(source, columns, shown) if shown else el("p", "Nothing has been decided yet.", class_="dim"),
            _pager(page, len(known)),
            aside=el("a", "Search all attempts", href="/attempts"),
        ),
        _files(source.run_dir),
    )


def _summary(source: Source, resolved: Mapping[str, Any], num_iterations: int) -> Html:
    summary = source.progress.summary()
    attempts = summary.get("attempts") or {}
    model = resolved.get("model") or {}
    pairs: list[tuple[str, object]] = [
        ("experiment", resolved.get("name") or source.run_dir.name),
        ("model", model.get("name") or "\u2013"),
        ("iterations", f"{num_iterations} of {number(resolved.get('iterations'))}"),
        ("attempts a task", number(resolved.get("group_size"))),
        ("seed", number(resolved.get("seed"))),
    ]
    if summary:
        pairs += [
            ("reward", f"{number(summary.get('reward_first'))} \u2192 {number(summary.get('reward_last'))}"),
            (
                "success",
                f"{number(summary.get('success_rate_first'))} \u2192 {number(summary.get('success_rate_last'))}",
            ),
            ("attempts", number(attempts.get("started"))),
            ("wall time", seconds(summary.get("wall_s"))),
            ("code", str(summary.get("code_version", "\u2013"))),
        ]
    causes = summary.get("masked_by_cause") or {}
    return join(
        facts(pairs),
        el(
            "p",
            "Masked by cause: ",
            *[
                el(
                    "a",
                    f"{cause} ({count})",
                    href=url("attempts", query={"kind": "masked", "cause": cause}),
                    class_="gap",
                )
                for cause, count in causes.items()
            ],
        )
        if causes
        else None,
    )


def _table(source: Source, columns: Mapping[int, Mapping[str, float | None]], shown: list[int]) -> Html:
    rows = []
    deadline = time.monotonic() + SCAN_BUDGET_S
    for iteration in shown:
        totals = source.totals(iteration, may_scan=time.monotonic() < deadline)
        logged = columns.get(iteration, {})
        address = url("iteration", iteration)
        rows.append(
            [
                el("a", f"iteration {iteration}", href=address),
                number(logged.get(REWARD, totals.reward_mean)),
                number(logged.get(SUCCESS, totals.success_rate)),
                number(logged.get(EVALUATED)),
                number(totals.groups) if totals.complete else "\u2013",
                _kinds(totals, address),
                number(logged.get("rollout/response_tokens_mean"), 1),
                seconds(logged.get("time/step_s")),
            ]
        )
    headings = ["", "#reward", "#success", "#evaluation", "#groups", "attempts", "#tokens", "#step"]
    return table(headings, rows, class_="rows")


def _kinds(totals: Totals, address: str) -> Html:
    if not totals.complete:
        return el("span", "not indexed; opening the iteration reads its file", class_="dim")
    return join(
        *[
            el("a", number(totals.by_kind[kind]), " ", kind_mark(kind), href=f"{address}?kind={kind}", class_="gap")
            for kind in KINDS
            if totals.by_kind.get(kind)
        ]
    )


def _pager(page: int, count: int) -> Html | None:
    if count <= ITERATIONS_A_PAGE:
        return None
    last = (count - 1) // ITERATIONS_A_PAGE
    return el(
        "p",
        el("a", "later", href=url(query={"page": page - 1})) if page > 0 else None,
        f" page {page + 1} of {last + 1} ",
        el("a", "earlier", href=url(query={"page": page + 1})) if page < last else None,
        class_="pager",
    )


def _files(run_dir: Path) -> Html:
    names = [n for n in ("resolved.yaml", "plan.json", "summary.json", "metrics.jsonl") if (run_dir / n).is_file()]
    links = [el("a", name, href=url("file", name), class_="gap") for name in names]
    return section("Files", el("p", *links, el("a", "logs/", href=url("files", "logs"), class_="gap")))


def metrics_table(row: Mapping[str, Any]) -> Html | None:
    """Every scalar of one iteration, grouped by the word before the slash."""
    if not row:
        return None
    groups: dict[str, list[tuple[str, Any]]] = {}
    for name, value in row.items():
        if name != "iteration":
            groups.setdefault(name.partition("/")[0], []).append((name, value))
    lists = [
        el("div", el("h3", group), table(["", "#"], [[name, _value(value)] for name, value in entries]))
        for group, entries in sorted(groups.items())
    ]
    return el("details", el("summary", f"All {len(row) - 1} metrics"), el("div", *lists, class_="columns"))


def _value(value: object) -> str:
    return number(value, 4) if isinstance(value, int | float) or value is None else json.dumps(value)
