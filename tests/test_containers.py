"""Containerfile and compose.yaml against the tree and the commands; docs/containers.md says what was built and run."""

import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import click
import pytest
import yaml
from broker import program
from typer.main import get_command

from benchd.daemon.commands import dashboard

ROOT = Path(__file__).parents[1]
RECIPE = (ROOT / "Containerfile").read_text()
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text())
SERVICES = COMPOSE["services"]


def test_what_is_copied_lies_in_the_tree():
    copied = [word for line in re.findall(r"^COPY (?!--)(.+) \S+$", RECIPE, re.MULTILINE) for word in line.split()]
    assert {"daemon", "dashboard", "constraints.txt", "systemd/broker.sh"} <= set(copied)
    assert [name for name in copied if not (ROOT / name).exists()] == []


def test_every_image_that_is_built_has_its_stage():
    stages = set(re.findall(r"^FROM \S+ AS (\w+)$", RECIPE, re.MULTILINE))
    assert {"measure", *(service["build"]["target"] for service in SERVICES.values() if "build" in service)} <= stages


@pytest.mark.parametrize("name", [name for name, service in SERVICES.items() if "command" in service])
def test_the_command_of_a_service_is_one(name):
    program, verb, *arguments = shlex.split(SERVICES[name]["command"])
    assert (program, verb) == ("benchd", "dashboard")
    with click.Context(command := get_command(dashboard.app)) as parent:
        given = command.make_context("dashboard", arguments, parent=parent).params
    assert (given["mqtt"], given["database"]) == ("mqtt://collector@broker", "postgresql://benchd@database/benchd")
    assert given["name"] == (name.partition("-")[2] or None)
    assert given["only"] == name.partition("-")[0]


def test_every_setting_that_compose_reads_is_described():
    read = set(re.findall(r"\$\{(\w+)\}", (ROOT / "compose.yaml").read_text()))
    page = (ROOT / "docs/containers.md").read_text()
    assert [name for name in sorted(read) if name not in page] == []


def test_a_changed_password_of_the_collector_takes_effect_and_boards_keep_theirs(tmp_path):
    program("mosquitto_passwd")
    command = re.findall(r"^CMD (.*broker\.sh.*)$", RECIPE.replace("\\\n", ""), re.MULTILINE)
    start = json.loads(command[0])
    text = start[2].replace("/etc/mosquitto", f"{tmp_path}/etc/mosquitto").replace("/opt/benchd", str(ROOT))
    text = text.partition("exec mosquitto")[0]

    def hashes(password):
        given = {"DESTDIR": str(tmp_path), "PATH": f"{os.environ['PATH']}:/usr/sbin", "DEVICES": "d1 d2"}
        subprocess.run(
            [*start[:2], text], env=given | {"COLLECTOR_PASSWORD": password}, check=True, capture_output=True
        )
        lines = (tmp_path / "etc/mosquitto/benchd.passwords").read_text().splitlines()
        assert sorted(line.partition(":")[0] for line in lines) == ["collector", "d1", "d2", "reader"]
        return {line for line in lines if not line.startswith("collector:")}, lines

    (boards, before), (same, after) = hashes("one"), hashes("two")
    assert boards == same
    assert before != after
    assert (tmp_path / "etc/mosquitto/benchd/collector").read_text() == "two"
