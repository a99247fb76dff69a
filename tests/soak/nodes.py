"""Two clustered nodes of ejabberd, an MQTT 5 broker, on loopback, and one address before them as a load balancer has.

Needs Debian's packages ejabberd and erlang-base; nothing of what they configure or run is touched.
"""

import asyncio
import os
import secrets
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from benchd.daemon.errors import NotAvailable
from tests.support.ports import HOST, answers, free_port

START_S, WAIT_S = 120.0, 300.0
_SETTINGS = """hosts: [localhost]
loglevel: warning
auth_method: [anonymous]
anonymous_protocol: login_anon
allow_multiple_connections: true
listen:
  - {{port: {port}, ip: "{host}", module: mod_mqtt, backlog: 1000}}
modules:
  mod_mqtt: {{max_queue: unlimited, session_expiry: 7 days}}
"""
# it takes connections before it has started, and cannot join then
_JOIN = """
Until = fun Again() ->
    Running = rpc:call('{node}', application, which_applications, []),
    lists:keymember(ejabberd, 1, Running) orelse (timer:sleep(100) == ok andalso Again())
end,
Until(),
io:format("~p", [rpc:call('{node}', ejabberd_cluster, join, ['{other}'])]),
halt().
"""


class Node:
    """One node; what it keeps is in `folder`, and it is started again with that."""

    def __init__(self, name: str, folder: Path, epmd_port: int, cookie: str) -> None:
        self.name, self.port = f"{name}@{HOST}", free_port()
        self._folder, self._cookie = folder / name, cookie
        self._process: subprocess.Popen[bytes] | None = None
        self._folder.mkdir()
        (self._folder / "ejabberd.yml").write_text(_SETTINGS.format(port=self.port, host=HOST))
        self._environment = os.environ | {
            "EJABBERD_CONFIG_PATH": str(self._folder / "ejabberd.yml"),
            "EJABBERD_LOG_PATH": str(self._folder / "ejabberd.log"),
            "ERL_CRASH_DUMP": os.devnull,
            "ERL_EPMD_PORT": str(epmd_port),
            "ERL_LIBS": str(_library().parent),
            "HOME": str(self._folder),
        }

    def start(self) -> None:
        """Start it and wait until it takes connections, of any user with any password."""
        mnesia = ["-mnesia", "dir", f'"{self._folder}/mnesia"']
        self._process = self._erl(self.name, *mnesia, "-s", "ejabberd", output=self._folder / "output")
        until_s = time.monotonic() + START_S
        while not answers(self.port):
            if self._process.poll() is not None or time.monotonic() > until_s:
                raise TimeoutError(f"{self.name} does not start: {(self._folder / 'output').read_text()[-1000:]}")
            time.sleep(0.1)

    def join(self, other: "Node") -> None:
        """Become one cluster with a node that runs."""
        output = self._folder / "joining"
        call = _JOIN.format(node=self.name, other=other.name)
        self._erl(f"join@{HOST}", "-hidden", "-eval", call, output=output).wait(START_S)
        if output.read_text() != "ok":
            raise RuntimeError(f"{self.name} does not join: {output.read_text()[-1000:]}")

    def kill(self) -> None:
        if self._process:
            self._process.kill()
            self._process.wait()

    def _erl(self, name: str, *words: str, output: Path) -> "subprocess.Popen[bytes]":
        loopback = ["-kernel", "inet_dist_use_interface", "{127,0,0,1}"]
        command = [_program("erl"), "-noinput", "-start_epmd", "false", "-name", name, "-setcookie", self._cookie]
        with output.open("wb") as file:
            return subprocess.Popen(
                [*command, *loopback, *words], stdout=file, stderr=file, cwd=self._folder, env=self._environment
            )


@contextmanager
def cluster(folder: Path) -> Iterator[list[Node]]:
    """Yield two nodes that are one cluster."""
    port, cookie = free_port(), secrets.token_hex(16)
    with ExitStack() as stack:
        names = subprocess.Popen([_program("epmd"), "-address", HOST, "-port", str(port)])  # of the nodes, by port
        stack.callback(names.wait)
        stack.callback(names.kill)
        nodes = [Node(name, folder, port, cookie) for name in ("one", "two")]
        for node in nodes:
            stack.callback(node.kill)
            node.start()
        nodes[1].join(nodes[0])
        yield nodes


@contextmanager
def front(nodes: Sequence[Node]) -> Iterator[int]:
    """Yield a port whose connections go to one node after the other, passing over one that is down."""
    loop, port = asyncio.new_event_loop(), free_port()
    turns = iter(range(2**63))

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first = next(turns)
        for number in range(len(nodes)):
            with suppress(OSError):
                node = await asyncio.open_connection(HOST, nodes[(first + number) % len(nodes)].port)
                await asyncio.gather(_pass_on(reader, node[1]), _pass_on(node[0], writer))
                return
        writer.close()

    server = loop.run_until_complete(asyncio.start_server(carry, HOST, port))
    thread = threading.Thread(target=loop.run_forever, name="front")
    thread.start()
    try:
        yield port
    finally:
        loop.call_soon_threadsafe(server.close)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


async def _pass_on(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    """Pass on what comes until either end closes, then close the other."""
    with suppress(OSError):
        while data := await source.read(2**16):
            target.write(data)
            await target.drain()
    target.close()


def wait_until(holds: Callable[[], bool], what: str, *, within_s: float = WAIT_S, step_s: float = 0.05) -> None:
    """Return once it holds; raise TimeoutError that says what did not."""
    until_s = time.monotonic() + within_s
    while not holds():
        if time.monotonic() > until_s:
            raise TimeoutError(f"{what} did not happen in {within_s:g} s")
        time.sleep(step_s)


def version() -> str:
    """Return the name and the version of the broker."""
    return _library().name.replace("-", " ", 1)


def _library() -> Path:
    library = next(iter(sorted(Path("/usr/lib").glob("*/ejabberd-*"))), None)
    if library is None:
        raise NotAvailable("ejabberd is not installed: apt install ejabberd")
    return library


def _program(name: str) -> str:
    executable = shutil.which(name)
    if executable is None:
        raise NotAvailable(f"{name} is not installed: apt install erlang-base")
    return executable
