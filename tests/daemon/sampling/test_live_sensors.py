"""This machine's sensors in the terminal: real samples, plain lines, an end by time and by a signal."""

import io
import json
import signal
import subprocess
import sys

from waiting import WAIT_S

from benchd.daemon.commands import watch


def test_each_second_is_a_line_with_every_metric(tmp_path):
    script = {"metrics": [{"metric": "power_w", "rail": "VDD_IN", "values": [5.0], "period_s": 1.0}]}
    (tmp_path / "script.json").write_text(json.dumps(script))
    out = UntilSaid()
    watch.watch_sensors([f"fake={tmp_path / 'script.json'}", "procfs"], WAIT_S, out)
    *empty, line = out.getvalue().splitlines()
    assert not any(empty)
    assert "power_w@VDD_IN=5 " in line or line.endswith("power_w@VDD_IN=5")
    assert "memory_available_bytes=" in line


class UntilSaid(io.StringIO):
    """A Ctrl-C after the first line that says something: a sampler that is held up for long says nothing meanwhile."""

    def flush(self):
        if self.getvalue().strip():
            raise KeyboardInterrupt


def test_it_ends_by_itself_after_the_time_that_is_given():
    watch.watch_sensors(["procfs"], 0.1, io.StringIO())


def test_a_signal_ends_it_and_its_sampler(tmp_path):
    command = [
        sys.executable,
        "-c",
        "import sys; from benchd.daemon.commands import watch; watch.watch_sensors(['procfs'], None, sys.stdout)",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert "memory_available_bytes" in child.stdout.readline()
        child.send_signal(signal.SIGTERM)
        child.stdout.read()  # ends only once nobody holds the pipe any more
        assert child.wait(timeout=WAIT_S) == 0
