"""The method `layers` on real forward passes: what it names, how it adds up, what it counts."""

import time
from functools import cache

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from benchd.daemon.errors import Unsupported
from benchd.daemon.measuring.plan import PRESETS
from benchd.daemon.profiling.profile import ProfileJob
from benchd.daemon.records import Case, ModelFacts, Probes, Variant
from benchd.daemon.worker import probes
from benchd.daemon.worker.backends import LayerRun
from benchd.daemon.worker.profiling import costs, layers, segments
from benchd.daemon.worker.profiling.work import Work
from benchd.kernels.exact_conv2d import native
from benchd.models import vim
from benchd.models.catalog import MODELS, build
from benchd.models.cost import cost

NO_OPTIONS = {}
RATES = Probes(
    copy_bytes_per_s=1e10,
    matrix_flops_per_s=1e11,
    matrix_dtype="float32",
    exponentials_per_s=1e9,
    exponentials_by="torch",
)
NARROW = {"width": 16}  # a sixteenth of the arithmetic, the same layers
SHORT = NARROW | {"time_steps": 3}
SMALL_VIM = {"dim": 16, "depth": 3, "patch_size": 8, "stride": 8, "num_classes": 5, "image_size": 32}


def work_of(module, images, model="own", variant="eager", given=NO_OPTIONS, **job):
    case = Case(model=model, variant=Variant.parse(variant), batch_size=len(images), options=dict(given))
    options = MODELS[model].resolve(given) if model in MODELS else {}
    fixed = {"methods": ["layers"], "device": "cpu", "cache": "", "limits": PRESETS["quick"]}
    asked = {"workload": "forward", "warm_up": 1, "steps": 1, "runs": 5, **job}
    facts = ModelFacts(
        options=options, input_shape=list(images.shape[1:]), parameters=0, weights="", weights_sha256="", data=""
    )

    def forward():
        return module(images)

    return Work(
        module=module,
        images=images,
        device=torch.device("cpu"),
        labels=None,
        job=ProfileJob(case=case, **fixed, **asked),
        facts=facts,
        step=forward,
        forward=forward,
        backward=None,
    )


def catalogued(model, variant="eager", batch_size=2, **options):
    torch.manual_seed(0)
    module = build(model, kernels=Variant.parse(variant).kernels, **options)
    return work_of(module, torch.rand(batch_size, *module.input_shape), model, variant, options)


def small_vim(implementation):
    torch.manual_seed(0)
    return work_of(vim.Vim(**SMALL_VIM, implementation=implementation).eval(), torch.rand(2, 3, 32, 32), "vim_tiny")


WORKS = {
    "onepass": lambda: catalogued("snn_onepass", time_steps=3),
    "onepass custom": lambda: catalogued("snn_onepass", "custom", time_steps=3),
    "stbif": lambda: catalogued("snn_stbif_resnet18", **SHORT),
    "stbif custom": lambda: catalogued("snn_stbif_resnet18", "custom", **SHORT),
    "qann": lambda: catalogued("qann_resnet18", **NARROW),
    "qann custom": lambda: catalogued("qann_resnet18", "custom", **NARROW),
    "vim": lambda: small_vim("torch"),
    "vim custom": lambda: small_vim("auto"),
    "own": lambda: work_of(nn.Sequential(nn.Linear(8, 4), nn.ReLU()), torch.rand(3, 8)),
}

if not native.paths():
    del WORKS["qann custom"]  # its kernels need a CPU with AMX, VNNI or a dot product of bytes


@pytest.fixture(autouse=True)
def _known_rates(monkeypatch):
    monkeypatch.setattr(probes, "probe", lambda *_: RATES)  # probing takes longer than most of these runs


@pytest.fixture(autouse=True)
def _one_thread():
    # two that wait for each other at every part take many times as long beside other work
    torch.set_num_threads(1)


@cache
def run_of(name):
    work = WORKS[name]()
    return work, layers.run(work)


@pytest.fixture(params=list(WORKS))
def profiled(request):
    return run_of(request.param)


def test_a_runtime_that_times_its_own_layers_is_believed():
    """A layer inside a loop is reported at each turn; the names are the runtime's, and no module is looked at."""
    asked = []

    def layer_times(runs, images):
        asked.append((runs, images.shape))
        rows = [[("conv + relu", 0.5 + run / 10), ("body", 0.25), ("body", 0.25)] for run in range(runs)]
        return [[LayerRun(*row) for row in run] for run in rows]

    work = catalogued("snn_onepass", "tensorrt")
    work.layer_times = layer_times
    found = layers.run(work)
    assert asked == [(5, work.images.shape)]
    assert [(row.name, row.ns, row.low_ns, row.high_ns) for row in found.layers] == [
        ("conv + relu", pytest.approx(7e5), pytest.approx(5e5), pytest.approx(9e5)),
        ("body", 5e5, 5e5, 5e5),
    ]
    assert sum(row.share for row in found.layers) == pytest.approx(1)
    assert (found.components, found.timed_by, found.synchronised_ns) == ([], "tensorrt", pytest.approx(1.2e6))
    assert found.fused_ns > 0


def top(rows):
    return [row for row in rows if row.parent is None]


def names(rows):
    return [row.name for row in rows]


def test_the_shares_of_each_breakdown_are_the_whole_and_those_of_a_group_its_own(profiled):
    _, found = profiled
    assert sum(row.share for row in found.components) == pytest.approx(1 if found.components else 0, abs=0.005)
    assert sum(row.share for row in top(found.layers)) == pytest.approx(1, abs=0.005)
    for group in found.layers:
        parts = [row for row in found.layers if row.parent == group.name]
        if parts:
            assert sum(part.ns for part in parts) == pytest.approx(group.ns)
            assert sum(part.bytes or 0 for part in parts) == (group.bytes or 0)


@pytest.mark.skipif(not native.paths(), reason="needs a CPU with AMX, VNNI or a dot product of bytes")
def test_a_folded_qann_has_the_stages_of_the_plain_one():
    folded, plain = (names(top(run_of(name)[1].layers)) for name in ("qann custom", "qann"))
    assert sorted(folded) == sorted(plain)


def test_names_tell_the_rows_apart_and_times_lie_within_their_runs(profiled):
    _, found = profiled
    assert len(set(names(found.layers))) == len(found.layers)
    assert all(row.low_ns <= row.ns <= row.high_ns for row in [*found.components, *found.layers])
    assert len(found.run_ns) == 5
    assert min(found.run_ns) <= found.fused_ns <= max(found.run_ns)
    assert found.variation > 0


@pytest.mark.parametrize("name", ["qann", "vim", "own"])
def test_components_are_those_of_spiking_nets(name):
    _, found = run_of(name)
    assert not found.components
    assert not any(component in note for (component, *_) in layers.COMPONENTS for note in found.notes)


@pytest.mark.parametrize("name", ["onepass", "onepass custom", "stbif", "stbif custom"])
def test_a_component_without_work_is_nothing_and_the_notes_say_why(name):
    _, found = run_of(name)
    assert names(found.components) == [path[0] for path in layers.COMPONENTS]
    idle = [row.name for row in found.components if row.ns == 0]
    assert "Model_Reset" in idle
    assert "Model_Forward_Pass" not in idle
    assert all(any(note.startswith(f"{name}: ") for note in found.notes) for name in idle)


def test_nothing_of_the_profiling_stays_behind(profiled):
    work, _ = profiled
    assert not any("forward" in vars(each) for each in work.module.modules())
    assert all(getattr(vim, name).__module__.startswith("benchd.kernels.") for name in segments.VIM_KERNELS)


def test_nothing_stays_behind_a_pass_that_raises():
    module = small_vim("torch").module
    with pytest.raises(ValueError, match="images must be"):
        segments.run(lambda: module(torch.rand(1, 3, 8, 8)), segments.of(module), torch.device("cpu"))
    assert "forward" not in vars(module.norm_f)
    assert vim.bidirectional_scan.__module__ == "benchd.kernels.selective_scan"


@pytest.mark.parametrize("name", ["stbif", "stbif custom"])
def test_the_spiking_resnet_has_the_published_stages_with_their_blocks_and_layers(name):
    _, found = run_of(name)
    stages = ["Conv1_Block", "MaxPool", *(f"Layer{number}_ResBlocks" for number in (1, 2, 3, 4)), "Final_Layers"]
    assert [name for name in names(top(found.layers)) if name in stages] == stages
    assert {"other", "Time_Encoding", "Output_Processing", *stages} == set(names(top(found.layers)))
    by_parent = {row.name: row.parent for row in found.layers}
    assert by_parent["layer3.1"] == "Layer3_ResBlocks"
    assert by_parent["layer3.0.downsample.0"] == by_parent["layer3.0.relu2"] == "layer3.0"
    assert names(found.loading) == ["QANN_Creation", "SNN_Wrapper_Creation"]
    assert sum(row.share for row in found.loading) == pytest.approx(1)


def test_onepass_is_cut_at_each_of_its_layers():
    _, found = run_of("onepass")
    assert names(found.layers) == [
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


@pytest.mark.parametrize("name", ["vim", "vim custom"])
def test_a_layer_of_vim_is_cut_at_its_kernels_whichever_run(name):
    _, found = run_of(name)
    parts = ["norm", "in_proj", "conv1d", "x_proj", "scan", "out_proj"]
    for layer in ("layers.0", "layers.2"):  # the last computes one token by a path of its own
        own = [row for row in found.layers if row.parent == layer]
        assert names(own) == [f"{layer}.{part}" for part in parts]
        assert all(row.x_of_floor > 0 for row in own)
    assert names(top(found.layers)) == ["other", "patch_embed", *(f"layers.{n}" for n in range(3)), "norm_f", "head"]


def total_of(module, images):
    with torch.inference_mode():
        found = costs.count(module, lambda: module(images), len(images), segments.of(module))
    return costs.total(cost for _, cost in found)


@pytest.mark.parametrize("kernels", ["torch", "custom"])
def test_the_parts_of_onepass_cost_what_the_formula_of_the_whole_says(kernels):
    module = build("snn_onepass", kernels=kernels)
    found, whole = total_of(module, torch.rand(2, 3, 32, 32)), cost("snn_onepass", {}, 2, "fp32", "inference")
    assert found.matrix_flops == whole.matrix_flops
    relu_and_mean = 2 * 8 * (256 + 10)
    assert found.elementwise_flops == whole.elementwise_flops - relu_and_mean
    assert found.parameters_bytes == whole.parameters_bytes


@pytest.mark.parametrize("kernels", ["torch", "custom"])
def test_the_parts_of_the_spiking_resnet_cost_what_the_formula_of_the_whole_says(kernels):
    module = build("snn_stbif_resnet18", kernels=kernels, **NARROW)
    found = total_of(module, torch.randn(2, 3, 32, 32))
    whole = cost("snn_stbif_resnet18", NARROW, 2, "fp32", "inference")
    assert found.matrix_flops == whole.matrix_flops
    pool_and_shortcuts = 2 * 8 * (8 * 16 * 8**2 + 2 * sum(width * side**2 for _, width, side in STAGES))
    assert found.elementwise_flops == whole.elementwise_flops - pool_and_shortcuts


STAGES = ((16, 16, 8), (16, 32, 4), (32, 64, 2), (64, 128, 1))


def test_the_parts_of_vim_cost_what_the_formula_of_the_whole_says():
    module = build("vim_tiny", kernels="custom")
    found, whole = total_of(module, torch.rand(1, 3, 224, 224)), cost("vim_tiny", {}, 1, "fp32", "inference")
    assert (found.matrix_flops, found.elementwise_flops) == (whole.matrix_flops, whole.elementwise_flops)
    assert found.exponentials == whole.exponentials


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
    found = layers.run(work_of(Own(), torch.rand(4, 4)))
    by_name = {row.name: row for row in found.layers}
    assert names(top(found.layers)) == ["other", "blocks.0", "blocks.1", "head"]
    assert names(row for row in found.layers if row.parent == "blocks.1") == [
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
    found = layers.run(work_of(Wrapped(Wrapped(Attention())), torch.rand(2, 3, 8)))
    (row,) = [row for row in found.layers if row.name == "inner.inner"]
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


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_sequences_of_different_lengths_are_counted_as_they_are():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1, mask_check=False).eval()
    padded = torch.arange(5) >= torch.tensor([[5], [2]])

    def forward():
        return encoder(torch.rand(2, 5, 8), src_key_padding_mask=padded)

    with torch.inference_mode():
        found = costs.count(encoder, forward, 2, segments.of(encoder))
    assert costs.total(cost for _, cost in found).matrix_flops == 2 * (7 * (4 * 8 * 8 + 2 * 8 * 16) + 2 * 29 * 8)


def test_one_tensor_that_a_part_gets_three_times_is_read_once():
    module, images = Attended().eval(), torch.rand(2, 5, 8)
    scores = 2 * 5 * 5
    assert total_of(module, images).bytes == 4 * (4 * 8 * 8 + 4 * 8 + 2 * images.numel() + scores)


def test_what_only_passes_its_input_on_moves_nothing():
    net = nn.Sequential(nn.Identity(), nn.Flatten(), nn.Dropout(), nn.Linear(12, 2)).eval()
    rows = [row for row in layers.run(work_of(net, torch.rand(2, 3, 4))).layers if row.name in ("0", "1", "2")]
    assert [(row.bytes, row.x_of_floor, row.binding) for row in rows] == 3 * [(None, None, None)]


def test_what_works_in_place_moves_its_input_twice():
    assert total_of(Wrapped(nn.ReLU(inplace=True)), torch.rand(2, 3, 4)).bytes == 2 * 4 * 24


def test_a_table_is_read_by_its_rows():
    found = total_of(Wrapped(nn.Embedding(1000, 8)), torch.zeros(2, 5, dtype=torch.int64))
    assert (found.bytes, found.parameters_bytes) == (10 * 8 + 2 * 10 * 8 * 4, 0)


@pytest.fixture(scope="module")
def ranges():
    """The ranges of a session as a trace holds them: name, begin and end."""
    work = catalogued("snn_stbif_resnet18", batch_size=1, **SHORT)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        layers.run(work)
    noted = [event for event in profiler.events() if event.is_user_annotation]
    return [(event.name, event.time_range.start, event.time_range.end) for event in noted]


def inside(ranges, name):
    ((_, start, end),) = [each for each in ranges if each[0] == name]
    return {inner for inner, begun, ended in ranges if start <= begun and ended <= end} - {name}


def test_the_ranges_of_a_session_nest_as_published(ranges):
    runs = {f"Main_Inference_Timing_Run_{run}" for run in range(5)}
    assert {"Model_Loading", "Warmup_Runs", *runs} <= inside(ranges, "Complete_Profiling_Session")
    assert inside(ranges, "Model_Loading") == {"QANN_Creation", "SNN_Wrapper_Creation"}
    assert inside(ranges, "Warmup_Runs") == {"Warmup_0"}
    detail = inside(ranges, "Detailed_Layer_Profiling_Run_4")
    assert {
        "Conv1_Block",
        "MaxPool",
        "Layer1_ResBlocks",
        "Layer4_ResBlocks",
        "Final_Layers",
        "layer2.0.conv1",
    } <= detail
    components = {"Model_Reset", "Time_Encoding", "Model_Forward_Pass", "Model_Compute_All_Layers", "Output_Processing"}
    rest = {"Memory_Profiling_Run_4", "Detailed_Layer_Profiling_Run_4"}
    assert inside(ranges, "Main_Inference_Timing_Run_4") == components | rest | detail


@pytest.mark.parametrize(
    ("variant", "workload"), [("compile", "forward"), ("tensorrt-fp16", "eval"), ("eager", "train")]
)
def test_what_has_no_layers_of_its_own_is_refused_with_the_reason(variant, workload):
    work = work_of(nn.Linear(2, 2), torch.rand(1, 2), variant=variant, workload=workload)
    with pytest.raises(Unsupported, match="profile"):
        layers.run(work)


@pytest.mark.parametrize("name", ["onepass", "stbif"])
def test_the_sparsity_is_that_of_each_layer_and_population(name):
    work, found = run_of(name)
    rows = {row.name: row for row in found.sparsity}
    modules = dict(work.module.named_modules())
    for neuron in work.module.neurons():
        (row,) = (row for row in found.sparsity if modules[row.name] is neuron)
        assert 0 < row.activation <= 1  # so few steps leave a population silent
        assert row.connection is None
    layer = next(name for name, module in modules.items() if isinstance(module, torch.nn.Linear))
    assert any(0 < (row.activation or 0) < 1 for row in found.sparsity)
    assert (rows[layer].connection, rows[layer].activation) == (0.0, None)
