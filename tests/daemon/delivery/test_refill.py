"""The outbox gets from the journals what it has never had, each record once and as its original bytes."""

import gzip

import pytest
from records_made import made

from benchd.daemon.delivery.outbox import CLOCK_SET_S, DELIVERED, JOURNALLED, Outbox, open_or_salvage
from benchd.daemon.delivery.refill import after, journals, refill
from benchd.daemon.records import encode


def line(run_id):
    return encode(made(device_id="d", run_id=run_id))[:-1] + b',"later":1}'


def lines(*run_ids):
    return b"".join(line(run_id) + b"\n" for run_id in run_ids)


@pytest.fixture
def folder(tmp_path):
    """A state folder whose journal was put away twice."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/records-1000.jsonl.gz").write_bytes(gzip.compress(lines("r1")))
    (tmp_path / "runs/records-2000.jsonl").write_bytes(lines("r2"))
    (tmp_path / "records.jsonl").write_bytes(lines("r3") + b"rubbish\n" + lines("r4") + b"torn")
    return tmp_path


def test_all_journals_are_taken_the_oldest_first_and_what_is_no_record_is_named(folder):
    with Outbox(folder / "outbox.db") as outbox:
        outbox.add("d:r3", "benchd/v1/d/result/r3", 1, b"already there")
        added, last, unreadable = refill(outbox, journals(folder))
        assert (added, last) == (3, "r4")
        assert [row.key for row in outbox.pending(9)] == ["d:r3", "d:r1", "d:r2", "d:r4"]
        assert outbox.pending(9)[3][2:] == ("benchd/v1/d/result/r4", 1, line("r4"), 4)
        assert [text.partition("records.jsonl line ")[2][:1] for text in unreadable] == ["2", "4"]
        assert refill(outbox, journals(folder)).added == 0


def test_what_a_damaged_outbox_had_delivered_is_not_sent_again(folder):
    path = folder / "outbox.db"
    with Outbox(path) as outbox:
        for run_id in ("r1", "r2", "r3", "r4"):
            outbox.add(f"d:{run_id}", f"t/{run_id}", 1, b"<body>" * 300)
        outbox.mark_sent(1, at_s=CLOCK_SET_S)
        outbox.keep({JOURNALLED: b"r4"})
    torn = path.read_bytes().rfind(b"<body>") // 4096 * 4096  # the page of one of the rows
    with path.open("r+b") as file:
        file.seek(torn)
        file.write(b"\xff" * 4096)
    outbox, told = open_or_salvage(path)
    with outbox:
        assert told
        assert (outbox.kept(JOURNALLED), outbox.kept(DELIVERED)) == (b"", b'["d:r1"]')
        refill(outbox, journals(folder))
        assert sorted(row.key for row in outbox.pending(9)) == ["d:r2", "d:r3", "d:r4"]


def test_what_follows_a_record_or_all_where_that_is_in_a_journal_put_away(folder):
    journal = folder / "records.jsonl"
    assert [record.run_id for record, _ in after(journal, b"r3")] == ["r4"]
    assert [record.run_id for record, _ in after(journal, b"r4")] == []
    assert [record.run_id for record, _ in after(journal, b"r2")] == ["r3", "r4"]
