"""`benchd demo` as a user runs it: this machine measured, simulated boards, the pages in a real browser."""

import json
import os
import re
import signal
from contextlib import contextmanager

import psutil
import pytest
from broker import HOST, free_port
from browsing import get, opened, running_browser
from forked import PAGES, Program
from waiting import WAIT_S, wait_for

SIMULATED = ("Orin Nano 1 (simulated)", "Orin AGX 2 (simulated)", "Desktop GPU 1 (simulated)")
# what bench-once measures without a name is the subject of other tests, and the story need not take half a minute
BRIEFLY = """
from benchd.daemon import cli
from benchd.dashboard.demo import start
start.MEASURED = ("--models", "square", "--variants", "eager", "--preset", "quick")
start.CONFIG = start.CONFIG.replace("warm_up_cap_s = 1.0", "warm_up_cap_s = 0.1").replace("= 2.0", "= 0.1")
start.TICK_S = 0.25
cli.benchd()
"""
STORY = ("1 slower", "1 silent", "1 throttled", "1 failed check")


@pytest.fixture
def environment(tmp_path, child_environment):
    """What the demo sees: temporary folders of its own, and the code under test."""
    (tmp_path / "tmp").mkdir()
    paths = {key: os.environ[key] for key in ("PYTHONPATH",) if key in os.environ}
    return child_environment | paths | {"TMPDIR": str(tmp_path / "tmp")}


@contextmanager
def demo(environment, port, folder):
    """Yield the command once it has said where its pages are, and what it says."""
    environment = {name: value for name, value in environment.items() if name != "PYTEST_CURRENT_TEST"}
    read_end, write_end = os.pipe()
    arguments = ["benchd", "demo", "--port", str(port)]
    with os.fdopen(read_end) as stream, Program(BRIEFLY, arguments, folder, environment, write_end, PAGES) as process:
        os.close(write_end)
        try:
            assert "seven simulated boards; Ctrl-C stops everything" in stream.readline()
            assert f"http://{HOST}:{port}/" in stream.readline()
            yield process, stream
        finally:
            process.terminate()
            process.wait(WAIT_S)


def parts(process):
    return {child.pid: child for child in psutil.Process(process.pid).children(recursive=True)}


def alive(children):
    """Return those that have not ended, whether or not their new parent has asked how."""
    return [child for child in children.values() if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]


def has_median(port, board):
    """Return whether the metrics have a median of a board whose id holds this; the pages may not listen yet."""
    try:
        lines = get(port, "/metrics")[2].splitlines()
    except ConnectionRefusedError:
        return False
    return any(line.startswith(b"benchd_case_median_seconds") and board in line for line in lines)


def test_one_command_tells_the_story_of_this_machine_and_seven_simulated_boards(environment, tmp_path):
    port = free_port()
    with demo(environment, port, tmp_path) as (process, _):
        children = parts(process)
        # an open page is drawn anew each second: it is opened once there is something to see
        wait_for(lambda: has_median(port, b"this-machine"), process, step_s=1.0)
        with running_browser() as browser, opened(browser, port, "/fleet") as page:
            for name in SIMULATED:
                page.get_by_role("link", name=name).get_by_text("online").wait_for()
            real = page.get_by_role("link", name="This machine")
            real.get_by_text("online").wait_for()
            assert "simulated" not in real.inner_text()
            page.goto(f"http://{HOST}:{port}/results?device=this-machine")
            row = page.get_by_role("row").filter(has_text="This machine").first
            row.wait_for(timeout=WAIT_S * 1000)
            text = row.inner_text()
            row.get_by_role("link", name="record of").click()
            href = page.get_by_role("link", name="raw record").get_attribute("href")
            # rounded by its error, or with its interval where a load made that wide
            median = re.search(r"([0-9.]+)(?: ± [0-9.]+| \[[^]]+\])? ms", text)[1]
            assert (
                median == f"{json.loads(get(port, href)[2])['timing']['median_ms']:.{len(median.partition('.')[2])}f}"
            )
            page.goto(f"http://{HOST}:{port}/")
            for words in STORY:
                page.get_by_role("link", name=words).wait_for(timeout=WAIT_S * 1000)
            page.get_by_text(re.compile("cases slower, .* since ")).first.wait_for()
        children |= parts(process)
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_S) == 0
    assert not alive(children)
    assert not list((tmp_path / "tmp").iterdir())


def test_a_demo_that_is_killed_leaves_nothing_running(environment, tmp_path):
    with demo(environment, free_port(), tmp_path) as (process, _):
        children = parts(process)
        assert children
        process.kill()
        wait_for(lambda: not alive(children))
