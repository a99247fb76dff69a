"""`benchd replay` on every state in which a run can leave its folder."""

import io
import shlex
import subprocess
from contextlib import closing
from dataclasses import replace

import pytest
from broker import HOST, free_port, program, running_broker
from certificates import Authority, serving
from records_made import made
from typer.testing import CliRunner
from waiting import WAIT_S

from benchd.daemon.commands.replay import app, send
from benchd.daemon.delivery.broker import PASSWORD_VARIABLE, parse_url
from benchd.daemon.delivery.delivery import CURSOR
from benchd.daemon.delivery.log import Log
from benchd.daemon.delivery.sinks import MqttSink
from benchd.daemon.errors import NotAvailable
from benchd.daemon.machine.lock import SERVICE, MachineLock
from benchd.daemon.records import encode

DEVICE = "replayed"


def journal(folder, *run_ids):
    """Append records as a run does; return the lines of the file."""
    with closing(Log(folder / "records.jsonl")) as log:
        for run_id in run_ids:
            # a field of a later minor version: the bytes must reach the broker as they are
            log.append(encode(made(device_id=DEVICE, run_id=run_id))[:-1] + b',"later":1}')
    return (folder / "records.jsonl").read_bytes().splitlines()


def subscriber(broker, *options):
    command = [program("mosquitto_sub"), "-h", broker.host, "-p", str(broker.port), "-i", "listener", "-c", "-q", "1"]
    command += ["-t", f"benchd/v1/{DEVICE}/#", "-W", "20", *options]
    return subprocess.run(command, check=True, capture_output=True).stdout.splitlines()


@pytest.fixture
def broker(tmp_path):
    with running_broker(tmp_path) as broker:
        subscriber(broker, "-E")
        yield broker


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "bench-out"
    path.mkdir()
    return path


def run(folder, url, **options):
    out = io.StringIO()
    return send(folder, parse_url(url), 20.0, out, **options), out.getvalue().splitlines()


def test_a_folder_is_sent_once(folder, broker):
    lines = journal(folder, "r1", "r2")
    assert run(folder, broker.url) == (0, ["2 sent, 0 refused, 0 left"])
    assert subscriber(broker, "-C", "2") == lines
    assert run(folder, broker.url) == (0, ["0 sent, 0 refused, 0 left"])
    assert sorted(path.name for path in folder.iterdir()) == [CURSOR, "records.jsonl"]


def test_a_broker_that_is_down_leaves_everything_for_the_next_time(folder, broker):
    lines = journal(folder, "r1")
    port = free_port()
    code, (line,) = run(folder, f"mqtt://{HOST}:{port}")
    assert (code, line) == (1, f"0 sent, 0 refused, 1 left: cannot reach {HOST}:{port}: Connection refused")
    assert run(folder, broker.url) == (0, ["1 sent, 0 refused, 0 left"])
    assert subscriber(broker, "-C", "1") == lines


def test_a_refusal_names_the_result_and_the_reason_and_is_tried_again(folder, tmp_path, broker):
    lines = journal(folder, "r1")
    acl = tmp_path / "acl"
    acl.write_text("topic read #\n")
    with running_broker(tmp_path, f"allow_anonymous true\nacl_file {acl}") as refusing:
        code, printed = run(folder, refusing.url)
    reason = f"{HOST}:{refusing.port} refused it: Not authorized"
    assert (code, printed) == (1, [f"refused: seq 1: {reason}", f"0 sent, 1 refused, 0 left: {reason}"])
    assert run(folder, broker.url) == (0, ["1 sent, 0 refused, 0 left"])
    assert subscriber(broker, "-C", "1") == lines


def test_damaged_lines_are_named_and_the_others_sent(folder, broker):
    first, second, third = journal(folder, "r1", "r2", "r3")
    (folder / "records.jsonl").write_bytes(b"\n".join([first, second[:50], third, third[:40]]))
    code, lines = run(folder, broker.url)
    assert code == 1
    assert f"{folder}/records.jsonl: a damaged line is skipped" in lines[0]
    assert lines[1:] == ["2 sent, 0 refused, 0 left"]
    assert subscriber(broker, "-C", "2") == [first, third]


def test_everything_is_sent_when_asked_for_also_what_is_archived(folder, broker):
    lines = journal(folder, "r1", "r2")
    with closing(Log(folder / "records.jsonl")) as log:
        log.rotate(1)
    lines += journal(folder, "r3")
    assert run(folder, broker.url) == (0, ["3 sent, 0 refused, 0 left"])
    assert run(folder, broker.url, everything=True) == (0, ["3 sent, 0 refused, 0 left"])
    assert subscriber(broker, "-C", "6") == lines * 2


def test_a_folder_that_a_service_delivers_is_left_to_it(folder):
    journal(folder, "r1")
    with MachineLock(folder / SERVICE), pytest.raises(NotAvailable, match="delivers its results; stop it first"):
        send(folder, parse_url("mqtt://h"), 1.0, io.StringIO())


def test_the_line_that_a_run_prints_reaches_a_broker_with_an_authority_and_client_certificates(tmp_path, monkeypatch):
    authority, port, err = Authority(tmp_path / "own ca"), free_port(), io.StringIO()
    certificate, key = map(str, authority.issue("client"))
    files = {"ca_file": str(authority.certificate), "certificate_file": certificate, "key_file": key}
    monkeypatch.setenv(PASSWORD_VARIABLE, "right")
    to, record = replace(parse_url(f"mqtts://me@{HOST}:{port}"), **files), made(device_id=DEVICE)
    with closing(Log(tmp_path / "bench out/records.jsonl")) as log:
        log.append(encode(record))
        sink = MqttSink(to, WAIT_S, tmp_path / "bench out", log, err)
        sink.publish(record, encode(record))
        sink.end()
    program_, verb, *arguments = shlex.split(err.getvalue().splitlines()[-1])
    assert (program_, verb) == ("benchd", "replay")
    with serving(tmp_path, authority, authority.issue("broker"), port):
        done = CliRunner().invoke(app, arguments)
    assert (done.exit_code, done.stdout) == (0, "1 sent, 0 refused, 0 left\n")
