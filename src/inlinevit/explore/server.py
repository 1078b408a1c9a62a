"""The explorer as a web application: routes, limits, and what keeps other web pages out."""

import ipaddress
from collections.abc import Awaitable, Callable
from importlib import resources
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .explorer import Explorer, StaleImageError
from .pictures import MOST_UPLOAD_BYTES

WEB = resources.files(__package__).joinpath("web")
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
# Requests that change something need this header, which pages of other origins cannot send without being asked.
OWN_HEADER = "x-inlinevit"
HEADERS = {
    "content-security-policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
# Numbers in addresses have at most so many digits.
MOST_DIGITS = 9


def create_app(explorer: Explorer, *, host: str = "127.0.0.1") -> Starlette:
    """Return the web application.

    Args:
        explorer: What it shows.
        host: The name or address that the server listens on.
    """

    def state(request: Request) -> Response:
        return JSONResponse(explorer.state())

    async def upload(request: Request) -> Response:
        content = await read_body(request, MOST_UPLOAD_BYTES)
        name = unquote(request.headers.get("x-file-name", ""), errors="replace")
        return JSONResponse(await run_in_threadpool(explorer.open_bytes, content, name))

    def open_sample(request: Request) -> Response:
        return JSONResponse(explorer.open_sample(request.path_params["index"]))

    def sample_png(request: Request) -> Response:
        return Response(explorer.sample_png(request.path_params["index"]), media_type="image/png")

    def picture(request: Request) -> Response:
        content = explorer.png(request.path_params["image"], request.path_params["model"])
        return Response(content, media_type="image/png")

    def rows(request: Request) -> Response:
        image, model, layer, row, column = (
            number(request, name) for name in ("image", "model", "layer", "row", "column")
        )
        only_own = request.query_params.get("own") == "1"
        return JSONResponse(explorer.rows(image, model, layer, (row, column), only_own=only_own))

    def locality(request: Request) -> Response:
        return JSONResponse(explorer.locality(number(request, "image"), number(request, "model")))

    def hidden(request: Request) -> Response:
        image, model, side = (number(request, name) for name in ("image", "model", "side"))
        return JSONResponse(explorer.hidden(image, model, side))

    return Starlette(
        routes=[
            Route("/", web_file),
            Route("/state.json", state),
            Route("/web/{name}", web_file),
            Route("/api/picture", upload, methods=["POST"]),
            Route("/api/sample/{index:int}", open_sample, methods=["POST"]),
            Route("/api/sample/{index:int}.png", sample_png),
            Route("/api/picture/{image:int}/{model:int}.png", picture),
            Route("/api/rows", rows),
            Route("/api/locality", locality),
            Route("/api/hidden", hidden),
        ],
        middleware=[Middleware(OnlyOwnPages, host=host)],
        exception_handlers={
            StaleImageError: report(409),
            ValueError: report(400),
            HTTPException: report(None),
        },
    )


def report(status: int | None) -> Callable[[Request, Exception], Response]:
    """Return a handler that answers with the sentence of an error; None = with its own status."""

    def handle(request: Request, error: Exception) -> Response:
        own = error if isinstance(error, HTTPException) else None
        message = own.detail if own is not None else " ".join(str(error).split())
        return JSONResponse({"error": message}, status or (own.status_code if own is not None else 500))

    return handle


def web_file(request: Request) -> Response:
    """Answer with a file of the page."""
    name = request.path_params.get("name", "index.html")
    # Only names of files in the folder itself.
    if name not in web_files():
        raise HTTPException(404, f"there is no {name[:80]} here")
    return Response(WEB.joinpath(name).read_bytes(), media_type=TYPES[PurePosixPath(name).suffix])


def web_files() -> list[str]:
    """Return the names of the files of the page."""
    return sorted(file.name for file in WEB.iterdir() if PurePosixPath(file.name).suffix in TYPES)


def number(request: Request, name: str) -> int:
    """Return a whole number in the query of an address."""
    text = request.query_params.get(name, "")
    if not (text.isascii() and text.isdecimal() and len(text) <= MOST_DIGITS):
        raise ValueError(f"{name} is {text[:20]!r}: it should be a whole number")
    return int(text)


async def read_body(request: Request, most: int) -> bytes:
    """Read the body of a request; refuse one that is too long before all of it is there."""
    refusal = HTTPException(413, f"the file is larger than {most >> 20} MB: choose a smaller picture")
    length = request.headers.get("content-length", "0")
    if not length.isdecimal() or int(length) > most:
        raise refusal
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > most:
            raise refusal
        parts.append(part)
    return b"".join(parts)


class OnlyOwnPages:
    """Answers only requests that come from the explorer's own page, and adds headers that restrict the page.

    A web site can have its name resolved to 127.0.0.1 (DNS rebinding): such requests have a foreign Host header.
    Requests that other pages send have a foreign Origin, say so in Sec-Fetch-Site, or lack OWN_HEADER.
    """

    def __init__(self, app: ASGIApp, host: str) -> None:
        self.app, self.host = app, host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                added = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message = {**message, "headers": [*message["headers"], *added]}
            await send(message)

        problem = self.refusal(scope["method"], headers)
        app: Callable[[Scope, Receive, Send], Awaitable[Any]] = self.app
        if problem:
            app = JSONResponse({"error": problem}, 403)
        await app(scope, receive, send_with_headers)

    def refusal(self, method: str, headers: dict[str, str]) -> str:
        """Return why a request is refused; "" if it is not."""
        host = headers.get("host", "")
        if not is_allowed_host(host, self.host):
            return "this address is not the explorer's: open the one that it has printed"
        if "origin" in headers and headers["origin"] != f"http://{host}":
            return "requests of other pages are refused: open the explorer itself"
        if headers.get("sec-fetch-site", "none") == "cross-site" and headers.get("sec-fetch-mode") != "navigate":
            return "requests of other pages are refused: open the explorer itself"
        if method not in ("GET", "HEAD") and OWN_HEADER not in headers:
            return f"requests that change something need the header {OWN_HEADER}"
        return ""


def is_allowed_host(header: str, listening: str) -> bool:
    """Whether a Host header names this server: its own name, or an address, which no web site can be resolved from.

    Args:
        header: The header, NAME or NAME:PORT.
        listening: What the server listens on.
    """
    try:
        name = urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return False
    if name in ("localhost", listening.lower()):
        return True
    address, own = parse_address(name), parse_address(listening)
    return address is not None and (address == own or own is None or not own.is_loopback)


def parse_address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return an IP address; None if it is a name."""
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None
