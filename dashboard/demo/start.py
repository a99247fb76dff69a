"""`benchd demo`: a broker, the service on this machine, seven simulated boards and the dashboard, in one command."""

import asyncio
import os
import signal
from asyncio.subprocess import Process
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TextIO

from benchd.daemon.delivery.broker import parse_url
from benchd.daemon.machine import interpreter
from benchd.dashboard.commands import run_suite
from benchd.dashboard.demo.broker import HOST, Broker
from benchd.dashboard.start import require_free

DEVICE, SUITE = "this-machine", "demo"
CONFIG = f"""
[device]
id = "{DEVICE}"
name = "This machine"
site = "demo"

[mqtt]
url = "{{url}}"

[limits]
warm_up_cap_s = 1.0
measure_cap_s = 2.0
check_images = 2

[[suite]]
name = "{SUITE}"
every = "5 min"
models = ["square", "snn_onepass"]
preset = "quick"
"""
LOOK_S = 0.2
ANSWER_S = 2.0
END_S = 20.0
LAST_LINES = 8
# variables that would redirect a part: systemd's folders, the token of pages beyond loopback
NOT_PASSED_ON = ("BENCHD_DASHBOARD_TOKEN", "CREDENTIALS_DIRECTORY", "NOTIFY_SOCKET", "RUNTIME_DIRECTORY")

Children = dict[str, Process]


def run(port: int, err: TextIO) -> int:
    """Run until SIGINT or SIGTERM and return 0, or 1 if a part ended by itself; nothing is left running."""
    require_free(HOST, port)
    with TemporaryDirectory(prefix="benchd-demo-") as folder:
        return asyncio.run(_run(Path(folder), port, err))


async def _run(folder: Path, port: int, err: TextIO) -> int:
    stopped = _on_signals()
    children: Children = {}
    async with AsyncExitStack() as stack:
        broker = Broker()
        url = f"mqtt://{HOST}:{await broker.start()}"
        stack.push_async_callback(broker.close)
        stack.push_async_callback(_end, children)
        (folder / "benchd.toml").write_text(CONFIG.format(url=url))
        for name, part in _parts(folder, url, port).items():
            children[name] = await _start(folder, name, part)
        welcome = asyncio.create_task(_welcome(url, port, err))
        waiting = [asyncio.create_task(stopped.wait()), asyncio.create_task(_first_end(children))]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        welcome.cancel()
        if stopped.is_set():
            return 0
        _say(err, _last_words(children, folder))
        return 1


def _on_signals() -> asyncio.Event:
    """Return the event that SIGINT and the other signals set."""
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    return stopped


def _parts(folder: Path, url: str, port: int) -> dict[str, list[str]]:
    """Return the module of each part and its arguments, by name."""
    database = f"sqlite:///{folder}/dashboard.db"
    return {
        "service": ["benchd.daemon.cli", "run", "--config", f"{folder}/benchd.toml"],
        "simulated boards": ["benchd.dashboard.demo.devices", url],
        "dashboard": ["benchd.daemon.cli", "dashboard", "--mqtt", url, "--database", database, "--port", str(port)],
    }


async def _start(folder: Path, name: str, part: list[str]) -> Process:
    """Start a part in its own session, so that a terminal's Ctrl-C reaches only this process."""
    environment = {key: value for key, value in os.environ.items() if key not in NOT_PASSED_ON}
    environment |= {"STATE_DIRECTORY": f"{folder}/state", "NICEGUI_STORAGE_PATH": str(folder)}
    with _log(folder, name).open("wb") as log:
        return await asyncio.create_subprocess_exec(
            *interpreter.of_module(*part), env=environment, stdout=log, stderr=log, start_new_session=True
        )


async def _welcome(url: str, port: int, err: TextIO) -> None:
    """Print the address of the pages once they answer, and start the service."""
    while not await _listens(port):
        await asyncio.sleep(LOOK_S)
    _say(err, f"http://{HOST}:{port}/ shows this machine and seven simulated boards; Ctrl-C stops everything")
    while not (await asyncio.to_thread(run_suite, parse_url(url), DEVICE, SUITE, ANSWER_S)).accepted:
        await asyncio.sleep(LOOK_S)


async def _listens(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection(HOST, port)
    except OSError:
        return False
    writer.close()
    return True


async def _first_end(children: Children) -> None:
    ends = [asyncio.create_task(child.wait()) for child in children.values()]
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)


def _last_words(children: Children, folder: Path) -> str:
    name, code = next((name, child.returncode) for name, child in children.items() if child.returncode is not None)
    words = _log(folder, name).read_text(errors="replace").splitlines()[-LAST_LINES:]
    return "\n".join([f"the {name} ended by itself, exit status {code}; stopping everything", *words])


async def _end(children: Children) -> None:
    """End every part and everything it has left running."""
    for child in children.values():
        if child.returncode is None:
            child.terminate()
    for child in children.values():
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(child.wait(), END_S)
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)


def _log(folder: Path, name: str) -> Path:
    return folder / f"{name}.log"


def _say(err: TextIO, line: str) -> None:
    err.write(f"benchd demo: {line}\n")
    err.flush()
