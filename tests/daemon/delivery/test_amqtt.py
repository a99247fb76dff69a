"""Delivery to amqtt, a real broker that does not know MQTT 5 and does not say so: `make test-amqtt`.

BENCHD_AMQTT names an environment that it is installed into where it is absent: it pins packages that ours has newer.
"""

import os
import subprocess
import venv
from contextlib import closing
from pathlib import Path

import pytest
from broker import HOST, free_port
from links import WAIT_S, add, linked, progress
from waiting import wait_for

from benchd.daemon.delivery.broker import parse_url
from benchd.daemon.delivery.topics import Topics
from benchd.dashboard.feed import Feed

VERSION = "0.12.1"
CONFIG = """
listeners:
  default:
    type: tcp
    bind: {host}:{port}
plugins:
  amqtt.plugins.authentication.AnonymousAuthPlugin:
    allow_anonymous: true
"""


@pytest.fixture(scope="module")
def amqtt() -> Path:
    """The broker's program."""
    if "BENCHD_AMQTT" not in os.environ:
        pytest.skip("make test-amqtt runs it")
    environment = Path(os.environ["BENCHD_AMQTT"]).absolute()
    program = environment / "bin" / "amqtt"
    if not program.exists():
        venv.create(environment, with_pip=True)
        command = [environment / "bin" / "python", "-m", "pip", "install", "--quiet", f"amqtt=={VERSION}"]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"amqtt cannot be installed here: {done.stderr.strip().splitlines()[-1]}")
    return program


@pytest.fixture
def port(amqtt, tmp_path):
    """The port of a running broker."""
    port = free_port()
    (tmp_path / "amqtt.yaml").write_text(CONFIG.format(host=HOST, port=port))
    with subprocess.Popen([amqtt, "-c", tmp_path / "amqtt.yaml"], stderr=subprocess.DEVNULL) as process:
        yield port
        process.kill()


def test_what_waits_is_sent_with_3_1_1_and_heard(port, device_id, tmp_path):
    url = f"mqtt://{HOST}:{port}"
    with linked(url, device_id, tmp_path) as (link, _):
        wait_for(lambda: link.state.connected)
        with closing(Feed(parse_url(url), "feed", 60)) as feed:
            add(link, device_id, "r1", "r2")
            heard = set()
            while not {Topics(device_id).result(run_id) for run_id in ("r1", "r2")} <= heard:
                arrived = feed.batch(WAIT_S)
                feed.acknowledge(arrived)
                heard |= {message.topic for message in arrived}
        wait_for(lambda: progress(link) == (2, 0))
