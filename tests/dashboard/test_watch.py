import json
import subprocess
import sys

import pytest
from broker import HOST, free_port, program
from records_made import made
from waiting import WAIT_S

from benchd.daemon.records import Case, encode


@pytest.fixture
def watched(mosquitto):
    """Return a function that publishes what the broker keeps for whoever asks later."""

    def keep(kind, body):
        command = [program("mosquitto_pub"), "-h", mosquitto.host, "-p", str(mosquitto.port), "-q", "1", "-r", "-s"]
        subprocess.run([*command, "-t", f"benchd/v1/{kind}"], input=body, check=True)

    return keep


def watch(url, *options):
    command = [sys.executable, "-m", "benchd.daemon.cli", "watch", "--mqtt", url, *options]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=WAIT_S)


def test_the_terminal_shows_devices_and_results(mosquitto, watched):
    watched("desk-1/status", b'{"state":"online","session":"s1"}')
    watched("desk-1/health", b'{"activity":"idle","pending":4,"problem":"[red]disk[/red]"}')
    watched("desk-1/result/r1", encode(made(device_id="desk-1")))
    done = watch(mosquitto.url, "--seconds", "1.5")
    assert done.returncode == 0, done.stderr
    for text in ("desk-1", "idle", "[red]disk[/red]", "vim_tiny", "5 [4.95, 5.05] ms"):
        assert text in done.stdout


def test_a_broker_that_is_not_there_is_named():
    port = free_port()
    done = watch(f"mqtt://{HOST}:{port}", "--seconds", "1")
    assert (done.returncode, done.stdout) == (7, "")
    assert done.stderr == f"error: cannot reach {HOST}:{port}: Connection refused\n"


def test_what_is_hostile_neither_ends_the_view_nor_reaches_the_terminal(mosquitto, watched):
    clear, title = "\x1b[2J", "\x1b]0;owned\x07"
    health = {"activity": clear + title + "\x9b2J\r\n[blink]", "pending": 1, "problem": "x" * 100_000}
    watched("hostile/status", b'{"state":"online","session":"s1"}')
    watched("hostile/health", json.dumps(health).encode())
    watched("hostile/info", b"\xff" * 1_000_000)
    for number, body in enumerate((b"{", b"NaN", b"[" * 100_000, encode(made(device_id="other")))):
        watched(f"hostile/result/bad{number}", body)
    case = Case(model=clear + "vim", seed=1)
    watched("hostile/result/r1", encode(made(device_id="hostile", case=case, reason=title, status="failed")))
    done = watch(mosquitto.url, "--seconds", "1.5")
    assert (done.returncode, done.stderr) == (0, "")
    assert "hostile" in done.stdout
    assert "failed" in done.stdout
    assert "x" * 200 not in done.stdout
    assert [char for char in done.stdout if not char.isprintable() and char != "\n"] == []
