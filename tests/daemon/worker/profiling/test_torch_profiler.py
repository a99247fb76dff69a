import gzip
import json

import msgspec
import pytest
import torch
from profile_jobs import own_job, profile_job
from torch import nn

from benchd.daemon.errors import UsageError
from benchd.daemon.profiling.profile import TorchProfile
from benchd.daemon.profiling.trace import tables, trace
from benchd.daemon.profiling.trace.trace import END_OF_STEP
from benchd.daemon.worker.profiling import profiled, torch_profiler
from benchd.daemon.worker.profiling.work import open_work


def profile_of(job, folder):
    name = torch_profiler.run(open_work(job))
    return tables.torch_profile(trace.read(folder / name), name, False)


def test_an_evaluation_of_a_spiking_net(tmp_path):
    job = profile_job(tmp_path, workload="eval", options={"time_steps": 2})
    profile = profile_of(job, tmp_path)
    modules = {row.name: row for row in profile.modules}
    assert (modules["OnePass"].calls, modules["CrossEntropyLoss"].calls, modules["Linear"].calls) == (2, 2, 4)
    assert modules["OnePass"].host_ns > modules["Linear"].host_ns
    assert [step.number for step in profile.steps] == [1, 2]
    for step in profile.steps:
        assert sum(step.by_category.values()) == step.duration_ns
        assert step.by_category["data_loader"] > 0
        assert step.by_category["cpu"] > 0
        assert step.by_category["kernel"] == 0
    calls = {row.name: row.calls for row in profile.operators}
    assert (calls["aten::conv2d"], calls["aten::item"]) == (4, 2)
    with gzip.open(tmp_path / profile.trace) as file:
        assert json.load(file)["traceEvents"]


@pytest.mark.parametrize(("workload", "waits"), [("forward", 2), ("train", 2), ("eval", 0)])
def test_a_wait_of_benchd_s_own_ends_each_step_in_a_range(workload, waits, tmp_path):
    torch_profiler.run(open_work(own_job(tmp_path, workload=workload)))
    ranges = trace.read(tmp_path / torch_profiler.TRACE).annotations
    assert [row.name for row in ranges].count(END_OF_STEP) == waits


def test_a_compiled_model_is_one_range(tmp_path):
    profile = profile_of(own_job(tmp_path, variant="compile"), tmp_path)
    assert [(row.name, row.calls) for row in profile.modules] == [("Net", 2)]


def test_ranges_end_with_the_profile_and_with_a_call_that_raises(tmp_path):
    work = open_work(own_job(tmp_path, forward="assert len(images) == 2, 'not two'"))
    with torch_profiler.module_ranges([work.module]), pytest.raises(AssertionError):
        work.module(work.images[:1])
    torch_profiler.run(work)
    assert not any("forward" in vars(each) for each in work.module.modules())


def operators_under_ranges(module, images):
    with (
        torch.inference_mode(),
        torch_profiler.module_ranges([module]),
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profiler,
    ):
        module(images)
    return [event.name for event in profiler.events()]


def test_a_layer_runs_the_fused_operator_that_it_has_without_a_profile():
    names = operators_under_ranges(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval(), torch.randn(2, 5, 8))
    assert {"aten::_transformer_encoder_layer_fwd", "nn.Module: TransformerEncoderLayer"} <= set(names)


def test_what_is_compiled_keeps_its_graph():
    net = nn.Sequential(torch.compile(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), backend="eager"), nn.Linear(8, 8))
    images, forward = torch.randn(2, 8), net[0].forward
    with torch.inference_mode():
        net(images)
    with torch.compiler.set_stance("fail_on_recompile"):
        names = operators_under_ranges(net, images)
    ranges = [name for name in names if name.startswith("nn.Module: ")]
    assert sorted(ranges) == ["nn.Module: Linear", "nn.Module: OptimizedModule", "nn.Module: Sequential"]
    assert net[0].forward is forward


def test_a_loop_of_ones_own(tmp_path):
    model, images = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(2, 4)
    with profiled(tmp_path / "out", model, steps=2) as profiler:
        for _ in range(5):
            model(images).sum().item()
            profiler.step()
    profile = msgspec.json.decode((tmp_path / "out" / "profile.json").read_bytes(), type=TorchProfile)
    assert [step.number for step in profile.steps] == [1, 2]
    assert {row.name: row.calls for row in profile.modules} == {"Sequential": 2, "Linear": 2, "ReLU": 2}
    assert {row.name: row.calls for row in profile.operators}["aten::item"] == 2
    assert len(trace.read(tmp_path / "out" / profile.trace).steps) == 2


def test_a_folder_with_a_profile_is_left_as_it_is(tmp_path):
    (tmp_path / "trace.json.gz").write_text("kept")
    with pytest.raises(UsageError, match="choose a different folder"), profiled(tmp_path):
        pass
    assert (tmp_path / "trace.json.gz").read_text() == "kept"


def test_a_loop_without_a_step_is_told_what_is_missing(tmp_path):
    with pytest.raises(UsageError, match="call step"), profiled(tmp_path):
        torch.ones(2).sum()


def test_what_a_loop_raises_is_not_covered(tmp_path):
    with pytest.raises(ZeroDivisionError), profiled(tmp_path):
        raise ZeroDivisionError
    assert not (tmp_path / "profile.json").exists()
