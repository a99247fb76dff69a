"""The noise floor: which A/A comparisons count, what a case gets from them, and how it is cleared."""

import pytest

from benchd.daemon.commands.noise_floor import noise_floor_
from benchd.daemon.errors import SchemaError, UsageError
from benchd.daemon.records import wall_now
from benchd.daemon.verdicts import noise_floor


@pytest.fixture(autouse=True)
def _state(tmp_path, monkeypatch):
    monkeypatch.delenv("STATE_DIRECTORY", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def add(*effects, half_width=0.002, **fields):
    """Store an A/A comparison of each effect, whose interval reaches so far either way."""
    for effect in effects:
        given = {"device_id": "d", "device": "cpu", "case_id": "c", "answer": "same", "pairs": 7, "t_wall": wall_now()}
        given |= {"effect": effect, "effect_low": effect - half_width, "effect_high": effect + half_width}
        noise_floor.add(noise_floor.AaEffect(**given | fields))


def test_what_intervals_exclude_is_the_floor_of_its_case_and_device():
    add(*[0.001] * 10, *[-0.03, 0.04] * 5)
    add(*[0.001] * 5, case_id="calm")
    add(*[0.2] * 5, device="cuda")
    assert noise_floor.of_device("d", "cpu") == {"c": pytest.approx(0.04)}
    assert noise_floor.of_device("other", "cpu") == {}


def test_pairs_in_turns_have_a_floor_of_their_own():
    add(*[0.03] * 5)
    add(*[0.006] * 5, interleaved=True)
    assert noise_floor.of_device("d", "cpu") == {"c": 0.03}
    assert noise_floor.of_device("d", "cpu", interleaved=True) == {"c": 0.006}
    assert [(entry.interleaved, entry.floor) for entry in noise_floor.every()] == [(False, 0.03), (True, 0.006)]


@pytest.mark.parametrize(
    "fields",
    [
        {"pairs": 6},
        {"half_width": 0.011},
        {"t_wall": "2026-01-01T00:00:00Z"},
        {"effect_low": None, "effect_high": None},
    ],
    ids=["few pairs", "wide", "old", "of an earlier version"],
)
def test_comparisons_that_cannot_tell_do_not_count(fields):
    """One at 6 % set 12 % for every case for ever."""
    add(*[0.06] * 9, **fields)
    add(*[0.06] * 4)
    assert noise_floor.of_device("d", "cpu") == {}
    assert [(entry.stored, entry.counted, entry.floor) for entry in noise_floor.every()] == [(13, 4, None)]
    add(0.06)
    assert noise_floor.of_device("d", "cpu") == {"c": 0.06}


def test_a_case_or_all_are_forgotten():
    add(*[0.06] * 5)
    add(0.06, case_id="other")
    assert noise_floor.clear("c") == 5
    assert [entry.case_id for entry in noise_floor.every()] == ["other"]
    assert (noise_floor.clear(), noise_floor.clear(), noise_floor.every()) == (1, 0, [])


@pytest.mark.parametrize(
    ("stored", "typed"),
    [
        ("square,eager,b1", "square,eager,b1,size=1024"),  # the default; the example of the command's help
        ("torchvision_resnet18,eager,b1", "torchvision:resnet18,eager"),
        ("own.net.build,eager,b4", "own.net.build,eager,b4"),
    ],
)
def test_a_case_is_found_as_compare_takes_it(stored, typed, capsys):
    add(*[0.06] * 5, case_id=stored)
    add(0.06, case_id="square,eager,b1,size=512")
    noise_floor_(case=typed, clear=True)
    assert capsys.readouterr().out == "A/A comparisons deleted: 5\n"
    with pytest.raises(UsageError, match=f"no A/A comparison of {stored} is stored"):
        noise_floor_(case=typed)


def test_a_damaged_noise_floor_is_named(tmp_path):
    add(0.001)
    with (tmp_path / "state" / "benchd" / noise_floor.FILE).open("a") as file:
        file.write("{}\n")
    with pytest.raises(SchemaError, match="remove the damaged line"):
        noise_floor.of_device("d", "cpu")


def test_a_damaged_noise_floor_is_cleared_by_the_command_that_its_message_names(tmp_path, capsys):
    add(0.001)
    file = tmp_path / "state" / "benchd" / noise_floor.FILE
    file.write_bytes(file.read_bytes() + b"{}\n")
    noise_floor_(case=None, clear=True)
    assert capsys.readouterr().out == "A/A comparisons deleted: 2\n"
    assert noise_floor.every() == []
