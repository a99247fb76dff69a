"""From names to cases: the default plans, products, options, and every name that nobody knows."""

import errno
import os
import re
from dataclasses import replace

import jetson_trees
import msgspec
import pytest
from machines import write

from benchd.daemon.config import LimitsConfig, Suite
from benchd.daemon.errors import UsageError
from benchd.daemon.machine import sandbox
from benchd.daemon.measuring import plan
from benchd.daemon.measuring.plan import Machine
from benchd.daemon.records import Case, UserFile, UserModule, UserNir, Variant
from benchd.daemon.runtimes import PACKAGES

CPU = Machine("cpu", has_cxx=True, has_cc=True)
GPU = Machine("cuda", has_cxx=True)
WITHOUT_TRITON = replace(GPU, packages=frozenset({"onnxruntime"}))
ALL = frozenset(PACKAGES)


def ids(suite, machine=CPU, **kwargs):
    return [planned.case.case_id for planned in plan.plan([suite], LimitsConfig(), machine, **kwargs)]


def test_the_quick_plan_on_a_cpu():
    assert ids(Suite(preset="quick")) == [
        "snn_onepass,eager,b64",
        "snn_onepass,custom,b64",
        "snn_stbif_resnet18,eager,b1",
        "snn_stbif_resnet18,custom,b1",
        "snn_stbif_resnet18,eager,b1,training",
        "vim_tiny,eager,b1",
        "vim_tiny,custom,b1",
    ]


def test_the_default_quick_plan_fits_in_three_minutes():
    quick = plan.plan([Suite(preset="quick")], LimitsConfig(), CPU)
    assert sum(planned.seconds for planned in quick) <= 180


def test_lists_multiply_and_a_default_value_leaves_no_trace():
    suite = Suite(models=["snn_onepass"], batch_sizes=[1, 4], options={"time_steps": ["4", "8"]}, variants=["eager"])
    assert ids(suite) == [
        "snn_onepass,eager,b1,time_steps=4",
        "snn_onepass,eager,b1",
        "snn_onepass,eager,b4,time_steps=4",
        "snn_onepass,eager,b4",
    ]


def test_trained_weights_bring_their_options_along():
    suite = Suite(variants=["eager"], options={"time_steps": ["4"]}, weights="demo")
    assert ids(suite) == [
        "snn_onepass,eager,b64,time_steps=4",
        "snn_stbif_resnet18,eager,b1,time_steps=4,width=16",
        "vim_tiny,eager,b1,depth=4,dim=64,image_size=32,num_classes=10,patch_size=4,stride=4",
    ]
    assert ids(msgspec.structs.replace(suite, weights="random"))[-1] == "vim_tiny,eager,b1"


@pytest.mark.parametrize(
    ("suite", "words"),
    [
        (Suite(models=["vim_small"]), "--weights demo: vim_small has none; choose one of vim_tiny, snn_onepass"),
        (Suite(models=["vim_tiny"], options={"depth": ["24"]}), "option depth=24: the weights demo of vim_tiny have"),
    ],
)
def test_what_the_trained_weights_are_not_of_is_named(suite, words):
    with pytest.raises(UsageError, match=words):
        ids(msgspec.structs.replace(suite, weights="demo"))


def of(model, **options):
    return Suite(models=[model], options={name: [value] for name, value in options.items()})


@pytest.mark.parametrize(
    ("suite", "words"),
    [
        (of("vim-tny"), r"unknown model 'vim-tny'; did you mean 'vim_tiny'\? Valid: snn_onepass, qann"),
        (of("torchvision:resnt18"), r"torchvision has no model 'resnt18'; did you mean torchvision:resnet18\?"),
        (of("torchvison:resnet18"), r"unknown model 'torchvison:resnet18'.*torchvision:NAME, timm:NAME"),
        (of("torchvision:resnet18", level="4"), r"unknown option of torchvision:resnet18 'level'.*Valid: image_size"),
        (of("vim_tiny", scam="1"), r"unknown option of vim_tiny 'scam'; did you mean 'scan'"),
        (of("vim_tiny", scan="up"), r"option scan=up: choose one of serial, two_level"),
        (of("vim_tiny", image_size="8"), r"patch_size=16 is larger than the image, 8 pixels"),
        (of("snn_onepass", time_steps="x"), r"option time_steps=x: expected int"),
        (of("snn_onepass", time_steps="0"), r"option time_steps=0: must be at least 1"),
        (of("snn_onepass", time_steps=2**63), r"option time_steps=\d+: expected int"),
        (of("snn_onepass", decay=10**400), r"option decay=\d+: expected float"),
        (of("snn_onepass", threshold="nan"), r"option threshold=nan: expected float"),
        (of("snn_stbif_resnet18", level="16", time_steps="4"), r"time_steps=4 is below 7, the minimum for level 16"),
        (Suite(onnx="/nowhere/net.onnx"), r"suite.onnx: /nowhere/net.onnx: No such file or directory"),
        (Suite(preset="fast"), r"unknown preset 'fast'.*Valid: quick, standard, thorough"),
    ],
)
def test_what_nobody_knows_is_named_with_what_is_valid(suite, words):
    with pytest.raises(UsageError, match=words):
        ids(suite)


@pytest.mark.parametrize(
    ("variant", "machine", "fields", "reason"),
    [
        ("tensorrt", CPU, {}, "TensorRT needs an NVIDIA GPU"),
        ("custom", CPU, {"models": ["square"]}, "square has no custom kernels"),
        ("custom", GPU, {"models": ["qann_resnet18"]}, "qann_resnet18 has custom kernels for CPUs only"),
        ("custom", WITHOUT_TRITON, {"models": ["snn_onepass"]}, "need the package triton on a GPU"),
        ("custom", replace(CPU, has_cc=False), {"models": ["snn_onepass"]}, "need a C compiler; install gcc or set CC"),
        ("amp", CPU, {"directions": ["training"]}, "training can be measured with eager and, for the ST-BIF net"),
        ("compile", replace(CPU, has_cxx=False), {}, "install g\\+\\+ or set CXX"),
        ("compile", WITHOUT_TRITON, {}, "torch.compile needs the package triton on a GPU"),
        ("onnxruntime", replace(CPU, packages=frozenset()), {}, "onnxruntime is not installed: .* -m pip install"),
        ("onnxruntime", CPU, {"provider": "cuda"}, "provider cuda needs an NVIDIA GPU"),
        ("onnxruntime", GPU, {"provider": "cpu"}, "provider cpu runs on the CPU: give --device cpu"),
        ("onnxruntime-int8", GPU, {}, "no int8 kernels for CUDA: use tensorrt-int8"),
        ("tensorrt-fp16", replace(GPU, packages=ALL), {"dla": 0}, "only a Jetson has a DLA"),
        ("int8", CPU, {}, "torchao is not installed: .* -m pip install"),
        ("int8", replace(GPU, packages=ALL), {}, "needs an x86 CPU: use onnxruntime-int8, or tensorrt-int8"),
        ("int8", replace(CPU, has_cxx=False, packages=ALL), {}, "install g\\+\\+ or set CXX"),
    ],
)
def test_what_cannot_run_stays_in_the_plan_with_its_reason(variant, machine, fields, reason, monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    planned = plan.plan([Suite(variants=[variant], **fields)], LimitsConfig(), machine)
    assert planned
    for entry in planned:
        assert re.search(reason, str(entry.reason))
        assert entry.seconds == 0


@pytest.mark.parametrize(
    ("variant", "machine"),
    [
        ("tensorrt", replace(GPU, packages=ALL - {"onnxruntime"})),
        ("openvino", replace(CPU, packages=ALL - {"onnxruntime"})),
    ],
)
def test_a_file_of_the_user_s_needs_onnx_runtime_in_every_runtime(variant, machine, monkeypatch):
    monkeypatch.setattr(plan, "has_gpu", lambda *root: True)
    case = Case(model="net", variant=Variant.parse(variant))
    assert plan.why_not(case, machine) is None
    reason = "the reference for an ONNX file is its own run in ONNX Runtime: the package onnxruntime is not installed"
    assert str(plan.why_not(case, machine, user_onnx=True)).startswith(reason)


def test_a_module_of_your_own_is_the_only_model_and_takes_no_options():
    own = UserModule("/somewhere/net.py:build")
    assert ids(Suite(variants=["eager", "amp"]), own=own) == ["own.net.build,eager,b1", "own.net.build,amp,b1"]
    with pytest.raises(UsageError, match="has no options"):
        ids(Suite(options={"time_steps": ["1"]}), own=own)
    with pytest.raises(UsageError, match="your own model has no custom kernels; omit those variants"):
        ids(Suite(variants=["eager", "custom-fp16"]), own=own)


def test_a_model_of_a_library_is_planned_as_one_of_the_catalog_without_kernels_of_ours():
    suite = Suite(models=["torchvision:resnet18"], variants=["eager", "custom"])
    planned = plan.plan([suite], LimitsConfig(), CPU)
    assert [entry.case.model for entry in planned] == ["torchvision:resnet18"] * 2
    assert [entry.reason for entry in planned] == [None, "torchvision:resnet18 has no custom kernels"]
    default = ids(Suite(models=["torchvision:resnet18"], preset="quick"))
    assert default == [f"torchvision_resnet18,{name},b1" for name in ("eager", "compile", "onnxruntime")]


@pytest.mark.parametrize("preset", ["quick", "standard"])
def test_a_module_of_your_own_runs_what_ships_most(preset):
    own = UserModule("package.net:build", folder="/somewhere")
    assert own.model == "own.net.build"
    gpu = replace(GPU, packages=ALL)
    on_both = ["eager", "compile", "onnxruntime"]
    for machine, more in ((CPU, []), (gpu, ["fp16", "cudagraph", "tensorrt-fp16"])):
        planned = plan.plan([Suite(preset=preset)], LimitsConfig(), machine, own)
        assert [entry.case.variant.name for entry in planned] == on_both + more


def test_a_file_of_a_fixed_batch_implies_it():
    own = UserFile("/somewhere/net.onnx", [], batch_size=4)
    assert ids(Suite(variants=["onnxruntime"]), own=own) == ["own.net,onnxruntime,b4"]
    assert ids(Suite(variants=["onnxruntime"], batch_sizes=[4]), own=own) == ["own.net,onnxruntime,b4"]
    with pytest.raises(UsageError, match=r"--batch-sizes 2: net\.onnx has a fixed batch size of 4$"):
        ids(Suite(batch_sizes=[4, 2]), own=own)


def test_a_file_is_measured_in_its_own_precision():
    own = UserFile("/somewhere/net.onnx", [], precision="fp16")
    assert ids(Suite(), own=own) == ["own.net,onnxruntime-fp16,b1"]


def test_presets_are_the_published_ones_and_the_configuration_changes_them():
    (quick,) = plan.plan([Suite(models=["square"], preset="quick")], LimitsConfig(), CPU)
    assert (quick.limits.processes, quick.limits.warm_up_cap_s, quick.limits.rule.cap_s) == (1, 2.0, 5.0)
    assert (quick.limits.rule.min_blocks, quick.limits.rule.half_width) == (5, None)
    changed = LimitsConfig(warm_up_cap_s=0.5, measure_cap_s=1.0, check_images=3, build_deadline_s=7.0)
    (short,) = plan.plan([Suite(models=["square"], processes=5, variants=["eager"])], changed, CPU)
    assert (short.limits.processes, short.limits.warm_up_cap_s, short.limits.rule.cap_s) == (5, 0.5, 1.0)
    assert (short.limits.check_images, short.limits.deadline_s("build"), short.limits.rule.half_width) == (3, 7.0, 0.01)


def test_a_jetson_may_build_for_an_hour_unless_the_configuration_says_otherwise(monkeypatch):
    assert plan.limited(plan.PRESETS["quick"], LimitsConfig()).deadline_s("load") == 900
    monkeypatch.setattr(plan, "is_tegra", lambda *_: True)
    assert plan.limited(plan.PRESETS["quick"], LimitsConfig()).deadline_s("load") == 3600
    assert plan.limited(plan.PRESETS["quick"], LimitsConfig(build_deadline_s=7.0)).deadline_s("load") == 7


def test_a_dla_is_refused_for_what_does_not_use_it():
    for variants in ([], ["eager", "onnxruntime"]):
        with pytest.raises(UsageError, match=r"--dla 0: only TensorRT uses a DLA; add --variants tensorrt-fp16"):
            ids(Suite(variants=variants, dla=0))


def test_a_dla_computes_in_half_precision(monkeypatch):
    monkeypatch.setattr(plan, "is_tegra", lambda *_: True)
    machine = replace(GPU, packages=ALL)
    reasons = [
        plan.why_not(Case(model="square", variant=Variant.parse(name), dla=0), machine)
        for name in ("tensorrt", "tensorrt-fp16")
    ]
    assert reasons[0] == "a DLA computes in fp16 and int8 only: give --variants tensorrt-fp16"
    assert "DLA" not in (reasons[1] or "")


@pytest.mark.parametrize(
    ("refused", "unit", "closed"),
    [
        (errno.EPERM, "", "/dev/nvidiactl cannot be opened: a device rule closes it"),
        (errno.EPERM, "DevicePolicy=closed", "DevicePolicy=closed, and no DeviceAllow= lists it"),
        (errno.EPERM, "ProtectClock=yes", "ProtectClock= hides it in versions of systemd before 253"),
        (errno.EACCES, "", "its mode excludes this user"),
        (errno.ENODEV, "", None),
    ],
)
def test_a_gpu_that_may_not_be_opened_is_named_with_the_option_and_never_no_gpu(
    tmp_path, monkeypatch, refused, unit, closed
):
    """Only a rule of systemd or a container answers EPERM, which no file of a test does."""
    opens = os.open

    def answered(path, *flags, **more):
        if str(path).endswith("/dev/nvidiactl"):
            raise OSError(refused, os.strerror(refused))
        return opens(path, *flags, **more)

    write(tmp_path, {sandbox.UNIT: f"[Service]\n{unit}\n"} if unit else {})
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidiactl").symlink_to("/dev/null")
    monkeypatch.setattr(os, "open", answered)
    assert plan.has_gpu(tmp_path) is bool(closed)
    assert str(closed) in str(plan.closed_gpu(tmp_path))


def test_a_tegra_that_shows_no_gpu_is_a_closed_one(tmp_path):
    jetson_trees.build(tmp_path, jetson_trees.ORIN_NANO)
    assert "PrivateDevices=" in plan.closed_gpu(tmp_path)
    assert plan.has_gpu(tmp_path)
    write(tmp_path, {"dev/nvmap": ""})
    assert plan.closed_gpu(tmp_path) is None


def test_a_suite_for_the_gpu_is_never_measured_on_the_cpu():
    suite = Suite(preset="quick", device="cuda")
    planned = plan.plan([suite], LimitsConfig(), CPU)
    assert {entry.reason for entry in planned} == {plan.NOT_ITS_DEVICE}
    assert [entry.case.case_id for entry in planned] == ids(suite, GPU)
    assert ids(suite, GPU) != ids(Suite(preset="quick"), CPU)


@pytest.mark.parametrize(
    ("machine", "node", "missed"),
    [
        (CPU, "dev/null", False),
        (CPU, "dev/nvidiactl", True),
        (GPU, "dev/nvidiactl", True),
        (Machine("cuda", True, gpu_uuid="GPU-1"), "dev/nvidiactl", False),
        (GPU, "dev/nvmap", False),
        (Machine("cuda", True, closed_gpu="it was shut"), "dev/nvmap", True),
    ],
)
def test_a_gpu_that_came_up_late_is_known_to_be_missed(tmp_path, machine, node, missed):
    (tmp_path / "dev").mkdir()
    (tmp_path / node).touch()
    assert plan.has_missed_gpu(machine, tmp_path) is missed


def test_a_sustained_run_is_long_and_one_and_a_cold_start_is_many_processes():
    suite = Suite(models=["square"], variants=["eager"], scenarios=["sustained", "cold_start", "periodic"])
    sustained, cold_start, periodic = (entry.limits for entry in plan.plan([suite], LimitsConfig(), CPU))
    assert (sustained.processes, sustained.rule.cap_s, sustained.rule.half_width) == (1, 600.0, None)
    assert cold_start.processes == 5
    assert periodic == plan.PRESETS["standard"]
    given = msgspec.structs.replace(suite, processes=2)
    limits = [entry.limits for entry in plan.plan([given], LimitsConfig(measure_cap_s=9.0), CPU)]
    assert [limit.processes for limit in limits] == [2, 2, 2]
    assert limits[0].rule.cap_s == 9.0


def test_a_search_doubles_the_batch_sizes_of_offline_alone():
    suite = Suite(models=["square"], variants=["eager"], scenarios=["offline", "wake_up"])
    *searched, paced = plan.plan([suite], LimitsConfig(), CPU, search=True)
    assert [entry.case.batch_size for entry in searched] == [2**power for power in range(11)]
    assert all(entry.is_searched for entry in searched)
    assert [entry.by_name for entry in searched] == [True] + [False] * 10
    assert (paced.case.batch_size, paced.is_searched) == (1, False)
    given = msgspec.structs.replace(suite, batch_sizes=[2])
    assert not any(entry.is_searched for entry in plan.plan([given], LimitsConfig(), CPU, search=True))


def test_offline_sweeps_batch_sizes_unless_they_are_given():
    suite = Suite(models=["square"], variants=["eager"], scenarios=["offline", "wake_up"])
    sizes = [entry.case.batch_size for entry in plan.plan([suite], LimitsConfig(), CPU)]
    assert sizes == [1, 4, 16, 64, 1]
    given = msgspec.structs.replace(suite, batch_sizes=[2])
    assert [entry.case.batch_size for entry in plan.plan([given], LimitsConfig(), CPU)] == [2, 2]


@pytest.mark.parametrize(
    "case_id",
    [
        "vim_tiny,eager,b1",
        "snn_onepass,custom-fp16,b4,reset=subtract,time_steps=4,offline,seed=3",
        "snn_stbif_resnet18,eager,b2,training",
        "square,eager,b1,seed=2,threads=4",
        "square,onnxruntime,b1,seed=2,provider=cpu,threads=4",
        "square,tensorrt-fp16,b1,dla=1",
        "torchvision_mobilenet_v3_small,onnxruntime,b2,image_size=96",
        "square,eager,b1,streams=4",
        "square,eager,b1,server,threads=1,streams=2,rate=33.3333333333,deadline=0.5,percentile=99.9,queue=1",
        "square,eager,b1,server,rate=highest,deadline=33",
    ],
)
def test_a_case_id_names_its_case(case_id):
    assert ids(plan.suite_of(case_id, "quick")) == [case_id]


@pytest.mark.parametrize(
    ("case_id", "words"),
    [
        ("vim_tiny,eagre", "unknown variant 'eagre'"),
        ("vim_tiny,eager,seed=x", "case vim_tiny,eager,seed=x: "),
        ("vim_tiny,onnxruntime,provider=gpu", "case vim_tiny,onnxruntime,provider=gpu: "),
        ("vim_tiny,eager,b0", "Expected `int` >= 1 - at `$.batch_sizes[0]`"),
    ],
)
def test_a_case_id_that_means_nothing_is_refused(case_id, words):
    with pytest.raises(UsageError, match=re.escape(words)):
        ids(plan.suite_of(case_id, "quick"))


def accuracies(suite, **kwargs):
    return {planned.inputs.accuracy for planned in plan.plan([suite], LimitsConfig(), CPU, **kwargs)}


@pytest.fixture
def checkpoint(tmp_path):
    path = tmp_path / "w.pth"
    path.write_bytes(b"")
    return str(path)


def test_accuracy_is_measured_where_weights_and_data_are_there_and_over_as_much_as_asked_for(checkpoint):
    suite = Suite(models=["snn_onepass"], weights=checkpoint, data="imagefolder:images")
    assert accuracies(suite) == {plan.POOL_IMAGES}
    assert accuracies(msgspec.structs.replace(suite, accuracy="full")) == {"full"}
    assert accuracies(msgspec.structs.replace(suite, accuracy=7)) == {7}
    assert accuracies(msgspec.structs.replace(suite, data=None)) == {None}


def test_cases_of_one_name_are_planned_once_and_read_the_same(checkpoint):
    suite = Suite(models=["snn_onepass"], variants=["eager"])
    planned = plan.plan([suite, msgspec.structs.replace(suite, preset="quick")], LimitsConfig(), CPU)
    assert [entry.preset for entry in planned] == ["standard"]
    for other in ({"weights": checkpoint}, {"data": "imagefolder:images"}):
        with pytest.raises(UsageError, match="measure snn_onepass,eager,b64 with different inputs, "):
            plan.plan([suite, msgspec.structs.replace(suite, **other)], LimitsConfig(), CPU)


def test_a_nir_file_has_options_that_multiply_into_cases_and_others_are_refused():
    own = UserNir("/net.nir")
    suite = Suite(variants=["eager"], options={"dt": [0.001, 0.0001], "reset": ["subtract"]})
    cases = [entry.case for entry in plan.plan([suite], LimitsConfig(), CPU, own)]
    assert [case.case_id for case in cases] == [
        "own.net,eager,b1,dt=0.001,reset=subtract",
        "own.net,eager,b1,reset=subtract",
    ]
    assert plan.suite_of(cases[0].case_id, "quick").options == {"dt": ["0.001"], "reset": ["subtract"]}
    with pytest.raises(UsageError, match="did you mean 'reset'"):
        plan.plan([Suite(options={"rest": ["zero"]})], LimitsConfig(), CPU, own)
    with pytest.raises(UsageError, match="option reset=none: choose one of zero, subtract"):
        plan.plan([Suite(options={"reset": ["none"]})], LimitsConfig(), CPU, own)
