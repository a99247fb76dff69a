import json

import pytest

from benchd.daemon.errors import UsageError
from benchd.daemon.sampling.sources import load
from benchd.daemon.sampling.sources.fake import Fake

VDD_IN = {"metric": "power_w", "rail": "VDD_IN", "values": [5.0, 15.0, 10.0], "period_s": 0.1}
LOAD = {"metric": "gpu_utilization_percent", "values": [40], "period_s": 1}


def script(folder, **fields):
    path = folder / "script.json"
    path.write_text(json.dumps({"metrics": [VDD_IN, LOAD]} | fields))
    return path


class Clock:
    now_ns = 7_000_000_000

    def __call__(self):
        return self.now_ns


def test_values_are_played_in_a_loop_by_the_clock(tmp_path):
    clock = Clock()
    fake = Fake(script(tmp_path), clock)
    assert fake.unavailable() is None
    readings = []
    for _ in range(8):
        power, load = fake.sample()
        assert (power.metric, power.rail, power.source, power.t_ns) == ("power_w", "VDD_IN", "fake", clock.now_ns)
        assert (load.rail, load.value) == ("", 40.0)
        readings.append(power.value)
        clock.now_ns += 50_000_000
    assert readings == [5.0, 5.0, 15.0, 15.0, 10.0, 10.0, 5.0, 5.0]


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        ({"metrics": [{"metric": "power_w", "values": [1.0]}]}, "period_s"),
        ({"metrics": [VDD_IN | {"period_s": 0}]}, "period_s"),
        ({"metrics": [VDD_IN | {"values": []}]}, "values"),
        ({"metrics": [VDD_IN | {"values": [1.0, None]}]}, "values"),
        ({"metrics": [VDD_IN | {"value": [1.0]}]}, "value"),
        ({"fail_at": 0}, "fail_at"),
        ({"fails_at": 1}, "fails_at"),
        ({"metrics": {}}, "metrics"),
    ],
)
def test_a_bad_script_names_the_key(fields, key, tmp_path):
    path = script(tmp_path, **fields)
    with pytest.raises(UsageError, match=rf"script\.json.*\b{key}\b"):
        load(f"fake={path}")
