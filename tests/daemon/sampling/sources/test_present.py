"""Which samplers a machine shows: whole fake trees, and none of the hardware of this one."""

import jetson_trees
import machines
import pytest

from benchd.daemon.sampling.sources import SAMPLERS, load, present


def test_a_jetson_reads_its_rails_first_and_never_nvml(tmp_path):
    root = jetson_trees.build(tmp_path, jetson_trees.ORIN_NANO)
    assert present("cuda", root=root) == ["ina3221", "procfs", "devfreq", "thermal"]


@pytest.mark.parametrize(
    ("device", "uuid", "first"), [("cpu", None, "rapl"), ("cuda", None, "nvml"), ("cuda", "GPU-12", "nvml=GPU-12")]
)
def test_a_desktop_s_best_power_source_is_that_of_the_device(tmp_path, device, uuid, first):
    root = machines.desktop(tmp_path)
    (root / "sys/class/powercap/intel-rapl:0").mkdir(parents=True)
    assert present(device, uuid, root)[0] == first
    assert "ina3221" not in present(device, uuid, root)


def test_what_this_machine_shows_can_be_loaded():
    shown = present("cpu")
    assert "procfs" in shown
    assert {load(name).name for name in shown} == set(shown) <= set(SAMPLERS)
