"""install.sh below a folder of the test's own, with real pip and a real doctor; only dependencies' wheels are stubs."""

import os
import re
import shutil
import sqlite3
import subprocess
import sys
import time
import zipfile
from contextlib import closing
from pathlib import Path

import jetson_trees
import pytest
import wheels_made
from broker import program
from test_makefile import base_python_has_torch

from benchd.daemon import config
from benchd.dashboard.store import Store
from benchd.exporters import tegra

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "systemd/install.sh"
NO_CUDA = "raise ImportError('libcudart.so.13: cannot open shared object file')"
CPU_TORCH = """
__version__ = "2.9.0"
class version:
    cuda = None
class cuda:
    is_available = staticmethod(lambda: False)
"""
PIP = {"PIP_RETRIES": "0", "PIP_NO_COMPILE": "1"}  # what runs here is compiled when it runs
BOARD_TORCH = """
import required_by_torch
__version__ = "2.8.0"
class version:
    cuda = "12.6"
class cuda:
    is_available = staticmethod(lambda: True)
    get_device_name = staticmethod(lambda: "Orin")
"""


class Site:
    """A machine's root in a folder: what is installed there, and what the last install printed."""

    def __init__(self, root, environment):
        self.root, self.home = root, root / "opt/benchd"
        self.environment = environment | {"DESTDIR": str(root), "PYTHON": sys.executable} | PIP

    def install(self, *arguments, code=0, **environment):
        command, variables = [SCRIPT, *map(str, arguments)], self.environment | environment
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=variables)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def points_to(self, name):
        return (self.home / name).readlink().name

    def files(self):
        """Return every installed file outside the virtual environments with its text."""
        apart = {self.home, self.root / "var"}
        paths = (path for path in self.root.rglob("*") if path.is_file() and apart.isdisjoint(path.parents))
        return {str(path.relative_to(self.root)): path.read_text() for path in paths}


@pytest.fixture
def site(tmp_path, child_environment):
    (tmp_path / "root").mkdir()
    return Site(tmp_path / "root", child_environment)


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    return wheels_made.build_ours(tmp_path_factory.mktemp("ours"))


@pytest.fixture
def wheels(tmp_path, ours):
    return wheels_made.fill(tmp_path / "wheels", ours, "constraints.txt", torch=CPU_TORCH)


@pytest.fixture
def broken_update(tmp_path, ours):
    """Another build of ours, with a torch that does not import."""
    folder = wheels_made.fill(tmp_path / "update", ours, "constraints.txt", torch=NO_CUDA)
    with zipfile.ZipFile(folder / ours.name, "a") as wheel:
        wheel.comment = b"another build"
    return folder


def test_an_installation_survives_its_life_cycle(site, wheels, broken_update):
    first = service_installed(site, wheels, "enable --now benchd\n")
    installed_again_and_only_what_differs_changes(site, wheels)
    second = interrupted_or_broken_and_the_first_stays(site, broken_update, first)
    cured_and_switched(site, broken_update, first, second)
    rolled_back_and_forth(site, first, second)
    uninstalled(site)


@pytest.mark.slow
def test_a_service_beside_a_dashboard_and_both_repaired_after_their_python_is_gone(site, wheels):
    dashboard_alone(site, wheels)
    first = service_beside_the_dashboard(site, wheels)
    repaired_after_its_python_is_gone(site, wheels, first)
    assert f"Kept: /etc/benchd, /{DASHBOARD}.d/broker.conf," in site.install("--uninstall")
    names = ("benchd.toml", "dashboard_mqtt_password", "requirements.txt")
    assert site.files().keys() == {
        *(f"etc/benchd/{name}" for name in names),
        *(f"{DASHBOARD}.d/broker.conf{end}" for end in ("", ".old")),
    }


LAB_1 = ("--device-id", "lab-1", "--device-name", "Lab 1")
DASHBOARD = "etc/systemd/system/benchd-dashboard.service"


def dashboard_alone(site, wheels):
    output = site.install("--wheels", wheels, "--dashboard", "--mqtt", "mqtt://a%40b@h")
    assert "enable --now benchd-dashboard\n" in output
    files = site.files()
    assert files[f"{DASHBOARD}.d/broker.conf"] == '[Service]\nEnvironment="MQTT_URL=mqtt://a%%40b@h"\n'
    assert "mqtt_password" in files["etc/tmpfiles.d/benchd.conf"]
    password = site.root / "etc/benchd/dashboard_mqtt_password"
    assert (password.read_text(), password.stat().st_mode & 0o777) == ("", 0o600)
    assert installed(site, "apprise")
    assert installed(site, "psycopg")
    assert not any("benchd.service" in name or name.endswith(".toml") for name in files)


def installed(site, distribution):
    return list(site.home.glob(f"current/lib/python3.*/site-packages/{distribution}-*.dist-info"))


def service_beside_the_dashboard(site, wheels):
    site.install("--wheels", wheels, "--mqtt", "mqtt://collector@h")
    assert not any("benchd.service" in name for name in site.files())
    assert "mqtt://collector@h" in site.files()[f"{DASHBOARD}.d/broker.conf"]
    alone, files = site.points_to("current"), site.files()
    first = service_installed(site, wheels, "enable --now benchd benchd-dashboard\n")
    assert files.items() <= site.files().items()
    assert first != alone
    look = [site.home / "current/bin/python", "-c", "import benchd.dashboard.app"]
    assert subprocess.run(look, check=False, env=site.environment).returncode == 0
    return first


def service_installed(site, wheels, start):
    (site.root / "etc/benchd").mkdir(parents=True, exist_ok=True)
    (site.root / "etc/benchd/requirements.txt").write_text("scikit-learn\n")
    output = site.install("--wheels", wheels, "--service", "--mqtt", "mqtt://broker.local:1884", *LAB_1)
    assert "yes  torch" in output
    assert start in output
    assert installed(site, "scikit_learn")
    settings = config.read(site.root / "etc/benchd/benchd.toml")
    assert settings.mqtt.url == "mqtt://broker.local:1884"
    assert (settings.device.id, settings.device.name) == ("lab-1", "Lab 1")
    unit = site.files()["etc/systemd/system/benchd.service"]
    command = site.root / re.search(r"^ExecStart=/(\S+)", unit, re.MULTILINE)[1]
    done = subprocess.run([command, "list"], capture_output=True, text=True, check=True, env=site.environment)
    assert "vim_tiny" in done.stdout
    return site.points_to("current")


def repaired_after_its_python_is_gone(site, wheels, first):
    (library,) = (site.home / "current/lib").glob("python3.*")
    library.rename(library.with_name("python3.1"))
    the_dashboard_s_broker_is_its_own(site, wheels)
    assert site.points_to("current") == f"{first}r"
    look = [site.home / "current/bin/python", "-c", "import benchd.daemon.cli"]
    assert subprocess.run(look, check=False, env=site.environment).returncode == 0
    return f"{first}r"


def the_dashboard_s_broker_is_its_own(site, wheels):
    before = site.files()
    site.install("--wheels", wheels, "--dashboard", "--mqtt", "mqtt://collector@other")
    files, name = site.files(), f"{DASHBOARD}.d/broker.conf"
    assert "mqtt://collector@other" in files.pop(name)
    broker = before.pop(name)
    assert files == before | {f"{name}.old": broker}


def installed_again_and_only_what_differs_changes(site, wheels):
    before = site.files()
    (site.root / "etc/systemd/system/benchd.service").write_text("the site's own")
    output = site.install("--wheels", wheels)
    assert "already installed" in output
    assert "/etc/systemd/system/benchd.service.old" in output
    assert site.files() == before | {"etc/systemd/system/benchd.service.old": "the site's own"}


def interrupted_or_broken_and_the_first_stays(site, update, first):
    before = site.files()
    left = left_by_a_killed_install(site, update)
    output = site.install("--wheels", update, "--device-name", "Lab 2", code=1)
    assert "libcudart.so.13" in output
    assert f"{first} stays" in output
    assert (site.points_to("current"), site.files()) == (first, before)
    (second,) = {path.name for path in site.home.iterdir() if path.is_dir() and not path.is_symlink()} - {first}
    assert (left.parent.name, left.exists()) == (second, False)
    return second


def left_by_a_killed_install(site, update):
    """Make the folder of an install that was killed while pip worked on it; return a file in it."""
    given = f"tree={ROOT} wheels={update} asked=service platform=cpu"
    code = f"{given}; find_parts; find_constraints; find_wheel; name_version; echo $version"
    left = site.home / phase(site, code).strip() / "half a package"
    left.parent.mkdir()
    for path in (left, left.with_name(".unfinished")):
        path.touch()
    return left


def cured_and_switched(site, update, first, second):
    (torch,) = site.home.glob(f"{second}/lib/python*/site-packages/torch/__init__.py")
    shutil.rmtree(torch.parent)
    (site.home / "0.0.9-abcdef").mkdir()
    assert "removed 0.0.9-abcdef" in site.install("--wheels", update, "--device-name", "Lab 2")
    assert config.read(site.root / "etc/benchd/benchd.toml").device.name == "Lab 2"
    assert "Lab 1" in site.files()["etc/benchd/benchd.toml.old"]
    assert (site.points_to("current"), site.points_to("previous")) == (second, first)


def rolled_back_and_forth(site, first, second):
    toml = site.root / "etc/benchd/benchd.toml"
    toml.write_text(toml.read_text() + "\n[of_a_newer_version]\n")
    assert f"{first} cannot read /etc/benchd/benchd.toml" in site.install("--rollback", code=1)
    assert site.points_to("current") == second
    toml.write_text(toml.read_text().replace("\n[of_a_newer_version]\n", ""))
    site.install("--rollback")
    assert (site.points_to("current"), site.points_to("previous")) == (first, second)


def uninstalled(site):
    override = site.root / "etc/systemd/system/benchd.service.d/override.conf"
    override.parent.mkdir()
    override.write_text("[Service]\n")
    assert "Kept: /etc/benchd," in site.install("--uninstall")
    files = {f"etc/benchd/benchd.toml{end}" for end in ("", ".old")}
    files |= {"etc/benchd/requirements.txt"}
    files |= {f"etc/systemd/system/{name}" for name in ("benchd.service.old", "benchd.service.d/override.conf")}
    assert site.files().keys() == files
    assert not site.home.exists()


def test_a_dashboards_password_has_a_file_that_only_root_reads_and_that_an_upgrade_keeps(site):
    password = site.root / "etc/benchd/dashboard_mqtt_password"
    phase(site, "place_password")
    assert (password.read_text(), password.stat().st_mode & 0o777) == ("", 0o600)
    password.write_text("secret")
    phase(site, "place_password")
    assert password.read_text() == "secret"


@pytest.fixture
def board(site):
    jetson_trees.build(site.root, jetson_trees.ORIN_NANO)
    (site.root / "etc/group").write_text("jtop:x:999:\n")
    return site


@pytest.fixture
def without_torch(wheels):
    for stub in (*wheels.glob("torch*"), *wheels.glob("triton*")):
        stub.unlink()
    return wheels


NEEDS_A_BARE_PYTHON = pytest.mark.skipif(base_python_has_torch(), reason="the Python below this environment has torch")


def phase(site, call, **environment):
    """Run one function of the script as the script does; return what it prints."""
    command = ["bash", "-c", f"source <(head -n -1 {SCRIPT}); {call}"]
    variables = site.environment | environment
    return subprocess.run(command, capture_output=True, text=True, check=True, env=variables).stdout


def test_each_drop_in_of_a_board_is_for_both_units_and_goes_with_them(board):
    listed = phase(board, "asked=service; list_files jetson").splitlines()
    for name in ("jetson.conf", "jtop.conf"):
        folders = [f"/etc/systemd/system/{unit}.service.d" for unit in ("benchd", "bench-once@")]
        places = [f"{folder}/{name}" for folder in folders]
        assert [line.split()[1] for line in listed if line.startswith(f"drop-ins/{name} ")] == places
        for place in places:
            (board.root / place[1:]).parent.mkdir(parents=True, exist_ok=True)
            (board.root / place[1:]).write_text("[Service]\n")
    board.install("--uninstall")
    assert list((board.root / "etc/systemd/system").iterdir()) == []


def test_a_kernel_without_the_module_does_not_keep_the_service_from_starting(site, tmp_path):
    conf, modprobe = site.root / "etc/modules-load.d/benchd.conf", tmp_path / "bin/modprobe"
    for path in (conf, modprobe):
        path.parent.mkdir(parents=True)
    conf.write_text("nvidia-uvm\n")
    modprobe.write_text("#!/bin/sh\necho modprobe: FATAL: Module $1 not found. >&2; exit 1\n")
    modprobe.chmod(0o755)
    output = phase(site, "load_module; echo went on", PATH=f"{modprobe.parent}:{os.environ['PATH']}")
    assert "nvidia-uvm does not load" in output
    assert output.endswith("went on\n")


def tool(folder, name, script):
    """Put a program into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def test_a_version_s_name_tells_platform_python_and_own_packages_apart(site, tmp_path):
    (tmp_path / "benchd-1.0-py3-none-any.whl").touch()
    tool(tmp_path, "python", "echo Python 3.99")

    def name(platform, python=sys.executable):
        given = f"tree={ROOT} wheel={tmp_path}/benchd-1.0-py3-none-any.whl asked=service"
        code = f"{given} platform={platform} python={python}; find_parts; find_constraints; name_version; echo $version"
        return phase(site, code).strip()

    names = [name("cpu"), name("gpu"), name("cpu", tmp_path / "python")]
    assert name("cpu") == names[0]
    (site.root / "etc/benchd").mkdir(parents=True)
    (site.root / "etc/benchd/requirements.txt").write_text("mine\n")
    assert len({*names, name("cpu")}) == 4


@pytest.mark.parametrize(
    ("platform", "index", "end", "whole"),
    [("jetson", "", 0, True), ("jetson", "http://i", 0, False), ("cpu", "http://i", 0, True), ("cpu", "", 1, False)],
)
def test_a_version_is_used_again_only_if_it_works_and_lacks_nothing(site, platform, index, end, whole):
    tool(site.home / "1-a/bin", "python", f"exit {end}")
    (site.home / "1-a/.complete").touch()
    output = phase(site, f"version=1-a platform={platform}; is_whole || echo no", JETSON_INDEX=index)
    assert (output == "") == whole


def test_the_folder_that_the_service_runs_from_is_never_built_again(site, tmp_path):
    wheel, python = tmp_path / "benchd-1.0-py3-none-any.whl", '"$1/bin/python"'
    for path in (wheel, constraints := tmp_path / "constraints-jetson72.txt"):
        path.touch()
    tool(tmp_path / ".ci", "setup", f"mkdir -p $1/bin; echo '#!/bin/sh' >{python}; chmod +x {python}; exit $END")
    given = f"tree={tmp_path} wheel={wheel} constraints={constraints} platform=jetson asked=service"

    def installed(index="", end=0):
        code = f"{given}; find_parts; name_version; make_environment; switch_to $version; remove_older"
        phase(site, code, JETSON_INDEX=index, END=str(end))
        return site.points_to("current")

    first = installed()
    with pytest.raises(subprocess.CalledProcessError):
        installed("http://i", end=1)
    assert (site.home / first / ".complete").exists(), "the service runs from a folder that is half built"
    assert installed() == first
    again = installed("http://i")
    assert again == installed() != first
    (site.home / "0-old").mkdir()
    (site.home / "previous").unlink()
    (site.home / "previous").symlink_to("0-old")
    assert installed("http://i") == first
    assert site.points_to("previous") == "0-old", "a version that is built again is not the one before"


def test_a_rollback_incompatible_with_the_dashboards_database_is_refused(site):
    for version in ("1-new", "0-old"):
        tool(site.home / version / "bin", "python", f'exec {sys.executable} "$@"')
    (site.home / "current").symlink_to("1-new")
    (site.home / "previous").symlink_to("0-old")
    database = site.root / "var/lib/benchd-dashboard/dashboard.db"
    for path in (site.root / DASHBOARD, database):
        path.parent.mkdir(parents=True)
        path.touch()
    Store(f"sqlite:///{database}").close()
    with closing(sqlite3.connect(database)) as later:
        later.execute("UPDATE version SET number = number + 1")
        later.commit()
    assert f"move {database}* away" in site.install("--rollback", code=1)
    assert site.points_to("current") == "1-new"
    database.unlink()
    site.install("--rollback")
    assert site.points_to("current") == "0-old"


STATES = 'case "$1" in is-*) [ "$STATE" = "${1#is-}" ];; *) echo "$@" >>"$LOG";; esac'


def asked_of_systemd(site, tmp_path, call, state=""):
    """Run phases under a systemd all of whose units are in the state; return what it was asked to do."""
    tool(tmp_path / "bin", "systemctl", STATES)
    for name in ("systemd-sysusers", "systemd-tmpfiles", "sleep"):
        tool(tmp_path / "bin", name, "")
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    phase(site, f"has_systemd() {{ true; }}; {call}", PATH=path, STATE=state, LOG=str(tmp_path / "log"))
    return (tmp_path / "log").read_text().splitlines()


@pytest.mark.parametrize(
    ("state", "asked"),
    [
        ("enabled", ["restart benchd", "restart benchd-dashboard"]),
        ("active", ["restart benchd", "restart benchd-dashboard"]),
        ("", ["restart benchd-dashboard"]),
    ],
)
def test_a_unit_that_the_site_has_turned_off_stays_off(site, tmp_path, state, asked):
    unit = site.root / "etc/systemd/system/benchd.service"
    unit.parent.mkdir(parents=True)
    unit.touch()
    code = "check_stays() { true; }; asked=dashboard platform=cpu changed=yes; find_parts; find_units; start"
    enable = ["daemon-reload", "enable --quiet benchd-dashboard"]
    assert sorted(asked_of_systemd(site, tmp_path, code, state)) == sorted(enable + asked)


def test_a_rollback_to_a_version_that_does_not_run_any_more_stops_nothing(site, tmp_path):
    tool(site.home / "0-old/bin", "python", "")
    (site.home / "0-old/bin/python").write_text("#!/usr/bin/python3.gone\n")
    (site.home / "current").symlink_to("1-new")
    (site.home / "previous").symlink_to("0-old")
    unit = site.root / "etc/systemd/system/benchd.service"
    unit.parent.mkdir(parents=True)
    unit.touch()
    error_file = tmp_path / "said"
    assert asked_of_systemd(site, tmp_path, f"systemctl begin; (do_rollback) 2>{error_file} || true") == ["begin"]
    assert "0-old no longer runs (see above). 1-new stays in use\n" in error_file.read_text()
    assert site.points_to("current") == "1-new"


@pytest.mark.parametrize(("state", "is_new"), [("", True), ("enabled", False)])
def test_what_an_interrupted_install_left_to_do_is_done_by_the_next(site, tmp_path, state, is_new):
    unit, begun = "/etc/systemd/system/benchd.service", "lock; asked=service platform=cpu; find_parts; find_units"
    placed = f"{begun}; place {SCRIPT.parent}/benchd.service {unit}"
    if not is_new:
        phase(site, f"{placed}; start")
    asked_of_systemd(site, tmp_path, f"{placed}; switch_to 1-a; systemctl interrupted", state)
    expected = ["interrupted", "daemon-reload", *["enable --quiet benchd"] * is_new, "restart benchd"]
    assert asked_of_systemd(site, tmp_path, f"{begun}; start", state) == expected
    expected += ["daemon-reload", "start benchd"]
    assert asked_of_systemd(site, tmp_path, f"{begun}; start", "enabled") == expected


def test_an_uninstall_ends_a_timer_and_what_it_started(site, tmp_path):
    for name in ("benchd.service", "bench-once@.timer"):
        (site.root / "etc/systemd/system").mkdir(parents=True, exist_ok=True)
        (site.root / "etc/systemd/system" / name).touch()
    calls = asked_of_systemd(site, tmp_path, "do_uninstall")
    assert [line for line in calls if line.startswith("stop ")] == ["stop benchd.service", "stop bench-once@*"]


@pytest.mark.parametrize(("lasts", "end"), [(3, "does not start"), (99, "runs; systemctl")])
def test_a_dashboard_that_ends_after_its_start_is_no_success(site, tmp_path, lasts, end):
    programs, calls = tmp_path / "bin", tmp_path / "asked"
    tool(programs, "systemctl", f'[ $1 != is-active ] || {{ echo >>{calls}; [ "$(wc -l <{calls})" -lt {lasts} ]; }}')
    tool(programs, "journalctl", "echo written by a newer benchd")
    tool(programs, "sleep", "")
    code = "(changed=yes; start_unit benchd-dashboard) 2>&1 || true"
    output = phase(site, code, PATH=f"{programs}:{os.environ['PATH']}")
    assert f"benchd-dashboard {end}" in output
    assert ("written by a newer benchd" in output) == (end == "does not start")


def refused_by_a_tree_without_sources(site, tmp_path, *arguments):
    """Run the script in a tree from which no wheel can be built; return its error."""
    for folder in (".ci", "exporters", "systemd"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    command = ["bash", str(tmp_path / "systemd/install.sh"), *arguments]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=site.environment)
    assert done.returncode == 1
    return done.stderr


def test_a_board_with_a_jetpack_that_is_too_old_is_refused_before_anything_is_built(site, tmp_path):
    jetson_trees.build(site.root, jetson_trees.AGX_ORIN)
    error = refused_by_a_tree_without_sources(site, tmp_path)
    assert error.startswith("benchd: this board runs JetPack 5 or older (L4T 35")


def test_a_bundle_for_another_machine_is_refused_with_the_line_that_makes_the_right_one(board, tmp_path):
    error = refused_by_a_tree_without_sources(board, tmp_path, "--wheels", str(tmp_path))
    assert "this bundle is for another JetPack. Where there is a network: make bundle TARGET=jetpack62" in error


@pytest.mark.slow
@NEEDS_A_BARE_PYTHON
def test_a_board_without_torch_stops_with_cause_and_cure(board, without_torch):
    output = board.install("--wheels", without_torch, code=1)
    assert f"{without_torch} has no torch torchvision" in output
    assert f"make bundle TARGET=jetpack62 JETSON_INDEX={tegra.RELEASES[0].index}" in output
    assert not (board.home / "current").exists()


@pytest.mark.slow
@NEEDS_A_BARE_PYTHON
def test_a_board_whose_index_is_down_is_told_so(board, without_torch):
    """Without --wheels, so ours is built from this checkout, which stays as it is."""
    index, before = "http://127.0.0.1:1/", set(ROOT.iterdir())
    offline = {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": index, "PIP_FIND_LINKS": str(without_torch)}
    output = board.install(code=1, JETSON_INDEX=index, **offline)
    assert f"{index} has no torch torchvision" in output
    assert set(ROOT.iterdir()) == before


# of torch and torchvision, as in the index of JetPack 6.2 or of a later one
BOARD_VERSIONS = ("2.8.0", "0.23.0") if sys.version_info[:2] == (3, 10) else ("99.0", "99.0")


@pytest.mark.slow
def test_a_board_with_its_own_torch_gets_the_board_s_drop_ins(board, tmp_path, ours):
    wheels, (torch, torchvision) = tmp_path / "wheels", BOARD_VERSIONS
    wheels_made.fill(wheels, ours, "constraints-jetson62.txt")
    wheels_made.stub(wheels, "torch", torch, {"torch/__init__.py": BOARD_TORCH}, requires="required-by-torch")
    wheels_made.stub(wheels, "torchvision", torchvision, {"torchvision/__init__.py": ""})
    wheels_made.stub(wheels, "required-by-torch", "1.0", {"required_by_torch.py": ""})
    for triton in wheels.glob("triton*"):
        triton.unlink()
    output = board.install("--wheels", wheels, PIP_CONFIG_FILE=os.devnull, PIP_FIND_LINKS="")  # torch from nowhere else
    assert f"{wheels} has no triton for this board" in output
    assert "yes  cuda         12.6 on Orin" in output
    for unit in ("benchd.service", "bench-once@.service"):
        drop_ins = {path.name for path in (board.root / f"etc/systemd/system/{unit}.d").iterdir()}
        assert {"jetson.conf", "jtop.conf"} <= drop_ins
    assert not (board.root / "etc/modules-load.d").exists()
    environment = (board.home / "current/pyvenv.cfg").read_text()
    assert "include-system-site-packages = true" in environment


def place(site, text):
    """Place a configuration as an upgrade does."""
    (site.root / "draft").write_text(text)
    draft = site.root / "draft"
    return phase(site, f"lock; draft={draft}; place_configuration")


def test_the_configuration_keeps_its_owner_mode_and_link(site):
    own, linked = site.root / "srv/site.toml", site.root / "etc/benchd/benchd.toml"
    for path in (own, linked):
        path.parent.mkdir(parents=True)
    own.write_text("# the site's\n")
    own.chmod(0o640)
    if os.geteuid() == 0:
        os.chown(own, 12345, 12346)
    linked.symlink_to("../../srv/site.toml")
    before = own.stat()
    assert "the previous file is /etc/benchd/benchd.toml.old" in place(site, "# ours\n")
    after = own.stat()
    assert linked.is_symlink()
    assert (after.st_mode, after.st_uid, after.st_gid) == (before.st_mode, before.st_uid, before.st_gid)
    old = linked.with_name("benchd.toml.old")
    assert (own.read_text(), old.read_text(), old.stat().st_mode) == ("# ours\n", "# the site's\n", before.st_mode)
    assert sorted(path.name for path in own.parent.iterdir()) == ["site.toml"]


@pytest.mark.parametrize("mode", [0o644, 0o640])
def test_a_password_in_a_configuration_that_all_may_read_is_refused(site, mode):
    toml = site.root / "etc/benchd/benchd.toml"
    toml.parent.mkdir(parents=True)
    toml.write_text("[mqtt]\nurl = 'mqtts://me:secret@broker'\n")
    toml.chmod(mode)
    code = f"(draft={toml}; check_password) 2>&1 || true"
    output = phase(site, code)
    assert ("/etc/benchd/mqtt_password" in output, "secret" in output) == (mode == 0o644, False)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--mqtt", "http://broker"], "expected mqtt://"),
        (["--mqtt", "me:secret@broker"], "a password does not belong"),
        (["--mqtt", "mqtt://me:secret@broker"], "/etc/benchd/mqtt_password"),
        (["--device-name", 'a"b'], "must not contain"),
        (["--device-id", "a|b"], "must not contain"),
        (["--device-name"], "needs a value"),
        (["--rollback"], "no earlier version to return to"),
        (["--verbose"], "unknown option --verbose"),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_reason(site, arguments, why):
    assert why in site.install(*arguments, code=1)
    assert site.files() == {}


def test_two_installs_at_once(site):
    site.home.mkdir(parents=True)
    with subprocess.Popen([program("flock"), site.home / ".lock", "cat"], stdin=subprocess.PIPE) as other:
        while other.poll() is None and not _is_locked(site.home / ".lock"):
            time.sleep(0.01)
        assert "another install is under way" in site.install("--rollback", code=1)
        other.communicate()


def _is_locked(path):
    return path.exists() and f":{path.stat().st_ino} " in Path("/proc/locks").read_text()


@pytest.mark.skipif(os.geteuid() == 0, reason="this is root")
def test_without_root_nothing_is_touched(site):
    assert "root is needed" in site.install(code=1, DESTDIR="")


def test_the_scripts_are_clean():
    scripts = [*SCRIPT.parent.glob("*.sh"), *(path for path in (ROOT / ".ci").iterdir() if path.suffix != ".py")]
    done = subprocess.run([program("shellcheck"), *scripts], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
