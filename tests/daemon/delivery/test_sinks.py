"""What bench-once says of results that no broker has taken."""

import io
import json

from broker import HOST, free_port, running_broker
from records_made import made
from waiting import WAIT_S

from benchd.daemon import records
from benchd.daemon.config import MqttConfig
from benchd.daemon.delivery.sinks import lasting


def told(folder, url, *device_ids):
    """Publish a record of each device and return the warning at the end of the run."""
    err = io.StringIO()
    sinks = lasting(folder, MqttConfig(url=url, timeout_s=WAIT_S), err)
    for device_id in device_ids:
        record = made(device_id=device_id)
        for sink in sinks:
            sink.publish(record, records.encode(record))
    for sink in sinks:
        sink.end()
        sink.close()
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
        f"  benchd replay {tmp_path}/out --mqtt {broker.url}\n"
    )


def test_what_waits_for_a_broker_that_is_down_goes_out_with_the_next_run(mosquitto, device_id, watcher, tmp_path):
    warning = told(tmp_path, f"mqtt://{HOST}:{free_port()}", device_id)
    assert warning.startswith("warning: not published: cannot reach ")
    assert told(tmp_path, mosquitto.url) == ""
    assert told(tmp_path, mosquitto.url, device_id) == ""
    numbers = [json.loads(watcher.until(lambda topic, _: "/result/" in topic).payload)["seq"] for _ in range(2)]
    assert numbers == [1, 2]
