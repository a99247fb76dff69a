"""Memory of a step, from real allocations and from made ones; no GPU."""

import pytest
from profile_jobs import own_job, profile_job
from traces_made import annotation, operator

from benchd.daemon.errors import Unsupported
from benchd.daemon.profiling.trace.trace import MemoryEvent, Trace
from benchd.daemon.worker.profiling import memory
from benchd.daemon.worker.profiling.memory import HeldMemory
from benchd.daemon.worker.profiling.work import open_work

FC_BYTES = 4 * (48 * 5 + 5)
BATCH_BYTES = 4 * 2 * 48


def event(t_us, address, size, on_gpu=False):
    return MemoryEvent(t_ns=t_us * 1000, address=address, bytes=size, thread=1, on_gpu=on_gpu)


def made(events, **rows):
    step = annotation(memory.STEP_RANGE, 0, 1000)
    ranges = [step, *rows.pop("annotations", [])]
    return Trace(annotations=ranges, memory_events=events, **rows)


def table_of(traced, held=(), gradients=()):
    nesting, blocks, start_ns = memory.traced_blocks(traced, list(held), False)
    memory.categorise(nesting, blocks, set(gradients))
    return memory.table(nesting, blocks, start_ns, "cpu", None, None)


def test_what_each_allocation_is_for():
    traced = made(
        [
            event(12, 1, 100),  # the batch
            event(22, 2, 200),  # the output of a module
            event(24, 3, 400),  # of use within it alone
            event(26, 3, -400),
            event(41, 4, 800),  # between modules
            event(52, 5, 1600),  # a gradient
            event(54, 3, 3200),  # passing through the backward pass, where something else was
            event(56, 3, -3200),
            event(60, 2, -200),
            event(2000, 9, 7),  # behind the step
            event(30, 8, 9, on_gpu=True),
        ],
        annotations=[annotation("enumerate(DataLoader)#x", 10, 5), annotation("nn.Module: Net", 20, 20)],
        operators=[operator("autograd::engine::evaluate_function: MmBackward0", 50, 8), operator("aten::empty", 21, 2)],
    )
    usage = table_of(traced, [HeldMemory(address=77, bytes=10, category="parameters")], {5})
    assert usage.timeline[0].by_category["parameters"] == 10
    assert usage.peak_bytes == 10 + 100 + 200 + 800 + 1600 + 3200
    assert usage.peak_by_category == {
        "parameters": 10,
        "inputs": 100,
        "activations": 200,
        "gradients": 1600,
        "temporaries": 3200,
        "other": 800,
    }
    assert usage.timeline[-1].by_category["activations"] == 0
    assert [(each.bytes, each.category, each.module, each.operator) for each in usage.largest][-3:] == [
        (400, "temporaries", "Net", None),
        (200, "activations", "Net", "aten::empty"),
        (100, "inputs", None, None),
    ]


def test_memory_of_before_that_is_given_back():
    traced = made([event(10, 1, -50), event(20, 2, -30), event(30, 3, 5)])
    usage = table_of(traced, [HeldMemory(address=1, bytes=50, category="inputs")])
    assert [(point.t_ns, point.by_category["inputs"], point.by_category["other"]) for point in usage.timeline] == [
        (0, 50, 30),
        (10_000, 0, 30),
        (20_000, 0, 0),
        (30_000, 0, 5),
    ]


def test_a_long_course_keeps_its_peak():
    ups = [event(2 * i, 1000 + i, 1 + 5000 * (i == 331)) for i in range(400)]
    downs = [event(2 * i + 1, 1000 + i, -1) for i in range(400)]
    usage = table_of(made([*ups, *downs]))
    assert len(usage.timeline) <= memory.POINTS + 1
    assert max(sum(point.by_category.values()) for point in usage.timeline) == usage.peak_bytes == 5001


def test_a_step_without_an_allocation_is_told():
    with pytest.raises(Unsupported, match="no allocation"):
        table_of(made([]))


def test_a_real_forward_pass(tmp_path):
    work = open_work(profile_job(tmp_path, options={"time_steps": 2}))
    usage = memory.run(work)
    assert usage.peak_by_category["parameters"] == sum(each.nbytes for each in work.module.parameters())
    assert usage.peak_by_category["inputs"] == work.images.nbytes + work.labels.nbytes
    assert usage.peak_bytes == sum(usage.peak_by_category.values())
    assert usage.peak_by_category["gradients"] == 0
    convolution = 4 * 2 * 64 * 32 * 32  # the largest output: float32, two images
    assert max(each.bytes for each in usage.largest if each.module == "Conv2d") == convolution
    assert (usage.snapshot, list(work.missing)) == (None, ["snapshot"])


def test_a_real_training_step_holds_the_gradients_of_its_parameters(tmp_path):
    work = open_work(own_job(tmp_path, workload="train"))
    usage = memory.run(work)
    last = usage.timeline[-1].by_category
    assert (last["parameters"], last["gradients"]) == (FC_BYTES, FC_BYTES)
    assert last["inputs"] == BATCH_BYTES + work.labels.nbytes


def test_a_real_evaluation_counts_the_batch_that_it_loads(tmp_path):
    work = open_work(own_job(tmp_path, workload="eval"))
    usage = memory.run(work)
    assert usage.peak_by_category["inputs"] >= 2 * BATCH_BYTES
