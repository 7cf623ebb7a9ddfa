"""The web server of the board: it serves the pages, the data of runs as JSON, and reports that are made on
request.

It listens only on this machine, answers only GET and HEAD, and writes nothing. Requests are refused if they
name another host (DNS rebinding) or come from the page of another site. Pages may run only the board's own
scripts.
"""

import asyncio
import socket
import sys
from base64 import b64encode
from contextlib import suppress
from hashlib import sha256
from importlib import resources
from pathlib import Path

from ssfl.board import describe, untrusted
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

MOST = 8  # the largest number of runs in one report: charts have eight colours
SECONDS = 600  # making a report is stopped after this time
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


class ReadOnly:
    """A layer around the web application. It refuses requests that would write, that name another host, or
    that come from the page of another site. It also adds the security headers to every response."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        headers = Headers(scope=scope)
        host = headers.get("host", "").rpartition(":")[0] or headers.get("host", "")
        refused: Response | None = None
        if host not in ("127.0.0.1", "localhost"):
            refused = PlainTextResponse(
                f"refused, because the address {host[:100]!r} is not the board's: open "
                "http://127.0.0.1:PORT on the machine that runs `ssfl board`\n",
                421,
            )
        elif scope["method"] not in ("GET", "HEAD"):
            refused = PlainTextResponse(
                "refused: the board only shows runs, so it answers only GET and HEAD requests\n",
                405,
                {"Allow": "GET, HEAD"},
            )
        elif headers.get("sec-fetch-site", "none") not in ("none", "same-origin") and scope["path"] != "/":
            refused = PlainTextResponse(
                "refused, because another website sent this request: open the board itself in the browser\n",
                403,
            )

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                out = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    out.setdefault(name, value)
            await send(message)

        return await (refused or self.app)(scope, receive, guarded)


def make_app(root: Path) -> Starlette:
    """Returns the web application that shows the runs under the folder `root`."""
    followers, known = Followers(), describe.Finished()
    one_at_a_time = asyncio.Semaphore(1)

    def asset(request: Request) -> Response:
        package, name, kind = ASSETS[request.url.path]
        return Response(resources.files(package).joinpath(name).read_bytes(), media_type=kind)

    def listed(request: Request) -> Response:
        described = []
        for name in untrusted.names(root):
            try:
                with untrusted.opened(root, name) as run:
                    described.append(known.run(run, name))
            except untrusted.NotThere:  # the run was deleted in the meantime
                continue
        return JSONResponse({"folder": untrusted.text(root), "runs": described})

    def looked_at(request: Request) -> Response:
        name = request.query_params.get("name", "")
        with untrusted.opened(root, name) as run:
            follower = followers.of(name)
            follower.look(run)
            description = describe.run(run, name) | {"settings": describe.settings(run)}
        return JSONResponse(description | {"curves": follower.shown(), "damaged": follower.damaged})

    async def report(request: Request) -> Response:
        names = request.query_params.getlist("run")
        if not 1 <= len(names) <= MOST:
            return PlainTextResponse(
                f"{len(names)} runs are selected: select 1 to {MOST} runs for a report\n", 400
            )
        for name in names:
            with untrusted.opened(root, name) as run:
                if strange := describe.strange(run):
                    return PlainTextResponse(
                        f"no report: the file {strange} in the run folder {name} was not written by ssfl\n",
                        422,
                    )
        async with one_at_a_time:
            return await _made([str(root / name) for name in names])

    def not_there(request: Request, error: Exception) -> Response:
        return PlainTextResponse(
            "there is no run with this name, perhaps because it was deleted: choose another run in the "
            "board's list\n",
            404,
        )

    routes = [Route(path, asset) for path in ASSETS]
    routes += [Route("/runs", listed), Route("/run", looked_at), Route("/report", report)]
    app = Starlette(routes=routes, exception_handlers={untrusted.NotThere: not_there})
    app.add_middleware(ReadOnly)
    return app


async def _made(paths: list[str]) -> Response:
    """Returns the response with a report on these run folders. The report is made in a separate process, so
    that a malicious run folder cannot stop the board."""
    command = [sys.executable, "-m", "ssfl.board.reporting", *paths]
    child = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, errors = await asyncio.wait_for(child.communicate(), SECONDS)
    except TimeoutError:
        return PlainTextResponse(
            f"the report took longer than {SECONDS} s and was stopped: write it with `ssfl report RUN`, "
            "which has no limit\n",
            504,
        )
    finally:
        if child.returncode is None:
            child.kill()
    if child.returncode:
        return PlainTextResponse(errors.decode("utf-8", "replace")[-2000:], 422)
    return HTMLResponse(out, headers={"Content-Security-Policy": _report_policy()})


def _report_policy() -> str:
    """Returns the Content-Security-Policy of a report page: only its own scripts may run, and the page cannot
    send requests, not even to the board."""
    scripts = ("\n" + page.asset(name) for name in ("charts.js", "page.js"))
    hashes = " ".join(f"'sha256-{b64encode(sha256(s.encode()).digest()).decode()}'" for s in scripts)
    return (
        f"sandbox allow-scripts; default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def serve(root: Path, port: int) -> None:
    """Serves the board for the runs under the folder `root`, on this port, until Ctrl-C."""
    if not root.is_dir():
        raise SsflError(
            f"there is no folder {root}, so there are no runs to show: start a run with `ssfl run`, which "
            "creates the folder runs, or name the folder of your runs, as in `ssfl board FOLDER`",
            key="DIR",
            value=str(root),
        )
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
        listener.listen(100)
    except OSError as error:
        raise SsflError(
            f"cannot listen on port {port} ({error.strerror}): choose another --port",
            key="--port",
            value=port,
        ) from None
    config = uvicorn.Config(make_app(root.resolve()), log_level="warning", ws="none", proxy_headers=False)
    server = uvicorn.Server(config)
    address = f"http://127.0.0.1:{listener.getsockname()[1]}"
    print(f"the board shows the runs in {root} at {address}   (stop it with Ctrl-C)", flush=True)
    with suppress(KeyboardInterrupt, Terminated), listener:
        server.run(sockets=[listener])
