"""The configurations of docs/scaling.md with real brokers: a site whose centre goes away and comes back.

Debian 12's mosquitto forgets shared subscriptions when it restarts: a collector has to be there before the site.
"""

import os
import subprocess
from contextlib import closing, contextmanager
from pathlib import Path

from broker import HOST, free_port, program, running_broker
from test_collector import collecting, count, publish
from waiting import WAIT_S, wait_for

from benchd.dashboard.store import Store

FILES = Path(__file__).parents[2] / "docs" / "integrations"
TOTAL = 1500  # beyond the 1,000 that a broker keeps by default


def kept(folder):
    """Return the settings of broker.conf for a broker that anybody may use, its files in `folder`."""
    settings = (FILES / "broker.conf").read_text().replace("/var/lib/mosquitto", str(folder))
    return f"{settings}\nallow_anonymous true"


def bridged(folder, central_port, password=None):
    """Return the settings of a site's broker in haste, without what a centre with TLS, and users if any, asks for."""
    bridge = (FILES / "bridge.conf").read_text().replace("central.example:8883", f"{HOST}:{central_port}")
    bridge = bridge.replace("restart_timeout 1 30", "restart_timeout 1 2")
    bridge = bridge.replace("remote_password secret", f"remote_password {password}")
    absent = ("bridge_cafile",) if password else ("remote_username", "remote_password", "bridge_cafile")
    lines = [line for line in bridge.splitlines() if not line.startswith(absent)]
    return "\n".join([kept(folder), *lines])


def say(broker, topic, body, *options):
    command = [program("mosquitto_pub"), "-V", "5", "-h", broker.host, "-p", str(broker.port), "-q", "1", "-t", topic]
    subprocess.run([*command, "-s", *options], input=body, text=True, check=True)


def hear(broker, topic, *options):
    """Return what a session that the broker keeps between two calls hears; with `-E` it only subscribes."""
    command = [program("mosquitto_sub"), "-V", "5", "-h", broker.host, "-p", str(broker.port), "-q", "1", "-t", topic]
    command += ["-c", "-i", "device", "-W", f"{WAIT_S:g}", *options]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@contextmanager
def site(folder, central_port, password=None):
    folder.mkdir(exist_ok=True)
    with running_broker(folder, bridged(folder, central_port, password)) as broker:
        yield broker


@contextmanager
def centre(folder, port, database):
    """Start a central broker with a collector whose session it knows, before any site comes."""
    with running_broker(folder, kept(folder), port=port) as broker, collecting(broker.url, database):
        yield broker


def test_a_site_keeps_what_its_devices_say_while_the_centre_is_away_and_through_a_restart(tmp_path):
    port, edge, database = free_port(), tmp_path / "site", f"sqlite:///{tmp_path}/d.db"
    with closing(Store(database)) as store:
        with centre(tmp_path, port, database), site(edge, port) as broker:
            publish(broker.url, tmp_path, [TOTAL])
            wait_for(lambda: count(store, "result") == 1)
        with site(edge, port) as broker:
            publish(broker.url, tmp_path, range(TOTAL))
            say(broker, "benchd/v1/d1/status", '{"state":"online","session":"s1"}', "-r")
        with centre(tmp_path, port, database), site(edge, port):
            wait_for(lambda: (count(store, "result"), count(store, "document")) == (TOTAL + 1, 1))


def test_a_centre_with_the_rules_of_broker_sh_lets_the_bridge_do_its_work(tmp_path):
    centre, port = tmp_path / "etc/mosquitto", free_port()
    environment = os.environ | {"DESTDIR": str(tmp_path), "PATH": f"{os.environ['PATH']}:/usr/sbin"}
    script = FILES.parents[1] / "systemd/broker.sh"
    subprocess.run([script, "--site", "site-1"], check=True, capture_output=True, env=environment)
    settings = f"allow_anonymous false\npassword_file {centre}/benchd.passwords\nacl_file {centre}/benchd.acl"

    def as_user(name):
        return ["-u", name, "-P", (centre / "benchd" / name).read_text().strip()]

    def heard(topic):
        return hear(central, topic, *as_user("collector"), "-C", "1")

    with running_broker(tmp_path, settings, port=port) as central:
        hear(central, "benchd/v1/d1/resp/#", *as_user("collector"), "-E")
        with site(tmp_path / "site", port, as_user("site-1")[-1]) as edge:
            hear(edge, "benchd/v1/d1/cmd/run", "-E")
            say(edge, "benchd/v1/d1/resp/page/0", "bridged")
            assert heard("benchd/v1/d1/resp/#") == "bridged\n"
            say(central, "benchd/v1/d1/cmd/run", "now", *as_user("collector"))
            assert hear(edge, "benchd/v1/d1/cmd/run", "-C", "1") == "now\n"
