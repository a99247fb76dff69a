"""A topic of a device is always below the device, whatever an id holds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchd.daemon.delivery.topics import Topics
from benchd.daemon.errors import UsageError


def test_a_result_has_a_topic_of_its_own():
    assert Topics("orin-7_a1b2c3").result("0f.A-9_z") == "benchd/v1/orin-7_a1b2c3/result/0f.A-9_z"


@pytest.mark.parametrize("device_id", ["", "Orin", "a/b", "a+", "#", "-a", "_a", "a b", "a\n", "ä", "a\0"])
def test_a_device_id_is_a_lower_case_slug(device_id):
    with pytest.raises(UsageError, match="device id"):
        Topics(device_id)


@given(st.text() | st.text("ab/+#.$\n", max_size=4))
def test_a_run_id_adds_one_plain_level_or_is_refused(run_id):
    try:
        topic = Topics("d").result(run_id)
    except UsageError:
        return
    assert topic.split("/") == ["benchd", "v1", "d", "result", run_id]
    assert run_id
    assert not set(run_id) & set("+#\n\0")
