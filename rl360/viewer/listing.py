"""Lists of tries: the groups of one iteration, and a search over all iterations, both with the same filter.

In: a run and a filter. Out: markup. Every attempt links to its page with the filter in the address, so that next and
previous there stay within the list.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from rl360.types import OutcomeKind, Purpose, Stop
from rl360.viewer.filters import Filter, Found
from rl360.viewer.html import Html, el, join, number, url
from rl360.viewer.layout import attempt_url, chip, kind_mark, mark, reward_tone, section, table, tag_marks
from rl360.viewer.metrics import Metrics
from rl360.viewer.overview import metrics_table
from rl360.viewer.progress import OPEN
from rl360.viewer.source import Line, Source

ATTEMPTS_A_PAGE = 100
MAX_GROUPS = 200  # shown at once
MAX_CHOICES = 500  # suggestions of one filter field


def iteration_page(source: Source, metrics: Metrics, iteration: int, wanted: Filter, first_group: int) -> Html:
    lines = source.lines(iteration)
    accepted = [line for line in lines if wanted.accepts(line, source)]
    groups = [list(members) for _, members in groupby(accepted, key=lambda line: line.group_id)]
    shown = groups[first_group : first_group + MAX_GROUPS]
    numbers = f"{len(accepted)} of {len(lines)} tries" if wanted.query() else f"{len(lines)} tries"
    return join(
        filter_form(wanted, url("iteration", iteration), lines, source),
        section(
            "Groups",
            el("div", *[_group(source, members, wanted) for members in shown], class_="groups"),
            el("p", "No attempt is like that.", class_="dim") if lines and not accepted else None,
            _more_groups(iteration, wanted, first_group, len(groups)),
            aside=f"{numbers} in {len(groups)} groups",
        ),
        metrics_table(metrics.row(iteration)),
    )


def _group(source: Source, members: Sequence[Line], wanted: Filter) -> Html:
    first = members[0]
    named = next((line for line in members if line.task_id is not None), first)
    rewards = [line.reward for line in members if line.reward is not None]
    kinds = sorted({(line.kind, line.reason) for line in members}, key=str)
    eval_mark = mark("evaluation", "info") if first.purpose == Purpose.EVAL.value else None
    return el(
        "article",
        el(
            "h3",
            el("a", named.task_id or first.group_id, href=f"#{first.group_id}"),
            eval_mark,
            tag_marks(source.tags(named)),
        ),
        el("div", *[chip(line, wanted.query()) for line in members], class_="chips"),
        el(
            "p",
            f"mean {number(sum(rewards) / len(rewards)) if rewards else number(None)} ",
            *[kind_mark(kind, reason) for kind, reason in kinds],
            class_="dim",
        ),
        class_="group",
        id=first.group_id,
    )


def _more_groups(iteration: int, wanted: Filter, first: int, count: int) -> Html | None:
    if first + MAX_GROUPS >= count and first == 0:
        return None

    def link(text: str, at: int) -> Html:
        return el("a", text, href=url("iteration", iteration, query={**wanted.query(), "group": at}), class_="gap")

    return el(
        "p",
        link("earlier groups", max(0, first - MAX_GROUPS)) if first else None,
        f"groups {first + 1} to {min(count, first + MAX_GROUPS)} of {count} ",
        link("later groups", first + MAX_GROUPS) if first + MAX_GROUPS < count else None,
        class_="pager",
    )


def search_page(source: Source, wanted: Filter, found: Found) -> Html:
    """A flat list over iterations."""
    rows = [
        [
            el("a", line.try_id, href=attempt_url(line.iteration, line.try_id, wanted.query()), class_="id"),
            el("a", line.iteration, href=url("iteration", line.iteration)),
            join(line.task_id, " ", tag_marks(source.tags(line))),
            line.purpose,
            mark(number(line.reward), reward_tone(line)),
            kind_mark(line.kind, line.reason),
            join(line.stop, f" ({line.cause})" if line.cause else None),
            number(line.turns),
            number(line.sampled_tokens),
        ]
        for line in found.lines
    ]
    headings = ["attempt", "#iteration", "task", "purpose", "#reward", "outcome", "stop", "#turns", "#tokens"]
    go_on = None
    if found.go_on_at is not None:
        at = f"{found.go_on_at[0]}.{found.go_on_at[1]}"
        text = "more" if found.enough else f"search on from iteration {found.go_on_at[0]}"
        go_on = el("p", el("a", text, href=url("attempts", query={**wanted.query(), "from": at})), class_="pager")
    return join(
        filter_form(wanted, "/attempts", found.lines, source),
        section(
            "Attempts",
            table(headings, rows, class_="rows") if rows else el("p", "No attempt is like that.", class_="dim"),
            go_on,
            aside="all iterations",
        ),
    )


def filter_form(wanted: Filter, action: str, lines: Iterable[Line], source: Source) -> Html:
    """Fields of the filter; what the lines have is suggested."""
    seen = list(lines)
    tasks = {line.task_id for line in seen if line.task_id}
    of_tasks = {line.task_id: line for line in seen if line.task_id and line.offset is not None}
    tags = {tag for line in of_tasks.values() for tag in source.tags(line)}
    causes = {text for line in seen for text in (line.cause, line.reason) if text}
    low = "" if wanted.reward_min is None else wanted.reward_min
    high = "" if wanted.reward_max is None else wanted.reward_max
    return el(
        "form",
        _text("tag", wanted.tag, tags),
        _text("task", wanted.task, tasks),
        el(
            "label",
            "reward",
            el(
                "span",
                el("input", name="reward_min", value=low, size=4, placeholder="from", inputmode="decimal"),
                el("input", name="reward_max", value=high, size=4, placeholder="to", inputmode="decimal"),
            ),
        ),
        _choice("success", wanted.success, ["yes", "no"]),
        _choice("kind", wanted.kind, [*[kind.value for kind in OutcomeKind], OPEN], "outcome"),
        _choice("stop", wanted.stop, [stop.value for stop in Stop]),
        _text("cause", wanted.cause, causes),
        _choice("purpose", wanted.purpose, [purpose.value for purpose in Purpose]),
        el("button", "Filter"),
        el("a", "clear", href=action) if wanted.query() else None,
        action=action,
        method="get",
        class_="filter",
        id="filter",
    )


def _text(name: str, value: str | None, choices: Iterable[str]) -> Html:
    options = [el("option", value=choice) for choice in sorted(choices)[:MAX_CHOICES]]
    return el(
        "label",
        name,
        el("input", name=name, value=value or "", list=f"all-{name}", size=12),
        el("datalist", *options, id=f"all-{name}"),
    )


def _choice(name: str, value: str | None, choices: Sequence[str], label: str | None = None) -> Html:
    options = [el("option", choice, value=choice, selected=choice == value) for choice in choices]
    return el("label", label or name, el("select", el("option", "any", value=""), *options, name=name))
