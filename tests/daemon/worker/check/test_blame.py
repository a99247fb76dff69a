"""Models that differ between float32 and float64, or between runs, by themselves: the check names the operation."""

import dataclasses

import pytest
from worker_jobs import build_and_load, job, user_module

from benchd.daemon.errors import UnfitModel
from benchd.daemon.worker.check import checking as check

SCORES = "scores = self.fc(images.flatten(1)); return "
AUTOCAST = """with torch.autocast(images.device.type, torch.bfloat16):
            return self.fc(images.flatten(1))"""


def checked(folder, forward, times=1.0):
    """Check a module with this forward, whose answers in eager are so many times its own."""
    a_job = job(folder, module=user_module(folder, forward=forward))
    built, loaded = build_and_load(a_job)
    of_times = dataclasses.replace(loaded, run=lambda images: times * loaded.run(images))
    return check.check_and_answers(built, of_times, a_job).check


@pytest.mark.parametrize(
    ("forward", "operation"),
    [
        (AUTOCAST, "`to` in bfloat16"),
        (SCORES + "torch.manual_seed(0) and scores + torch.randn(16, dtype=scores.dtype)[:5]", "`randn`"),
        (SCORES + "torch.ceil(scores / 3 * 3 / scores)", "`ceil`"),
        (SCORES + "(scores + 1e6) - 1e6", "`sub`"),
        (
            SCORES
            + "scores.clone() if scores.dtype == torch.float64 else torch.cat([scores[:, :4], 2 * scores[:, 4:]], 1)",
            "`cat`",
        ),
        (SCORES + "scores.half().to(scores.dtype) + torch.frac(1e7 * scores)", "`frac`"),
    ],
    ids=[
        "autocast",
        "a seed of its own",
        "jump",
        "cancellation",
        "an operation of its own",
        "beside a cast that does not matter",
    ],
)
def test_the_operation_at_which_float32_and_float64_part_is_named(forward, operation, tmp_path):
    check_result = checked(tmp_path, forward)
    assert not check_result.passed
    assert check_result.note.endswith(
        f"the model's own operation {operation} is the first that differs between float32 and float64"
    )


def test_the_model_is_not_blamed_for_a_variant_that_is_off(tmp_path):
    check_result = checked(tmp_path, SCORES + "torch.relu(scores)", times=1.1)
    assert check_result.verdict == "failed"
    assert "the model" not in check_result.note


@pytest.mark.parametrize(
    ("forward", "operation"),
    [
        ("images = torch.nn.functional.dropout(images, 0.5)", "`dropout`"),
        ("return torch.nn.functional.dropout(self.fc(images.flatten(1)), 0.04)", "`dropout`"),
        ("images = images + 1e-4 * torch.rand_like(images)", "`rand_like`"),
        ("self.count = getattr(self, 'count', torch.zeros(())) + 1; images = images * self.count", "`add`"),
    ],
)
def test_the_operation_that_changes_the_answer_between_runs_is_named(forward, operation, tmp_path):
    with pytest.raises(UnfitModel, match=f"changes between runs: .*; the first operation that differs is {operation}$"):
        checked(tmp_path, forward)
