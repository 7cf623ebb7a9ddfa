"""The board's web server: pages, a little JSON, and reports made when asked for.

It listens on this machine alone, answers GET and HEAD, and writes nothing. Requests that name another host
(DNS rebinding) or come from another site's page are refused, and pages may run no script but the board's own.
"""

import asyncio
import socket
import sys
from base64 import b64encode
from contextlib import suppress
from hashlib import sha256
from importlib import resources
from pathlib import Path

from ssfl.board import describe, folder
from ssfl.board.follow import Followers
from ssfl.errors import SsflError
from ssfl.report import page
from ssfl.signals import Terminated

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.datastructures import Headers, MutableHeaders
    from starlette.requests import Request
    from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
    from starlette.routing import Route
    from starlette.types import ASGIApp, Message, Receive, Scope, Send
except ImportError as error:
    raise SsflError("the board needs a web server: install it with `pip install 'ssfl[board]'`") from error

MOST = 8  # runs looked at together: as many as charts tell apart
SECONDS = 600  # a report that takes longer is given up
ASSETS = {
    "/": ("ssfl.board", "board.html", "text/html"),
    "/board.css": ("ssfl.board", "board.css", "text/css"),
    "/board.js": ("ssfl.board", "board.js", "text/javascript"),
    "/charts.js": ("ssfl.report", "charts.js", "text/javascript"),
    "/report.css": ("ssfl.report", "report.css", "text/css"),
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Guard:
    """Only looking, only from this machine, only by its own pages."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        headers = Headers(scope=scope)
        host = headers.get("host", "").rpartition(":")[0] or headers.get("host", "")
        refused: Response | None = None
        if host not in ("127.0.0.1", "localhost"):
            refused = PlainTextResponse("open the board as http://127.0.0.1\n", 421)
        elif scope["method"] not in ("GET", "HEAD"):
            refused = PlainTextResponse("the board is for looking only\n", 405, {"Allow": "GET, HEAD"})
        elif headers.get("sec-fetch-site", "none") not in ("none", "same-origin") and scope["path"] != "/":
            refused = PlainTextResponse("not for the pages of another site\n", 403)

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                out = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    out.setdefault(name, value)
            await send(message)

        return await (refused or self.app)(scope, receive, guarded)


def make_app(root: Path) -> Starlette:
    """The board of the runs under a folder."""
    followers, known = Followers(), describe.Finished()
    one_at_a_time = asyncio.Semaphore(1)

    def asset(request: Request) -> Response:
        package, name, kind = ASSETS[request.url.path]
        return Response(resources.files(package).joinpath(name).read_bytes(), media_type=kind)

    def listed(request: Request) -> Response:
        found = []
        for name in folder.names(root):
            try:
                with folder.opened(root, name) as run:
                    found.append(known.run(run, name))
            except folder.NotThere:  # it has just gone
                continue
        return JSONResponse({"folder": folder.text(root), "runs": found})

    def looked_at(request: Request) -> Response:
        name = request.query_params.get("name", "")
        with folder.opened(root, name) as run:
            follower = followers.of(name)
            follower.look(run)
            told = describe.run(run, name) | {"settings": describe.settings(run)}
        return JSONResponse(told | {"curves": follower.told(), "damaged": follower.damaged})

    async def report(request: Request) -> Response:
        names = request.query_params.getlist("run")
        if not 1 <= len(names) <= MOST:
            return PlainTextResponse(f"choose 1 to {MOST} runs\n", 400)
        for name in names:
            with folder.opened(root, name) as run:
                if strange := describe.strange(run):
                    return PlainTextResponse(f"{name}: {strange} is not what a run writes\n", 422)
        async with one_at_a_time:
            return await _made([str(root / name) for name in names])

    def not_there(request: Request, error: Exception) -> Response:
        return PlainTextResponse("there is no such run\n", 404)

    routes = [Route(path, asset) for path in ASSETS]
    routes += [Route("/runs", listed), Route("/run", looked_at), Route("/report", report)]
    app = Starlette(routes=routes, exception_handlers={folder.NotThere: not_there})
    app.add_middleware(Guard)
    return app


async def _made(paths: list[str]) -> Response:
    """A report, made by a process of its own: whatever a run folder holds, the board goes on."""
    command = [sys.executable, "-m", "ssfl.board.reporting", *paths]
    child = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, told = await asyncio.wait_for(child.communicate(), SECONDS)
    except TimeoutError:
        return PlainTextResponse(f"the report was not done in {SECONDS} s; try `ssfl report`\n", 504)
    finally:
        if child.returncode is None:
            child.kill()
    if child.returncode:
        return PlainTextResponse(told.decode("utf-8", "replace")[-2000:], 422)
    return HTMLResponse(out, headers={"Content-Security-Policy": _report_policy()})


def _report_policy() -> str:
    """A report holds its scripts; no other may run in it, and it can reach nothing, not even the board."""
    scripts = ("\n" + page.asset(name) for name in ("charts.js", "page.js"))
    hashes = " ".join(f"'sha256-{b64encode(sha256(s.encode()).digest()).decode()}'" for s in scripts)
    return (
        f"sandbox allow-scripts; default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def serve(root: Path, port: int) -> None:
    """Serve the runs under a folder until Ctrl-C."""
    if not root.is_dir():
        raise SsflError(f"there is no folder {root}: `ssfl run` makes runs/, or give the folder of your runs")
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
        listener.listen(100)
    except OSError as error:
        raise SsflError(f"cannot listen on port {port} ({error.strerror}): choose another --port") from None
    server = uvicorn.Server(uvicorn.Config(make_app(root.resolve()), log_level="warning", ws="none"))
    print(f"the runs in {root}: http://127.0.0.1:{listener.getsockname()[1]}   (Ctrl-C ends it)", flush=True)
    with suppress(KeyboardInterrupt, Terminated), listener:
        server.run(sockets=[listener])
