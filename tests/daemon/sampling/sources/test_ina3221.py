import time

import pytest
from boards_read import available, read
from jetson_trees import (
    AGX_ORIN,
    BOARDS,
    ORIN_NANO,
    Rail,
    add_chip,
    build,
    rail,
    rebind,
    rename_rail,
    set_rail,
)
from machines import desktop, write

from benchd.daemon.sampling.sources import PowerMeter
from benchd.daemon.sampling.sources.ina3221 import MODULE_RAILS, RESET_PERIOD_S, Ina3221

EIO = "/proc/self/mem"  # nothing is mapped at 0
EACCES = "/proc/sys/vm/drop_caches"  # for writing only, even for root
FAULTS = {"Input/output error": EIO, "Permission denied": EACCES, "Is a directory": "/proc"}


def put_link(file, target):
    file.unlink()
    file.symlink_to(target)


@pytest.fixture
def agx(tmp_path):
    return build(tmp_path, AGX_ORIN)


@pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS)
def test_each_rail_is_volts_times_amps(board, tmp_path):
    watts, error = read(available(Ina3221(build(tmp_path, board))))
    assert error is None
    assert {rail: value for rail, value in watts.items() if rail} == pytest.approx(board.rails())


@pytest.mark.parametrize("name", ["orin_nano", "orin_nx"])
def test_the_total_of_a_module_with_an_input_rail_is_that_rail(name, tmp_path):
    sampler = available(Ina3221(build(tmp_path, BOARDS[name])))
    assert isinstance(sampler, PowerMeter)
    first, *parts = sampler.power_sources()
    assert (first.rail, first.scope, first.total) == ("VDD_IN", "module input VDD_IN", True)
    assert [(part.rail, part.total) for part in parts] == [("VDD_CPU_GPU_CV", False), ("VDD_SOC", False)]
    assert "" not in read(sampler)[0]


def test_the_total_of_an_agx_is_a_sum_that_counts_the_memory_once(agx):
    sampler = available(Ina3221(agx))
    first, *parts = sampler.power_sources()
    assert first.scope == "sum of module rails VDD_GPU_SOC + VDD_CPU_CV + VIN_SYS_5V0"
    assert (first.rail, first.total) == ("", True)
    assert {part.rail for part in parts} == {*MODULE_RAILS, "VDDQ_VDD2_1V8AO"}
    assert not any(part.total for part in parts)
    assert read(sampler)[0][""] == pytest.approx(19.04 * 0.320 + 19.04 * 0.180 + 5.032 * 0.960)


@pytest.mark.parametrize(
    ("interval", "samples", "period_s", "averaging_s"),
    [("7", "1", 0.007, 0.0), ("7", "16", 0.007, 0.112), (None, None, RESET_PERIOD_S, 0.0)],
)
def test_period_and_averaging_are_those_the_chip_is_set_to(interval, samples, period_s, averaging_s, nano):
    folder, _ = rail(nano, "VDD_IN")
    for name, value in (("update_interval", interval), ("samples", samples)):
        (folder / name).unlink() if value is None else write(folder, {name: f"{value}\n"})
    for source in available(Ina3221(nano)).power_sources():
        assert (source.period_s, source.averaging_s) == pytest.approx((period_s, averaging_s))


def test_stamps_lie_within_the_reading_and_go_on_where_a_value_stands_still(nano):
    sampler = available(Ina3221(nano))
    stamps = []
    for _ in range(2):
        before_ns = time.monotonic_ns()
        samples = list(sampler.sample())
        assert all(before_ns <= sample.t_ns <= time.monotonic_ns() for sample in samples)
        assert {(sample.metric, sample.source) for sample in samples} == {("power_w", "ina3221")}
        stamps += [sample.t_ns for sample in samples]
    assert stamps == sorted(set(stamps))


@pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS)
def test_a_driver_bound_again_costs_a_reading_and_changes_no_rail(board, tmp_path):
    sampler = available(Ina3221(build(tmp_path, board)))
    before = read(sampler)
    rebind(tmp_path)
    watts, error = read(sampler)
    assert watts == {}
    assert all(label in error for label in board.rails())
    assert read(sampler) == before


def test_a_rail_that_is_renamed_ends_and_its_new_name_is_not_taken_for_another(nano):
    sampler = available(Ina3221(nano))
    rename_rail(nano, "VDD_IN", "VDD_5V")
    for _ in range(2):
        watts, error = read(sampler)
        assert watts.keys() == {"VDD_CPU_GPU_CV", "VDD_SOC"}
        assert "rail VDD_IN" in error
        assert "VDD_5V" in error


@pytest.mark.parametrize("board", [ORIN_NANO, AGX_ORIN], ids=["nano", "agx"])
def test_a_rail_beside_the_module_s_power_that_fails_from_the_start_costs_only_its_own_values(board, tmp_path):
    root, (*_, lost) = build(tmp_path, board), board.rails()  # a part of the whole, or a rail behind one
    before = read(available(Ina3221(root)))[0]
    set_rail(root, lost, "garbage", 1)
    watts, error = read(available(Ina3221(root)))
    assert watts == {rail: value for rail, value in before.items() if rail != lost}
    assert f"rail {lost}" in error


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_label_that_fails(fault, nano):
    sampler = available(Ina3221(nano))
    label = rail(nano, "VDD_IN")[0] / "in1_label"
    rename_rail(nano, "VDD_IN", "")
    put_link(label, fault)
    assert "in1_label cannot be read" in Ina3221(nano).unavailable()
    watts, error = read(sampler)
    assert watts.keys() == {"VDD_CPU_GPU_CV", "VDD_SOC"}
    assert "rail VDD_IN" in error


@pytest.mark.parametrize(
    ("millivolts", "milliamps"),
    [
        ("", 1200),
        ("garbage", 1200),
        (4984, "32760 ma"),
        (4984, "1200.5"),
        (0, 1200),
        (-8, 1200),
        (32760, 1200),
        (4984, 32760),
        (4984, -1200),
    ],
)
def test_a_value_that_no_sensor_can_have_is_none(millivolts, milliamps, nano):
    sampler = available(Ina3221(nano))
    set_rail(nano, "VDD_IN", millivolts, milliamps)
    watts, error = read(sampler)
    assert watts.keys() == {"VDD_CPU_GPU_CV", "VDD_SOC"}
    assert "rail VDD_IN" in error
    assert "rail VDD_IN" in Ina3221(nano).unavailable()


def test_a_label_twice_is_no_rail_to_trust(nano):
    add_chip(nano, "2-0040", 5, {1: Rail("VDD_IN", 12000, 900)}, 2000)
    assert "two rails are labelled VDD_IN" in Ina3221(nano).unavailable()


def test_a_machine_without_the_chip(tmp_path):
    assert "no INA3221" in Ina3221(desktop(tmp_path)).unavailable()
    assert Ina3221(tmp_path).power_sources() == []
