"""Whether a promise is kept: each verdict, its exit code, and how often it is wrong."""

import sys
from itertools import product

import msgspec
import numpy as np
import pytest
from manifests_made import manifest
from records_made import PASSED, made, timing
from simulations import counts, most

from benchd.daemon.records import Check, LayerTime, ProcessResult
from benchd.daemon.shipping import promise
from benchd.daemon.shipping.manifest import PromisedResults

HERE = made().environment
PROMISED = [9.98, 10.0, 10.02, 9.99, 10.01]


def shipped(times_ms=PROMISED, environment=HERE):
    promised = PromisedResults(processes_ms=list(times_ms), latency_ms=10.0, low_ms=None, high_ms=None)
    return manifest(promised=promised, environment=environment)


def measured(times_ms, check=PASSED, status="ok", **fields):
    processes = [ProcessResult(status="ok", timing=timing(time_ms)) for time_ms in times_ms]
    return made(processes=processes, check=check, status=status, timing=timing(10.0), **fields)


@pytest.mark.parametrize(
    ("times", "answer", "code"),
    [
        ([1.0, 1.01, 0.99, 1.0, 1.02], "kept", 0),
        ([1.3, 1.31, 1.29, 1.3, 1.32], "slower", 3),
        ([0.7, 0.71, 0.69, 0.7, 0.72], "faster", 0),
        ([1.0, 1.3, 0.9, 1.2, 1.0], "inconclusive", 4),
        ([1.0, 1.0], "inconclusive", 4),
    ],
)
def test_times_are_judged_against_the_promise(times, answer, code):
    judgement = promise.judge(shipped(), measured([10.0 * time for time in times]), is_golden=True)
    assert (judgement.answer, promise.EXIT_CODES[judgement.answer]) == (answer, code)
    assert answer in promise.line(judgement)


def test_a_slowdown_names_the_layer_that_it_is_in():
    def processes(*layers_ms):
        sizes = zip(("conv1", "conv2"), layers_ms, strict=True)
        layers = [LayerTime(name=name, ms=ms, kind="Conv") for name, ms in sizes]
        return [
            ProcessResult(status="ok", timing=timing(sum(layers_ms) + step / 1000), layers=layers) for step in range(5)
        ]

    record = made(processes=processes(6.0, 9.0), check=PASSED, timing=timing(15.0))
    verified = promise.judge(shipped(), record, is_golden=True, confirmed=processes(6.0, 4.0))
    line = promise.line(verified)
    assert " slower: 15 ms, promised 10 ms" in line
    assert line.endswith(" (5 ms slower: +5 ms conv2; the rest within noise)")
    assert promise.judge(shipped(), measured([13.0] * 5), is_golden=True).reason == ""


@pytest.mark.parametrize(("factor", "answer"), [(1.0, "kept"), (1.3, "slower")])
def test_what_puts_either_time_in_doubt_is_named(factor, answer):
    record = measured([factor * time for time in PROMISED], flags=["steal", "mqtt", "correlated_blocks"])
    judgement = promise.judge(shipped(), record, is_golden=True, promise_flags=["busy_machine"])
    assert judgement.answer == answer
    assert judgement.reason == (
        "drifting times, CPU taken by other virtual machines; the promise is doubtful: busy machine"
    )


def test_the_verdict_and_its_interval_are_explained():
    kept = promise.judge(shipped(), measured(PROMISED), is_golden=True)
    assert promise.explained(kept) == [
        "kept: it is less than 10 % slower, with 95 % confidence on this side alone",
        "[...]: where the true change lies with 95 % confidence; runs of the same code differ by a few per cent",
    ]
    assert promise.explained(promise.judge(shipped(), measured([1.0, 1.0]), is_golden=True)) == []


def test_each_limit_that_it_was_shipped_under_is_stated_with_its_figure_now():
    folder = msgspec.structs.replace(shipped(), asked={"max_latency_ms": 20.0, "max_power_w": 9.0, "min_effect": None})
    record = measured(PROMISED)
    tail = msgspec.structs.replace(record, timing=msgspec.structs.replace(record.timing, p99_ms=21.5))
    assert promise.explained(promise.judge(folder, tail, is_golden=True))[:2] == [
        "latency: p99 21.5 ms, above the limit of 20 ms",
        "power: not measured, so the limit of 9 W is not checked",
    ]


def test_other_answers_break_a_promise_whatever_the_times():
    record = measured([], status="failed", reason="its answers differ from the golden ones: y is off", check=None)
    judgement = promise.judge(shipped(), record, is_golden=False)
    assert (judgement.answer, promise.EXIT_CODES[judgement.answer]) == ("broken", 5)
    failed = Check(**msgspec.structs.asdict(PASSED) | {"passed": False})
    assert promise.judge(shipped(), measured([10.0] * 5, failed), is_golden=True).answer == "broken"


@pytest.mark.parametrize(
    ("name", "was"),
    [
        ("machine", "aarch64"),
        ("board", "Orin"),
        ("soc", "tegra234"),
        ("cpu_model", "another"),
        ("cpu_count", 12),
        ("device", "cuda"),
        ("gpu", "H100"),
        ("power_mode", "15W"),
    ],
)
def test_another_machine_is_shown_and_not_judged(name, was):
    elsewhere = msgspec.structs.replace(HERE, **{name: was})
    judgement = promise.judge(shipped(environment=elsewhere), measured([20.0] * 5), is_golden=True)
    assert (judgement.answer, round(judgement.change, 3)) == ("another_machine", 1.0)
    assert judgement.reason == f"promised on {name} {was}, not {getattr(HERE, name)}"


def test_an_update_of_the_same_machine_is_judged_and_told():
    before = msgspec.structs.replace(HERE, versions={"torch": "2.1"}, fingerprint="old-old")
    judgement = promise.judge(shipped(environment=before), measured([10.0] * 5), is_golden=True)
    assert judgement.answer == "kept"
    assert any("torch" in line for line in judgement.changed)


def answers(change, between, spread, count, processes=5):
    """Return the answers on promises of five processes, `spread` apart, in runs that are `between` apart."""
    rng = np.random.default_rng(0)
    for _ in range(count):
        run = between * rng.standard_normal((2, 1)) + spread * rng.standard_normal((2, processes))
        promised, now = (10.0 * np.exp(run)).tolist()
        record = measured([(1.0 + change) * time_ms for time_ms in now])
        yield promise.judge(shipped(promised), record, is_golden=True).answer


def shares(*of):
    verdicts = list(answers(*of))
    return [verdicts.count(answer) / len(verdicts) for answer in ("kept", "inconclusive", "slower", "faster")]


@pytest.mark.parametrize("between", [0.0, 0.01, 0.03])
@pytest.mark.parametrize("spread", [0.005, 0.05])
@counts(400, 4_000)
def test_a_slowdown_of_ten_percent_is_rarely_called_kept_and_an_untouched_folder_rarely_broken(count, spread, between):
    kept, *_ = shares(0.1, between, spread, count)
    assert kept <= most(0.05, count)
    _, _, slower, faster = shares(0.0, between, spread, count)
    assert slower + faster <= most(0.05, count)


@pytest.mark.slow
def test_rates_of_the_documentation():
    """Print the rows of docs/evidence.md, with -s."""
    for between, spread in product((0.01, 0.03, 0.05), (0.005, 0.03, 0.1)):
        rows = [f"{100 * share:.1f}" for change in (0.0, 0.1, 0.3) for share in shares(change, between, spread, 4_000)]
        sys.stdout.write(f"\nruns {between:.0%}, processes {spread:.1%}: {' '.join(rows)}")
        assert len(rows) == 12
