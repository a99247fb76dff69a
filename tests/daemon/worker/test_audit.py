"""The audits of a timed section on modules that cheat: answers that are kept, and answers that went stale."""

import re
import time

import msgspec
import numpy as np
import pytest
import torch
from test_check import onepass
from test_measure import loaded
from torch import nn
from worker_jobs import job, own_module, run

from benchd.daemon.records import Check
from benchd.daemon.worker import audit, check, steps, subject
from benchd.daemon.worker.audit import Expected
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


def measured(folder, forward="pass", **fields):
    return run(job(folder, module=own_module(folder, forward=forward), **fields))


@pytest.mark.parametrize("scenario", ["offline", "wake_up"])
def test_answers_that_go_stale_while_they_are_timed_fail_the_check(tmp_path, scenario):
    outcome = measured(tmp_path, STALE.format(calls=20), scenario=scenario)
    assert outcome.process.status == "ok", outcome.process.reason
    assert "output_changed" in outcome.flags
    assert not outcome.check.passed
    assert "an answer of the timed section is off by" in outcome.check.note


def test_a_cache_of_right_answers_passes_its_check_and_is_seen(tmp_path):
    outcome = measured(tmp_path, CACHING)
    assert outcome.process.status == "ok", outcome.process.reason
    assert "repeated_input_faster" in outcome.flags
    assert "output_changed" not in outcome.flags
    assert (outcome.check.passed, outcome.check.audited) == (True, 4)


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
    assert audit.repeated_is_faster(loaded(Caching(key)), torch.rand(1, 3, 4, 4), 1e-3)


@pytest.mark.parametrize(
    ("again", "cached"),
    [([94] * 10, True), ([96] * 10, False), ([50] * 9 + [200], True), ([50] * 8 + [200] * 2, False)],
)
def test_nearly_every_second_run_has_to_be_faster(again, cached):
    assert audit.is_cached([100] * 10, again) is cached


def known(a_job):
    """Return what the timed section of the job has to answer."""
    built = subject.build(a_job)
    _, right = check.check_and_answers(built, loaded(built.plain), a_job)
    return right


def test_training_and_random_encoding_have_no_known_answers(tmp_path):
    assert len(known(job(tmp_path)).outputs) == 4
    assert known(job(tmp_path, direction="training")) is None
    assert known(onepass(tmp_path, options={"time_steps": 2, "encoding": "rate"})) is None


def test_large_answers_are_not_all_kept_while_it_is_measured(tmp_path):
    a_job = job(tmp_path, batch_size=2)
    large = msgspec.structs.replace(a_job, options={"size": 512})  # 2 MiB an answer in float64
    assert [len(batch["output"]) for batch in known(large).outputs] == [2, 2]
    assert len(known(msgspec.structs.replace(large, options={"size": 1024})).outputs) == 1


def test_one_buffer_for_all_answers_is_no_stale_answer():
    buffer = torch.zeros(1)
    step = steps.SingleStream(loaded(buffer.copy_), [torch.full((1,), float(number)) for number in range(2)], known=2)
    for index in range(9):
        step(index)
    assert {place: answer.item() for place, answer in step.answers.items()} == {0: 0.0, 1: 1.0}


def test_every_fourth_run_takes_a_batch_whose_answer_is_known():
    module = loaded(nn.Identity())
    pool = [torch.full((1,), float(number)) for number in range(9)]
    step = steps.SingleStream(module, pool, known=2)
    for index in range(12):
        step(index)
    assert {place: answer.item() for place, answer in step.answers.items()} == {0: 0.0, 1: 1.0}
    assert not steps.SingleStream(module, pool).answers


def expected(*batches):
    return Expected([{"output": batch} for batch in batches], {"output": 0.1})


def passed_check(**fields):
    given = {"passed": True, "rule": "outputs", "images": 2, "max_abs_error": 0.5, "error_share": 0.0, "tolerance": 0.3}
    return Check(**given | {"argmax_disagreements": 0} | fields)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (passed_check(), 0.04),
        (passed_check(rule="argmax"), 0.3),
        (passed_check(rule="codes", baseline_max_abs_error=0.1), 0.5),
        (passed_check(rule="codes", baseline_max_abs_error=0.4), 0.8),
        (passed_check(rule="codes", max_abs_error=0.0, baseline_max_abs_error=0.0), 0.04),
    ],
)
def test_an_answer_may_be_off_by_what_the_check_allows(given, wanted):
    assert audit.allowed(given, 0.01, np.array([[-4.0, 2.0]])) == pytest.approx(wanted)


@pytest.mark.parametrize(("value", "passed"), [(2.09, True), (2.11, False), (float("nan"), False)])
def test_one_wrong_answer_of_a_batch_is_enough(value, passed):
    right = expected(np.array([[1.0], [1.0]]), np.array([[2.0], [2.0]]))
    answers = {0: torch.ones(2, 1), 1: torch.tensor([[2.0], [value]])}
    found = audit.audited(passed_check(), right, answers, 2)
    assert (found.passed, found.audited) == (passed, 4)


def test_a_check_that_failed_keeps_its_own_words():
    right = expected(np.array([[1.0]]))
    failed = passed_check(passed=False, note="its own")
    assert audit.audited(failed, right, {0: torch.zeros(1, 1)}, 1).note == "its own"


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({"a": torch.ones(2, 1), "loss": torch.tensor(3.05)}, ""),
        ({"a": torch.ones(2, 1), "loss": torch.tensor(3.2)}, r"off by 0\.2 \(loss\), and 0\.1 is allowed"),
        ({"a": torch.ones(2, 1)}, r"another form than in the check \(loss\)"),
        ({"a": torch.ones(3, 1), "loss": torch.tensor(3.0)}, r"another form than in the check \(a\)"),
    ],
    ids=["right", "off", "absent", "larger"],
)
def test_each_path_of_an_answer_is_audited(answer, words):
    right = Expected([{"a": np.ones((2, 1)), "loss": np.array(3.0)}], {"a": 0.1, "loss": 0.1})
    found = audit.audited(passed_check(), right, {0: Tensors(answer)}, 2)
    assert found.passed is not bool(words)
    assert re.search(words, found.note)
