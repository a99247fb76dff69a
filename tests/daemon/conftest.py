"""A device of the test's own on the broker of the whole run, and who hears it."""

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
