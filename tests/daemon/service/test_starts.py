"""How long a start waits after others that did not last, and what counts as one that lasted."""

import time

import msgspec
import pytest

from benchd.daemon.service.starts import FILE, STEADY_S, Starts, counted, delay_s


def test_starts_that_do_not_last_wait_longer_and_longer_up_to_a_minute():
    assert [delay_s(failed) for failed in (*range(8), 5000)] == [0, 0, 5, 10, 20, 40, 60, 60, 60]


@pytest.mark.parametrize(("ran_s", "failed"), [(0.0, 2), (STEADY_S + 1, 1)])
def test_only_a_start_that_was_steady_ends_the_count(tmp_path, monkeypatch, ran_s, failed):
    monkeypatch.setenv("RUNTIME_DIRECTORY", str(tmp_path))
    file = tmp_path / FILE
    file.write_bytes(msgspec.json.encode(Starts(1, time.monotonic() - ran_s, "no disk")))
    with counted() as said:
        assert said == (None if failed == 1 else "started again after 1 starts that did not last: no disk")
        assert msgspec.json.decode(file.read_bytes(), type=Starts).failed == failed
    assert not file.exists()
