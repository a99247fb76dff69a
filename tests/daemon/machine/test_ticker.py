"""What a terminal shows while a command works: a real one, read as its screen."""

import contextlib
import fcntl
import os
import pty
import re
import struct
import termios

import pytest
from waiting import wait_for

from benchd.daemon.machine.standard_streams import STDERR, lasting
from benchd.daemon.machine.ticker import ERASE, show, ticker_of


@pytest.fixture
def terminal(monkeypatch):
    """Return a stream on a terminal of 80 columns, and a function that reads what it got so far."""
    monkeypatch.setenv("TERM", "xterm")
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    os.set_blocking(leader, False)
    got = bytearray()

    def read():
        with contextlib.suppress(BlockingIOError):
            got.extend(os.read(leader, 2**16))
        return bytes(got)

    with os.fdopen(follower, "w") as given:
        stream, _ = lasting(given, STDERR, ticker_of(given))
        show(stream, "")
        yield stream, read
        show(stream, "")
    os.close(leader)


def test_a_wait_shows_what_for_and_a_clock_that_goes_on(terminal):
    stream, read = terminal
    show(stream, "check image 12 of 64")
    wait_for(lambda: len(set(re.findall(rb"check image 12 of 64, (\d+) s", read()))) >= 2)


def test_what_is_timed_is_named_at_once_and_drawn_no_more(terminal):
    stream, read = terminal
    show(stream, "load")
    show(stream, "measure", ticks=False)
    wait_for(lambda: read().endswith(b"measure\r"))
    stream.write("a line\n")
    stream.flush()
    wait_for(lambda: read().endswith(ERASE + b"a line\r\n"))


def test_a_command_that_writes_lines_until_it_is_stopped_has_a_clock_only_until_the_first(terminal):
    stream, read = terminal
    show(stream, "benchd demo", until_output=True)
    wait_for(lambda: b"benchd demo, " in read())
    stream.write("ready\n")
    stream.flush()
    wait_for(lambda: read().endswith(ERASE + b"ready\r\n"))
    assert not stream.buffer.raw.ticker._ticks.is_set()


def test_a_line_replaces_what_was_drawn_and_no_half_line_is_drawn_over(terminal):
    stream, read = terminal
    stream.write("half a line")
    stream.flush()
    show(stream, "measure", ticks=False)
    stream.write(".\n")
    stream.flush()
    wait_for(lambda: read() == b"half a line.\r\n")


def test_elsewhere_nothing_is_drawn(tmp_path):
    with (tmp_path / "out").open("w") as file:
        stream, _ = lasting(file, STDERR, ticker_of(file))
        assert not show(stream, "check")
    assert (tmp_path / "out").read_text() == ""


def test_a_long_line_is_wrapped_between_words_but_json_is_not(terminal):
    stream, read = terminal
    stream.write("  note: " + "words " * 15 + "net.nir --option\n" + "  [...]: " + "words " * 15 + "\n")
    stream.write('{"reason": "' + "word " * 20 + '"}\n')
    stream.flush()
    note = "  note: " + "words " * 11 + "words\r\n  " + "words " * 3 + "net.nir --option\r\n"
    legend = "  [...]: " + "words " * 11 + "words\r\n  " + "words " * 2 + "words\r\n"
    wait_for(lambda: read().endswith((note + legend + '{"reason": "' + "word " * 20 + '"}\r\n').encode()))
