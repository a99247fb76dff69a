"""`benchd run` with TLS files and a password out of systemd's credentials: a wrong one costs the connection only."""

import json
import signal
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from itertools import groupby
from pathlib import Path

import msgspec
from broker import free_port
from certificates import Authority, serving
from waiting import wait_for

from benchd.daemon.config import Suite
from benchd.daemon.delivery.delivery import CURSOR
from benchd.daemon.service.facts import STATE, Facts
from benchd.daemon.service.schedule import Schedule, begin

SUITE = Suite(models=["square"], variants=["eager"], options={"size": [16]}, preset="quick")
CONFIG = """
[device]
id = "tls"

[mqtt]
url = "mqtts://me@{broker.host}:{broker.port}"
ca_file = "{ca.certificate}"
certificate_file = "{files[0]}"
key_file = "{files[1]}"

[limits]
warm_up_cap_s = 0.2
measure_cap_s = 0.2
check_images = 1
"""


def a_pass_waits(folder):
    """Leave a pass of one case in the schedule that the service keeps."""
    folder.mkdir(parents=True)
    state = begin(Schedule(), SUITE, ["square,eager,b1,size=16"], by_command=True)
    (folder / STATE).write_bytes(msgspec.json.encode(Facts(schedule=state)))


def lines_and_acknowledged(folder, name):
    """Return how many results, or events, there are and how many of them a broker has taken."""
    path, cursor = folder / f"{name}.jsonl", folder / CURSOR
    lines = path.read_bytes().count(b"\n") if path.exists() else 0
    known = json.loads(cursor.read_bytes()) if cursor.exists() else {}
    return lines, known.get(name, {"acknowledged": 0})["acknowledged"]


@contextmanager
def serviced(folder, broker, authority, environment):
    """Yield the running service, and what it has logged so far when asked."""
    config = CONFIG.format(broker=broker, ca=authority, files=authority.issue("client"))
    (folder / "benchd.toml").write_text(config)
    command = [Path(sys.executable).parent / "benchd", "run", "--config", "benchd.toml"]
    environment = environment | {"PYTHONPATH": ":".join(sys.path)}
    with (
        (folder / "log").open("wb") as stderr,
        subprocess.Popen(command, cwd=folder, env=environment, stderr=stderr) as process,
    ):
        try:
            yield process, (folder / "log").read_text
        finally:
            process.kill()


def test_an_expired_certificate_breaks_the_connection_until_it_is_renewed(tmp_path, child_environment):
    """So does a wrong password until it is replaced: cases are measured meanwhile."""
    authority, state, port = Authority(tmp_path / "ca"), tmp_path / "state/benchd", free_port()
    valid, expired = authority.issue("broker"), authority.issue("old", period="expired")
    a_pass_waits(state)
    credential = tmp_path / "credentials" / "mqtt_password"
    credential.parent.mkdir()
    credential.write_text("wrong\n")
    environment = child_environment | {"CREDENTIALS_DIRECTORY": str(credential.parent)}
    with ExitStack() as stack:
        with serving(tmp_path, authority, valid, port) as broker:
            process, log = stack.enter_context(serviced(tmp_path, broker, authority, environment))
            wait_for(lambda: lines_and_acknowledged(state, "records") == (1, 0), process)
            wait_for(lambda: "Not authorized; check the user and the password" in log(), process)
            credential.write_text("right\n")
            process.send_signal(signal.SIGHUP)
            wait_for(lambda: lines_and_acknowledged(state, "records") == (1, 1), process)
            wait_for(lambda: is_delivered(state), process)
        with serving(tmp_path, authority, expired, port):
            wait_for(lambda: "certificate has expired" in log(), process)
            log_file = tmp_path / "mosquitto.log"
            wait_for(lambda: log_file.read_text().count("alert certificate expired") > 1, process)
            (tmp_path / "benchd.toml").write_text("[devise]")
            process.send_signal(signal.SIGHUP)  # which is an event
            wait_for(lambda: not is_delivered(state), process)
        with serving(tmp_path, authority, valid, port):
            wait_for(lambda: is_delivered(state), process)
    reasons = [line for line in log().splitlines() if "mqtt down: " in line]
    assert reasons == [reason for reason, _ in groupby(reasons)], "a reason is told once, not at every attempt"


def is_delivered(state):
    """Return whether a broker has acknowledged every event."""
    lines, acknowledged = lines_and_acknowledged(state, "events")
    return lines == acknowledged
