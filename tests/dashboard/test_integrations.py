"""The files of docs/integrations against the programs they are for."""

import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from broker import program, running_broker
from test_collector import WAIT_S, collecting, count, wait_until

from benchd.daemon.delivery.mqtt import drain, parse_url
from benchd.daemon.delivery.outbox import Outbox
from benchd.daemon.delivery.topics import Topics
from benchd.dashboard.store import Store

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FILES = Path(__file__).parents[2] / "docs" / "integrations"


@pytest.fixture
def broker(tmp_path):
    """A broker with the access rules, and users whose password is their name."""
    passwords = tmp_path / "passwords"
    passwords.touch()
    for user in ("d1", "collector"):
        subprocess.run([program("mosquitto_passwd"), "-b", str(passwords), user, user], check=True)
    settings = f"allow_anonymous false\npassword_file {passwords}\nacl_file {FILES / 'mosquitto.acl'}"
    with running_broker(tmp_path, settings) as found:
        yield found


def url_of(broker, user):
    return f"mqtt://{user}:{user}@{broker.host}:{broker.port}"


def test_a_device_may_write_its_own_topics_and_no_other_s(broker, tmp_path):
    database = f"sqlite:///{tmp_path}/d.db"
    with collecting(url_of(broker, "collector"), database), closing(Store(database)) as store:
        with Outbox(tmp_path / "outbox.db") as outbox:
            for device in ("d1", "d2"):
                outbox.add(device, Topics(device).result("r1"), 1, b"{}")
            report = drain(outbox, parse_url(url_of(broker, "d1")), "d1", WAIT_S)
        assert (report.sent, report.refused) == (1, 1)
        wait_until(lambda: count(store, "quarantine") == 1)


def test_the_alert_rules_are_well_formed():
    subprocess.run([program("promtool"), "check", "rules", str(FILES / "prometheus-rules.yml")], check=True)


def test_the_telegraf_configuration_is_well_formed():
    inputs = tomllib.loads((FILES / "telegraf.conf").read_text())["inputs"]["mqtt_consumer"]
    assert [consumer["topics"] for consumer in inputs] == [
        ["benchd/v1/+/latest/+"],
        ["benchd/v1/+/health"],
        ["benchd/v1/+/telemetry"],
    ]
