"""What tests of the commands share: limits that keep a run short, and our programs in a folder of the test's own."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TextIO

import pytest
from forked import Program
from records_made import PASSED, made, timing
from waiting import WAIT_S

from benchd.daemon import cli
from benchd.daemon.records import Case, ProcessResult, Variant, encode

TINY = """
[device]
id = "test-device"

[limits]
warm_up_cap_s = 0.05
measure_cap_s = 0.1
check_images = 1
"""
LIMITS = ("--config", "tiny.toml", "--preset", "quick", "--device", "cpu", "--output", "out")
Run = Callable[..., subprocess.CompletedProcess[str]]
Begun = tuple[Program, TextIO]


@pytest.fixture
def command(tmp_path: Path, child_environment: dict[str, str]) -> Run:
    """Return a function that runs one of our programs in `tmp_path`, where tiny.toml lies, and returns how it ended."""
    (tmp_path / "tiny.toml").write_text(TINY)

    def run(program: str, *arguments: str, cwd: Path = tmp_path, **variables: str) -> subprocess.CompletedProcess[str]:
        line = [Path(sys.executable).parent / program, *arguments]
        environment = child_environment | variables
        return subprocess.run(
            line, check=False, timeout=WAIT_S, cwd=cwd, env=environment, capture_output=True, text=True
        )

    return run


@pytest.fixture
def here(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    child_environment: dict[str, str],
) -> Run:
    """Return a function as `command` that runs the program in this process, and forks its workers."""
    (tmp_path / "tiny.toml").write_text(TINY)
    monkeypatch.chdir(tmp_path)
    for name in os.environ.keys() - child_environment.keys():
        monkeypatch.delenv(name)
    for name in ("XDG_STATE_HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, child_environment[name])

    def run(program: str, *arguments: str, limits: tuple[str, ...] | None = None) -> subprocess.CompletedProcess[str]:
        if limits is None:
            limits = LIMITS if program == "bench-once" else ()
        monkeypatch.setattr(sys, "argv", [program, *limits, *arguments])  # a test's own options come last, and hold
        with pytest.raises(SystemExit) as end:
            {"benchd": cli.benchd, "bench-once": cli.bench_once}[program]()
        captured = capfd.readouterr()
        return subprocess.CompletedProcess(arguments, int(end.value.code or 0), captured.out, captured.err)

    return run


@pytest.fixture
def begun(tmp_path: Path, child_environment: dict[str, str]) -> Callable[..., AbstractContextManager[Begun]]:
    """Return a function that starts one of our programs in `tmp_path`, forked, and yields it and what it says."""
    (tmp_path / "tiny.toml").write_text(TINY)

    @contextmanager
    def start(program: str, *arguments: str) -> Iterator[Begun]:
        # who starts the tests in the background has them ignore SIGINT
        code = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        code += f"from benchd.daemon import cli; sys.exit(cli.{program.replace('-', '_')}())"
        read_end, write_end = os.pipe()
        given = (code, [program, *arguments], tmp_path, child_environment, write_end)
        with os.fdopen(read_end) as stream, Program(*given) as process:
            os.close(write_end)
            yield process, stream

    return start


@pytest.fixture
def once(here: Run) -> Run:
    """Return a function that runs bench-once with tiny limits, writes to `out` and waits for whoever measures now."""
    return lambda *arguments: here("bench-once", *arguments, "--wait")


@pytest.fixture
def once_apart(command: Run) -> Run:
    """Return a function as `once` that starts new interpreters, of the command and of each worker."""
    return lambda *arguments, **variables: command("bench-once", *arguments, *LIMITS, "--wait", **variables)


@pytest.fixture
def results(tmp_path: Path) -> Callable[..., str]:
    """Return a function that writes three runs of two variants, `custom` so many times as fast as `eager`."""

    def written(name: str, scale: float = 1.0, ratio: float = 2.0) -> str:
        lines = []
        for number in range(3):
            for variant, median_ms in (("eager", 10.0), ("custom", 10.0 / ratio)):
                times = [timing(scale * median_ms * (1 + step / 1000)) for step in (number, 1, 2)]
                record = made(
                    run_id=f"{name}{number}{variant}",
                    suite_id=f"{name}{number}",
                    case=Case(model="vim_tiny", variant=Variant.parse(variant)),
                    timing=times[1],
                    check=PASSED,
                    processes=[ProcessResult(status="ok", timing=process_timing) for process_timing in times],
                )
                lines.append(encode(record) + b"\n")
        (tmp_path / name).write_bytes(b"".join(lines))
        return name

    return written
