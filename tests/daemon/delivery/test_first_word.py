"""A site without a collector yet, over a real mosquitto: what was sent before its first word comes again after it."""

from links import acknowledge, acknowledgement, add, counts, linked
from waiting import wait_for

from benchd.daemon.delivery.outbox import PART_ROWS
from benchd.daemon.delivery.topics import Topics

EARLY = [f"r{number}" for number in range(PART_ROWS + 50)]


def test_what_the_broker_took_before_the_first_word_of_a_collector_is_sent_again_in_order(
    mosquitto, device_id, watcher, tmp_path
):
    path, topics = tmp_path / "outbox.db", Topics(device_id)
    add(path, device_id, *EARLY)
    with linked(mosquitto, device_id, path) as (link, _):
        wait_for(lambda: counts(path) == ((0, len(EARLY), 0), 0))
        watcher.until(lambda topic, _: topic == topics.result(EARLY[-1]))  # and say that nobody stored them
        watcher.all.clear()
        add(path, device_id, "last")
        link.poke()
        watcher.until(lambda topic, _: topic == topics.result("last"))
        acknowledge(watcher, topics, "last")
        again = []
        while len(again) < len(EARLY):
            message = watcher.until(lambda topic, _: "/result/" in topic)
            again.append(message.topic.rpartition("/")[2])
            acknowledge(watcher, topics, again[-1])
        assert again == EARLY
        wait_for(lambda: counts(path) == ((0, 0, 0), 0))


def test_a_forged_acknowledgement_removes_nothing_and_holds_nothing(mosquitto, device_id, watcher, tmp_path):
    path, topics = tmp_path / "outbox.db", Topics(device_id)
    add(path, device_id, "r1")
    with linked(mosquitto, device_id, path) as (link, _):
        wait_for(lambda: counts(path) == ((0, 1, 0), 0))
        link.hold()
        add(path, device_id, "pending")
        forged = acknowledgement(topics, "r1", "pending", body=b"guessed")
        watcher.say(f"{topics.root}ack/forger", forged)
        watcher.say(f"{topics.root}ack/old", b'{"keys":["%s:r1"]}' % device_id.encode())
        watcher.until(lambda topic, _: topic.endswith("/ack/old"))
        link.release()
        wait_for(lambda: counts(path) == ((0, 2, 0), 0))
        wait_for(lambda: link.seen.events)
        assert link.seen.events.popleft()[0] == "acknowledgement_ignored"
        acknowledge(watcher, topics, "r1")
        wait_for(lambda: counts(path) == ((0, 1, 0), 1))
