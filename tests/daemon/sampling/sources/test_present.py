"""Which samplers a machine shows: whole fake trees, and none of the hardware of this one."""

import jetson_trees
import machines
import pytest

from benchd.daemon.records import Sample, Window
from benchd.daemon.sampling.energy import measure
from benchd.daemon.sampling.sources import SAMPLERS, load, present
from benchd.daemon.sampling.sources.ina3221 import Ina3221
from benchd.daemon.sampling.sources.jtop import Jtop, _Reading


def test_a_jetson_reads_its_rails_first_and_never_nvml(tmp_path):
    root = jetson_trees.build(tmp_path, jetson_trees.ORIN_NANO)
    assert present("cuda", root=root) == ["ina3221", "procfs", "devfreq", "throttle", "thermal"]


def test_a_thor_reads_its_module_s_input_and_no_usb_supply(tmp_path):
    root = jetson_trees.build(tmp_path, jetson_trees.THOR)
    assert present("cuda", root=root) == ["ina238", "procfs", "devfreq", "throttle", "thermal", "nvml"]
    assert present("cpu", root=root) == ["ina238", "procfs", "devfreq", "throttle", "thermal"]
    sampler = load(f"ina238={root}")
    assert sampler.unavailable() is None
    (sample,) = sampler.sample()
    assert (sample.rail, sample.value) == ("VIN", 31.25)


def test_jtop_is_read_where_its_service_runs_and_its_rails_check_those_of_the_board(tmp_path):
    root = jetson_trees.build(tmp_path, jetson_trees.ORIN_NANO)
    machines.write(root, {"run/jtop.sock": ""})
    names = present("cuda", root=root)
    assert names.index("ina3221") < names.index("devfreq") < names.index("jtop")
    board, jtop = Ina3221(root), Jtop()
    assert board.unavailable() is None
    jtop._first = _Reading(1.0, 0.5, ("VDD_IN", 5.9), [])
    samples = [Sample(i * 10**8, "power_w", 5.98 + i % 2 * 1e-3, "ina3221", "VDD_IN") for i in range(200)]
    samples += [Sample(i * 5 * 10**8, "power_w", 5.90 + i % 2 * 1e-3, "jtop", "VDD_IN") for i in range(40)]
    sources = [*board.power_sources(), *jtop.power_sources()]
    energy = measure(samples, sources, Window(4 * 10**9, 16 * 10**9), 100, 0.05)
    assert (energy.source, energy.cross_check.source) == ("ina3221", "jtop")
    assert energy.cross_check.energy_j / energy.energy_j == pytest.approx(5.90 / 5.98, abs=2e-3)


@pytest.mark.parametrize(
    ("device", "uuid", "first"), [("cpu", None, "rapl"), ("cuda", None, "nvml"), ("cuda", "GPU-12", "nvml=GPU-12")]
)
def test_a_desktop_s_best_power_source_is_that_of_the_device(tmp_path, device, uuid, first):
    root = machines.desktop(tmp_path)
    (root / "sys/class/powercap/intel-rapl:0").mkdir(parents=True)
    assert present(device, uuid, root)[0] == first
    assert "ina3221" not in present(device, uuid, root)


def test_what_this_machine_shows_can_be_loaded():
    names = present("cpu")
    assert "procfs" in names
    assert {load(name).name for name in names} == set(names) <= set(SAMPLERS)
