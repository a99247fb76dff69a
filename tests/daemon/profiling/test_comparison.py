"""Two profiles compared: what changed beyond the noise of the steps, in words, and from a shell."""

import io
import sys

import msgspec
import pytest
from profile_shown import operator, shown_on_cpu

from benchd.daemon import cli
from benchd.daemon.profiling import comparison
from benchd.daemon.profiling.output.terminal import print_compared
from benchd.daemon.profiling.profile import LayerRow, LayersProfile, StepTime


def profile(steps_ms, operators_ms, layers_ms=None, **fields):
    """Return a profile whose operators take these milliseconds per step."""
    steps = [StepTime(number=n, duration_ns=round(1e6 * ms), by_category={}) for n, ms in enumerate(steps_ms, 1)]
    rows = [operator(name, round(1e6 * ms * len(steps))) for name, ms in operators_ms.items()]
    parts = [LayerRow(name=name, ns=1e6 * ms, share=0.5) for name, ms in (layers_ms or {}).items()]
    layers = LayersProfile(
        components=[], layers=parts, fused_ns=1.0, synchronised_ns=1.0, run_ns=[1.0] * 5, variation=0.01
    )
    cpu_profile = shown_on_cpu(layers=layers, **fields)
    return msgspec.structs.replace(
        cpu_profile, torch=msgspec.structs.replace(cpu_profile.torch, steps=steps, operators=rows)
    )


BEFORE = profile(
    [100, 101, 99], {"aten::conv2d": 60.0, "aten::add": 30.0, "aten::cat": 5.0}, {"conv1": 60.0, "fc": 40.0}
)
AFTER = profile(
    [80, 81, 79], {"aten::conv2d": 40.0, "aten::add": 30.2, "aten::stack": 6.0}, {"conv1": 40.0, "fc": 40.1}
)


def test_what_changed_beyond_the_noise_is_listed_the_largest_first():
    result = comparison.compare(BEFORE, AFTER)
    assert result.noise == pytest.approx(0.0125)
    assert (result.step.before_ns, result.step.after_ns) == (100e6, 80e6)
    assert [(change.name, change.added_ns / 1e6) for change in result.changed["operator"]] == [
        ("aten::conv2d", -20.0),
        ("aten::stack", 6.0),
        ("aten::cat", -5.0),
    ]
    assert [change.name for change in result.changed["layer"]] == ["conv1"]
    assert result.same == {"operator": 1, "kernel": 0, "layer": 1}
    assert result.differences == []


def test_nothing_changes_between_two_noisy_profiles_of_one_thing():
    noisy = profile([100, 160, 40], {"aten::conv2d": 60.0})
    result = comparison.compare(noisy, profile([100, 101, 99], {"aten::conv2d": 80.0}))
    assert result.changed["operator"] == []


def test_the_table_says_both_times_and_the_noise():
    out = io.StringIO()
    print_compared(out, comparison.compare(BEFORE, AFTER))
    for text in ("aten::conv2d", "-20", "-33.3", "operators: 3 changed, 1 did not", "Steps vary by ±1.2 % within"):
        assert text in out.getvalue()


def test_two_folders_are_compared_from_a_shell(tmp_path, monkeypatch, capsys):
    for name, profiled in (("a", BEFORE), ("b", AFTER)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "profile.json").write_bytes(msgspec.json.encode(profiled))
    monkeypatch.chdir(tmp_path)

    def run(*sides):
        monkeypatch.setattr(sys, "argv", ["benchd", "profile", *sides])
        with pytest.raises(SystemExit) as end:
            cli.benchd()
        return end.value.code, capsys.readouterr()

    assert "aten::stack" in run("compare", "a", "b")[1].out
    assert msgspec.json.decode(run("compare", "a", "b", "--json")[1].out)["noise"] == pytest.approx(0.0125)
    for sides, message in (
        (("compare", "a"), "takes two profiles, not 1"),
        (("compare", "a", "none"), "not a profile"),
    ):
        code, captured = run(*sides)
        assert (code, captured.out) == (2, "")
        assert message in captured.err
    assert "a profile covers one model" in run("square", "a")[1].err
