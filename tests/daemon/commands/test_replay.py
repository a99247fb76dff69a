"""`benchd replay` on every state in which a run can leave its folder."""

import gzip
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
from benchd.daemon.delivery.outbox import JOURNALLED, Outbox
from benchd.daemon.delivery.sinks import MqttSink
from benchd.daemon.delivery.topics import Topics
from benchd.daemon.errors import UsageError
from benchd.daemon.journal import Journal
from benchd.daemon.records import encode

DEVICE = "replayed"


def a_record(run_id):
    # a field of a later minor version: the bytes must reach the broker as they are
    return encode(made(device_id=DEVICE, run_id=run_id))[:-1] + b',"later":1}'


def journal(folder, *lines):
    with closing(Journal(folder / "records.jsonl")) as file:
        for line in lines:
            file.append(line)


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


def test_a_run_without_an_outbox_is_sent_from_its_records_once(folder, broker):
    lines = [a_record("r1"), a_record("r2")]
    journal(folder, *lines)
    assert run(folder, broker.url) == (0, ["2 sent, 0 refused, 0 left"])
    assert subscriber(broker, "-C", "2") == lines
    assert run(folder, broker.url) == (0, ["0 sent, 0 refused, 0 left"])
    with Outbox(folder / "outbox.db") as outbox:
        assert outbox.counts() == (0, 2, 0)
    assert sorted(path.name for path in folder.iterdir()) == ["outbox.db", "records.jsonl"]


def test_a_broker_that_is_down_leaves_everything_for_the_next_time(folder, broker):
    journal(folder, a_record("r1"))
    port = free_port()
    code, (line,) = run(folder, f"mqtt://{HOST}:{port}")
    assert (code, line) == (1, f"0 sent, 0 refused, 1 left: cannot reach {HOST}:{port}: Connection refused")
    assert run(folder, broker.url) == (0, ["1 sent, 0 refused, 0 left"])
    assert subscriber(broker, "-C", "1") == [a_record("r1")]


def test_an_outbox_is_the_truth_and_its_refused_results_get_another_try_when_asked_for(folder, broker):
    journal(folder, a_record("r0"), a_record("r1"), a_record("r2"))
    with Outbox(folder / "outbox.db") as outbox:
        for run_id in ("r0", "r1", "r2"):
            outbox.add(f"{DEVICE}:{run_id}", Topics(DEVICE).result(run_id), 1, a_record(run_id))
        sent, refused, _ = outbox.pending(3)
        outbox.mark_sent(sent.seq)
        outbox.mark_refused(refused.seq, "Not authorized")
    line = f"refused: {DEVICE}:r1: Not authorized"
    assert run(folder, broker.url) == (1, [line, "1 sent, 0 refused, 0 left"])
    assert run(folder, broker.url, dead=True) == (0, ["1 sent, 0 refused, 0 left"])
    assert subscriber(broker, "-C", "2") == [a_record("r2"), a_record("r1")]


def test_a_refusal_names_the_result_and_the_reason(folder, tmp_path):
    journal(folder, a_record("r1"))
    acl = tmp_path / "acl"
    acl.write_text("topic read #\n")
    with running_broker(tmp_path, f"allow_anonymous true\nacl_file {acl}") as broker:
        code, lines = run(folder, broker.url)
    reason = f"{HOST}:{broker.port} refused it: Not authorized"
    assert (code, lines) == (1, [f"refused: {DEVICE}:r1: {reason}", f"0 sent, 1 refused, 0 left: {reason}"])


def test_lines_that_are_no_records_are_named_and_the_others_sent(folder, broker):
    journal(folder, a_record("r1"), b"rubbish", a_record("a/b"), a_record("r2"))
    with (folder / "records.jsonl").open("ab") as file:
        file.write(a_record("r3")[:50])
    code, lines = run(folder, broker.url)
    assert code == 1
    path = folder / "records.jsonl"
    assert [line.partition(": ")[0] for line in lines[:3]] == [f"{path} line {number}" for number in (2, 3, 5)]
    assert lines[3:] == ["2 sent, 0 refused, 0 left"]
    assert subscriber(broker, "-C", "2") == [a_record("r1"), a_record("r2")]


def test_a_replay_that_died_while_it_built_the_outbox_is_done_again(folder, broker):
    journal(folder, a_record("r1"), a_record("r2"))
    with Outbox(folder / "outbox.db.unfinished") as outbox:
        outbox.add(f"{DEVICE}:r1", Topics(DEVICE).result("r1"), 1, a_record("r1"))
    assert run(folder, broker.url) == (0, ["2 sent, 0 refused, 0 left"])
    assert subscriber(broker, "-C", "2") == [a_record("r1"), a_record("r2")]


def test_what_was_measured_while_no_broker_was_configured_is_sent_too_and_what_the_outbox_let_go_of_is_not(
    folder, broker
):
    known = encode(made(device_id=DEVICE, run_id="r2", flags=["mqtt", "service"]))
    journal(folder, a_record("r1"), known, a_record("r3"))
    with Outbox(folder / "outbox.db") as outbox:
        for run_id in ("r2", "r3"):
            outbox.add(f"{DEVICE}:{run_id}", Topics(DEVICE).result(run_id), 1, b"{}")
        outbox.mark_sent(1, 2)
        outbox.mark_stored({f"{DEVICE}:r2": None})
        outbox.keep({JOURNALLED: b"r3"})  # as the service does
    assert run(folder, broker.url) == (0, ["1 sent, 0 refused, 0 left"])
    assert subscriber(broker, "-C", "1") == [a_record("r1")]


def test_a_folder_without_results_is_a_usage_error(folder):
    with pytest.raises(UsageError, match=r"contains neither outbox\.db nor records\.jsonl"):
        send(folder, parse_url("mqtt://h"), 1.0, io.StringIO())
    assert not list(folder.iterdir())


def test_the_line_that_a_run_prints_reaches_a_broker_with_an_authority_and_client_certificates(tmp_path, monkeypatch):
    authority, port, err = Authority(tmp_path / "own ca"), free_port(), io.StringIO()
    certificate, key = map(str, authority.issue("client"))
    files = {"ca_file": str(authority.certificate), "certificate_file": certificate, "key_file": key}
    monkeypatch.setenv(PASSWORD_VARIABLE, "right")
    to, one = replace(parse_url(f"mqtts://me@{HOST}:{port}"), **files), made(device_id=DEVICE)
    with closing(MqttSink(to, WAIT_S, tmp_path / "bench out", err)) as sink:
        sink.publish(one, encode(one))
        sink.end()
    program_, verb, *arguments = shlex.split(err.getvalue().splitlines()[-1])
    assert (program_, verb) == ("benchd", "replay")
    with serving(tmp_path, authority, authority.issue("broker"), port):
        done = CliRunner().invoke(app, arguments)
    assert (done.exit_code, done.stdout) == (0, "1 sent, 0 refused, 0 left\n")


def test_an_outbox_of_0_bytes_is_filled_from_the_journal_of_the_service(folder, broker):
    flagged = [encode(made(device_id=DEVICE, run_id=run_id, flags=["mqtt", "service"])) for run_id in ("r1", "r2")]
    journal(folder, *flagged)
    (folder / "outbox.db").touch()
    assert run(folder, broker.url) == (0, ["2 sent, 0 refused, 0 left"])
    assert subscriber(broker, "-C", "2") == flagged


def test_everything_is_sent_when_asked_for_whatever_became_of_it(folder, broker):
    (folder / "runs").mkdir()
    (folder / "runs/records-1000.jsonl.gz").write_bytes(gzip.compress(a_record("r0") + b"\n"))
    journal(folder, a_record("r1"), a_record("r2"), a_record("r3"))
    with Outbox(folder / "outbox.db") as outbox:
        for run_id in ("r1", "r2", "r3"):
            outbox.add(f"{DEVICE}:{run_id}", Topics(DEVICE).result(run_id), 1, a_record(run_id))
        outbox.mark_stored({f"{DEVICE}:r1": None})
        outbox.mark_sent(2)
        outbox.mark_refused(3, "Not authorized")
        outbox.keep({JOURNALLED: b"r3"})
    assert run(folder, broker.url, everything=True) == (0, ["4 sent, 0 refused, 0 left"])
    assert sorted(subscriber(broker, "-C", "4")) == [a_record(f"r{number}") for number in range(4)]
