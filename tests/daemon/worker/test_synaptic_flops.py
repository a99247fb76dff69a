"""The products that a spiking network's measured spikes cause: the least that a run takes."""

import pytest
import torch
from worker_jobs import job, run_here, trained, user_module

from benchd.daemon.records import Variant
from benchd.daemon.worker import workload
from benchd.daemon.worker.check.truth import Reference
from benchd.daemon.worker.profiling.spikes import fan_out
from benchd.models.cost import cost

CPU = torch.device("cpu")


def counted(network, image):
    """Return 2 x the synapses that every input other than 0 reaches, one image and one layer at a time."""
    total = 0.0

    def arrives(synapses):
        def hook(_, inputs):
            nonlocal total
            read = torch.ones_like(inputs[0]) if synapses.receives == "values" else inputs[0] != 0
            total += 2.0 * float((read * fan_out(synapses.layer, inputs[0].shape[1:])).sum())

        return hook

    hooks = [each.module.register_forward_pre_hook(arrives(each)) for each in network.synapses()]
    with torch.inference_mode():
        network(image)
    for hook in hooks:
        hook.remove()
    return total


@pytest.mark.parametrize("model", ["snn_onepass", "snn_stbif_resnet18"])
def test_they_are_counted_over_every_image_whatever_the_batch(tmp_path, model):
    a_job = trained(tmp_path, model, batch_size=2)
    built = workload.build(a_job)
    images = built.images[:6]
    network = built.reference()
    wanted = sum(counted(network, image[None].double()) for image in images) / len(images)
    flops = Reference(built, a_job, images, torch.float64, CPU).synaptic_flops()
    assert flops == pytest.approx(wanted, rel=1e-12)
    assert 0 < flops < cost(model, a_job.options, 1, "fp32", "inference").matrix_flops


def test_a_network_without_spikes_has_none(tmp_path):
    a_job = job(tmp_path)
    built = workload.build(a_job)
    assert Reference(built, a_job, built.images[:2], torch.float64, CPU).synaptic_flops() is None


def test_a_worker_counts_them_once_per_network(tmp_path):
    variants = [Variant(), Variant(kernels="custom")]
    jobs = [trained(tmp_path, "snn_onepass", {"time_steps": 2}, variant=variant) for variant in variants]
    flops = [run_here(a_job).synaptic_flops for a_job in jobs]
    assert flops[0] == flops[1] > 0


def test_a_users_network_may_call_a_layer_synapses(tmp_path):
    a_job = job(tmp_path, module=user_module(tmp_path, build="Net.synapses = nn.Linear(5, 5)"))
    assert run_here(a_job).process.status == "ok"
