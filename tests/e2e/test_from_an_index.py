"""The README's two commands without a checkout: our wheel on the test's own index, the rest from the usual one."""

import shutil
import subprocess
import sys
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
import wheels_made
from broker import HOST
from waiting import WAIT_S

from benchd.daemon import journal, records

pytestmark = pytest.mark.index


@pytest.fixture
def index(tmp_path):
    """Yield the address of an index that holds our wheel."""
    (folder := tmp_path / "index/simple/benchd").mkdir(parents=True)
    (tmp_path / "built").mkdir()
    shutil.copy(wheels_made.build_ours(tmp_path / "built"), folder)
    handler = partial(SimpleHTTPRequestHandler, directory=tmp_path / "index")
    with ThreadingHTTPServer((HOST, 0), handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://{HOST}:{server.server_port}/simple"
        server.shutdown()
        thread.join()


def test_two_commands_lead_to_a_table(index, tmp_path, child_environment):
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    (empty := tmp_path / "empty").mkdir()

    def run(program, *arguments):
        command = [tmp_path / "venv/bin" / program, *arguments]
        done = subprocess.run(
            command, cwd=empty, env=child_environment, capture_output=True, text=True, check=False, timeout=WAIT_S
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run("pip", "install", "--quiet", "--extra-index-url", index, "benchd[cpu]")
    assert "fastest here (one process): eager" in run("bench-once", "--models", "square")
    (record,) = (records.decode(line) for line in journal.read(empty / "bench-out/records.jsonl"))
    assert (record.status, record.check.passed) == ("ok", True)
