"""Messages from a pipe: whole lines, torn ones, rubbish, a line without an end, the end of the pipe."""

import os
import select
import subprocess

import msgspec
import pytest

from benchd.daemon.machine.lines import Lines, Rubbish


@pytest.fixture
def pipe():
    """Return the lines of a pipe of numbers, and its write end as a file."""
    read_end, write_end = os.pipe()
    with os.fdopen(read_end), os.fdopen(write_end, "wb", buffering=0) as written:
        yield Lines(read_end, msgspec.json.Decoder(int), most_bytes=8), written


def test_a_line_waits_for_its_end_and_reading_never_waits(pipe):
    lines, written = pipe
    assert lines.read() == []
    written.write(b"1\n2\n3")
    assert lines.read() == [1, 2]
    written.write(b"4\n")
    assert (lines.read(), lines.ended) == ([34], False)


def test_what_is_no_message_is_rubbish_and_the_next_line_counts(pipe):
    lines, written = pipe
    written.write(b"{\n\xff\n5\n")
    assert lines.read() == [Rubbish(b"{"), Rubbish(b"\xff"), 5]
    written.write(b"[23456789")
    assert lines.read() == [Rubbish(b"[23456789")], "a line without an end"


def test_what_is_torn_at_the_end_of_the_pipe_is_dropped(pipe):
    lines, written = pipe
    written.write(b"6\n7")
    written.close()
    assert (lines.read(), lines.ended) == ([6], True)
    assert lines.read() == []


@pytest.mark.parametrize("byte", ["0", "\\n"])
def test_who_writes_without_a_pause_keeps_its_reader_from_nothing_else(byte):
    """And takes no more memory than one line may."""
    read_end, write_end = os.pipe()
    with subprocess.Popen(["sh", "-c", f"tr '\\0' '{byte}' </dev/zero"], stdout=write_end) as writer:
        os.close(write_end)
        lines = Lines(read_end, msgspec.json.Decoder(int))
        for _ in range(3):
            select.select([lines], [], [])
            lines.read()
        writer.kill()
    os.close(read_end)
