"""A device of the test's own on the broker of the whole run, and who hears it; a disk that is soon full."""

import subprocess
import uuid

import pytest
from links import Watcher


@pytest.fixture
def device_id():
    return f"d{uuid.uuid4().hex[:8]}"


@pytest.fixture
def watcher(mosquitto, device_id):
    watcher = Watcher(mosquitto, device_id)
    yield watcher
    watcher.close()


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 4 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", folder], check=False, capture_output=True
    )
    if mounted.returncode:
        pytest.skip("needs the right to mount a small tmpfs")
    yield folder
    subprocess.run(["umount", folder], check=True)
