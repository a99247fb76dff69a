import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from benchd.daemon.errors import NotAvailable
from benchd.daemon.machine import lock
from benchd.daemon.machine.lock import MachineLock, default_path

HOLD = """
import sys
from pathlib import Path
from benchd.daemon.machine.lock import MachineLock
with MachineLock(Path(sys.argv[1])):
    print("locked", flush=True)
    sys.stdin.read()
"""
BROKER = f"mqtt://me:{'word' * 40}@broker"  # longer than what is told of a command line


@pytest.fixture
def path(tmp_path):
    return tmp_path / "benchd.lock"


@pytest.fixture
def holder(path):
    """Another process that holds the lock until its standard input is closed; its options name a broker."""
    command = [sys.executable, "-X", BROKER, "-c", HOLD, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"locked\n"
        yield process


def locked_by_other(path):
    code = HOLD.replace("sys.stdin.read()", "pass")
    return subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, check=False).returncode != 0


def test_a_second_process_is_told_who_holds_the_lock_and_what_to_do(holder, path):
    with pytest.raises(NotAvailable) as error, MachineLock(path):
        pass
    assert "measured by `-X mqtt://broker -c" in str(error.value)
    assert f"…` (process {holder.pid}); wait until that ends" in str(error.value)
    assert "wait" in str(error.value)
    assert "\n" not in str(error.value)


def test_the_lock_is_free_when_its_holder_ends(holder, path):
    holder.stdin.close()
    holder.wait()
    with MachineLock(path):
        assert locked_by_other(path)
    assert not locked_by_other(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_locks_the_same_file():
    """In a sticky folder that anyone may write to, as /run/lock is, whoever came first."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o1777)
        path = Path(folder, "benchd.lock")
        with MachineLock(path):
            assert as_nobody(path) == 7
        assert as_nobody(path) == 0
        path.unlink()
        assert as_nobody(path) == 0
        assert path.stat().st_uid == 65534
        with MachineLock(path):
            assert as_nobody(path) == 7


def as_nobody(path):
    """Lock as the user nobody; return 0, or 7 where the lock is taken."""
    code = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from benchd.daemon.errors import NotAvailable\n"
        "from benchd.daemon.machine.lock import MachineLock\n"
        "os.setgroups([]), os.setgid(65534), os.setuid(65534)\n"
        "try:\n"
        "    MachineLock(Path(sys.argv[1])).__enter__()\n"
        "except NotAvailable as error:\n"
        "    sys.exit(7 if 'already being measured' in str(error) else 1)\n"
    )
    return subprocess.run([sys.executable, "-c", code, str(path)], check=False).returncode


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/etc/passwd")])
def test_something_else_in_its_place_is_refused(make, path):
    make(path)
    with pytest.raises(NotAvailable, match=r"benchd\.lock"), MachineLock(path):
        pass


def test_the_default_is_the_lock_folder_or_the_temporary_one(tmp_path, monkeypatch):
    monkeypatch.delenv(lock.FOLDER_VARIABLE)
    assert default_path(tmp_path) == tmp_path / "benchd.lock"
    assert default_path(tmp_path / "no") == Path(tempfile.gettempdir()) / "benchd.lock"


def test_who_sets_another_folder_has_a_lock_of_its_own_there(path, tmp_path, monkeypatch):
    monkeypatch.setenv(lock.FOLDER_VARIABLE, str(tmp_path / "of its own"))
    with MachineLock(path), pytest.raises(NotAvailable, match="its folder must exist"), MachineLock():
        pass
    (tmp_path / "of its own").mkdir()
    with MachineLock(path), MachineLock():
        assert (tmp_path / "of its own/benchd.lock").exists()
