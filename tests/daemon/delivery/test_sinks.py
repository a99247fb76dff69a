"""What bench-once says of results that no broker has taken."""

import io
from contextlib import closing

from broker import HOST, free_port, running_broker
from records_made import made
from waiting import WAIT_S

from benchd.daemon import records
from benchd.daemon.delivery.broker import parse_url
from benchd.daemon.delivery.sinks import MqttSink


def told(folder, url, *device_ids):
    """Publish a record of each device and return the warning at the end of the run."""
    err = io.StringIO()
    with closing(MqttSink(parse_url(url), WAIT_S, folder, err)) as sink:
        for device_id in device_ids:
            record = made(device_id=device_id)
            sink.publish(record, records.encode(record))
        sink.end()
    return err.getvalue()


def test_a_refused_result_is_told_with_the_command_that_sends_it_again(tmp_path):
    acl = tmp_path / "acl"
    acl.write_text("topic readwrite benchd/v1/mine/#\n")
    with running_broker(tmp_path, f"allow_anonymous true\nacl_file {acl}") as broker:
        warning = told(tmp_path / "out", broker.url, "theirs", "mine")
        assert told(tmp_path / "other", broker.url, "mine") == ""
    assert warning == (
        f"warning: not published: {HOST}:{broker.port} refused it: Not authorized. "
        "Nothing is lost; send it later with\n"
        f"  benchd replay {tmp_path}/out --mqtt {broker.url} --dead\n"
    )


def test_what_waits_for_a_broker_that_is_down_needs_no_dead(tmp_path):
    warning = told(tmp_path, f"mqtt://{HOST}:{free_port()}", "mine")
    assert warning.startswith("warning: not published: cannot reach ")
    assert "--dead" not in warning
