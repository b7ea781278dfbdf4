"""One attempt: what was said, what was sampled, how it was scored, how it ended, and the logs that are left.

In: a row of a trajectory file (or of the journal, while it has no outcome). Out: markup. Long things come in parts, so
that an attempt of 100,000 tokens opens as fast as a short one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rl360.viewer.chart import bar
from rl360.viewer.conversation import conversation
from rl360.viewer.files import listing, read_part, trial_folder
from rl360.viewer.html import Html, el, join, number, seconds, size, url
from rl360.viewer.layout import attempt_url, chip, facts, kind_mark, mark, section, table, tag_marks
from rl360.viewer.progress import OPEN
from rl360.viewer.source import Line
from rl360.viewer.tokens import TokenTexts
from rl360.viewer.tokenview import segments_view

INLINE_LOG_BYTES = 6000  # of the end of each log that is shown on the page itself
INLINE_LOGS = ("exception.txt", "verifier/test-stdout.txt", "verifier/test-stderr.txt", "agent/agent.log", "trial.log")
PHASES = ("queue_s", "sandbox_s", "agent_s", "verify_s")


def attempt_page(
    row: Mapping[str, Any],
    group: Sequence[Line],
    texts: TokenTexts,
    run_dir: Path,
    query: Mapping[str, object],
    view: Mapping[str, int | str],
) -> Html:
    """The page's body.

    Args:
        row: as `Source.row` gives it.
        group: the lines of its group, other tries included.
        query: the filter of the list that one came from, for links.
        view: "turn", "segment", "token": the first ones shown; "colour": mask | logprob.
    """
    spec = row["spec"]
    here = attempt_url(spec["iteration"], spec["try_id"])
    if "segments" not in row:
        return join(_head(row), _group(group, spec, query), _no_attempt(row), _raw(here))
    return join(
        _head(row),
        _group(group, spec, query),
        el("div", _rewards(row), _timings(row), class_="two"),
        conversation(row["turns"], int(view.get("turn", 0)), lambda turn: f"{here}?{_query(query, turn=turn)}#turns"),
        segments_view(row["segments"], texts, view, lambda **at: f"{here}?{_query(query, **{**view, **at})}#tokens"),
        _logs(row, run_dir),
        _trial(row),
        _raw(here),
    )


def _query(query: Mapping[str, object], **more: object) -> str:
    return url(query={**query, **more}).partition("?")[2]


def _head(row: Mapping[str, Any]) -> Html:
    spec, outcome = row["spec"], row.get("outcome")
    task = spec.get("task") or {}
    kind = kind_mark(outcome["kind"], outcome["reason"]) if outcome else kind_mark(OPEN)
    pairs: list[tuple[str, object]] = [("outcome", kind)]
    if "segments" in row:
        success = row["success"]
        tone = "none" if row["reward"] is None else "good" if success else "bad"
        sampled = sum(stop - start for segment in row["segments"] for start, stop in segment["sampled"])
        pairs += [
            ("reward", mark(number(row["reward"]), tone)),
            ("success", {True: "yes", False: "no"}.get(success, "\u2013")),
            ("stop", row["stop"]),
            ("cause", row["cause"] or "\u2013"),
            (
                "turns",
                number(len(row["turns"])) + (f", {row['truncated_turns']} cut" if row["truncated_turns"] else ""),
            ),
            ("sampled tokens", number(sampled)),
        ]
    pairs += [("purpose", spec["purpose"]), ("try", number(spec["try_number"]))]
    if spec.get("seed") is not None:
        pairs.append(("seed", str(spec["seed"])))
    return join(
        el("h1", task.get("task_id") or spec["attempt_id"], " ", tag_marks(task.get("tags") or ())),
        el("p", spec["try_id"], class_="id dim"),
        facts(pairs),
    )


def _group(group: Sequence[Line], spec: Mapping[str, Any], query: Mapping[str, object]) -> Html | None:
    if len(group) < 2:
        return None
    chips = [chip(line, query, here=line.try_id == spec["try_id"]) for line in group]
    return el("div", el("span", "group", class_="dim"), *chips, class_="chips")


def _no_attempt(row: Mapping[str, Any]) -> Html:
    reason = (row.get("outcome") or {}).get("reason")
    text = "Nothing of this try was kept: it ended before there was an attempt"
    return section("No attempt", el("p", f"{text}{f' ({reason})' if reason else ''}."))


def _rewards(row: Mapping[str, Any]) -> Html:
    scores = row["scores"]
    if not scores:
        cause = row["cause"] or "no reward was scored"
        return section("Rewards", el("p", "Not scored: ", mark(cause, "warn")))
    rows = [
        [
            name,
            number(score["raw"]),
            number(score["shaped"]),
            {True: "yes", False: "no"}.get(score["success"], "\u2013"),
            "valid" if score["valid"] else mark(f"invalid: {score['cause']}", "warn"),
        ]
        for name, score in scores.items()
    ]
    rows.append([el("b", "reward"), "", el("b", number(row["reward"])), "", ""])
    return section("Rewards", table(["", "#raw", "#shaped", "#success", ""], rows))


def _timings(row: Mapping[str, Any]) -> Html:
    timings = row["timings"]
    values = [(name.removesuffix("_s"), float(timings.get(name) or 0.0)) for name in PHASES]
    total = max(float(timings.get("total_s") or 0.0), sum(value for _, value in values))
    legend = [
        el("div", el("dt", el("span", name, class_=f"key c{index}")), el("dd", seconds(value)))
        for index, (name, value) in enumerate(values)
    ]
    legend.append(
        el("div", el("dt", "waiting for the engine, in agent"), el("dd", seconds(timings.get("engine_wait_s"))))
    )
    legend.append(el("div", el("dt", "total"), el("dd", seconds(timings.get("total_s")))))
    return section("Time", bar(values, total), el("dl", *legend, class_="legend"))


def _logs(row: Mapping[str, Any], run_dir: Path) -> Html:
    folder = trial_folder(row)
    found = listing(run_dir, folder) if folder else []
    if not found:
        text = (
            "The trial's folder is gone. Folders of failed trials stay; rollout.keep_trial_dirs=true keeps all of them."
        )
        return section("Logs", el("p", text, class_="dim"), id_="logs")
    names = {name.removeprefix(f"{folder}/"): (name, num_bytes) for name, num_bytes in found}
    inline = [_inline_log(run_dir, names[short][0], short) for short in INLINE_LOGS if names.get(short, ("", 0))[1]]
    links = [
        el("li", el("a", short, href=url("file", *name.split("/"))), " ", el("span", size(num_bytes), class_="dim"))
        for short, (name, num_bytes) in names.items()
    ]
    return section("Logs", *inline, el("ul", *links, class_="files"), id_="logs", aside=folder)


def _inline_log(run_dir: Path, name: str, short: str) -> Html | None:
    try:
        part = read_part(run_dir, name)
    except FileNotFoundError:
        return None  # gone meanwhile
    text = part.text[-INLINE_LOG_BYTES:]
    cut = "the end of it: " if len(text) < len(part.text) or part.start else ""
    is_open = short.startswith(("verifier/", "exception"))
    return el(
        "details",
        el("summary", f"{short} ", el("span", f"{cut}{size(part.size)}", class_="dim")),
        el("pre", text),
        open=is_open,
    )


def _trial(row: Mapping[str, Any]) -> Html:
    trial = row.get("trial") or {}
    shown: list[tuple[str, object]] = [("task folder", (row["spec"].get("task") or {}).get("path") or "\u2013")]
    if trial.get("exception_type"):
        shown.append(("exception", f"{trial['exception_type']}: {trial.get('exception_message') or ''}"))
    parts = {
        "verifier's rewards": trial.get("rewards"),
        "agent": trial.get("agent_metadata"),
        "sampling": row["spec"].get("sampling"),
    }
    return el(
        "details",
        el("summary", "Trial, agent and sampling"),
        facts(shown),
        *[
            (el("h3", name), el("pre", json.dumps(value, indent=2, default=str)))
            for name, value in parts.items()
            if value
        ],
        open=bool(trial.get("exception_type")),
    )


def _raw(here: str) -> Html:
    return el("p", el("a", "This row as JSON", href=here.replace("/attempt/", "/raw/", 1)), class_="dim")
