"""What cannot be deployed as files is refused before its check and its measurement, and only where it will ship."""

import msgspec
import pytest
from worker_jobs import job, run_here, user_module

from benchd.daemon.measuring.protocol import Race

NESTED = 'return {"found": [self.fc(images.flatten(1))]}'


@pytest.mark.parametrize(
    ("forward", "told"),
    [(NESTED, "its answers are nested (found[0]): return a flat dict or tuple"), ("pass", "")],
)
def test_a_variant_that_cannot_be_deployed_is_not_measured(tmp_path, forward, told):
    asked = job(tmp_path, module=user_module(tmp_path, forward=forward))
    found = run_here(msgspec.structs.replace(asked, recipe=Race()))
    assert (found.process.status, told in (found.process.reason or "")) == ("unsupported" if told else "ok", True)
    assert (found.check is None, found.process.timing is None) == (bool(told), bool(told))


def test_it_is_measured_if_it_will_not_ship(tmp_path):
    found = run_here(job(tmp_path, module=user_module(tmp_path, forward=NESTED)))
    assert found.process.timing
