"""The viewer over HTTP: every page of a run, and that nothing in the run can do harm there."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from yarl import URL

from rl360.viewer import conversation, tokenview
from rl360.viewer.layout import attempt_url
from rl360.viewer.server import is_loopback
from tests.tiny_model import write_tiny_llama
from tests.viewer.runs import client, write_run
from tests.viewer.test_html import Reader, read

HOSTILE = "/attempt/1/i1-a-0.t0"
# What a page may hold: nothing that a run brought.
OUR_TAGS = {
    *("html", "head", "meta", "title", "link", "script", "body", "header", "nav", "main", "section", "article", "div"),
    *("a", "span", "b", "p", "h1", "h2", "h3", "pre", "ul", "li", "dl", "dt", "dd", "details", "summary", "dialog"),
    *("table", "thead", "tbody", "tr", "th", "td", "form", "label", "input", "button", "select", "option", "datalist"),
    *("figure", "figcaption", "svg", "line", "text", "polyline", "circle", "rect"),
}


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("view")
    run = write_run(folder / "run", write_tiny_llama(folder / "model", weights=False))
    logs = run / "trials" / "i0-a-1.t0" / "verifier"
    logs.mkdir(parents=True)
    (logs / "test-stdout.txt").write_text("<script>log</script> 2 passed\n")
    (run / "trials" / "i0-a-1.t0" / "agent.log").symlink_to("/etc/passwd")
    return run


async def page(run_dir: Path, address: str, status: int = 200) -> str:
    async with client(run_dir) as http:
        answer = await http.get(URL(address, encoded=True))
        text = await answer.text()
        assert answer.status == status, text[-300:]
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
        assert "unsafe" not in answer.headers["Content-Security-Policy"]
        return text


def text_of(markup: str) -> str:
    return re.sub(r"\s+", " ", read(markup).text)


async def test_overview(run_dir):
    text = text_of(await page(run_dir, "/"))
    assert "demo" in text
    assert "iterations2 of 5" in text
    assert "2 tries have started and have no outcome yet" in text
    assert re.search(r"iteration 0\s*0.417\s*0.6\s*\u2013\s*3\s*3 trained", text)
    assert "stopped" in text


async def test_iteration_has_groups_and_filters(run_dir):
    markup = await page(run_dir, "/iteration/0")
    text = text_of(markup)
    assert "8 tries in 3 groups" in text
    assert "mean 0.417" in text  # of 0, 1, 0.25
    assert "masked: sandbox_died" in text
    assert "train/loss" in text
    assert 'href="/attempt/0/i0-a-3.t1"' in markup
    filtered = await page(run_dir, "/iteration/0?tag=tools&reward_min=0.5")
    assert "2 of 8 tries in 1 groups" in text_of(filtered)
    assert 'href="/attempt/0/i0-b-1.t0?tag=tools&amp;reward_min=0.5"' in filtered
    assert "No attempt is like that" in text_of(await page(run_dir, "/iteration/0?cause=nothing"))


async def test_search_over_iterations(run_dir):
    text = text_of(await page(run_dir, "/attempts?kind=open"))
    assert "i1-a-1.t0" in text
    assert "i1-a-2.t0" in text
    assert "i0-a-0.t0" not in text
    assert "i1-a-2.t0" not in text_of(await page(run_dir, "/attempts?kind=open&reward_min=0.5"))
    assert "i0-a-0.t0" not in text_of(await page(run_dir, "/attempts?from=1.0"))


async def test_attempt_shows_everything(run_dir):
    markup = await page(run_dir, "/attempt/0/i0-a-1.t0")
    text = text_of(markup).replace(" ", "")
    for part in (
        "task-a coding easy",
        "outcome trained",
        "reward 1",
        "stop finished",
        "turns 1",
        "sampled tokens 3",
        "verifier 1 1 yes valid",
        "user \u00e4",
        "assistant b",
        "turn 1 \u00b7 stop \u00b7 3 prompt tokens, 3 sampled \u00b7 engine 0.25 s",
        "3 sampled of 6",
        "Weight versions: v0: tokens 3\u20135",
        "sandbox 0.20 s agent 0.30 s verify 0.40 s waiting for the engine, in agent 0.25 s total 1.10 s",
        "<script>log</script> 2 passed",
        '"format_ok": true',
    ):
        assert part.replace(" ", "") in text, part
    assert "agent.log" not in text  # a link out of the folder
    titles = {
        a["rel"]: a["title"] for tag, pairs in read(markup).tags if (a := dict(pairs)) and tag == "a" and "rel" in a
    }
    assert titles == {"prev": "i0-a-0.t0", "up": "iteration 0", "next": "i0-a-2.t0"}


async def test_tokens_are_marked_by_mask_and_by_logprob(run_dir):
    markup = await page(run_dir, HOSTILE)
    classes = [
        dict(attributes)["class"]
        for tag, attributes in read(markup).tags
        if tag == "span" and dict(attributes).get("title", "").count(" \u00b7 id ") == 1
    ]
    # linspace(0, -6, 12)[4:] = -2.18, -2.73, -3.27, -3.82, -4.36, -4.91, -5.45, -6
    levels = ["l4", "l4", "l5", "l5", "l5", "l6", "l6", "l6"]
    assert [c.removesuffix(" part") for c in classes] == ["t"] * 4 + [f"t s {level}" for level in levels]
    assert 'class="by-logprob" id="token-box"' in markup
    assert 'class="by-mask" id="token-box"' in await page(run_dir, f"{HOSTILE}?colour=mask")
    assert "logprob -2.1818 \u00b7 p 0.113 \u00b7 v0" in markup
    assert "&lt;|im_start|&gt;" in markup  # id 1, by the run's tokenizer
    assert "v0: tokens 4\u20137, v1: tokens 8\u201311" in text_of(markup)
    assert "segment 0" in text_of(await page(run_dir, f"{HOSTILE}?segment=1"))


async def test_ids_are_shown_when_the_model_is_gone(tmp_path):
    run = write_run(tmp_path / "run", tmp_path / "gone")
    text = text_of(await page(run, "/attempt/0/i0-a-1.t0"))
    assert "Token ids are shown: no tokenizer.json" in text
    assert re.search(r"1 2 3 v0 ?5 6 7", text)


async def test_nothing_of_a_run_becomes_markup(run_dir):
    addresses = ["/", "/iteration/1", "/attempts", HOSTILE, f"{HOSTILE}?segment=1", "/attempt/0/i0-a-1.t0"]
    for address in [*addresses, "/file/trials/i0-a-1.t0/verifier/test-stdout.txt"]:
        markup = await page(run_dir, address)
        found = read(markup)
        assert {tag for tag, _ in found.tags} <= OUR_TAGS, address
        assert [a for tag, a in found.tags if tag == "script"] == [[("src", "/static/viewer.js"), ("defer", None)]]
        for tag, attributes in found.tags:
            for name, value in attributes:
                assert not name.startswith("on"), (tag, name)
                assert name != "style"
                if name in ("href", "src", "action"):
                    assert value.startswith(("/", "#")), value
                    assert not value.startswith("//")
        assert markup.count("<!--") == 0
        assert "\x00" not in markup
        assert "\u202e" not in markup
    text = read(await page(run_dir, HOSTILE)).text
    assert "<script>alert('stolen')</script>" in text
    assert "a\u2400\u241b[31m\u27e8U+202E\u27e9b" in text


@pytest.mark.parametrize("hostile", ["<script>x</script>", '"><b>', "\u202e", "%00", "{{7*7}}"])
async def test_addresses_are_escaped_too(run_dir, hostile):
    async with client(run_dir) as http:
        for address in (
            URL("/attempts").with_query(tag=hostile, task=hostile, cause=hostile, kind=hostile),
            URL("/iteration/0").with_query(reward_min=hostile),
            URL("/iteration/0").with_query(stop=hostile),
            URL("/").with_query(page=hostile),
            URL(attempt_url(0, hostile), encoded=True),
            URL(f"/file/{hostile}"),
        ):
            answer = await http.get(address)
            assert answer.status in (200, 400, 404)
            reader = Reader()
            if answer.content_type == "text/html":
                reader.feed(await answer.text())
            assert sum(tag == "script" for tag, _ in reader.tags) <= 1
            assert {tag for tag, _ in reader.tags} <= OUR_TAGS


async def test_ids_of_any_kind_can_be_opened(tmp_path):
    from dataclasses import replace

    from rl360.engine.journal import Trajectories
    from tests.engine.records import make_attempt, make_spec, outcome

    odd = "i0/../a b?c#d%2F\u00e4<>&\"'"
    spec = replace(make_spec(), attempt_id=odd, group_id=odd)
    Trajectories(tmp_path).write([(make_attempt(spec), outcome(spec))])
    assert odd in read(await page(tmp_path, attempt_url(0, spec.try_id))).text
    hrefs = [dict(a).get("href", "") for tag, a in read(await page(tmp_path, "/iteration/0")).tags if tag == "a"]
    assert attempt_url(0, spec.try_id) in hrefs


async def test_tries_without_an_attempt(run_dir):
    assert "worker_died" in text_of(await page(run_dir, "/attempt/0/i0-a-3.t0"))
    running = text_of(await page(run_dir, "/attempt/1/i1-a-2.t0"))
    assert "No attempt" in running
    assert "open" in running
    masked = text_of(await page(run_dir, "/attempt/0/i0-a-3.t1"))
    assert "Not scored: sandbox_died" in masked


async def test_a_finished_attempt_without_an_outcome(run_dir):
    markup = await page(run_dir, "/attempt/1/i1-a-1.t0")
    assert "data-stamp" in markup  # asked for again until it is decided
    assert "data-stamp" not in await page(run_dir, HOSTILE)
    assert "0.75" in text_of(markup)


async def test_what_is_not_there(run_dir):
    for address in (
        "/iteration/7",
        "/attempt/0/none",
        "/attempt/7/none",
        "/file/.lock",
        "/file/trials/i0-a-1.t0/agent.log",
    ):
        assert "not found" in text_of(await page(run_dir, address, 404))
    for address in (
        "/file/%2e%2e/secret",
        "/file/trials%2F..%2F..%2Fmodel%2Ftokenizer.json",
        "/static/..%2Fserver.py",
        "/x",
    ):
        await page(run_dir, address, 404)
    for address in ("/iteration/0?reward_min=x", "/attempts?from=x", "/?page=-1", "/iteration/0?group=1e3"):
        assert "Nothing to show" in text_of(await page(run_dir, address, 400))


async def test_a_row_as_json(run_dir):
    found = json.loads(await page(run_dir, "/raw/0/i0-a-1.t0"))
    assert found["spec"]["try_id"] == "i0-a-1.t0"
    async with client(run_dir) as http:
        answer = await http.get("/raw/1/i1-a-0.t0")
        assert answer.content_type == "application/json"


async def test_a_row_of_a_later_version_is_said(tmp_path):
    from rl360.engine import frames
    from rl360.engine.codec import attempt_to_json
    from rl360.engine.journal import Trajectories
    from tests.engine.records import make_attempt, make_spec

    row = {**attempt_to_json(make_attempt(make_spec())), "outcome": {"kind": "trained", "reason": None}, "format": 99}
    trajectories = Trajectories(tmp_path)
    trajectories.folder.mkdir()
    frames.append(trajectories.path(0), [frames.pack(row)])
    assert "later version" in text_of(await page(tmp_path, "/attempt/0/i0-a-0.t0", 400))
    assert "i0-a-0.t0" in await page(tmp_path, "/iteration/0")


async def test_read_only(run_dir):
    def state() -> list[tuple[str, int, int]]:
        return sorted((str(p), p.lstat().st_mtime_ns, p.lstat().st_size) for p in run_dir.rglob("*"))

    before = state()
    async with client(run_dir) as http:
        for method in ("POST", "PUT", "DELETE", "PATCH"):
            assert (await http.request(method, "/iteration/0")).status == 405
        assert (await http.head("/")).status == 200
        for address in ("/", "/iteration/0", "/iteration/1", "/attempts", HOSTILE, "/stamp", "/files/logs"):
            assert (await http.get(address)).status == 200
    assert state() == before


async def test_other_names_for_this_machine_are_refused(run_dir):
    async with client(run_dir) as http:
        for name, status in (
            ("evil.example", 403),
            ("evil.example:80", 403),
            ("localhost.evil.example", 403),
            ("localhost:8000", 200),
            ("127.0.0.1", 200),
            ("[::1]:8000", 200),
            ("[::1]", 200),
        ):
            assert (await http.get("/", headers={"Host": name})).status == status, name
    async with client(run_dir, any_host=True) as http:
        assert (await http.get("/", headers={"Host": "cluster.example"})).status == 200


def test_loopback_addresses():
    assert [is_loopback(h) for h in ("127.0.0.1", "127.8.8.8", "::1", "localhost")] == [True] * 4
    assert [is_loopback(h) for h in ("0.0.0.0", "::", "10.0.0.1", "example")] == [False] * 4


async def test_the_stamp_moves_with_the_run(tmp_path):
    run = write_run(tmp_path / "run")
    async with client(run) as http:
        first = await (await http.get("/stamp")).json()
        assert first["running"] is False
        assert (await (await http.get("/stamp")).json()) == first
        metrics = run / "metrics.jsonl"
        metrics.write_text(metrics.read_text() + '{"iteration": 2, "reward/unfiltered_mean": 0.875}\n')
        second = await (await http.get("/stamp")).json()
        assert second["stamp"] != first["stamp"]
        assert second["stamp"] in await (await http.get("/")).text()
        assert "0.875" in text_of(await (await http.get("/")).text())


async def test_an_empty_folder_and_a_run_that_just_began(tmp_path):
    assert "Nothing has been decided yet" in text_of(await page(tmp_path, "/"))
    assert "No attempt is like that" in text_of(await page(tmp_path, "/attempts"))


async def test_long_attempts_come_in_parts(run_dir, monkeypatch):
    monkeypatch.setattr(conversation, "TURNS_A_PAGE", 1)
    monkeypatch.setattr(tokenview, "TOKENS_A_PAGE", 5)
    monkeypatch.setattr(conversation, "MAX_CHARS", 10)
    markup = await page(run_dir, HOSTILE)
    assert 'id="turn-0"' in markup
    assert 'id="turn-1"' not in markup
    assert "more characters" in markup
    assert 'id="turn-1"' in await page(run_dir, f"{HOSTILE}?turn=1")
    part = await page(run_dir, f"{HOSTILE}?token=10")
    assert len(re.findall(r'title="\d+ · id', part)) == 2
    assert 'title="11 · id 11 ' in part
    hrefs = [dict(a).get("href", "") for tag, a in read(part).tags if tag == "a"]
    assert f"{HOSTILE}?turn=0&segment=0&token=5#tokens" in hrefs


async def test_tool_calls_and_unknown_fields_are_shown(run_dir):
    text = read(await page(run_dir, HOSTILE)).text
    assert "command: ls\nid" in text  # the script keeps its lines
    assert '"odd": "<script>' in text
    assert "cut at the token limit" in text
