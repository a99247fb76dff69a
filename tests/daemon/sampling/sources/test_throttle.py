"""What holds a Jetson's clocks down, in the tree of each board; a real one was not at hand."""

import pytest
from boards_read import available
from jetson_trees import ORIN_NANO
from machines import write

from benchd.daemon.sampling.sources.throttle import BRAKE, THERMAL, Throttle

NODE = f"sys/class/devfreq/{ORIN_NANO.gpu}"


def masks(sampler):
    """The masks of the GPU and of the CPU."""
    by_metric = {sample.metric: int(sample.value) for sample in sampler.sample()}
    return by_metric["gpu_throttle_reasons"], by_metric["cpu_throttle_reasons"]


def cool(root, kind, level):
    (kinds,) = [path.parent for path in root.glob("sys/class/thermal/*/type") if path.read_text().strip() == kind]
    write(kinds, {"cur_state": f"{level}\n"})


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        ("cpu-throttle-alert", (0, THERMAL)),
        ("thermal-cpufreq-0", (0, THERMAL)),
        ("gpu-throttle-alert", (THERMAL, 0)),
        ("devfreq-gpu", (THERMAL, 0)),
        ("hot-surface-alert", (0, 0)),
    ],
)
def test_a_cooling_device_at_work(kind, found, nano):
    sampler = available(Throttle(nano))
    cool(nano, kind, 1)
    assert masks(sampler) == found
    cool(nano, kind, 0)
    assert masks(sampler) == (0, 0)


def test_a_limit_of_the_gpu_below_its_highest(nano):
    sampler = available(Throttle(nano))
    write(nano, {f"{NODE}/max_freq": "510000000\n"})
    assert masks(sampler) == (THERMAL, 0)
    write(nano, {f"{NODE}/max_freq": "624750000\n"})
    assert masks(sampler) == (0, 0)


def test_an_over_current_event_counts_once(nano):
    sampler = available(Throttle(nano))
    write(nano, {"sys/class/hwmon/hwmon9/oc2_event_cnt": "5\n"})
    assert masks(sampler) == (BRAKE, BRAKE)
    assert masks(sampler) == (0, 0)


def test_a_file_that_goes_is_an_error(nano):
    sampler = available(Throttle(nano))
    (nano / NODE / "max_freq").write_text("")
    with pytest.raises(ValueError, match="invalid literal"):
        masks(sampler)
