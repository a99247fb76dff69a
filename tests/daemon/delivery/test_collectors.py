"""Which collectors are known over restarts and silence, and what that means for what waits."""

import time

import msgspec
import pytest

from benchd.daemon.delivery import collectors
from benchd.daemon.delivery.collectors import Collectors
from benchd.daemon.delivery.outbox import PART_ROWS, Message, Outbox, body_digest

RESULT, EVENT, REASON = "benchd/v1/d/result/r", "benchd/v1/d/event", "record of schema 2"


@pytest.fixture
def outbox(tmp_path):
    with Outbox(tmp_path / "outbox.db") as outbox:
        outbox.add("d:r", RESULT, 1, b"{}")
        outbox.add("d:e", EVENT, 1, b"{}")
        yield outbox


def awaited(known, outbox):
    return [row.key for row in outbox.pending(10) if known.awaited(row)]


def ack(*keys, body=b"{}", unread=()):
    digests = dict.fromkeys((*keys, *unread), body_digest(body))
    return msgspec.json.encode({"keys": keys, "unread": dict.fromkeys(unread, REASON), "digests": digests})


def hear(known, outbox, name="store"):
    """Let a collector prove that it stores."""
    outbox.add("d:proof", RESULT, 1, b"{}")
    outbox.mark_sent(outbox.pending(10)[-1].seq, at_s=0.0)
    known.take(name, ack("d:proof"))


def test_without_a_collector_nothing_is_awaited_and_with_one_only_results_are(outbox):
    known = Collectors(outbox, [])
    assert awaited(known, outbox) == []
    hear(known, outbox)
    assert awaited(known, outbox) == ["d:r"]
    assert awaited(Collectors(outbox, []), outbox) == ["d:r"], "forgotten by a restart"
    assert awaited(Collectors(outbox, ["named"]), outbox) == ["d:r"]


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b'{"keys":[1]}', b"\xff", b"[" * 100_000, b'{"keys":"d:r"}', ack("d:r"), ack("d:r", body=b"[]")],
)
def test_what_is_no_acknowledgement_makes_nobody_known_and_removes_nothing(outbox, body):
    known = Collectors(outbox, [])
    known.take("store", body)
    assert awaited(known, outbox) == []
    assert outbox.counts().pending == 2


def test_names_that_are_none_and_too_many_are_not_remembered(outbox):
    known = Collectors(outbox, [])
    hear(known, outbox, "a/b")
    assert outbox.kept(collectors.SILENT) is None
    for number in range(100):
        hear(known, outbox, f"c{number}")
    assert outbox.kept(collectors.SILENT).count(b'"c') == collectors.MAX_KNOWN


def test_a_collector_that_falls_silent_is_forgotten_with_a_word_and_its_results_count_as_sent(outbox):
    known = Collectors(outbox, [])
    hear(known, outbox)
    outbox.mark_sent(outbox.pending(1)[0].seq, at_s=0.0, unstored=True)
    assert known.expire(time.monotonic() + collectors.KNOWN_S - 60) is None
    told = known.expire(time.monotonic() + collectors.KNOWN_S + 60)
    assert told == "no acknowledgement from store for seven days: 1 results now count as sent"
    assert outbox.backlog() == ((1, 1, 0), 0)
    assert outbox.kept(collectors.SILENT) == b"{}"


def test_its_silence_goes_on_over_restarts_and_is_written_once_an_hour(outbox):
    known = Collectors(outbox, [])
    hear(known, outbox)
    written, told, nights = [], None, 0
    while not told and nights < 20:
        known, begun_s, nights = Collectors(outbox, []), time.monotonic(), nights + 1
        for minute in range(24 * 60):
            told = told or known.expire(begun_s + 60 * minute)
            written += [kept] if (kept := outbox.kept(collectors.SILENT)) not in written else []
    assert nights == 8
    assert kept == b"{}"
    assert len(written) <= 7 * 24


def test_a_word_after_a_long_silence_is_kept_at_once(outbox):
    outbox.keep({collectors.SILENT: b'{"store":604000}'})
    hear(Collectors(outbox, []), outbox)
    assert outbox.kept(collectors.SILENT) == b'{"store":0}'


def test_one_that_is_named_is_never_forgotten(outbox):
    known = Collectors(outbox, ["store"])
    assert known.expire(time.monotonic() + 1e9) is None
    assert awaited(known, outbox) == ["d:r"]


def test_what_a_collector_cannot_read_is_kept_and_sent_again_every_hour_whatever_else_it_stores(outbox):
    known, unread = Collectors(outbox, []), ack(unread=["d:r"])
    outbox.mark_sent(1, at_s=0.0)
    assert known.take("store", unread) == (
        "not_stored",
        "store cannot read 1 results (record of schema 2); they are kept and sent again every hour",
    )
    begun_s, again = time.monotonic(), []
    for second in range(0, 3 * 3600 + 1, 10):
        hear(known, outbox)
        if known.send_again(begun_s + second):
            again.append(second)
            outbox.mark_sent(1, at_s=0.0, unstored=True)
            assert known.take("store", unread) is None
    assert again == [0, 3600, 7200, 10800]
    assert outbox.backlog() == ((1, 1, 0), 1)


def test_that_a_result_cannot_be_read_must_be_proven_too_and_makes_its_collector_known(outbox):
    known = Collectors(outbox, ["named"])
    outbox.mark_sent(1, at_s=0.0)
    assert known.take("store", ack(unread=["d:r"], body=b"other")) is None
    assert known.take("store", b'{"keys":[],"unread":{"d:r":"?"}}')[0] == "acknowledgement_ignored"
    assert known.take("a/b", ack(unread=["d:r"])) is None
    assert (outbox.backlog(), outbox.kept(collectors.SILENT)) == (((1, 1, 0), 0), None)
    assert known.take("named", b'{"keys":[],"unread":{"d:r":"?"}}')[0] == "not_stored"
    assert known.take("store", ack(unread=["d:r"]))[0] == "not_stored"
    assert (outbox.backlog(), outbox.kept(collectors.SILENT)) == (((1, 1, 0), 1), b'{"named":0,"store":0}')


def test_one_that_cannot_be_read_keeps_no_part_of_the_others_waiting(outbox):
    outbox.add_all([Message(f"d:{number}", RESULT, 1, b"{}") for number in range(2)])
    outbox.mark_sent(2, at_s=0.0)
    outbox.mark_sent(1, 3, 4, at_s=0.0, unstored=True)
    known, now_s = Collectors(outbox, ["store"]), time.monotonic()
    assert known.send_again(now_s)
    outbox.mark_sent(1, 3, 4, at_s=0.0, unstored=True)
    known.take("store", ack("d:0", "d:1"))
    assert not known.send_again(now_s)
    known.take("store", ack(unread=["d:r"]))
    outbox.add("d:2", RESULT, 1, b"{}")
    outbox.mark_sent(5, at_s=0.0, unstored=True)
    assert known.send_again(now_s)
    assert [row.key for row in outbox.pending(9)] == ["d:2"]


def test_all_that_cannot_be_read_goes_out_at_once_each_hour(outbox):
    keys = [f"d:{number}" for number in range(PART_ROWS + 1)]
    outbox.add_all([Message(key, RESULT, 1, b"{}") for key in keys])
    outbox.mark_sent(*range(1, PART_ROWS + 4), at_s=0.0)
    known = Collectors(outbox, [])
    known.take("store", ack(unread=keys))
    assert known.send_again(time.monotonic())
    assert [row.key for row in outbox.pending(2 * PART_ROWS)][-len(keys) :] == keys


def test_what_nobody_stores_is_sent_again_later_and_later_until_somebody_does(outbox):
    known = Collectors(outbox, ["store"])
    outbox.mark_sent(outbox.pending(1)[0].seq, at_s=0.0, unstored=True)
    begun_s = time.monotonic()
    assert known.send_again(begun_s)
    again = []
    for second in range(1, 1000):
        outbox.mark_sent(1, at_s=0.0, unstored=True)
        if known.send_again(begun_s + second):
            again.append(second)
    assert again == [30, 90, 210, 450, 930]
    known.take("store", ack("d:r"))
    assert not known.send_again(begun_s + 1e6)
    assert outbox.counts().pending == 1


def test_only_who_has_received_a_sent_result_can_acknowledge_it(outbox):
    known = Collectors(outbox, ["named"])
    for name, said in (("named", b'{"keys":["d:r"]}'), ("store", ack("d:r"))):
        known.take(name, said)
        assert outbox.counts().pending == 2, "no broker has it"
    outbox.mark_sent(1, at_s=0.0)
    known.take("named", ack("d:r", body=b"other"))
    known.take("store", ack("d:r", body=b"other"))
    told = [known.take(name, b'{"keys":["d:r"]}') for name in ("x/y", "store", "store")]
    assert [bool(line) for line in told] == [False, True, False]
    assert "store without digests are ignored: upgrade it, or name it in [mqtt] collectors" in told[1][1]
    assert (outbox.counts().sent, outbox.kept(collectors.SILENT)) == (1, None)
    known.take("named", b'{"keys":["d:r"]}')
    assert outbox.counts().sent == 0


def test_one_on_its_way_again_can_be_acknowledged(outbox):
    outbox.mark_sent(1, at_s=0.0, unstored=True)
    assert outbox.send_unstored() == 1
    Collectors(outbox, []).take("store", ack("d:r"))
    assert outbox.counts() == (1, 0, 0)


def test_what_was_sent_before_a_collector_was_known_is_not_stored_and_goes_out_again_in_order_and_in_parts(outbox):
    outbox.add_all([Message(f"d:{number}", RESULT, 1, b"{}") for number in range(2 * PART_ROWS)])
    outbox.mark_sent(*range(1, 2 * PART_ROWS + 3), at_s=0.0)
    known, now_s = Collectors(outbox, []), time.monotonic()
    assert not known.send_again(now_s)
    hear(known, outbox)
    sent = []
    for turn in range(5):
        known.send_again(now_s + 100 * (turn + 1))
        rows = outbox.pending(10 * PART_ROWS)
        assert len(rows) <= PART_ROWS
        known.take("store", ack(*(row.key for row in rows)))
        sent += [row.key for row in rows]
    assert sent == ["d:r", *(f"d:{number}" for number in range(2 * PART_ROWS))]
    assert outbox.counts() == (0, 1, 0), "the event was sent, and nobody stores it"


def test_the_next_part_goes_out_at_once_when_the_last_one_is_stored(outbox):
    outbox.add_all([Message(f"d:{number}", RESULT, 1, b"{}") for number in range(PART_ROWS)])
    outbox.mark_sent(*range(1, PART_ROWS + 3), at_s=0.0, unstored=True)
    known, now_s = Collectors(outbox, ["store"]), time.monotonic()
    assert known.send_again(now_s)
    first, *rest = (row.key for row in outbox.pending(PART_ROWS))
    known.take("store", ack(first))
    assert not known.send_again(now_s)
    known.take("store", ack(*rest))
    assert known.send_again(now_s)
    assert outbox.counts().pending == 2
