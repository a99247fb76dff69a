"""Numbered journals: what is on the disk keeps its number for ever, whatever becomes of the file."""

import gzip
import re
import subprocess
import sys

import msgspec
import pytest
from links import body

from benchd.daemon.delivery import log as module
from benchd.daemon.delivery.disk import tidy
from benchd.daemon.delivery.log import files
from benchd.daemon.errors import Full

OPEN = []
TAIL_BYTES = 2**12


@pytest.fixture(autouse=True)
def _closed():
    yield
    while OPEN:
        OPEN.pop().close()


def opened(path, report=pytest.fail):
    OPEN.append(module.Log(path, report))
    return OPEN[-1]


def numbers(log, after=0, to=module.LAST_SEQ):
    return [(entry.seq, msgspec.json.decode(entry.body)["run_id"]) for entry in log.entries(after, to)]


def filled(path, count, report=pytest.fail):
    log = opened(path, report)
    for number in range(1, count + 1):
        assert log.append(body("d", f"r{number}")) == number
    return log


def test_each_line_begins_with_the_log_and_its_number_and_a_new_start_counts_on(tmp_path):
    log = filled(tmp_path / "records.jsonl", 2)
    again = opened(tmp_path / "records.jsonl")
    assert (again.id, again.last_seq) == (log.id, 2)
    assert again.append(body("d", "r3")) == 3
    records = [msgspec.json.decode(line) for line in (tmp_path / "records.jsonl").read_bytes().splitlines()]
    assert [(record["log"], record["seq"], record["run_id"]) for record in records] == [
        (log.id, n, f"r{n}") for n in (1, 2, 3)
    ]
    assert numbers(again, 1, 2) == [(2, "r2")]


def test_another_process_that_wrote_meanwhile_is_counted(tmp_path):
    log, other = (opened(tmp_path / "records.jsonl") for _ in range(2))
    log.append(body("d", "r1"))
    assert (other.append(body("d", "r2")), log.append(body("d", "r3"))) == (2, 3)
    assert numbers(log) == [(1, "r1"), (2, "r2"), (3, "r3")]


def test_a_line_truncated_by_a_crash_is_set_aside_and_reported_and_later_lines_are_read(tmp_path):
    """Wherever it is cut: a whole line stays, and half of one is moved aside."""
    path = tmp_path / "whole" / "records.jsonl"
    filled(path, 3)
    content = path.read_bytes()
    for size in range(0, len(content), 7):
        reports, cut = [], tmp_path / str(size) / "records.jsonl"
        cut.parent.mkdir()
        cut.write_bytes(content[:size])
        whole, _, torn = content[:size].rpartition(b"\n")
        log = opened(cut, reports.append)
        log.append(body("d", "next"))
        count = len(whole.splitlines())
        assert numbers(log) == [*((n, f"r{n}") for n in range(1, count + 1)), (count + 1, "next")]
        aside = cut.with_name("records.jsonl.damaged")
        assert (aside.read_bytes() if aside.exists() else b"") == (torn + b"\n" if torn else b"")
        wanted = f"{cut}: the last line was truncated, perhaps by a power cut, and is now in records.jsonl.damaged"
        assert reports == [wanted] * bool(torn)


@pytest.mark.parametrize(
    "damage", [b"rubbish", b'{"log":"0000000000000000","seq":2,"run_id":"x"}', b'{"log":', b"a byte of its text"]
)
def test_a_damaged_line_is_reported_once_and_the_others_are_read(tmp_path, damage):
    path, reports = tmp_path / "records.jsonl", []
    filled(path, 3)
    first, second, last = path.read_bytes().splitlines()
    if damage == b"a byte of its text":
        damage = second.replace(b"r2", b"r\xff")
    path.write_bytes(b"\n".join([first, damage, last, b""]))
    log = opened(path, reports.append)
    assert numbers(log) == numbers(log) == [(1, "r1"), (3, "r3")]
    (line,) = reports
    assert line.startswith(f"{path}: a damaged line is skipped")


@pytest.mark.parametrize(
    ("end", "found"),
    [
        (bytes(TAIL_BYTES + 1), [1, 2, 3]),
        (b'{"log":"0000000000000000","seq":4,"run_id":"r4"}\n', [1, 2, 3]),
        (b"\n" * TAIL_BYTES, [1, 2, 3]),
    ],
    ids=["zeros", "another id", "empty lines"],
)
def test_an_end_that_is_damaged_makes_no_other_log_of_the_file(tmp_path, monkeypatch, end, found):
    """As a file system leaves it that wrote the size before the content."""
    monkeypatch.setattr(module, "TAIL_BYTES", TAIL_BYTES)
    path, reports = tmp_path / "records.jsonl", []
    log = filled(path, 3)
    with path.open("ab") as file:
        file.write(end)
    again = opened(path, reports.append)
    again.append(body("d", "next"))
    assert (again.id, numbers(again)) == (log.id, [*((n, f"r{n}") for n in found), (4, "next")])
    assert reports


def test_numbers_go_on_across_archives_which_are_read_compressed_or_not(tmp_path):
    path = tmp_path / "records.jsonl"
    log = filled(path, 3)
    log.rotate(1)
    log.append(body("d", "r4"))
    log.rotate(1)
    tidy(tmp_path / "runs", 0.0)
    log.append(body("d", "r5"))
    log.rotate(1)
    restarted = opened(path)
    assert (restarted.id, restarted.last_seq, restarted.first_seq()) == (log.id, 5, 1)
    restarted.append(body("d", "r6"))
    assert numbers(restarted) == [(n, f"r{n}") for n in range(1, 7)]
    assert numbers(restarted, 3, 5) == [(4, "r4"), (5, "r5")]
    names = [file.name for file in files(tmp_path, "records.jsonl")]
    archived = ["1-3.jsonl.gz", "4-4.jsonl.gz", "5-5.jsonl"]
    assert names == [*(f"records-{log.id}-{name}" for name in archived), "records.jsonl"]
    (tmp_path / "runs" / names[0]).unlink()
    assert restarted.first_seq() == 4
    assert restarted.archived(4) == {tmp_path / "runs" / names[2]}


DAMAGES = {
    "truncated": lambda packed: packed[:60],
    "overwritten": lambda packed: packed[:30] + b"\xff" * 30 + packed[60:],
    "zeros": lambda packed: bytes(len(packed)),
    "not compressed": gzip.decompress,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_archive_is_reported_and_the_rest_is_read(tmp_path, damage):
    reports = []
    log = filled(tmp_path / "records.jsonl", 2, reports.append)
    log.rotate(1)
    (archive,) = (tmp_path / "runs").iterdir()
    archive.with_name(f"{archive.name}.gz").write_bytes(damage(gzip.compress(archive.read_bytes())))
    archive.unlink()
    log.append(body("d", "r3"))
    assert numbers(log)[-1] == (3, "r3")
    assert re.search(r"-1-2\.jsonl\.gz: a damaged archive .*; restore it from a copy", reports[0])


def test_a_reader_goes_on_where_it_was_while_the_file_is_rotated_and_grows(tmp_path):
    log = filled(tmp_path / "records.jsonl", 2)
    reading = log.entries()
    assert next(reading).seq == 1
    log.append(body("d", "r3"))
    log.rotate(1)
    log.append(body("d", "r4"))
    assert [entry.seq for entry in reading] == [2]  # up to what there was
    assert [entry.seq for entry in log.entries(2)] == [3, 4]


def test_a_file_that_is_rotated_just_as_it_is_read_skips_nothing(tmp_path, monkeypatch):
    log, lines = filled(tmp_path / "records.jsonl", 3), module.Log._lines

    def rotated(self, *given):
        monkeypatch.undo()
        log.rotate(1)
        log.append(body("d", "r4"))
        return lines(self, *given)

    monkeypatch.setattr(module.Log, "_lines", rotated)
    assert numbers(log) == [(1, "r1"), (2, "r2"), (3, "r3")]
    assert numbers(log, 2) == [(3, "r3"), (4, "r4")]


def test_a_log_whose_file_was_moved_away_has_no_lines_and_counts_on(tmp_path):
    log = filled(tmp_path / "records.jsonl", 2)
    log.path.rename(tmp_path / "elsewhere")
    assert (numbers(log), log.first_seq()) == ([], 3)
    assert log.append(body("d", "r3")) == 3
    assert numbers(log) == [(3, "r3")]


def test_an_undelivered_archive_outlives_its_age_and_size(tmp_path):
    log = filled(tmp_path / "records.jsonl", 2)
    log.rotate(1)
    tidy(tmp_path / "runs", 1e12, undelivered=log.archived(1))
    assert numbers(log) == [(1, "r1"), (2, "r2")]
    tidy(tmp_path / "runs", 1e12, undelivered=log.archived(2))
    assert numbers(log) == []


def test_a_full_disk_takes_no_half_of_a_line_and_costs_no_number(small_disk):
    log = filled(small_disk / "records.jsonl", 1)
    with pytest.raises(Full, match=r"records\.jsonl: No space left on device; free some space"):
        log.append(body("d", "large", "x" * 2**23))
    assert log.append(body("d", "r2")) == 2
    assert numbers(log) == [(1, "r1"), (2, "r2")]
    OPEN.pop().close()  # the disk is about to go


KILLED = """
import os, signal, sys
from pathlib import Path
from benchd.daemon.delivery.log import Log
log = Log(Path(sys.argv[1]))
os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)
log.append(b'{"device_id":"d","run_id":"killed"}')
"""


def test_nothing_is_told_of_a_line_before_it_is_on_the_disk(tmp_path):
    """It dies in the call that writes through: whoever reads meanwhile has been told of nothing."""
    reader = filled(tmp_path / "records.jsonl", 1)
    subprocess.run([sys.executable, "-c", KILLED, tmp_path / "records.jsonl"], check=False)
    assert (tmp_path / "records.jsonl").read_bytes().count(b"\n") == 2
    assert numbers(reader) == [(1, "r1")]
    assert reader.append(body("d", "r2")) == 3
