"""A real Chromium on pages of this machine: what goes wrong in one, or asks another host, fails the test."""

import http.client
import os
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import pytest
from broker import HOST, program
from waiting import WAIT_S

ZONE = "Asia/Kathmandu"  # no machine that tests is there
BOXES = Path(__file__).with_name("boxes.js").read_text()
AXE = "async () => (await axe.run({ resultTypes: ['violations'] })).violations"
EVERY_LOOK = tuple(product((390, 1024, 1600), ("light", "dark")))
LOOKS = EVERY_LOOK[::3] + EVERY_LOOK[4:5]  # each width, and both schemes


@contextmanager
def running_browser():
    """Yield a Chromium driven by Playwright."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright, of the extra dev")
    with sync_api.sync_playwright() as started:
        options = ["--no-sandbox"] if os.geteuid() == 0 else []
        chromium = started.chromium.launch(executable_path=program("chromium"), args=options)
        yield chromium
        chromium.close()


@contextmanager
def opened(browser, port, path="/", heard=None):
    """Yield a page; at its end nothing has gone wrong in it and nothing has asked another host.

    The sizes of what its websocket receives are added to `heard`.
    """
    # one context for all pages: what is compiled and cached for the first serves the others
    context = browser.contexts[0] if browser.contexts else browser.new_context(timezone_id=ZONE)
    page, wrong = context.new_page(), []
    page.set_default_timeout(WAIT_S * 1000)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda line: wrong.append(line.text) if line.type == "error" else None)
    ours = (f"http://{HOST}:{port}/", f"ws://{HOST}:{port}/", "data:")
    page.on("request", lambda request: None if request.url.startswith(ours) else wrong.append(request.url))
    if heard is not None:
        page.on("websocket", lambda socket: socket.on("framereceived", lambda frame: heard.append(len(frame))))
    page.goto(f"http://{HOST}:{port}{path}")
    page.get_by_role("heading", level=1).wait_for()
    try:
        yield page
        assert page.title().endswith("benchd")
    finally:
        page.close()
    assert not wrong


def faults(page, looks=LOOKS, judged=9):
    """Return what is wrong with a page at each width and scheme by its boxes, and at the first `judged` by axe-core."""
    axe = pytest.importorskip("axe_playwright_python.base", reason="needs axe-playwright-python, of the extra dev")
    page.evaluate(axe.AXE_SCRIPT)
    wrong = []
    for place, (width, scheme) in enumerate(looks):
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(color_scheme=scheme)
        wrong += [(width, scheme, fault) for fault in answer(page, BOXES)]
        rules = [rule for rule in answer(page, AXE) if rule["impact"] != "minor"] if place < judged else []
        wrong += [(width, scheme, rule["id"], node["html"][:200]) for rule in rules for node in rule["nodes"]]
    return wrong


def answer(page, function):
    """Return what an asynchronous function of JavaScript returns; `evaluate` would wait for it without end."""
    page.evaluate(f"void (window.answer = null, ({function})().then((value) => (window.answer = {{ value }})))")
    return page.wait_for_function("window.answer", polling=20).json_value()["value"]


def get(port, path, **headers):
    connection = http.client.HTTPConnection(HOST, port, timeout=WAIT_S)
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()
