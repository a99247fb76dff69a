"""The number that each result has on its way: without a gap in one outbox, and the same when it is sent again."""

from broker import running_broker
from links import add, linked
from waiting import WAIT_S, wait_for

from benchd.daemon.delivery.outbox import STREAM, Outbox
from benchd.daemon.delivery.topics import Topics


def numbers(messages):
    """Return stream, number and run of the results among these messages."""
    given = [
        (dict(message.properties.UserProperty), message.topic) for message in messages if "/result/" in message.topic
    ]
    return [(found["stream"], int(found["seq"]), topic.rpartition("/")[2]) for found, topic in given]


def test_any_subscriber_sees_a_gap_in_the_results(mosquitto, device_id, watcher, tmp_path):
    path, topics = tmp_path / "outbox.db", Topics(device_id)
    with Outbox(path) as outbox:
        for run_id in ("r1", "r2", "r2", "r3"):
            outbox.add(f"{device_id}:{run_id}", topics.result(run_id), 1, b"{}")
            outbox.add(f"{device_id}:event:{run_id}", topics.of("event"), 1, b"{}")
        stream = outbox.kept(STREAM).decode()
        with linked(mosquitto, device_id, path) as (link, _):
            watcher.until(lambda topic, _: topic == topics.result("r3"))
            wait_for(lambda: outbox.counts() == (0, 6, 0))
            assert outbox.mark_stored({f"{device_id}:r1": None, f"{device_id}:r3": None}) == 2
            add(path, device_id, "r4")
            link.poke()
            watcher.until(lambda topic, _: topic == topics.result("r4"))
            assert numbers(watcher.all) == [(stream, number, f"r{number}") for number in (1, 2, 3, 4)]
            watcher.all.clear()
            wait_for(lambda: outbox.counts().pending == 0)
            assert outbox.send_again(2, 3) == 1
            link.replay()
            watcher.until(lambda topic, _: topic == topics.result("r2"))
            assert numbers(watcher.all) == [(stream, 2, "r2")]


def test_what_a_broker_has_forbidden_goes_out_at_the_next_connection_that_may(device_id, tmp_path):
    path, topics, acl = tmp_path / "outbox.db", Topics(device_id), tmp_path / "acl"
    acl.write_text(f"topic read benchd/v1/{device_id}/#\n")
    add(path, device_id, "r1")
    with (
        running_broker(tmp_path, f"allow_anonymous true\nacl_file {acl}") as broker,
        linked(broker, device_id, path),
        Outbox(path) as outbox,
    ):
        wait_for(lambda: outbox.counts().refused == 1)
        assert outbox.send_again(1) == 1, "the command `replay` asks for it"
        outbox.mark_refused(1, f"{broker.host} refused it: Not authorized", may_retry=True)
        outbox.add("too large", topics.result("r2"), 1, b"{}")
        outbox.mark_refused(outbox.pending(1)[0].seq, "9 bytes, but the broker accepts 1")
        acl.write_text("topic readwrite benchd/v1/#\n")
        port = broker.port
        broker.process.terminate()
        broker.process.wait(WAIT_S)  # else it may still answer on the port that the next one is to take
        with running_broker(tmp_path, f"allow_anonymous true\nacl_file {acl}", port=port):
            wait_for(lambda: outbox.counts() == (0, 1, 1))
