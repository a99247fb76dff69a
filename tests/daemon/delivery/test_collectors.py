"""Which collectors are known over restarts and silence, and what that means for what waits."""

import time

import pytest

from benchd.daemon.delivery import collectors
from benchd.daemon.delivery.collectors import Collectors
from benchd.daemon.delivery.outbox import Outbox

RESULT, EVENT = "benchd/v1/d/result/r", "benchd/v1/d/event"


@pytest.fixture
def outbox(tmp_path):
    with Outbox(tmp_path / "outbox.db") as outbox:
        outbox.add("d:r", RESULT, 1, b"{}")
        outbox.add("d:e", EVENT, 1, b"{}")
        yield outbox


def awaited(known, outbox):
    return [row.key for row in outbox.pending(10) if known.awaited(row)]


def test_without_a_collector_nothing_is_awaited_and_with_one_only_results_are(outbox):
    known = Collectors(outbox, [])
    assert awaited(known, outbox) == []
    known.take("store", b'{"keys":[]}')
    assert awaited(known, outbox) == ["d:r"]
    assert awaited(Collectors(outbox, []), outbox) == ["d:r"], "forgotten by a restart"
    assert awaited(Collectors(outbox, ["named"]), outbox) == ["d:r"]


@pytest.mark.parametrize("body", [b"", b"[]", b'{"keys":[1]}', b"\xff", b"[" * 100_000, b'{"keys":"d:r"}'])
def test_what_is_no_acknowledgement_makes_nobody_known_and_removes_nothing(outbox, body):
    known = Collectors(outbox, [])
    known.take("store", body)
    assert awaited(known, outbox) == []
    assert outbox.counts().pending == 2


def test_names_that_are_none_and_too_many_are_not_remembered(outbox):
    known = Collectors(outbox, [])
    known.take("a/b", b'{"keys":[]}')
    assert outbox.kept(collectors.SILENT) is None
    for number in range(100):
        known.take(f"c{number}", b'{"keys":[]}')
    assert outbox.kept(collectors.SILENT).count(b'"c') == collectors.MAX_KNOWN


def test_a_collector_that_falls_silent_is_forgotten_with_a_word_and_its_results_count_as_sent(outbox):
    known = Collectors(outbox, [])
    known.take("store", b'{"keys":[]}')
    outbox.mark_sent(outbox.pending(1)[0].seq, at_s=0.0, unstored=True)
    assert known.expire(time.monotonic() + collectors.KNOWN_S - 60) is None
    told = known.expire(time.monotonic() + collectors.KNOWN_S + 60)
    assert told == "no acknowledgement from store for seven days: 1 results now count as sent"
    assert outbox.backlog() == ((1, 1, 0), 0)
    assert outbox.kept(collectors.SILENT) == b"{}"


def test_its_silence_goes_on_over_restarts_and_is_written_once_an_hour(outbox):
    known = Collectors(outbox, [])
    known.take("store", b'{"keys":[]}')
    written, told, nights = [], None, 0
    while not told and nights < 20:
        known, begun_s, nights = Collectors(outbox, []), time.monotonic(), nights + 1
        for minute in range(24 * 60):
            told = told or known.expire(begun_s + 60 * minute)
            written += [kept] if (kept := outbox.kept(collectors.SILENT)) not in written else []
    assert nights == 8
    assert kept == b"{}"
    assert len(written) <= 7 * 24


def test_one_that_was_kept_by_an_earlier_version_is_known(outbox):
    outbox.keep({"collectors": b'["store"]'})
    assert awaited(Collectors(outbox, []), outbox) == ["d:r"]


def test_a_word_after_a_long_silence_is_kept_at_once(outbox):
    outbox.keep({collectors.SILENT: b'{"store":604000}'})
    Collectors(outbox, []).take("store", b'{"keys":[]}')
    assert outbox.kept(collectors.SILENT) == b'{"store":0}'


def test_one_that_is_named_is_never_forgotten(outbox):
    known = Collectors(outbox, ["store"])
    assert known.expire(time.monotonic() + 1e9) is None
    assert awaited(known, outbox) == ["d:r"]


def test_what_a_collector_cannot_read_is_kept_and_sent_again_every_hour_whatever_else_it_stores(outbox):
    known, unread = Collectors(outbox, []), b'{"keys":[],"unread":{"d:r":"record of schema 2"}}'
    outbox.mark_sent(1, at_s=0.0)
    assert known.take("store", unread) == (
        "store cannot read 1 results (record of schema 2); they are kept and sent again every hour"
    )
    begun_s, again = time.monotonic(), []
    for second in range(0, 3 * 3600 + 1, 10):
        assert known.take("store", b'{"keys":["others"]}') is None
        if known.send_again(begun_s + second):
            again.append(second)
            outbox.mark_sent(1, at_s=0.0, unstored=True)
            assert known.take("store", unread) is None
    assert again == [0, 3600, 7200, 10800]
    assert outbox.backlog() == ((1, 1, 0), 1)


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
    known.take("store", b'{"keys":["d:r"]}')
    assert not known.send_again(begun_s + 1e6)
    assert outbox.counts().pending == 1
