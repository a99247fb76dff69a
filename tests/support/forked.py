"""Workers and programs forked from one that has imported what they need: as real as the product's, and 1.3 s cheaper.

What a new interpreter alone takes from its environment, as the settings of malloc, a forked one does not have.
"""

import ctypes
import functools
import json
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn

from benchd.daemon.commands import export
from benchd.daemon.machine import interpreter
from benchd.daemon.measuring import process

if TYPE_CHECKING:
    import pytest

WORKER, PAGES = "benchd.daemon.worker", "benchd.dashboard.app"
# before any test changes it; beside other tests, threads that wait in a loop would take all the time
ENVIRONMENT = os.environ | {"PYTHONUNBUFFERED": "1", "OMP_WAIT_POLICY": "passive"}
SERVE = f"sys.path.insert(0, {str(Path(__file__).parent)!r}); import forked; forked.serve(sys.argv[-1])"
BENCHD = "import sys; from benchd.daemon import cli; sys.exit(cli.benchd())"
DIES_WITH_PARENT, TAKES_ORPHANS = 1, 36  # PR_SET_PDEATHSIG and PR_SET_CHILD_SUBREAPER
_OURS: list[socket.socket] = []  # of a command that was itself forked
LONGEST = 2**18  # bytes of an environment


class Forked:
    """What Popen gives of a worker."""

    def __init__(
        self, command: list[str], stdout: Any, env: dict[str, str], errors: int | None = None, **_: object
    ) -> None:
        output = stdout if isinstance(stdout, int) else stdout.fileno()
        line = {"environment": env, "folder": str(Path.cwd()), "module": command[-2], "pipe": int(command[-1])}
        self._start(line, [output, errors or output, line["pipe"]], WORKER)

    def _start(self, line: dict[str, Any], files: list[int], loaded: str) -> None:
        read_end, write_end = os.pipe()
        self.stdin, self.returncode = os.fdopen(write_end, "wb"), None
        line["cpus"] = list(os.sched_getaffinity(0))
        first = _OURS[0] if _OURS else _first(loaded)[0]
        prctl(TAKES_ORPHANS, 1)
        try:
            socket.send_fds(first, [json.dumps(line).encode()], [read_end, *files])
            self.pid = int(first.recv(32))
        finally:
            prctl(TAKES_ORPHANS, 0)
            os.close(read_end)

    def poll(self) -> int | None:
        """Return its exit status, None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; raise TimeoutExpired if it works on."""
        end_s = time.monotonic() + (float("inf") if timeout is None else timeout)
        while self.poll() is None:
            if time.monotonic() > end_s:
                raise subprocess.TimeoutExpired("worker", timeout or 0.0)
            time.sleep(0.002)
        return self.returncode or 0

    def terminate(self) -> None:
        """Send SIGTERM."""
        if self.poll() is None:
            os.kill(self.pid, 15)


class Program(Forked):
    """What Popen gives of Python `code` that runs one of our commands in `folder`; its workers are forked too.

    It is forked from a process that has `loaded` a module: the worker's, with torch, or the pages', without.
    """

    def __init__(
        self, code: str, arguments: list[str], folder: Path, env: dict[str, str], errors: int, loaded: str = WORKER
    ) -> None:
        line = {"environment": env, "folder": str(folder), "module": arguments[0], "arguments": arguments, "code": code}
        self._start(line | {"pipe": 3}, [errors] * 3, loaded)

    def __enter__(self) -> "Program":
        return self

    def __exit__(self, *_: object) -> None:
        self.stdin.close()
        self.wait()

    def send_signal(self, number: int) -> None:
        """Send the signal."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(9)


def popen(command: list[str], **given: Any) -> "Forked | subprocess.Popen[bytes]":
    """Start a worker of this interpreter by a fork, and all else as Popen does."""
    is_own = command[0] == sys.executable and command[-2].startswith(WORKER)
    return Forked(command, **given) if is_own else subprocess.Popen(command, **given)


_FORKING = SimpleNamespace(Popen=popen, PIPE=subprocess.PIPE, TimeoutExpired=subprocess.TimeoutExpired)


def run(command: list[str], *, input: bytes, **_: object) -> "subprocess.CompletedProcess[bytes]":  # noqa: A002
    """Run a module of the worker by a fork, as subprocess.run does with a pipe for its standard output."""
    with tempfile.TemporaryFile() as output, Path(os.devnull).open() as unused:
        child = Forked([command[-1], str(unused.fileno())], output, dict(os.environ), errors=2)
        with child.stdin:
            child.stdin.write(input)
        code = child.wait()
        output.seek(0)
        return subprocess.CompletedProcess(command, code, output.read())


def workers_forked(monkeypatch: "pytest.MonkeyPatch") -> None:
    """Let whoever measures in this process fork its workers."""
    monkeypatch.setattr(process, "subprocess", _FORKING)
    monkeypatch.setattr(export, "subprocess", SimpleNamespace(run=run, PIPE=subprocess.PIPE))


def workers_apart(monkeypatch: "pytest.MonkeyPatch") -> None:
    """Let whoever measures in this process start interpreters, as the product does."""
    for module in (process, export):
        monkeypatch.setattr(module, "subprocess", subprocess)


def onnx_table_kept() -> None:
    """Make torch's tables of operators once for all exports of this process: 1.2 s of CPU each."""
    if "onnxscript" in sys.modules:
        from torch._export import utils
        from torch.onnx._internal.exporter._registration import ONNXRegistry

        ONNXRegistry.from_torchlib = staticmethod(functools.cache(ONNXRegistry.from_torchlib))
        utils._materialize_cpp_cia_ops = functools.cache(utils._materialize_cpp_cia_ops)


def prctl(name: int, value: int) -> None:
    """Set a property of this process."""
    ctypes.CDLL(None).prctl(name, value, 0, 0, 0)


@functools.cache
def _first(loaded: str) -> tuple[socket.socket, "subprocess.Popen[bytes]"]:
    """Return a process to fork from that has loaded this, and the connection to it; it ends with this one."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with its:
        command = interpreter.of_code(SERVE, loaded)
        return ours, subprocess.Popen(command, stdin=its.fileno(), env=ENVIRONMENT)


def serve(loaded: str) -> NoReturn:
    """Import this, then fork a process for each message on stdin: its environment, folder and files."""
    sys.path.pop(0)
    del sys.modules[__name__]  # what is loaded from no package counts as code of the measured module
    import gc
    import importlib

    importlib.import_module(loaded)
    if loaded == WORKER:
        import numpy.ma  # noqa: F401

        from benchd.daemon.worker import __main__, probes, recipes, user_code  # noqa: F401
        from benchd.daemon.worker.profiling import break_even
        from benchd.daemon.worker.scenarios import single_stream  # noqa: F401

        # 0.5 s of CPU a run, and 5 s a process, for rates that are other tests' subject
        probes.BUDGET_S, probes.MIN_RUNS, break_even.RATES = 0.001, 2, break_even.RATES[::4]
        user_code.imported()  # looks up the file of each module once
        _used_by_some()
    gc.collect()
    gc.freeze()
    _fork_for(socket.socket(fileno=0))


def _fork_for(connection: socket.socket) -> NoReturn:
    while True:
        line, files, _, _ = socket.recv_fds(connection, LONGEST, 4)
        if not line:
            os._exit(0)
        read_end, write_end = os.pipe()
        if not (middle := os.fork()):
            own = os.getpid()
            if pid := os.fork():
                os.write(write_end, str(pid).encode())
                os._exit(0)
            os.close(read_end), os.close(write_end)
            _work(own, json.loads(line), files)
        os.waitpid(middle, 0)  # who asked is the parent of the worker from here on
        connection.send(os.read(read_end, 32))
        for file in (read_end, write_end, *files):
            os.close(file)


def _used_by_some() -> None:
    """Export a net: the first one in a process costs 6 s of imports and tables, which a compilation needs too."""
    with suppress(ImportError):
        import torchvision  # noqa: F401
    with suppress(ImportError):
        import torch

        from benchd.exporters import files, onnx  # noqa: F401

        onnx_table_kept()
        net, example = torch.nn.Linear(2, 2).eval(), (torch.ones(1, 2),)
        torch.onnx.export(net, example, dynamo=True, opset_version=files.OPSET, optimize=False, verbose=False)


def _work(middle: int, line: dict[str, Any], files: list[int]) -> NoReturn:
    """Be the worker that the product's command would be."""
    while os.getppid() == middle:
        time.sleep(0.0002)
    prctl(DIES_WITH_PARENT, 9)
    os.setsid()
    pipe = line["pipe"]
    for number, file in zip((0, 1, 2, pipe), files, strict=True):
        os.dup2(file, number)
    for file in set(files) - {pipe}:
        os.close(file)
    os.environ.clear()
    os.environ.update(line["environment"])
    sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(":"))
    os.chdir(line["folder"])
    os.sched_setaffinity(0, line["cpus"])
    sys.argv = line.get("arguments", [line["module"], str(pipe)])
    code: object = 1
    try:
        if "code" in line:
            if WORKER in sys.modules:
                _fork_own_workers()
            exec(line["code"], {"__name__": "__main__"})  # noqa: S102
        else:
            runpy.run_module(line["module"], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        os._exit(code if isinstance(code, int) else 0)


def _fork_own_workers() -> None:
    """Let this process start its workers by forks of what it is now."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if not os.fork():
        prctl(DIES_WITH_PARENT, 9)
        ours.close()
        _fork_for(its)
    its.close()
    _OURS.append(ours)
    process.subprocess = _FORKING
