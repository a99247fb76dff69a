"""The audits of a timed section on modules that cheat: answers that are kept, and answers that went stale."""

import time

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from worker_jobs import TINY, as_loaded, catalogued, changed, job, measured, user_module

from benchd.daemon.records import Check
from benchd.daemon.worker import steps, workload
from benchd.daemon.worker.check import agreement, audit
from benchd.daemon.worker.check import checking as check
from benchd.daemon.worker.check.agreement import Observation, Rule
from benchd.daemon.worker.check.audit import ExpectedAnswers
from benchd.daemon.worker.child import StageClock
from benchd.daemon.worker.scenarios import server
from benchd.daemon.worker.structures import Tensors

STALE = """
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls > {calls}:
            return self.kept.clone()
        self.kept = self.fc(images.flatten(1))
        return self.kept
"""
CACHING = """
        key = images.data_ptr()
        kept = self.__dict__.setdefault("cache", {})
        if key not in kept:
            for _ in range(50): torch.randn(96, 96) @ torch.randn(96, 96)
            kept[key] = self.fc(images.flatten(1)), images
        return kept[key][0].clone()
"""


def of_module(folder, forward="pass", **fields):
    """Return what is measured of a module with this `forward`."""
    return measured(job(folder, module=user_module(folder, forward=forward), **fields))


@pytest.mark.parametrize("scenario", ["offline", "wake_up"])
def test_answers_that_go_stale_while_they_are_timed_fail_the_check(tmp_path, scenario):
    outcome = of_module(tmp_path, STALE.format(calls=20), scenario=scenario)
    assert "output_changed" in outcome.flags
    assert not outcome.check.passed
    assert "while it was timed: the output is off by" in outcome.check.note


def test_a_cache_of_right_answers_passes_its_check_and_is_seen(tmp_path):
    outcome = of_module(tmp_path, CACHING)
    assert "repeated_input_faster" in outcome.flags
    assert "output_changed" not in outcome.flags
    assert outcome.check.passed


class Caching(nn.Module):
    """Answers at once what it has answered before."""

    def __init__(self, key):
        super().__init__()
        self.key, self.kept = key, {}

    def forward(self, images):
        key = self.key(images)
        if key not in self.kept:
            time.sleep(0.01)
            self.kept[key] = images, images.clone()
        return self.kept[key][1]


@pytest.mark.parametrize("key", [id, torch.Tensor.data_ptr, lambda images: images.numpy().tobytes()])
def test_a_cache_by_identity_address_or_content_is_seen(key):
    caching, pool = as_loaded(Caching(key)), [torch.rand(1, 3, 4, 4) for _ in range(9)]
    for images in pool:
        caching.run(images)
    assert audit.repeated_is_faster(caching, pool, lambda: None)


@pytest.mark.parametrize("raised", [torch.OutOfMemoryError("a further batch"), MemoryError()])
def test_a_test_for_cached_answers_that_fails_costs_only_its_answer(tmp_path, monkeypatch, raised):
    def rolled(*_):
        raise raised

    monkeypatch.setattr(audit, "rolled", rolled)
    outcome = of_module(tmp_path, probes=True)
    assert outcome.process.timing is not None
    assert outcome.process.probes is not None
    assert "repeated_input_untested" in outcome.flags
    assert outcome.missing["repeated_input"].startswith("the test for cached answers did not run: out of memory")


def test_each_run_of_the_test_for_cached_answers_says_that_the_stage_goes_on(tmp_path, monkeypatch):
    """Ten runs of 12 s outlast the stage's deadline."""
    monkeypatch.setattr(server, "BEAT_S", 0.0)
    progress = []
    monkeypatch.setattr(StageClock, "go_on", lambda self, done="": progress.append(done))
    of_module(tmp_path)
    assert progress.count("") >= 10


STEADY, LOADED = [100] * 8, [80] * 3 + [100] * 5


@pytest.mark.parametrize(
    ("unseen", "seen", "cached"),
    [
        (STEADY, [94] * 8, True),
        (STEADY, [96] * 8, False),
        (STEADY, [2] * 6 + [100] * 2, True),
        (STEADY, [90] * 3 + [100] * 5, False),
        (LOADED, [94] * 8, False),
        (LOADED, [96] * 8, False),
        (LOADED, [2] * 6 + [100] * 2, True),
        (LOADED, [90] * 3 + [100] * 5, False),
    ],
)
def test_most_inputs_that_were_timed_have_to_be_faster(unseen, seen, cached):
    assert audit.is_cached(unseen, seen) is cached


@given(st.lists(st.tuples(st.integers(1, 200), st.integers(1, 200)), min_size=audit.PAIRS, max_size=audit.PAIRS))
def test_a_trial_ends_early_only_if_its_answer_is_known(pairs):
    unseen, seen = zip(*pairs, strict=True)
    firsts = [audit.may_be_cached(unseen[:count], seen[:count]) for count in range(1, audit.PAIRS + 1)]
    assert firsts == sorted(firsts, reverse=True)
    assert firsts[-1] == audit.is_cached(unseen, seen)


@pytest.mark.parametrize("spread", [0.1, 0.5, 1.0, 2.0])
def test_other_load_never_looks_like_a_cache_in_every_trial(spread):
    times = np.random.default_rng(0).lognormal(0, spread, (4000, 2, audit.PAIRS))
    share = np.mean([audit.is_cached(unseen, seen) for unseen, seen in times])
    assert share**audit.TRIALS < 1e-4


def known(a_job):
    """Return what the timed section of the job has to answer."""
    built = workload.build(a_job)
    return check.check_and_answers(built, as_loaded(built.plain), a_job).expected


def test_training_and_random_encoding_have_no_known_answers(tmp_path):
    assert list(known(job(tmp_path)).outputs) == [0, 1, 2, 3]
    assert known(job(tmp_path, direction="training")) is None
    assert known(catalogued(tmp_path, "snn_onepass", {"time_steps": 1, "encoding": "rate"})) is None


def test_large_answers_are_not_all_kept_while_it_is_measured(tmp_path):
    a_job = job(tmp_path, batch_size=2)
    large = changed(a_job, options={"size": 512})  # 2 MiB an answer in float64
    assert list(known(large).outputs) == [0]
    assert list(known(changed(large, options={"size": 64})).outputs) == [0, 1]


def test_one_buffer_for_all_answers_is_no_stale_answer():
    buffer = torch.zeros(1)
    step = steps.SingleInference(
        as_loaded(buffer.copy_), [torch.full((1,), float(number)) for number in range(2)], known=[0, 1]
    )
    for index in range(9):
        step(index)
    assert {place: answer.item() for place, answer in step.sample.answers} == {0: 0.0, 1: 1.0}


def test_about_every_second_run_is_audited_and_no_beat_is_missed():
    module = as_loaded(nn.Identity())
    pool = [torch.full((1,), float(number)) for number in range(9)]
    step, runs = steps.SingleInference(module, pool, known=[0, 1]), []
    for index in range(200):
        before = len(step.sample.answers)
        step(index)
        runs += [index] * (len(step.sample.answers) - before)
    assert 90 < len(runs) < 145  # half of them, and those of the others that the pool's turn brings
    assert all(answer.item() == place for place, answer in step.sample.answers)
    for beat in (2, 3, 4, 10):
        assert {run % beat for run in runs} == set(range(beat))
    unknown = steps.SingleInference(module, pool)
    unknown(0)
    assert not unknown.sample.answers


def test_of_many_answers_a_bounded_sample_of_the_whole_section_is_kept():
    sample, counter = steps.AuditSample([0]), torch.zeros(1)
    for _ in range(4000):
        sample.keep(0, counter.add_(1))
    sampled = sorted(answer.item() for _, answer in sample.answers)
    assert len(sampled) == steps.SAMPLE_ANSWERS
    assert sampled[0] < 200 < 3800 < sampled[-1]
    assert len(set(sampled)) == len(sampled)
    sample.clear()
    for _ in range(9):
        sample.keep(0, torch.zeros(steps.SAMPLE_BYTES // 8))
    assert len(sample.answers) == 2


def expected(noise=0.0, **fields):
    """Return what two batches of two have to answer: 1 and 2, and 3 and 4."""
    answers = np.array([[1.0], [2.0], [3.0], [4.0]])
    exact, rule = Observation({"output": answers}, None), Rule("fp32", spiking=False, trained=True)
    limits = agreement.bounds(exact, [(exact, Observation({"output": answers * (1 + noise)}, None))], rule)
    right = {0: {"output": answers[:2]}, 1: {"output": answers[2:]}}
    return ExpectedAnswers(right, right, torch.zeros(0), [], 2, limits, rule, None)


def passed_check(**fields):
    given = {"passed": True, "rule": "outputs", "images": 2, "max_abs_error": 0.5, "error_share": 0.0, "tolerance": 0.3}
    return Check(**given | {"argmax_disagreements": 0} | fields)


@pytest.mark.parametrize(("value", "passed"), [(4.00007, True), (4.00009, False), (float("nan"), False)])
def test_one_wrong_answer_of_a_batch_is_enough_whatever_the_check_s_own_error(value, passed):
    answers = [(0, torch.tensor([[1.0], [2.0]])), (1, torch.tensor([[3.0], [value]]))]
    for error in (0.0, 1e99):
        check_result = audit.audited(passed_check(error_share=error, max_abs_error=error), expected(), answers)
        assert (check_result.passed, check_result.audited) == (passed, 4)


def test_a_check_that_failed_keeps_its_own_words():
    failed = passed_check(passed=False, note="its own")
    assert audit.audited(failed, expected(), [(0, torch.zeros(2, 1))]).note == "its own"


SOMETIMES = """
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls > 20 and self.calls % 10 == 7: return self.fc(images.flatten(1)).roll(1, 0)
"""
ONLY_MET_EARLY = """
        if images.dtype == torch.float64: return self.fc(images.flatten(1))
        met = self.__dict__.setdefault("met", [])
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls < 40: met.append(images.clone())
        elif not any(torch.equal(images, one) for one in met): return -self.fc(images.flatten(1))
"""


@pytest.mark.parametrize(
    ("forward", "words"),
    [(SOMETIMES, "while it was timed"), (ONLY_MET_EARLY, "on inputs that it saw for the first time")],
)
def test_answers_that_are_wrong_now_and_then_or_for_new_inputs_alone_fail(tmp_path, forward, words):
    outcome = of_module(tmp_path, forward, batch_size=8)
    assert outcome.check.verdict == "failed"
    assert words in outcome.check.note


FIRST = """
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls == 1 and images.dtype == torch.float32: return 100 * torch.rand(len(images), 5)
"""


@pytest.mark.parametrize("scenario", ["single_stream", "cold_start"])
def test_a_first_answer_that_is_wrong_fails(tmp_path, scenario):
    outcome = of_module(tmp_path, FIRST, scenario=scenario)
    assert outcome.check.verdict == "failed"
    assert "in its first run: the output is off by" in outcome.check.note


LATE = """
        seen = self.__dict__.setdefault("seen", dict())
        key = images.numpy().tobytes()
        seen[key] = seen.get(key, 0) + 1
        if seen[key] < 4:
            for _ in range(20): torch.randn(96, 96) @ torch.randn(96, 96)
"""
LAGGING = """
        seen = self.__dict__.setdefault("seen", dict())
        key, self.calls = images[..., 0].numpy().tobytes(), getattr(self, "calls", 0) + 1
        before, seen[key] = seen.get(key), self.calls
        if before is None or self.calls - before < 6:
            for _ in range(20): torch.randn(96, 96) @ torch.randn(96, 96)
"""


@pytest.mark.parametrize("forward", [LATE, LAGGING])
def test_a_cache_that_waits_is_seen(tmp_path, forward):
    limits = msgspec.structs.replace(TINY, warm_up_cap_s=1.0)
    outcome = of_module(tmp_path, forward, batch_size=32, limits=limits)
    assert "repeated_input_faster" in outcome.flags


@pytest.mark.parametrize("size", [16, 256])
def test_a_small_operation_is_not_taken_for_a_cache(tmp_path, size):
    a_job = changed(job(tmp_path), options={"size": size})
    assert "repeated_input_faster" not in measured(a_job).flags


WHOLE = """
        found = self.fc(images.flatten(1))
        return {"scores": found, "loss": found.mean(), "steps": torch.stack([found] * 3), "only": found.squeeze()}

    def neurons(self):
        return [self.fc]
"""


@pytest.mark.parametrize("batch_size", [1, 2])
def test_an_output_without_a_batch_dimension_is_as_in_the_check(tmp_path, batch_size):
    outcome = of_module(tmp_path, WHOLE, batch_size=batch_size)
    assert (outcome.check.rule, outcome.check.verdict, outcome.check.note) == (
        "codes",
        "passed",
        "accuracy not measured (--metric)",
    )
    assert outcome.check.audited > batch_size


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({"a": torch.tensor([[1.0], [2.0]]), "loss": torch.tensor(3.0)}, ""),
        ({"a": torch.tensor([[1.0], [2.0]]), "loss": torch.tensor(3.2)}, "the output loss is off by more than 2.0e-05"),
        ({"a": torch.tensor([[1.0], [2.0]])}, "the output loss is nothing, but 1 in float64"),
        ({"a": torch.ones(3, 1), "loss": torch.tensor(3.0)}, "the output a is 1x3x1, but 2x1 in float64"),
    ],
    ids=["right", "off", "absent", "larger"],
)
def test_each_path_of_an_answer_is_audited(answer, words):
    answers = {"a": np.array([[1.0], [2.0]]), "loss": np.array(3.0)}
    exact, rule = Observation({"a": answers["a"], "loss": np.array([3.0])}, None), Rule("fp32", False, True)
    right = ExpectedAnswers(
        {0: answers}, {0: answers}, torch.zeros(0), [], 2, agreement.bounds(exact, [(exact, exact)], rule), rule, None
    )
    check_result = audit.audited(passed_check(), right, [(0, Tensors(answer))])
    assert check_result.passed is not bool(words)
    assert words in check_result.note
