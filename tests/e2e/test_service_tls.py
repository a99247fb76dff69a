"""`benchd run` with TLS files and a password out of systemd's credentials: a wrong one costs the connection only."""

import signal
import subprocess
import sys
from pathlib import Path

import msgspec
from certificates import Authority, serving
from waiting import wait_for

from benchd.daemon.config import Suite
from benchd.daemon.delivery.outbox import Outbox
from benchd.daemon.service.schedule import State, begin

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


def a_pass_waits(path):
    """Leave a pass of one case in the schedule that the service keeps."""
    path.parent.mkdir(parents=True)
    with Outbox(path) as outbox:
        state = begin(State(), SUITE, ["square,eager,b1,size=16"], by_command=True)
        outbox.keep({"schedule": msgspec.json.encode(state)})


def results(path):
    """Return how many results wait and how many are sent."""
    with Outbox(path) as outbox:
        return [sum("/result/" in row.topic for row in outbox.pending(100)), outbox.counts().sent]


def test_with_a_wrong_password_it_measures_and_with_the_right_one_it_sends(tmp_path, child_environment):
    authority, outbox, log = Authority(tmp_path / "ca"), tmp_path / "state/benchd/outbox.db", tmp_path / "log"
    a_pass_waits(outbox)
    credential = tmp_path / "credentials" / "mqtt_password"
    credential.parent.mkdir()
    credential.write_text("wrong\n")
    environment = child_environment | {
        "CREDENTIALS_DIRECTORY": str(credential.parent),
        "PYTHONPATH": ":".join(sys.path),
    }
    with serving(tmp_path, authority, authority.issue("broker")) as broker, log.open("wb") as stderr:
        config = CONFIG.format(broker=broker, ca=authority, files=authority.issue("client"))
        (tmp_path / "benchd.toml").write_text(config)
        command = [Path(sys.executable).parent / "benchd", "run", "--config", "benchd.toml"]
        with subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=stderr) as process:
            try:
                wait_for(lambda: outbox.exists() and results(outbox)[0] == 1, process)
                assert "mqtt down: " in log.read_text()
                assert "Not authorized; check the user and the password" in log.read_text()
                credential.write_text("right\n")
                process.send_signal(signal.SIGHUP)
                wait_for(lambda: results(outbox)[0] == 0, process)
                assert results(outbox)[1] >= 1
            finally:
                process.kill()
