"""The method `break-even` on a small net: the spikes that it draws, and what it leaves behind."""

import pytest
import torch
from profile_jobs import profile_job

from benchd.daemon.worker.profiling import break_even
from benchd.daemon.worker.profiling.work import open_work
from benchd.kernels.exact_conv2d import native

SMALL = {"width": 8, "time_steps": 4}
needs_integers = pytest.mark.skipif(not native.paths(), reason="its ANN needs a CPU with AMX, VNNI or a dot product")
VARIANTS = ["eager", pytest.param("custom", marks=needs_integers)]


@pytest.mark.parametrize("variant", VARIANTS)
def test_it_sweeps_both_nets_of_the_same_weights(tmp_path, variant, monkeypatch):
    monkeypatch.setattr(break_even, "RATES", break_even.RATES[::4])
    torch.set_num_threads(1)
    work = open_work(profile_job(tmp_path, model="snn_stbif_resnet18", variant=variant, batch=1, options=SMALL))
    sweep = break_even.run(work)
    assert sweep.ann == f"qann_resnet18,{variant},b1,width=8,threads=1"
    assert [point.rate for point in sweep.points] == list(break_even.RATES)
    assert {len(point.ns) for point in [*sweep.points, sweep.own]} == {len(sweep.own.ann_ns)} == {3}
    assert all(("c" in point.kernels or "_" in point.kernels) == (variant == "custom") for point in sweep.points)
    assert 0 < sweep.own.rate < 1
    assert not any(module._forward_hooks for module in work.module.modules())


@pytest.mark.parametrize("variant", ["eager", "custom"])
def test_each_layer_emits_the_rate_and_the_height_that_was_drawn(tmp_path, variant):
    work = open_work(profile_job(tmp_path, model="snn_stbif_resnet18", variant=variant, batch=1, options=SMALL))
    emitters, before = work.module.emitters(), work.forward()
    assert len(emitters) == len(work.module.neurons())
    drawn, left = break_even._DrawnSpikes(work.module, work.forward), {}
    with drawn, torch.inference_mode():
        drawn.draw(0.3)
        hooks = [each.register_forward_hook(lambda each, _, out: left.update({each: out})) for each in emitters]
        assert not torch.equal(work.forward(), before)
        for hook in hooks:
            hook.remove()
        for emitter, height in emitters.items():
            assert left[emitter].count_nonzero() / left[emitter].numel() == pytest.approx(0.3, abs=0.06)
            assert set(left[emitter].unique().tolist()) == {0.0, height.item()}
        drawn.draw(None)
        assert torch.equal(work.forward(), before)
    assert torch.equal(work.forward(), before)
