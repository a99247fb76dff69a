"""systemd/broker.sh below a folder of the test's own, and a real mosquitto with what it wrote."""

import os
import re
import subprocess
import time
from contextlib import closing
from pathlib import Path

import pytest
from broker import program, running_broker
from links import add, linked, progress
from waiting import WAIT_S, wait_for

from benchd.daemon.delivery.broker import ConnectionEnded, parse_url
from benchd.daemon.delivery.connection import connect
from benchd.daemon.delivery.topics import Topics

SCRIPT = Path(__file__).parents[1] / "systemd/broker.sh"
TOPICS = Topics("d1")
NOT_AUTHORISED = 0x87


def run(root, *arguments, code=0):
    program("mosquitto_passwd")
    environment = os.environ | {"DESTDIR": str(root), "PATH": f"{os.environ['PATH']}:/usr/sbin"}
    done = subprocess.run([SCRIPT, *arguments], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture
def site(tmp_path):
    """Yield a function that returns the URL of a user of a broker that the script has set up for d1 and d2."""
    run(tmp_path, "--port", "1", "d1", "d2")
    folder = tmp_path / "etc/mosquitto"
    settings = (folder / "conf.d/benchd.conf").read_text().replace("/etc/mosquitto", str(folder))
    with running_broker(tmp_path, settings.replace("listener 1\n", "")) as broker:

        def url(user):
            password = (folder / "benchd" / user).read_text().strip()
            return f"mqtt://{user}:{password}@{broker.host}:{broker.port}"

        yield url


def reason(url, topic, body=b"{}"):
    """Return the broker's answer to a publication."""
    with closing(connect(parse_url(url), f"test-{time.monotonic_ns()}", time.monotonic() + WAIT_S)) as session:
        session.publish(topic, body, 1)
        while not (acknowledged := session.take_acknowledged()):
            session.turn(1.0)
    return acknowledged[0][1].value


def test_a_device_does_its_work_and_a_collector_its_own(site, tmp_path):
    with linked(site("d1"), "d1", tmp_path / "device") as (link, wake):
        add(link, "d1", "r1")
        wait_for(lambda: progress(link) == (1, 0))
        assert reason(site("collector"), TOPICS.command("status"), b'{"id":"1"}') < NOT_AUTHORISED
        assert wake.recv(100)
        assert link.state.commands.popleft().topic == TOPICS.command("status")
        assert link.problem() is None


@pytest.mark.parametrize("user", ["d2", "reader"])
@pytest.mark.parametrize("leaf", ["cmd/run", "status", "result/r1", "health"])
def test_a_user_cannot_publish_as_another(site, user, leaf):
    assert reason(site(user), TOPICS.root + leaf) == NOT_AUTHORISED


def test_a_collector_cannot_speak_for_a_device_nor_a_stranger_enter(site):
    assert reason(site("collector"), TOPICS.result("r1")) == NOT_AUTHORISED
    stranger = site("d1").replace("d1:", "d3:")
    for url in (stranger, f"mqtt://{stranger.rpartition('@')[2]}"):
        with pytest.raises(ConnectionEnded, match="Not authorized"):
            reason(url, TOPICS.of("status"))


def test_a_second_run_adds_and_changes_nobody_s_password(tmp_path):
    folder = tmp_path / "etc/mosquitto"
    run(tmp_path, "d1")
    before = (folder / "benchd.passwords").read_text()
    assert "d1 already has a password" in run(tmp_path, "d1", "d2")
    assert (folder / "benchd.passwords").read_text().startswith(before)
    assert {path.stat().st_mode & 0o777 for path in (folder / "benchd").iterdir()} == {0o600}
    assert (folder / "benchd.passwords").stat().st_mode & 0o777 == 0o640
    assert "listener 1883" in (folder / "conf.d/benchd.conf").read_text()


def test_a_listener_of_the_site_s_own_stays_the_only_one(tmp_path):
    folder = tmp_path / "etc/mosquitto/conf.d"
    folder.mkdir(parents=True)
    (folder / "site.conf").write_text("listener 8883\n")
    run(tmp_path, "d1")
    assert "listener" not in (folder / "benchd.conf").read_text()


def test_a_port_that_was_asked_for_is_listened_on_beside_a_listener_of_the_site_s_own(tmp_path):
    folder = tmp_path / "etc/mosquitto/conf.d"
    run(tmp_path, "--port", "8884", "d1")
    (folder / "site.conf").write_text("listener 8883\n")
    run(tmp_path, "d1", "d2")
    assert "listener 8884\n" in (folder / "benchd.conf").read_text(), "the devices' port is gone"
    run(tmp_path, "--port", "8885", "d1")
    assert re.findall("^listener .*", (folder / "benchd.conf").read_text(), re.MULTILINE) == ["listener 8885"]
    run(tmp_path, "--port", "8883", "d1")
    assert "listener" not in (folder / "benchd.conf").read_text(), "mosquitto does not listen on one port twice"


@pytest.mark.parametrize(
    "given",
    [
        (),
        ("collector",),
        ("A",),
        ("a/b",),
        ("--port", "x", "d1"),
        ("--port",),
        ("--site",),
        ("--site", "reader"),
        ("#",),
    ],
)
def test_what_is_no_device_is_refused_and_nothing_written(tmp_path, given):
    assert "benchd: " in run(tmp_path, *given, code=1)
    assert not list(tmp_path.iterdir())
