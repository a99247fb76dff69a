"""Controls access to the pages: the right host name, same origin, beyond loopback a token; strict headers for all.

NiceGUI compiles its templates in the browser, so scripts need 'unsafe-inline' and 'unsafe-eval'; tests open every view
under this policy.
"""

import hmac
import ipaddress
import socket
from typing import Any
from urllib.parse import quote, unquote, urlencode, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import HTTPConnection
from starlette.responses import PlainTextResponse, RedirectResponse, Response

from benchd.daemon.errors import UsageError

COOKIE = "benchd_token"
POLICY = (
    "default-src 'none'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; font-src 'self'; connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; "
    "form-action 'self'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}


def is_loopback(host: str) -> bool:
    """Return whether a name or an address refers to this machine."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def require_free(host: str, port: int) -> None:
    """Raise UsageError if no server can listen on this address and port."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise UsageError(f"--port {port} on {host}: {error.strerror}; choose a different one") from error


class Guard:
    """ASGI middleware. Without a `token`, it answers only to loopback names, so that other names do not lead here."""

    def __init__(self, app: Any, token: str | None) -> None:
        self._app, self._token = app, token

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass a request on, or reject it."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        request = HTTPConnection(scope)
        tokens = unquote(request.cookies.get(COOKIE, "")), _bearer(request.headers)
        given = request.query_params.get("token", "")
        if not self._same_origin(request.headers):
            answer = _refusal(403, "This server does not accept requests from other sites or host names.")
        elif self._token is None or any(map(self._matches, tokens)):
            await self._app(scope, receive, _with_headers(send))
            return
        elif self._matches(given):
            answer = RedirectResponse(_without_token(request), 303, HEADERS)
            answer.set_cookie(COOKIE, quote(given, safe=""), httponly=True, samesite="strict")
        else:
            answer = _refusal(401, "Open this page once with ?token=..., the value of BENCHD_DASHBOARD_TOKEN.")
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await answer(scope, receive, send)

    def _matches(self, given: str) -> bool:
        return self._token is not None and hmac.compare_digest(given.strip().encode(), self._token.encode())

    def _same_origin(self, headers: Headers) -> bool:
        host, origin = headers.get("host", ""), headers.get("origin")
        try:
            address, ours = urlsplit(f"//{host}"), origin is None or urlsplit(origin).netloc == host
            known = self._token is not None or is_loopback(address.hostname or "")
            return ours and known and (address.port or 0) >= 0
        except ValueError:  # for example an address with an unclosed bracket, or a port that is not a number
            return False


def _without_token(request: HTTPConnection) -> str:
    """Return the requested address as a path on this site, because a browser treats a leading // as a host."""
    rest = urlencode([parameter for parameter in request.query_params.multi_items() if parameter[0] != "token"])
    return quote("/" + request.scope["path"].lstrip("/")) + (f"?{rest}" if rest else "")


def _bearer(headers: Headers) -> str:
    """Return the token sent by programs without cookies, such as Prometheus."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    # programs send a token's UTF-8, which Starlette reads as Latin-1
    return token.encode("latin-1").decode(errors="replace") if scheme.lower() == "bearer" else ""


def _with_headers(send: Any) -> Any:
    async def send_with_headers(message: Any) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message).update(HEADERS)
        await send(message)

    return send_with_headers


def _refusal(status: int, text: str) -> Response:
    return PlainTextResponse(text, status, HEADERS)
