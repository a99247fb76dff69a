import pytest
from boards_read import available
from jetson_trees import AGX_ORIN, BOARDS, ORIN_NANO, THOR, build, show_emc
from machines import desktop, write

from benchd.daemon.sampling.sources.devfreq import Devfreq

NODE = f"sys/class/devfreq/{ORIN_NANO.gpu}"
EMC = "sys/kernel/debug/bpmp/debug/clk/emc/rate"


def read(sampler):
    samples = list(sampler.sample())
    assert all((sample.source, sample.rail) == ("devfreq", "") for sample in samples)
    return {sample.metric: sample.value for sample in samples}


@pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS)
def test_load_and_clock_of_the_gpu_whatever_its_node_is_called(board, tmp_path):
    values = read(available(Devfreq(build(tmp_path, board))))
    assert values == {"gpu_utilization_percent": pytest.approx(43.7), "gpu_clock_hz": 510e6}


def test_a_thor_has_a_clock_and_no_load(tmp_path):
    assert read(available(Devfreq(build(tmp_path, THOR)))) == {"gpu_clock_hz": 510e6}


def test_the_memory_controller_where_the_kernel_shows_it(nano):
    show_emc(nano)
    sampler = available(Devfreq(nano))
    values = read(sampler)
    assert (values["emc_clock_hz"], values["emc_utilization_percent"]) == (2133e6, pytest.approx(25.0))
    write(nano, {EMC: "204000000\n"})  # the average still counts what the faster clock did
    assert read(sampler)["emc_utilization_percent"] == 100.0


def test_the_monitor_of_the_memory_at_its_other_place(nano):
    write(nano, {EMC: "2133000000\n", "sys/kernel/actmon_avg_activity/mc_all": "21330000\n"})
    assert read(available(Devfreq(nano)))["emc_utilization_percent"] == pytest.approx(10.0)


@pytest.mark.parametrize("name", ["cur_freq", "device/load"])
@pytest.mark.parametrize("target", ["/proc/self/mem", "/proc/sys/vm/drop_caches", "/proc", "/nowhere"])
def test_a_file_that_cannot_be_read_is_named(name, target, nano):
    file = nano / NODE / name
    file.unlink()
    file.symlink_to(target)
    metric = {"cur_freq": "gpu_clock_hz", "device/load": "gpu_utilization_percent"}[name]
    assert metric in Devfreq(nano).unavailable()


def test_no_gpu_or_more_than_one(tmp_path):
    assert "0 integrated GPU nodes" in Devfreq(desktop(tmp_path / "desktop")).unavailable()
    root = build(tmp_path, AGX_ORIN)
    write(root, {f"{NODE}/cur_freq": "510000000\n"})
    assert "2 integrated GPU nodes" in Devfreq(root).unavailable()
