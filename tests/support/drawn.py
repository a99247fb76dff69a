"""Pages without a browser, in which elements can be built and read."""

from nicegui import Client
from nicegui.page import page
from starlette.requests import Request

REQUEST = {"type": "http", "method": "GET", "path": "/", "headers": [], "query_string": b""}


def blank():
    """Return the client of an empty page, to be built in its context, within an event loop."""
    return Client(page(""), request=Request(REQUEST))
