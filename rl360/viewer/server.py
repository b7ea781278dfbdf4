"""The viewer's web server: addresses to pages, and what keeps a page about untrusted text harmless.

In: a run folder, a host and a port. Out: pages until it is stopped. Left to others: what the pages show.

Only GET and HEAD are answered. Pages may load nothing but the two files of static/ (a content policy, beside the
escaping in html.py). On a loopback address only requests that name this machine are answered, so that a page of another
site cannot read the run through a name that it points here. Pages are built in threads: a long search holds up nobody
else.
"""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from rl360.engine.codec import FORMAT, plain
from rl360.viewer.attempt import attempt_page
from rl360.viewer.files import PART_BYTES, inside, listing, read_part
from rl360.viewer.filters import Filter, FilterError, neighbours, search
from rl360.viewer.html import Html, el, join, number, size, url
from rl360.viewer.layout import attempt_url, document, section
from rl360.viewer.listing import ATTEMPTS_A_PAGE, iteration_page, search_page
from rl360.viewer.metrics import Metrics
from rl360.viewer.overview import overview, read_resolved
from rl360.viewer.source import Line, Source
from rl360.viewer.tokens import TokenTexts, model_folders

STATIC = Path(__file__).parent / "static"
STATIC_TYPES = {"viewer.css": "text/css", "viewer.js": "text/javascript", "icon.svg": "image/svg+xml"}
WATCHED = ("ledger.jsonl", "metrics.jsonl", "summary.json", "journal.jsonl.zst")
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self'; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]", "::1"})


@dataclass(frozen=True, slots=True)
class Page:
    """What a page builder returns. `links` as in layout.document; `is_live`: fetched again when the run moves."""

    title: str
    crumbs: tuple[tuple[str, str | None], ...]
    body: Html
    links: Mapping[str, tuple[str, str] | None] | None = None
    is_live: bool = False
    status: int = 200


class Viewer:
    """The pages of one run. Blocking; the app calls it from threads."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.source = Source(run_dir)
        self.metrics = Metrics(run_dir)
        self.resolved = read_resolved(run_dir)
        self.texts = TokenTexts(model_folders(run_dir, self.resolved))

    def render(self, page: Page) -> str:
        state = self.source.progress.state()
        name = f"{self.resolved.get('name') or ''} {self.run_dir.name}".strip()
        stamp = self.stamp() if page.is_live else ""
        return document(page.title, name, state, page.crumbs, page.body, stamp=stamp, links=page.links)

    def stamp(self) -> str:
        """Differs when anything that a live page shows does."""
        found = [self.source.progress.state()]
        for path in [*(self.run_dir / name for name in WATCHED), self.source.trajectories.folder]:
            try:
                info = path.stat()
            except OSError:
                continue
            found.append(f"{path.name} {info.st_ino} {info.st_mtime_ns} {info.st_size}")
        return hashlib.sha256("\n".join(found).encode()).hexdigest()[:16]

    def overview(self, request: web.Request) -> Page:
        body = overview(self.source, self.metrics, self.resolved, _number(request, "page"))
        return Page("overview", (), body, is_live=True)

    def iteration(self, request: web.Request) -> Page:
        iteration = int(request.match_info["iteration"])
        known = self.source.iterations()
        if iteration not in known:
            raise FileNotFoundError(f"iteration {iteration}: the run has none of that number")
        wanted = Filter.from_query(request.query)
        body = iteration_page(self.source, self.metrics, iteration, wanted, _number(request, "group"))
        at = known.index(iteration)

        def to(position: int) -> tuple[str, str] | None:
            if not 0 <= position < len(known):
                return None
            return url("iteration", known[position], query=wanted.query()), f"iteration {known[position]}"

        links = {"prev": to(at - 1), "up": ("/", "the run"), "next": to(at + 1)}
        return Page(f"iteration {iteration}", ((f"iteration {iteration}", None),), body, links, is_live=True)

    def attempts(self, request: web.Request) -> Page:
        wanted = Filter.from_query(request.query)
        iteration, _, position = request.query.get("from", "0.0").partition(".")
        if not (iteration.isdecimal() and position.isdecimal()):
            raise FilterError("from: expected ITERATION.POSITION")
        found = search(self.source, wanted, (int(iteration), int(position)), ATTEMPTS_A_PAGE)
        links = {"prev": None, "up": ("/", "the run"), "next": None}
        return Page("attempts", (("attempts", None),), search_page(self.source, wanted, found), links)

    def attempt(self, request: web.Request) -> Page:
        iteration, try_id = int(request.match_info["iteration"]), request.match_info["try_id"]
        wanted = Filter.from_query(request.query)
        lines = self.source.lines(iteration)
        here = next((line for line in lines if line.try_id == try_id), None)
        if here is None:
            raise FileNotFoundError(f"{try_id}: iteration {iteration} has no such try")
        try:
            row = self.source.row(iteration, try_id)
        except KeyError:  # it runs now
            spec = {"try_id": try_id, "attempt_id": here.attempt_id, "iteration": iteration, "try_number": "\u2013"}
            row = {"spec": {**spec, "purpose": here.purpose, "group_id": here.group_id}}
        if row.get("format", 0) > FORMAT:
            raise FilterError(f"{try_id}: written by a later version of RL360 (format {row['format']})")
        group = [line for line in lines if line.group_id == here.group_id]
        before, after = neighbours(self.source, wanted, iteration, try_id)
        query = wanted.query()
        view: dict[str, int | str] = {key: _number(request, key) for key in ("turn", "segment", "token")}
        if colour := request.query.get("colour"):
            view["colour"] = colour
        body = attempt_page(row, group, self.texts, self.run_dir, query, view)
        above = url("iteration", iteration, query=query)

        def to(line: Line | None) -> tuple[str, str] | None:
            if line is None:
                return None
            return attempt_url(line.iteration, line.try_id, query), line.try_id

        links = {
            "prev": to(before),
            "up": (f"{above}#{here.group_id}", f"iteration {iteration}"),
            "next": to(after),
        }
        crumbs = ((f"iteration {iteration}", above), (try_id, None))
        return Page(try_id, crumbs, body, links, is_live="outcome" not in row)

    def file(self, request: web.Request) -> Page:
        name = request.match_info["name"]
        if inside(self.run_dir, name).is_dir():
            return self.files(request)
        start = request.query.get("from")
        part = read_part(self.run_dir, name, int(start) if start and start.isdecimal() else None)
        address = url("file", *name.split("/"))
        more = [
            el("a", "the beginning", href=f"{address}?from=0", class_="gap") if part.start else None,
            el("a", "earlier", href=f"{address}?from={max(0, part.start - PART_BYTES)}", class_="gap")
            if part.start
            else None,
            el("a", "later", href=f"{address}?from={part.end}", class_="gap") if part.end < part.size else None,
            el("a", "the end", href=address, class_="gap") if part.end < part.size else None,
        ]
        aside = f"bytes {number(part.start)} to {number(part.end)} of {size(part.size)}"
        body = section(name, el("p", *more, class_="pager") if any(more) else None, el("pre", part.text), aside=aside)
        return Page(name, ((name, None),), body, {"prev": None, "up": ("/", "the run"), "next": None})

    def files(self, request: web.Request) -> Page:
        name = request.match_info["name"]
        rows = [
            el("li", el("a", found, href=url("file", *found.split("/"))), " ", el("span", size(num), class_="dim"))
            for found, num in listing(self.run_dir, name)
        ]
        body = section(f"{name}/", el("ul", *rows, class_="files") if rows else el("p", "No files.", class_="dim"))
        return Page(name, ((f"{name}/", None),), body, {"prev": None, "up": ("/", "the run"), "next": None})

    def raw(self, iteration: int, try_id: str) -> str:
        try:
            return json.dumps(plain(self.source.row(iteration, try_id)), indent=1)
        except KeyError as error:
            raise FileNotFoundError(f"{try_id}: iteration {iteration} has no such try") from error


VIEWER = web.AppKey("viewer", Viewer)


def make_app(run_dir: Path, *, any_host: bool = False) -> web.Application:
    """The application. any_host: answer requests whatever name they were sent to (for an address that is not loopback).

    Raises FileNotFoundError when the folder is not there.
    """
    if not run_dir.is_dir():
        raise FileNotFoundError(f"{run_dir}: no such folder")
    viewer = Viewer(run_dir.resolve())
    app = web.Application(middlewares=[_guard(any_host)])
    app[VIEWER] = viewer
    number_ = r"{iteration:\d{1,12}}"
    pages: list[tuple[str, Callable[[web.Request], Page]]] = [
        ("/", viewer.overview),
        (f"/iteration/{number_}", viewer.iteration),
        ("/attempts", viewer.attempts),
        (f"/attempt/{number_}/{{try_id:.+}}", viewer.attempt),
        ("/file/{name:.+}", viewer.file),
        ("/files/{name:.+}", viewer.files),
    ]
    app.add_routes([web.get(address, _answer(viewer, build)) for address, build in pages])
    app.add_routes(
        [
            web.get(f"/raw/{number_}/{{try_id:.+}}", _raw),
            web.get("/stamp", _stamp),
            web.get("/static/{name}", _static),
        ]
    )
    return app


def serve(run_dir: Path, host: str, port: int, ready: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM. `ready` gets the address once it answers. Raises OSError when it cannot listen."""

    async def main() -> None:
        runner = web.AppRunner(make_app(run_dir, any_host=not is_loopback(host)), access_log=None, handle_signals=True)
        await runner.setup()
        try:
            site = web.TCPSite(runner, host, port)
            await site.start()
            taken = runner.addresses[0][1]
            ready(f"http://{f'[{host}]' if ':' in host else host}:{taken}/")
            await asyncio.Event().wait()
        finally:
            await runner.cleanup()

    try:
        asyncio.run(main())
    except (KeyboardInterrupt, web.GracefulExit):
        return


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address of that name."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


# ---- handlers


def _answer(viewer: Viewer, build: Callable[[web.Request], Page]) -> Handler:
    def page(request: web.Request) -> tuple[int, str]:
        try:
            found = build(request)
        except FilterError as error:
            found = _sorry(str(error), 400)
        except FileNotFoundError as error:
            found = _sorry(f"not found: {error}", 404)
        return found.status, viewer.render(found)

    async def handler(request: web.Request) -> web.Response:
        status, text = await asyncio.to_thread(page, request)
        return web.Response(text=text, content_type="text/html", status=status)

    return handler


async def _raw(request: web.Request) -> web.Response:
    viewer = request.app[VIEWER]
    iteration, try_id = int(request.match_info["iteration"]), request.match_info["try_id"]
    try:
        text = await asyncio.to_thread(viewer.raw, iteration, try_id)
    except FileNotFoundError as error:
        return web.Response(text=f"not found: {error}", status=404)
    return web.Response(text=text, content_type="application/json")


async def _stamp(request: web.Request) -> web.Response:
    viewer = request.app[VIEWER]
    stamp = await asyncio.to_thread(viewer.stamp)
    return web.json_response({"stamp": stamp, "running": viewer.source.progress.state() == "running"})


async def _static(request: web.Request) -> web.Response:
    name = request.match_info["name"]
    if name not in STATIC_TYPES:
        return web.Response(text="not found", status=404)
    text = (STATIC / name).read_text(encoding="utf-8")
    return web.Response(text=text, content_type=STATIC_TYPES[name])


def _guard(any_host: bool) -> Middleware:
    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        name = request.host if request.host.endswith("]") else request.host.rpartition(":")[0] or request.host
        if any_host or name in LOCAL_NAMES or is_loopback(name):
            try:
                response = await handler(request)
            except web.HTTPException as error:  # 404 and 405 of the router
                response = web.Response(text=f"{error.status} {error.reason}", status=error.status)
        else:
            response = web.Response(text="this address is for requests to this machine only", status=403)
        response.headers.update(HEADERS)
        return response

    return guard


def _sorry(text: str, status: int) -> Page:
    body = join(el("h1", "Nothing to show"), el("p", text), el("p", el("a", "to the run", href="/")))
    return Page("nothing to show", ((str(status), None),), body, status=status)


def _number(request: web.Request, name: str) -> int:
    text = request.query.get(name, "0")
    if not (text.isascii() and text.isdecimal() and len(text) <= 12):
        raise FilterError(f"{name}: {text!r} is not a whole number")
    return int(text)
