"""The method `layers` on real forward passes: what it names, how it adds up, what it counts."""

import time
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from profile_jobs import profile_job
from torch import nn
from torch.profiler import ProfilerActivity, profile

from benchd.daemon.errors import Unsupported
from benchd.daemon.records import Probes
from benchd.daemon.worker import probes
from benchd.daemon.worker.backends import LayerRun
from benchd.daemon.worker.profiling import costs, layers, segments
from benchd.daemon.worker.profiling.work import Work, open_work
from benchd.kernels.exact_conv2d import native
from benchd.models import vim
from benchd.models.catalog import build
from benchd.models.cost import cost

RATES = Probes(
    copy_bytes_per_s=1e10,
    matrix_flops_per_s=1e11,
    matrix_dtype="float32",
    exponentials_per_s=1e9,
    exponentials_by="torch",
)
NARROW = {"width": 16}  # a sixteenth of the arithmetic, the same layers
OPTIONS = {
    "snn_onepass": {"time_steps": 3},
    "snn_stbif_resnet18": NARROW | {"time_steps": 3},
    "qann_resnet18": NARROW,
    "vim_tiny": {"dim": 16, "depth": 3, "patch_size": 8, "stride": 8, "num_classes": 5, "image_size": 32},
}
WORKS = {
    f"{name} {variant}": (model, variant)
    for name, model in zip(("onepass", "stbif", "qann", "vim"), OPTIONS, strict=True)
    for variant in ("eager", "custom")
    if name != "qann" or variant == "eager" or native.paths()  # needs a CPU with AMX, VNNI or a dot product of bytes
}


def work_of(module, images, **job):
    """Return the work on a module as it is."""
    forward, a_job = partial(module, images), profile_job(Path(), batch=len(images), **job)
    device = torch.device("cpu")
    return Work(
        module=module, images=images, device=device, labels=None, job=a_job, facts=None, step=forward, forward=forward
    )


@pytest.fixture(autouse=True)
def _known_rates(monkeypatch):
    monkeypatch.setattr(probes, "probe", lambda *_: RATES)  # probing takes longer than most of these runs


@pytest.fixture(autouse=True)
def _one_thread():
    # two that wait for each other at every part take many times as long beside other work
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def run_of(tmp_path_factory):
    """Return a function that gives the work of this name and what was profiled of it, once."""

    @cache
    def run(name):
        if name == "own":
            work = work_of(nn.Sequential(nn.Linear(8, 4), nn.ReLU()), torch.rand(3, 8))
        else:
            model, variant = WORKS[name]
            folder = tmp_path_factory.mktemp("work")
            work = open_work(profile_job(folder, model=model, variant=variant, options=OPTIONS[model]))
        return work, layers.run(work)

    return run


@pytest.fixture(params=[*WORKS, "own"])
def profiled(request, run_of):
    return run_of(request.param)


def test_a_runtime_that_times_its_own_layers_is_believed():
    """A layer inside a loop is reported at each turn; the names are the runtime's, and no module is looked at."""
    calls = []

    def layer_times(runs, images):
        calls.append((runs, images.shape))
        rows = [[("conv + relu", 0.5 + run / 10), ("body", 0.25), ("body", 0.25)] for run in range(runs)]
        return [[LayerRun(*row) for row in run] for run in rows]

    work = work_of(nn.Flatten(), torch.rand(2, 3), variant="tensorrt")
    work.layer_times = layer_times
    layer_profile = layers.run(work)
    assert calls == [(5, work.images.shape)]
    assert [(row.name, row.ns, row.low_ns, row.high_ns) for row in layer_profile.layers] == [
        ("conv + relu", pytest.approx(7e5), pytest.approx(5e5), pytest.approx(9e5)),
        ("body", 5e5, 5e5, 5e5),
    ]
    assert sum(row.share for row in layer_profile.layers) == pytest.approx(1)
    assert (layer_profile.components, layer_profile.timed_by, layer_profile.synchronised_ns) == (
        [],
        "tensorrt",
        pytest.approx(1.2e6),
    )
    assert layer_profile.fused_ns > 0


def top(rows):
    return [row for row in rows if row.parent is None]


def names(rows):
    return [row.name for row in rows]


def test_the_shares_of_each_breakdown_are_the_whole_and_those_of_a_group_its_own(profiled):
    _, layer_profile = profiled
    assert sum(row.share for row in layer_profile.components) == pytest.approx(
        1 if layer_profile.components else 0, abs=0.005
    )
    assert sum(row.share for row in top(layer_profile.layers)) == pytest.approx(1, abs=0.005)
    for group in layer_profile.layers:
        parts = [row for row in layer_profile.layers if row.parent == group.name]
        if parts:
            assert sum(part.ns for part in parts) == pytest.approx(group.ns)
            assert sum(part.bytes or 0 for part in parts) == (group.bytes or 0)


def test_names_tell_the_rows_apart_and_times_lie_within_their_runs(profiled):
    _, layer_profile = profiled
    assert len(set(names(layer_profile.layers))) == len(layer_profile.layers)
    assert all(row.low_ns <= row.ns <= row.high_ns for row in [*layer_profile.components, *layer_profile.layers])
    assert len(layer_profile.run_ns) == 5
    assert min(layer_profile.run_ns) <= layer_profile.fused_ns <= max(layer_profile.run_ns)
    assert layer_profile.variation > 0


@pytest.mark.parametrize("name", ["qann eager", "vim eager", "own"])
def test_components_are_those_of_spiking_nets(run_of, name):
    _, layer_profile = run_of(name)
    assert not layer_profile.components
    assert not any(component in note for (component, *_) in layers.COMPONENTS for note in layer_profile.notes)


@pytest.mark.parametrize("name", ["onepass eager", "onepass custom", "stbif eager", "stbif custom"])
def test_a_component_without_work_is_nothing_and_the_notes_say_why(run_of, name):
    _, layer_profile = run_of(name)
    assert names(layer_profile.components) == [path[0] for path in layers.COMPONENTS]
    idle = [row.name for row in layer_profile.components if row.ns == 0]
    assert "Model_Reset" in idle
    assert "Model_Forward_Pass" not in idle
    assert all(any(note.startswith(f"{name}: ") for note in layer_profile.notes) for name in idle)


def test_nothing_of_the_profiling_stays_behind(profiled):
    work, _ = profiled
    assert not any("forward" in vars(each) for each in work.module.modules())
    assert all(getattr(vim, name).__module__.startswith("benchd.kernels.") for name in segments.VIM_KERNELS)


@pytest.mark.parametrize("name", ["stbif eager", "stbif custom"])
def test_the_spiking_resnet_has_the_published_stages_with_their_blocks_and_layers(run_of, name):
    _, layer_profile = run_of(name)
    stages = ["Conv1_Block", "MaxPool", *(f"Layer{number}_ResBlocks" for number in (1, 2, 3, 4)), "Final_Layers"]
    assert [name for name in names(top(layer_profile.layers)) if name in stages] == stages
    assert {"other", "Time_Encoding", "Output_Processing", *stages} == set(names(top(layer_profile.layers)))
    by_parent = {row.name: row.parent for row in layer_profile.layers}
    assert by_parent["layer3.1"] == "Layer3_ResBlocks"
    assert by_parent["layer3.0.downsample.0"] == by_parent["layer3.0.relu2"] == "layer3.0"
    assert names(layer_profile.loading) == ["QANN_Creation", "SNN_Wrapper_Creation"]
    assert sum(row.share for row in layer_profile.loading) == pytest.approx(1)


def test_onepass_is_cut_at_each_of_its_layers(run_of):
    _, layer_profile = run_of("onepass eager")
    assert names(layer_profile.layers) == [
        "Time_Encoding",
        "conv1",
        "Input_Reshaping",
        "lif1+pool",
        "other",
        "conv2",
        "lif2+pool",
        "flatten",
        "fc1",
        "fc2",
        "Output_Processing",
    ]


@pytest.mark.parametrize("name", ["vim eager", "vim custom"])
def test_a_layer_of_vim_is_cut_at_its_kernels_whichever_run(run_of, name):
    _, layer_profile = run_of(name)
    parts = ["norm", "in_proj", "conv1d", "x_proj", "scan", "out_proj"]
    for layer in ("layers.0", "layers.2"):  # the last computes one token by a path of its own
        own = [row for row in layer_profile.layers if row.parent == layer]
        assert names(own) == [f"{layer}.{part}" for part in parts]
        assert all(row.x_of_floor > 0 for row in own)
    assert names(top(layer_profile.layers)) == [
        "other",
        "patch_embed",
        *(f"layers.{n}" for n in range(3)),
        "norm_f",
        "head",
    ]


def total_of(module, images):
    with torch.inference_mode():
        counts = costs.count(module, lambda: module(images), len(images), segments.of(module))
    return costs.total(cost for _, cost in counts)


# the operations of two images in eight steps that no part has
RELU_AND_MEAN = 2 * 8 * (256 + 10)
MAPS = ((16, 8), (32, 4), (64, 2), (128, 1))  # (width, side) of each stage
POOL_AND_SHORTCUTS = 2 * 8 * (8 * 16 * 8**2 + 2 * sum(width * side**2 for width, side in MAPS))


@pytest.mark.parametrize(
    ("model", "kernels", "options", "elsewhere", "also"),
    [
        ("snn_onepass", "torch", {}, RELU_AND_MEAN, "parameters_bytes"),
        ("snn_onepass", "custom", {}, RELU_AND_MEAN, "parameters_bytes"),
        ("snn_stbif_resnet18", "torch", NARROW, POOL_AND_SHORTCUTS, "matrix_flops"),
        ("snn_stbif_resnet18", "custom", NARROW, POOL_AND_SHORTCUTS, "matrix_flops"),
        ("vim_tiny", "custom", {}, 0, "exponentials"),
    ],
)
def test_the_parts_of_a_net_cost_what_the_formula_of_the_whole_says(model, kernels, options, elsewhere, also):
    module = build(model, kernels=kernels, **options)
    total, whole = total_of(module, torch.rand(2, *module.input_shape)), cost(model, options, 2, "fp32", "inference")
    assert total.matrix_flops == whole.matrix_flops
    assert total.elementwise_flops == whole.elementwise_flops - elsewhere
    assert getattr(total, also) == getattr(whole, also)


class Slow(nn.Module):
    """A module whose own work lies between that of its children."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        x = self.first(x)
        time.sleep(0.02)
        return self.second(x @ x.mT)


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Slow(), Slow()])
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        time.sleep(0.01)
        return self.head(x)


def test_what_no_module_of_a_users_net_does_is_named_where_it_happens():
    layer_profile = layers.run(work_of(Own(), torch.rand(4, 4)))
    by_name = {row.name: row for row in layer_profile.layers}
    assert names(top(layer_profile.layers)) == ["other", "blocks.0", "blocks.1", "head"]
    assert names(row for row in layer_profile.layers if row.parent == "blocks.1") == [
        "blocks.1 other",
        "blocks.1.first",
        "blocks.1.second",
    ]
    assert by_name["blocks.0 other"].low_ns >= 20e6
    assert by_name["other"].low_ns >= 10e6
    assert by_name["head"].flops == 2 * 4 * 4 * 2


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Sequential(nn.Linear(8, 8)), nn.Conv1d(3, 5, 3, padding=1))

    def forward(self, x):
        return self.inner(x) @ x.mT


class Wrapped(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


def test_products_below_the_second_level_and_of_no_module_are_counted_as_torch_makes_them():
    layer_profile = layers.run(work_of(Wrapped(Wrapped(Attention())), torch.rand(2, 3, 8)))
    (row,) = [row for row in layer_profile.layers if row.name == "inner.inner"]
    assert row.flops == 2 * 2 * (3 * 8 * 8 + 5 * 8 * 3 * 3 + 5 * 8 * 3)


class Attending(nn.Module):
    """Attention of two heads without products of its own."""

    def forward(self, x):
        heads = x.view(2, 5, 2, 4).transpose(1, 2)
        return nn.functional.scaled_dot_product_attention(heads, heads, heads)


class Attended(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x)


MATRICES, SCORES = 4 * 8 * 8, 2 * 5 * 8  # of an attention of width 8 over 5 tokens: per token


@pytest.mark.parametrize(
    ("module", "width", "products"),
    [
        (Attended(), 8, MATRICES + SCORES),
        (Wrapped(Attending()), 8, SCORES),
        (Wrapped(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)), 8, MATRICES + SCORES + 2 * 8 * 16),
        (Wrapped(nn.LSTM(4, 6, batch_first=True)), 4, 4 * 6 * (4 + 6)),
    ],
    ids=["MultiheadAttention", "scaled_dot_product_attention", "TransformerEncoderLayer", "LSTM"],
)
def test_the_products_inside_a_fused_operator_are_counted(module, width, products):
    assert total_of(module.eval(), torch.rand(2, 5, width)).matrix_flops == 2 * 2 * 5 * products


def test_one_tensor_that_a_part_gets_three_times_is_read_once():
    module, images = Attended().eval(), torch.rand(2, 5, 8)
    scores = 2 * 5 * 5
    assert total_of(module, images).bytes == 4 * (4 * 8 * 8 + 4 * 8 + 2 * images.numel() + scores)


def test_what_only_passes_its_input_on_moves_nothing():
    net = nn.Sequential(nn.Identity(), nn.Flatten(), nn.Dropout(), nn.Linear(12, 2)).eval()
    rows = [row for row in layers.run(work_of(net, torch.rand(2, 3, 4))).layers if row.name in ("0", "1", "2")]
    assert [(row.bytes, row.x_of_floor, row.binding) for row in rows] == 3 * [(None, None, None)]


def test_a_table_is_read_by_its_rows():
    total = total_of(Wrapped(nn.Embedding(1000, 8)), torch.zeros(2, 5, dtype=torch.int64))
    assert (total.bytes, total.parameters_bytes) == (10 * 8 + 2 * 10 * 8 * 4, 0)


def inside(ranges, name):
    """Return the names of the ranges within the only one of this name."""
    (outer,) = [each.time_range for each in ranges if each.name == name]
    within = [each for each in ranges if outer.start <= each.time_range.start and each.time_range.end <= outer.end]
    return {each.name for each in within} - {name}


def test_the_ranges_of_a_session_nest_as_published(run_of):
    work, _ = run_of("stbif eager")
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        layers.run(work)
    ranges = [event for event in profiler.events() if event.is_user_annotation]
    runs = {f"Main_Inference_Timing_Run_{run}" for run in range(5)}
    assert {"Model_Loading", "Warmup_Runs", *runs} <= inside(ranges, "Complete_Profiling_Session")
    assert inside(ranges, "Model_Loading") == {"QANN_Creation", "SNN_Wrapper_Creation"}
    assert inside(ranges, "Warmup_Runs") == {"Warmup_0"}
    detail = inside(ranges, "Detailed_Layer_Profiling_Run_4")
    assert {"Conv1_Block", "MaxPool", "Layer1_ResBlocks", "Layer4_ResBlocks", "Final_Layers"} <= detail
    components = {"Model_Reset", "Time_Encoding", "Model_Forward_Pass", "Model_Compute_All_Layers", "Output_Processing"}
    rest = {"Memory_Profiling_Run_4", "Detailed_Layer_Profiling_Run_4"}
    assert inside(ranges, "Main_Inference_Timing_Run_4") == components | rest | detail


@pytest.mark.parametrize(
    ("variant", "workload"), [("compile", "forward"), ("tensorrt-fp16", "eval"), ("eager", "train")]
)
def test_what_has_no_layers_of_its_own_is_refused_with_the_reason(variant, workload):
    work = work_of(nn.Linear(2, 2), torch.rand(1, 2), variant=variant, workload=workload)
    with pytest.raises(Unsupported, match=r"forward pass without gradients|profile"):
        layers.run(work)


@pytest.mark.parametrize("name", ["onepass eager", "stbif eager"])
def test_the_sparsity_is_that_of_each_layer_and_population(run_of, name):
    work, layer_profile = run_of(name)
    rows = {row.name: row for row in layer_profile.sparsity}
    modules = dict(work.module.named_modules())
    for neuron in work.module.neurons():
        (row,) = (row for row in layer_profile.sparsity if modules[row.name] is neuron)
        assert 0 < row.activation <= 1  # so few steps leave a population silent
        assert row.connection is None
    layer = next(name for name, module in modules.items() if isinstance(module, torch.nn.Linear))
    assert any(0 < (row.activation or 0) < 1 for row in layer_profile.sparsity)
    assert (rows[layer].connection, rows[layer].activation) == (0.0, None)
