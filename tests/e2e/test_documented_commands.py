"""Every command of README and docs, as printed: the cheap run, the others plan, or stand in NOT_RUN with the reason.

What measures is started while another process holds the machine's lock: it reads its line, its files and its plan, and
then says that the machine is busy. What runs until Ctrl-C gets it after its first output. `make` says what it would do.
"""

import fcntl
import gc
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import warnings
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np
import onnx
import pytest
from broker import free_port, program
from onnx import TensorProto, helper
from PIL import Image
from profile_shown import shown_on_cpu
from records_made import PASSED, made, timing
from waiting import WAIT_S

from benchd.daemon import cli
from benchd.daemon.machine.lock import NAME
from benchd.daemon.records import Case, Load, ProcessResult, Requests, Variant, encode

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", "CONTRIBUTING.md", "systemd/README.md", "benchmarks/README.md"]
PAGES += [str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").rglob("*.md"))]
PLANS = r"bench-once(?!.*--dry-run)|benchd (ship|profile(?! compare)|compare --live)"
SPEAKS = r"benchd (watch|dashboard|run|selfcheck --wait)"
NOT_RUN = {
    r"sudo ": "root, and a machine to set up; tests/test_install.py and `make test-unit` run the scripts elsewhere",
    r"export BENCHD_MQTT_PASSWORD=": "root reads the password: tests/test_broker_script.py",
    r"(pip|pipx|uv) ": "the package index: `make test-index`",
    r"podman|for name in ": "podman: docs/containers.md says what was run",
    r"git (clone|worktree) ": "a repository of the user's: tests/e2e/test_compare_live.py makes one",
    r"benchd doctor --json": "half a dozen imports: tests/e2e/test_agents_page.py reads it by its schema",
    r"benchd demo": "nine processes: tests/e2e/test_demo.py",
    r"bench-once --models hf:": "transformers and a net of the Hub: `make test-hub` makes and measures some",
    r"benchd export ": "a minute of exporting: tests/e2e/test_benchd_export.py does it with a small model",
    r"benchd verify ": "a folder that was shipped: tests/e2e/test_ship.py",
    r"benchd dashboard .*--only collector": "it says nothing while all is well: tests/dashboard/test_collector.py",
    r"benchd dashboard --mqtt mqtts:": "a broker with TLS: tests/dashboard/test_dashboard_tls.py",
    r"benchd dashboard .*--only pages": "a PostgreSQL: tests/dashboard/test_pages.py",
    r"mkdir log && .* tensorboard": "tensorboard, which nothing of benchd needs",
}
NET = "from torch import nn\n\ndef build():\n    net = nn.Linear({0}, 5)\n    net.input_shape = {0}\n    return net\n"


def commands():
    """Return every command of the pages' shell blocks, each once, with the first page that prints it."""
    by_command = {}
    for page in PAGES:
        for block in re.findall(r"```(?:sh|bash)\n(.*?)```", (ROOT / page).read_text(), re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                if command := re.sub(r"(^|\s+)# .*", "", line):
                    by_command.setdefault(command.removeprefix(".venv/bin/"), page)
    return [(page, command) for command, page in by_command.items()]


COMMANDS = commands()


def why_not(line):
    return next((reason for start, reason in NOT_RUN.items() if re.match(start, line)), None)


def test_each_reason_is_for_a_command_that_is_documented():
    assert [start for start in NOT_RUN if not any(re.match(start, line) for _, line in COMMANDS)] == []


@pytest.mark.parametrize("page", PAGES)
def test_no_page_lets_sudo_look_for_our_programs(page):
    """Its secure_path holds no virtual environment."""
    assert not re.search(r"sudo (benchd|bench-once) ", (ROOT / page).read_text())


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A folder as the pages find it: the checkout's entries, and what the user brings or has measured before."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("Makefile", ".ci", "pyproject.toml", "constraints.txt", "docs", "systemd", "benchmarks"):
        (folder / name).symlink_to(ROOT / name)
    (folder / ".venv").symlink_to(sys.prefix)
    for name in ("lock", "base", "files", "val/a", "bench-out", "onepass", "load", "profiles/before", "profiles/after"):
        (folder / name).mkdir(parents=True)
    (own,) = re.findall("```python\n(# net.py\n.*?)```", (ROOT / "docs/own-model.md").read_text(), re.DOTALL)
    for name in ("net.py", "audio.py", "table.py"):
        (folder / name).write_text(own + NET.format(64))
    (folder / "base/net.py").write_text(NET.format(64))
    (folder / "mynet.py").write_text(NET.format(224))
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(folder / "val/a/a.png")
    (folder / "vim_t.pth").touch()
    (folder / "task.py").write_text("".join(f"def {name}(): ...\n" for name in ("items", "right", "iou")))
    np.savez(folder / "val.npz", images=np.zeros((1, 3, 8, 8), np.float32))
    _onnx_file(folder / "mynet.onnx")
    (folder / "mynet.nir").touch()
    records = b"".join(encode(_record(name, ms)) + b"\n" for name, ms in (("eager", 10.0), ("custom", 5.0)))
    for name in ("bench-out", "onepass"):
        (folder / name / "records.jsonl").write_bytes(records)
    (folder / "load/records.jsonl").write_bytes(encode(_served()) + b"\n")
    for name in ("before", "after"):
        (folder / "profiles" / name / "profile.json").write_bytes(msgspec.json.encode(shown_on_cpu()))
    return folder


def _record(variant, median_ms):
    processes = [ProcessResult(status="ok", timing=timing(median_ms * (1 + step / 1000))) for step in range(3)]
    case = Case(model="vim_tiny", variant=Variant.parse(variant))
    return made(run_id=variant, case=case, check=PASSED, timing=timing(median_ms), processes=processes)


def _served():
    """Return a record of requests at the rate that docs/scenarios.md asks for."""
    load = Load(rate_hz=5.0, deadline_ms=500.0)
    counts = {"asked": 1000, "answered": 1000, "late": 0, "dropped": 0}
    requests = Requests(**counts, rate_hz=5.0, met=True, arrivals_p=0.5, noticed_ms=0.1, busy_share=0.1)
    case = Case(model="vim_tiny", scenario="server", streams=2, load=load)
    processes = [ProcessResult(status="ok", timing=timing(10.0 + step / 100), requests=requests) for step in range(3)]
    return made(run_id="served", case=case, check=PASSED, timing=timing(10.0), processes=processes, requests=requests)


def _onnx_file(path):
    images, same = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", 3, "H", "W"]) for name in ("images", "y")
    )
    graph = helper.make_graph([helper.make_node("Relu", ["images"], ["y"])], "g", [images], [same])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)


@pytest.fixture
def at_site(checkout, child_environment, monkeypatch):
    """Be in that folder, with state, caches and lock of the test's own and our programs on the PATH."""
    monkeypatch.chdir(checkout)
    for name in ("MAKEFLAGS", "MAKELEVEL"):
        monkeypatch.delenv(name, raising=False)
    ours = {name: child_environment[name] for name in ("XDG_STATE_HOME", "XDG_CACHE_HOME")}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin"
    for name, value in (ours | {"BENCHD_LOCK_DIR": str(checkout / "lock"), "PATH": path}).items():
        monkeypatch.setenv(name, value)


def addressed(line, mosquitto):
    """Return a line with the broker of the test, and pages on a free port."""
    line = re.sub(r"broker\.local(?!:)", f"{mosquitto.host}:{mosquitto.port}", line)
    line = line.replace(f"-h {mosquitto.host}:", f"-h {mosquitto.host} -p ")
    return line + (f" --port {free_port()}" if line.startswith("benchd dashboard") else "")


def called(line, monkeypatch, capfd):
    """Run one of our commands in this process; return its exit code and what it said."""
    program, *arguments = shlex.split(line)
    monkeypatch.setattr(sys, "argv", [program, *arguments])
    with pytest.raises(SystemExit) as end:
        {"benchd": cli.benchd, "bench-once": cli.bench_once}[program]()
    return int(end.value.code or 0), "".join(capfd.readouterr())


def started(line):
    """Run a line in a shell; return its exit code and what it said."""
    done = subprocess.run(["bash", "-ec", line], check=False, capture_output=True, text=True, timeout=WAIT_S)
    return done.returncode, done.stdout + done.stderr


def interrupted(line):
    """Run a line that never ends in a terminal until its first output; return its exit code and what it said."""
    ours, theirs = pty.openpty()
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
    shell = ["env", "--default-signal=INT", "bash", "-ec", line]  # tests that run in the background ignore it
    with subprocess.Popen(shell, env=environment, start_new_session=True, **streams) as process:
        os.close(theirs)
        output = os.read(ours, 4096)
        while not re.sub(rb"[^\r\n]* s\r|\r|\x1b\[J", b"", output):  # the clock of a start that takes its time
            output += os.read(ours, 4096)
        process.send_signal(signal.SIGINT)
        with suppress(OSError):  # a terminal without a process ends so
            while output := output + os.read(ours, 4096):
                pass
    os.close(ours)
    return process.returncode, output.decode()


@pytest.mark.usefixtures("at_site")
@pytest.mark.parametrize(("page", "line"), COMMANDS, ids=[line for _, line in COMMANDS])
def test_a_command_does_what_its_page_says(page, line, checkout, mosquitto, monkeypatch, capfd):
    if reason := why_not(line):
        pytest.skip(reason)
    line = addressed(re.sub("^make ", "make --dry-run ", line), mosquitto)
    if line.startswith("mosquitto_sub"):
        message = ["-h", mosquitto.host, "-p", str(mosquitto.port), "-r", "-t", "benchd/v1/b/status", "-m", "{}"]
        subprocess.run([program("mosquitto_pub"), *message], check=True)
        line += " -C 1"  # its handler of SIGINT may corrupt its memory
    with (checkout / "lock" / NAME).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if re.match(SPEAKS, line):
            code, output = interrupted(line)
        elif re.match("benchd |bench-once", line):
            code, output = called(line, monkeypatch, capfd)
            with warnings.catch_warnings():  # who finds the machine busy leaves its files to the end of its process
                warnings.simplefilter("ignore", ResourceWarning)
                gc.collect()
        else:
            code, output = started(line)
    plans = re.match(PLANS, line)
    assert "Traceback" not in output
    assert ("already being measured" in output) == bool(plans or "--wait" in line), output
    assert code in ([7] if plans else [0, 130, -signal.SIGINT] if re.match(SPEAKS, line) else [0]), output
