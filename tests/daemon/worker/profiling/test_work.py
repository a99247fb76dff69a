import pytest
import torch
from profile_jobs import own_job, profile_job

from benchd.daemon.errors import Unsupported
from benchd.daemon.records import InputSpec
from benchd.daemon.worker.profiling.work import Whole, open_work

IMAGES, IDS = InputSpec("x", "float32", [4]), InputSpec("ids", "int64", [6])
SEVERAL = """
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.embedding = nn.Linear(4, 3), nn.Embedding(2, 3)

    def forward(self, x, ids):
        logits = self.fc(x) + self.embedding(ids).sum(1)
        return {"loss": logits.mean(), "logits": logits}

build = Net
"""


def test_a_forward_step_runs_the_model_on_its_batch(tmp_path):
    work = open_work(profile_job(tmp_path, options={"time_steps": 2}))
    assert work.images.shape == (2, 3, 32, 32)
    torch.testing.assert_close(work.forward(), work.module(work.images).detach())
    assert work.backward is None
    assert work.facts.parameters == sum(each.numel() for each in work.module.parameters())


def test_an_evaluation_goes_through_the_pool_and_begins_again(tmp_path):
    work = open_work(own_job(tmp_path, workload="eval", batch=100))
    sums = []
    work.module.register_forward_pre_hook(lambda module, given: sums.append(given[0].sum().item()))
    for _ in range(4):
        work.step()
    assert len(set(sums)) == 2  # 256 images are two batches
    assert sums[:2] == sums[2:]


def test_training_leaves_the_gradients_of_one_batch(tmp_path):
    work = open_work(own_job(tmp_path, workload="train"))
    for _ in range(2):
        work.step()
    gradient = work.module.fc.weight.grad.clone()
    work.module.zero_grad()
    work.loss(work.module(work.images), work.labels).backward()
    torch.testing.assert_close(gradient, work.module.fc.weight.grad)
    work.forward()
    work.backward()
    torch.testing.assert_close(gradient, work.module.fc.weight.grad)


def test_mixed_precision_runs_as_it_is_deployed(tmp_path):
    work = open_work(own_job(tmp_path, variant="amp"))
    assert work.forward().dtype == torch.bfloat16


def test_a_compiled_model_is_one_whole_that_keeps_its_name_and_does_not_train(tmp_path):
    work = open_work(own_job(tmp_path, variant="compile", workload="eval"))
    assert isinstance(work.module, Whole)
    assert work.module.class_name == "Net"
    work.step()
    with pytest.raises(Unsupported, match="cannot be trained"):
        open_work(own_job(tmp_path, variant="compile", workload="train"))


def test_kernels_without_gradients_do_not_train(tmp_path):
    with pytest.raises(Unsupported, match="training can be measured with"):
        open_work(profile_job(tmp_path, variant="custom", workload="train"))


@pytest.mark.parametrize("workload", ["forward", "eval", "train"])
def test_a_model_of_several_inputs_and_answers_is_profiled(tmp_path, workload):
    """A loss is taken of the first answer of floats whose batch leads."""
    job = own_job(tmp_path, workload=workload, inputs=[IMAGES, IDS])
    (tmp_path / "net.py").write_text(SEVERAL)
    work = open_work(job)
    assert [value.shape for value in work.images.named.values()] == [(2, 4), (2, 6)]
    for _ in range(2):
        work.step()
    outputs = work.forward()
    assert (outputs if workload == "train" else outputs["logits"]).shape == (2, 3)
