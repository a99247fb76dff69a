"""The files of docs/integrations against the programs they are for."""

import http.client
import json
import re
import shutil
import subprocess
import sys
import time
from contextlib import closing, contextmanager
from datetime import datetime, timezone
from pathlib import Path
from urllib.parse import urlencode

import jinja2
import msgspec
import pytest
from broker import HOST, free_port, program, running_broker
from messages_made import add, message
from prometheus_client import generate_latest
from records_made import ENERGY, ENVIRONMENT, WRONG, made, timing
from test_collector import collecting, count
from test_pages import serving
from waiting import WAIT_S, wait_for

from benchd.daemon.delivery.broker import parse_url
from benchd.daemon.delivery.connection import connect
from benchd.daemon.delivery.messages import Health, Info, Latest
from benchd.daemon.delivery.topics import Topics
from benchd.daemon.records import Case
from benchd.daemon.service import homeassistant
from benchd.daemon.verdicts.when import AHEAD_S
from benchd.dashboard import metrics
from benchd.dashboard.app import TOKEN_VARIABLE
from benchd.dashboard.messages import TableRow
from benchd.dashboard.store import Store

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FILES = Path(__file__).parents[2] / "docs" / "integrations"
RULES_TEST = "prometheus-rules-test.yml"
NOW_S = 1_000_000_000.0


@pytest.fixture
def broker(tmp_path):
    """A broker with the access rules, and users whose password is their name."""
    passwords = tmp_path / "passwords"
    passwords.touch()
    for user in ("d1", "collector"):
        subprocess.run([program("mosquitto_passwd"), "-b", str(passwords), user, user], check=True)
    settings = f"allow_anonymous false\npassword_file {passwords}\nacl_file {FILES / 'mosquitto.acl'}"
    with running_broker(tmp_path, settings) as running:
        yield running


def url_of(broker, user):
    return f"mqtt://{user}:{user}@{broker.host}:{broker.port}"


def test_a_device_may_write_its_own_topics_and_no_other_s(broker, tmp_path):
    database = f"sqlite:///{tmp_path}/d.db"
    with collecting(url_of(broker, "collector"), database), closing(Store(database)) as store:
        refused = {}
        for device in ("d1", "d2"):
            for topic in (Topics(device).result("r1"), homeassistant.topic(device)):
                with closing(connect(parse_url(url_of(broker, "d1")), "d1", time.monotonic() + WAIT_S)) as connection:
                    connection.publish(topic, b"{}", 1)
                    while not (answers := connection.take_acknowledged()):
                        connection.turn(1.0)
                    refused[topic] = answers[0][1].is_failure
        assert list(refused.values()) == [False, False, True, True]
        wait_for(lambda: count(store, "quarantine") == 1)


def said(now_s):
    """Yield what a small fleet has said: one device that is ill and hot, one gone."""
    when = {"t_wall": datetime.fromtimestamp(now_s, timezone.utc).isoformat(), "device_id": "ill"}
    case = {"case": Case(model="vim_tiny"), **when}
    bodies = {
        "ill/status": {"state": "online"},
        "ill/health": {"problem": "degraded:disk", "pending": 1502, "cases_left": 3},
        "ill/telemetry": {"samples": [[0, "power_w", 9.0, "ina3221"], [0, "gpu_throttle_reasons", 4.0, "nvml"]]},
        "gone/status": {"state": "offline"},
        "ill/result/old": made(run_id="old", timing=timing(7.0), **case),
        "ill/result/new": made(run_id="new", energy=ENERGY, check=WRONG, **case),
        "ill/result/r": made(run_id="r", case=Case(model='a"b\\c\n'), status="failed", timing=None, **when),
    }
    for where, body in bodies.items():
        yield message(*where.split("/", 1), body, now_s - 1 if where.endswith("old") else now_s)


def fill(store, now_s):
    """Store what that fleet has said, one of its cases slower than its baseline."""
    add(store, *said(now_s))
    latest = {"device_id": "ill", "kind": "latest/vim_tiny", "body": b"{}", "arrived_s": now_s, "session": "s0"}
    store.add([TableRow("document", latest | {"state": "slower"})])


def test_metrics_are_in_the_units_of_their_names_and_of_the_last_result(store):
    fill(store, NOW_S)
    text = generate_latest(metrics.Fleet(store, NOW_S + 1)).decode()
    lines = text.splitlines()
    case = 'batch_size="1",case_id="vim_tiny,eager,b1",device_id="ill",model="vim_tiny",variant="eager"'
    for line in (
        'benchd_online{device_id="ill"} 1.0',
        'benchd_online{device_id="gone"} 0.0',
        'benchd_problem{device_id="ill"} 1.0',
        'benchd_throttled{device_id="ill"} 1.0',
        'benchd_power_watts{device_id="ill"} 9.0',
        'benchd_pending{device_id="ill"} 1502.0',
        f"benchd_case_median_seconds{{{case}}} 0.005",
        f"benchd_case_energy_joules{{{case}}} 0.5",
        f"benchd_case_energy_error_joules{{{case}}} 0.025",
        f"benchd_case_check_passed{{{case}}} 0.0",
        'benchd_case_slower{case_id="vim_tiny",device_id="ill"} 1.0',
    ):
        assert line in lines
    assert not any("gone" in line and "watts" in line for line in lines)
    assert r'model="a\"b\\c\n"' in text
    checked = subprocess.run(
        [program("promtool"), "check", "metrics"], input=text, capture_output=True, text=True, check=False
    )
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


def test_the_alert_rules_fire_for_what_they_name_and_only_then():
    subprocess.run([program("promtool"), "check", "config", str(FILES / "prometheus.yml")], check=True)
    subprocess.run([program("promtool"), "test", "rules", str(Path(__file__).with_name(RULES_TEST))], check=True)


@contextmanager
def prometheus(folder, port, token):
    """Yield a function that asks a real Prometheus, configured by our files but for the port, token and haste."""
    (folder / "token").write_text(token)
    shutil.copy(FILES / "prometheus-rules.yml", folder)
    config = (FILES / "prometheus.yml").read_text().replace("15s", "1s").replace("8420", str(port))
    config = config.replace("# authorization", "authorization").replace("/etc/prometheus/benchd-token", "token")
    (folder / "prometheus.yml").write_text(config)
    address = f"{HOST}:{free_port()}"
    command = [program("prometheus"), f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/tsdb"]
    with subprocess.Popen([*command, f"--web.listen-address={address}"], stderr=subprocess.DEVNULL) as process:
        try:
            yield lambda path, **query: ask(address, path, query)
        finally:
            process.terminate()


def ask(address, path, query):
    """Return what Prometheus answers, None while it does not."""
    connection = http.client.HTTPConnection(address, timeout=WAIT_S)
    try:
        connection.request("GET", f"/api/v1/{path}?{urlencode(query)}")
        return json.load(connection.getresponse()).get("data")
    except (OSError, http.client.HTTPException, json.JSONDecodeError):
        return None
    finally:
        connection.close()


def queries_of_grafana():
    """Return what the dashboard asks for, its variables replaced by all there is, and what these take."""
    dashboard = json.loads((FILES / "grafana.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    given = {"$device": ".*", "$model": ".*", "$__interval": "1m"}
    labels = [variable["query"] for variable in dashboard["templating"]["list"] if variable["type"] == "query"]
    return [
        re.sub("|".join(map(re.escape, given)), lambda match: given[match[0]], expr) for expr in expressions
    ], labels


def test_a_real_prometheus_finds_all_that_the_grafana_dashboard_asks_for(tmp_path):
    database, token = f"sqlite:///{tmp_path}/d.db", "secret"
    exprs, labels = queries_of_grafana()
    with closing(Store(database)) as store:
        fill(store, time.time() + AHEAD_S - 10.0)  # what is live stays so until Prometheus has come round
        pages = serving("mqtt://127.0.0.1", database, "--only", "pages", **{TOKEN_VARIABLE: token})
        with pages as (port, _), prometheus(tmp_path, port, token) as asking:

            def answer(expr):
                return (asking("query", query=expr) or {}).get("result")

            wait_for(lambda: answer("benchd_throttled == 1"))
            wait_for(lambda: asking("rules")["groups"][0]["lastEvaluation"] > "1970")
            wait_for(lambda: all(map(answer, exprs)), why="an expression of the dashboard finds nothing")
            for metric, label in (re.fullmatch(r"label_values\((\w+), (\w+)\)", text).groups() for text in labels):
                assert all(label in series for series in asking("series", **{"match[]": metric}))
            wait_for(lambda: {"BenchdWrong", "BenchdThrottled", "BenchdBacklog"} <= alerts(asking))


def alerts(asking):
    return {alert["labels"]["alertname"] for alert in asking("alerts")["alerts"]}


# in its abbreviations, and what a sensor and a binary sensor require
ENTITY_KEYS = {"p", "name", "unique_id", "state_topic", "value_template"}
OPTIONAL_KEYS = {"device_class", "unit_of_measurement"}


def test_home_assistant_is_told_of_entities_whose_templates_render():
    document = msgspec.json.decode(homeassistant.discovery(Topics("d1"), Info(environment=ENVIRONMENT)))
    (availability,) = document["avty"]
    assert rendered(availability["value_template"], {"state": "online"}) == "online"  # what is available by default
    for entity in document["cmps"].values():
        assert ENTITY_KEYS <= entity.keys() <= ENTITY_KEYS | OPTIONAL_KEYS
    health = {"pending": 3, "uptime_s": 1.5, "case_id": None, "problem": "degraded:disk"}
    states = {name: rendered(entity["value_template"], health) for name, entity in document["cmps"].items()}
    # "None" is how Home Assistant spells a sensor that knows nothing
    wanted = {"pending": "3", "uptime_s": "1.5", "case_id": "None", "problem": "ON"}
    assert {name: states[name] for name in wanted} == wanted
    assert rendered(document["cmps"]["problem"]["value_template"], health | {"problem": None}) == "OFF"


def rendered(template, value_json):
    return jinja2.Template(template).render(value_json=value_json)


def test_telegraf_is_told_of_fields_that_there_are():
    """Only that: Telegraf itself has not run it."""
    inputs = tomllib.loads((FILES / "telegraf.conf").read_text())["inputs"]["mqtt_consumer"]
    by_topic = {consumer["topics"][0]: consumer for consumer in inputs}
    for topic, kind in (("latest/+", Latest), ("health", Health)):
        consumer = by_topic.pop(f"benchd/v1/+/{topic}")
        named = {*consumer.get("tag_keys", ()), *consumer["json_string_fields"]}
        assert named <= {field.name for field in msgspec.structs.fields(kind)}
    assert list(by_topic) == ["benchd/v1/+/telemetry"]
