"""A journal after every way a write can end."""

import errno
import os
from contextlib import closing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchd.daemon.errors import Full, UsageError
from benchd.daemon.journal import Journal, explaining, read


def append(path, *records):
    with closing(Journal(path)) as journal:
        for record in records:
            journal.append(record)


def test_records_come_back_as_they_were(tmp_path):
    path = tmp_path / "made" / "here" / "records.jsonl"
    append(path, b'{"a":1}')
    append(path, b'{"b":"\xc3\xa4"}', b"x" * 300_000)
    assert list(read(path)) == [b'{"a":1}', b'{"b":"\xc3\xa4"}', b"x" * 300_000]


@given(st.lists(st.binary(max_size=20).filter(lambda record: b"\n" not in record), min_size=1), st.data())
def test_a_record_after_a_crash_has_a_line_of_its_own(tmp_path_factory, records, data):
    path = tmp_path_factory.mktemp("journal") / "records.jsonl"
    append(path, *records)
    whole = path.read_bytes()
    size = data.draw(st.integers(0, len(whole)))
    os.truncate(path, size)
    append(path, b"after")
    lines = list(read(path))
    complete = whole[:size].count(b"\n")
    assert lines[:complete] == records[:complete]
    assert lines[-1] == b"after"
    assert len(lines) <= complete + 2


@pytest.mark.parametrize("put_there", ["before", "meanwhile"])
@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/full")], ids=["pipe", "device"])
def test_a_pipe_or_a_device_is_no_journal(tmp_path, make, put_there):
    path = tmp_path / "records.jsonl"
    if put_there == "before":
        make(path)
        with pytest.raises(UsageError, match=r"records\.jsonl: not a regular file; move it away"):
            Journal(path)
        return
    with closing(Journal(path)) as journal:
        path.unlink()
        make(path)
        with pytest.raises(UsageError, match="not a regular file"):
            journal.append(b"{}")
        path.unlink()
        journal.append(b"{}")
    assert list(read(path)) == [b"{}"]


@pytest.mark.parametrize(
    ("number", "is_full"),
    [(errno.ENOSPC, True), (errno.EDQUOT, True), (errno.EIO, True), (errno.EROFS, True), (errno.EACCES, False)],
)
def test_a_disk_that_fails_is_told_from_a_path_that_is_wrong(number, is_full, tmp_path):
    """A service waits for the first, and gives up what it was to do for the second."""
    with pytest.raises(UsageError) as refused, explaining(tmp_path):
        raise OSError(number, os.strerror(number))
    assert isinstance(refused.value, Full) is is_full
