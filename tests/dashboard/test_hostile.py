"""Messages at the limit of their kind, one byte over it and of 10 MiB, while a real dashboard serves its pages."""

import json
import subprocess
import time
from contextlib import closing
from pathlib import Path

import msgspec
from broker import program, running_broker
from browsing import get, opened, running_browser
from records_made import made
from test_app import metric
from test_collector import SETTINGS, count, publish
from test_pages import serving
from waiting import WAIT_S, wait_for

from benchd.daemon.delivery.connection import IncomingMessage
from benchd.daemon.records import Case
from benchd.dashboard.limits import BYTES, SHOWN
from benchd.dashboard.messages import rows
from benchd.dashboard.store import Store

DEVICE = "hostile"
MOST_BYTES = 250e6
PATHS = (
    "/",
    "/fleet",
    f"/device/{DEVICE}",
    "/results",
    "/changes",
    "/trade-off",
    f"/history/{DEVICE}/vim_tiny,eager,b1",
)
MANY = [f"{number:x}" for number in range(12_000)]
NAMES = [f"{number:x}" for number in range(800)]
SAMPLES = [[number, f"m{number}_power_w", 1.0, "s"] for number in range(900)]
PROCESS = {"status": "ok"}
RESULT = msgspec.to_builtins(made(device_id=DEVICE))
BODIES = {
    "result/r1": RESULT | {"processes": [PROCESS] * 20_000},
    "status": {"state": "online"},
    "info": {
        "tags": NAMES,
        "environment": RESULT["environment"] | {"versions": dict.fromkeys(NAMES, "x")},
        "suites": [{"name": name, "cases": ["c"]} for name in NAMES],
    },
    "health": {"problem": "p" * 10_000},
    "latest/c": {"case_id": "c", "verdict": "slower", "verdict_reason": "r" * 5_000},
    "telemetry": {"samples": SAMPLES},
    "event": {"event": "e" * 10_000, "detail": "d" * 40_000},
}


def filled(body, size):
    """Return a message of so many bytes; readers ignore a field that they do not know."""
    plain = json.dumps(body, separators=(",", ":"))
    return f'{plain[:-1]},"pad":"{"x" * (size - len(plain) - 9)}"}}'.encode()


def of_many_cases():
    """Yield results within their limit, of as many cases as are read, each in two setups of different versions."""
    for number in range(2 * SHOWN):
        setup, case = f"s{number // SHOWN}", Case(model=f"c{number % SHOWN}")
        environment = RESULT["environment"] | {"fingerprint": setup, "versions": dict.fromkeys(MANY, setup)}
        result = msgspec.to_builtins(made(device_id="many", run_id=f"n{number}", case=case))
        body = json.dumps(result | {"environment": environment, "missing": dict.fromkeys(MANY, "")}).encode()
        yield IncomingMessage(f"benchd/v1/many/result/n{number}", body, time.time() + number)


def say(broker, kind, body):
    command = [program("mosquitto_pub"), "-h", broker.host, "-p", str(broker.port), "-q", "1", "-s"]
    retained = [] if kind.partition("/")[0] in ("result", "telemetry", "event") else ["-r"]
    subprocess.run([*command, *retained, "-t", f"benchd/v1/{DEVICE}/{kind}"], input=body, check=True)


def most_bytes(process):
    """Return the most memory that a process has had."""
    status = Path(f"/proc/{process}/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def test_messages_of_any_size_do_not_affect_pages_memory_or_other_results(tmp_path):
    url = f"sqlite:///{tmp_path}/dashboard.db"
    with running_broker(tmp_path, SETTINGS.format(tmp_path)) as broker, closing(Store(url)) as store:
        for message in of_many_cases():
            store.add(rows(message))
        assert count(store, "result") == 2 * SHOWN
        with serving(broker.url, url) as (port, process), running_browser() as browser:
            wait_for(lambda: metric(port, "up") == 1.0)
            for kind, body in BODIES.items():
                size = BYTES[kind.partition("/")[0]]
                for large in (filled(body, size), filled(body, size + 1), filled(body, 10 * 2**20)):
                    say(broker, kind, large)
                assert get(port, "/metrics")[0] == 200
            for path in PATHS:
                with opened(browser, port, path) as page:
                    page.get_by_text("Reading.").wait_for(state="hidden")
            publish(broker.url, tmp_path, range(10))
            wait_for(lambda: count(store, "result") == 2 * SHOWN + 11)
            wait_for(lambda: count(store, "quarantine") == len(BODIES))  # the broker itself drops the largest
            assert (count(store, "document"), count(store, "event")) == (4, 1)
            assert most_bytes(process.pid) < MOST_BYTES
            with opened(browser, port, f"/device/{DEVICE}") as page:
                page.get_by_text(f"and {len(NAMES) - 50} more").first.wait_for()
        assert process.wait(WAIT_S) is not None
