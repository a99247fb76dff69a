"""Plans of shipped folders, which are loaded and which are built again; and the lines of LOAD.md, run on a CPU."""

import io
import sys
from contextlib import nullcontext
from math import inf, nan
from types import SimpleNamespace

import msgspec
import onnx
import onnx.parser
import pytest
from manifests_made import manifest
from records_made import ENVIRONMENT, PASSED, made

from benchd.daemon.machine import folders
from benchd.daemon.measuring.protocol import Tensor
from benchd.daemon.records import Case, RuntimeFacts, Variant
from benchd.daemon.shipping import load_text, promise, verifying
from benchd.daemon.shipping import manifest as manifests
from benchd.daemon.shipping.manifest import Resource
from benchd.exporters import sessions

ORIN = msgspec.structs.replace(
    ENVIRONMENT, device="cuda", gpu="Orin", driver="540.4", versions={"tensorrt": "10.3.0"}, threads=None
)
AGX, NANO = "NVIDIA Jetson AGX Orin Developer Kit", "NVIDIA Jetson Orin Nano Developer Kit"
CASE = Case(model="net", variant=Variant.parse("tensorrt-fp16"))
TENSORS = {"inputs": [Tensor("x", "float16", [1, 3])], "outputs": [Tensor("y", "float16", [1, 3])]}


def shipped(**fields):
    packages = {"numpy": "2", "torch": "2.8", "tensorrt": "10.3.0"}
    given = {"case": CASE, "environment": ORIN, "provider": "TensorRT 10.3.0", "packages": packages, **TENSORS}
    return manifest(**given | {"resources": [Resource("model.plan", 1, "")]} | fields)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a plan."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("STATE_DIRECTORY", raising=False)
    there = tmp_path / "net"
    there.mkdir()
    (there / "model.plan").write_bytes(b"a plan")
    text = '<ir_version: 8, opset_import: ["": 17]> net (float16[1, 3] x) => (float16[1, 3] y) {y = Add(x, x)}'
    onnx.save(onnx.parser.parse_model(text), there / "model.onnx")
    manifests.write(there, shipped())
    return there


def why(folder, here=ORIN, **trust):
    return verifying.why_rebuilt(folder, manifests.read(folder), here, **{"trust_plan": False} | trust)


def test_only_a_plan_that_this_user_made_or_trusts_is_loaded(folder):
    assert why(folder) == (
        f"this user ({folders.user()}) did not make model.plan, which is a program: --trust-plan loads it, or for the "
        "service trust_plan = true in [[shipped]]"
    )
    assert why(folder, trust_plan=True) == ""
    manifests.remember(folder)
    assert why(folder) == ""


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"gpu": "NVIDIA H200"}, "model.plan was built for GPU Orin, not NVIDIA H200"),
        ({"driver": "550.1"}, "model.plan was built for driver 540.4, not 550.1"),
        ({"versions": {"tensorrt": "10.7.0"}}, "model.plan was built for TensorRT 10.3.0, not 10.7.0"),
    ],
)
def test_a_plan_of_another_gpu_driver_or_version_is_built_again(folder, changed, told):
    manifests.remember(folder)
    environment = msgspec.structs.replace(ORIN, **changed)
    assert why(folder, environment) == told == why(folder, environment, trust_plan=True)


@pytest.mark.parametrize(("board", "told"), [(AGX, ""), (NANO, f"model.plan was built for GPU {AGX}, not {NANO}")])
def test_a_jetson_loads_the_plan_that_it_made_though_a_worker_names_its_gpu_otherwise(folder, board, told):
    installed = {"tensorrt": "10.3.0.30-1+cuda12.5"}  # by dpkg; TensorRT itself says 10.3.0
    was = msgspec.structs.replace(ORIN, board=AGX, soc="tegra234", l4t="R36.4.3", versions=installed)
    environment = msgspec.structs.replace(was, board=board, gpu="tegra234 integrated GPU")
    assert verifying.why_rebuilt(folder, shipped(environment=was), environment, trust_plan=True) == told


def test_so_is_a_package_of_aotinductor_which_its_process_compares_with_what_it_was_compiled_for(folder):
    package = shipped(resources=[Resource("model.pt2", 1, "")])
    environment = msgspec.structs.replace(ORIN, driver="550.1")
    reason = verifying.why_rebuilt(folder, package, environment, trust_plan=False)
    assert reason.startswith(f"this user ({folders.user()}) did not make model.pt2, which is a program: --trust-plan")
    assert verifying.why_rebuilt(folder, package, environment, trust_plan=True) == ""


def test_a_folder_without_a_plan_needs_no_trust(folder):
    assert verifying.why_rebuilt(folder, shipped(resources=[]), ENVIRONMENT, trust_plan=False) == ""


def test_a_plan_that_tensorrt_refuses_is_told_too():
    runtime = RuntimeFacts(
        provider="TensorRT 10.3.0", notes=["rebuilt, because model.plan was built for a different GPU"]
    )
    record = made(check=PASSED, runtime=runtime)
    judgement = promise.judge(shipped(), record, is_golden=True)
    assert judgement.rebuilt == "model.plan was built for a different GPU"


def run_lines(folder, patch, given, exact, *, forward="return x", outputs=("output",), variant="eager"):
    """Run LOAD.md of a module that reads `given`; `exact` are its golden answers, in the order of `outputs`."""
    numpy, safetensors = pytest.importorskip("numpy"), pytest.importorskip("safetensors.torch")
    code = folder / "code"
    code.mkdir()
    (code / "same.py").write_text(
        f"import torch\n\n\nclass build(torch.nn.Module):\n    def forward(self, x):\n        {forward}\n"
    )
    safetensors.save_file({}, folder / "weights.safetensors")
    golden = {f"exact0:{name}": numpy.array(values) for name, values in zip(outputs, exact, strict=True)}
    numpy.savez(folder / "golden.npz", **{"input0:0": numpy.array(given, numpy.float32)}, **golden)
    text = load_text.code(
        manifest(
            case=Case(model="own.same.build", variant=Variant.parse(variant)),
            entry="same:build",
            inputs=[Tensor("0", "float32", [])],
            outputs=[Tensor(name, "float32", []) for name in outputs],
            golden=manifests.Golden(1, 1, dict.fromkeys(outputs, 1e-6)),
        )
    )
    patch.chdir(folder)
    patch.setattr(sys, "path", list(sys.path))
    patch.setattr(sys, "dont_write_bytecode", True)
    sys.modules.pop("same", None)  # of another folder, which the finder of its path remembers too
    sys.path_importer_cache.pop("code", None)
    names = {}
    try:
        exec(text, names)  # noqa: S102 - it is what a user runs
    finally:
        names["golden"].close()


@pytest.mark.parametrize(
    ("forward", "outputs"),
    [
        ("return x, None", ["0"]),
        ("return None, x", ["1"]),
        ("return x, 3.0", ["0", "1"]),
        ("return {'scores': x, 'others': None}", ["scores"]),
        ("return {'scores': x, 'loss': 3.0}", ["scores", "loss"]),
        ("return {'output': x}", ["output"]),
    ],
)
def test_the_lines_take_the_tensors_and_numbers_of_an_answer(tmp_path, monkeypatch, capsys, forward, outputs):
    run_lines(
        tmp_path, monkeypatch, [[1.0, 2.0]], ([[1.0, 2.0]], 3.0)[: len(outputs)], forward=forward, outputs=outputs
    )
    assert capsys.readouterr().out == "the answers match the golden ones\n"


@pytest.mark.parametrize(
    ("answer", "exact", "rows_off"),
    [
        ([[0.0, 0.0]], [[0.0, 0.0]], 0),
        ([[0.0, 0.0], [1.0, 0.0]], [[0.0, 0.0], [0.0, 0.0]], 1),
        ([[1.0, -inf]], [[1.0, -inf]], 0),
        ([[1.1, -inf], [1.0, -inf]], [[1.0, -inf], [1.0, -inf]], 1),
        ([[1.0, -inf]], [[1.0, 2.0]], 1),
        ([[1.0, 2.0]], [[1.0, -inf]], 1),
        ([[1.0, inf]], [[1.0, -inf]], 1),
        ([[nan, -inf]], [[1.0, -inf]], 1),
        ([[]], [[]], 0),
        ([], [], 0),
        (3.0, 3.0, 0),
        (3.1, 3.0, 1),
    ],
)
def test_the_lines_count_the_inputs_whose_answers_are_off(tmp_path, monkeypatch, answer, exact, rows_off):
    pattern = rf"\{{'output': {rows_off}\}} inputs"
    with pytest.raises(AssertionError, match=pattern) if rows_off else nullcontext():
        run_lines(tmp_path, monkeypatch, answer, [exact])


HERE = msgspec.structs.replace(ORIN, l4t=None)
BOARD = msgspec.structs.replace(ORIN, soc="tegra234", l4t="R36.4.3")
OF_BOARD = "python -m pip install --no-deps --index-url https://pypi.jetson-ai-lab.io/jp6/cu126"
VENV = "python3 -m venv --system-site-packages env && . env/bin/activate"


@pytest.mark.parametrize(
    ("environment", "packages", "lines"),
    [
        (HERE, {"numpy": "2.4.6", "torch": "2.14.1"}, ["python -m pip install numpy==2.4.6 torch==2.14.1"]),
        (
            HERE,
            {"torch": "2.14.1+cpu", "torchvision": "0.29.1+cpu", "benchd": "0.1.0"},
            [
                "python -m pip install torch==2.14.1 torchvision==0.29.1 benchd-0.1.0-py3-none-any.whl "
                "--extra-index-url https://download.pytorch.org/whl/cpu"
            ],
        ),
        (HERE, {"torch": "2.9.0a0+git1234"}, ["python -m pip install torch==2.9.0a0"]),
        (
            BOARD,
            {"numpy": "1.26.4", "torch": "2.8.0", "tensorrt": "10.3.0"},
            [
                VENV,
                "sudo apt install python3-libnvinfer  # JetPack's, here tensorrt==10.3.0",
                f"{OF_BOARD} torch==2.8.0",
                "python -m pip install numpy==1.26.4 torch==2.8.0",
            ],
        ),
        (
            BOARD,
            {"numpy": "1.26.4", "onnxruntime-gpu": "1.23.0"},
            [
                VENV,
                f"{OF_BOARD} onnxruntime-gpu==1.23.0",
                "python -m pip install numpy==1.26.4 onnxruntime-gpu==1.23.0",
            ],
        ),
        (
            msgspec.structs.replace(BOARD, l4t=None, os="Ubuntu 22.04.5 LTS"),  # in a container
            {"torch": "2.8.0"},
            [VENV, f"{OF_BOARD} torch==2.8.0", "python -m pip install torch==2.8.0"],
        ),
        (
            msgspec.structs.replace(BOARD, l4t="R39.2.0"),
            {"torch": "2.9.1"},
            [
                VENV,
                "python -m pip install --no-deps --index-url https://pypi.jetson-ai-lab.io/sbsa/cu130 torch==2.9.1  "
                "# torch links to nvpl-blas, nvpl-lapack, nvidia-cudss-cu13: benchd's `make once` sets that up",
                "python -m pip install torch==2.9.1",
            ],
        ),
        (
            msgspec.structs.replace(BOARD, l4t="R35.4"),
            {"torch": "2.8.0", "safetensors": "0.5.3"},
            [
                VENV,
                "python -m pip install --no-deps --index-url URL torch==2.8.0",
                "python -m pip install torch==2.8.0 safetensors==0.5.3",
            ],
        ),
    ],
)
def test_what_is_to_be_installed_comes_from_where_it_is(environment, packages, lines):
    case = Case(model="net", variant=Variant.parse("eager"))
    page = load_text.page(shipped(case=case, entry="same:build", environment=environment, packages=packages))
    assert page.split("```")[1].splitlines()[1:] == lines
    assert ("benchd itself is needed (its wheel is on no package index" in page) == ("benchd" in packages)


def test_the_lines_of_onnx_runtime_run_on_a_gpu_as_was_measured(monkeypatch, tmp_path, capsys):
    numpy, called = pytest.importorskip("numpy"), []

    class Session:
        def __init__(self, path, options, providers):
            called.append(providers)

        def get_providers(self):
            return [called[-1][0][0]]

        def get_outputs(self):
            return [SimpleNamespace(name="y")]

        def run(self, names, inputs):
            return [inputs["x"]]

    runtime = SimpleNamespace(SessionOptions=SimpleNamespace, InferenceSession=Session)
    runtime.preload_dlls = lambda: called.append("libraries")
    monkeypatch.setitem(sys.modules, "onnxruntime", runtime)
    monkeypatch.chdir(tmp_path)
    numpy.savez("golden.npz", **{"input0:x": numpy.ones((1, 3)), "exact0:y": numpy.ones((1, 3))})
    names, given = {}, {"golden": manifests.Golden(1, 1, {"y": 1e-6}), "provider": "CUDAExecutionProvider"}
    code = load_text.code(shipped(case=Case(model="net", variant=Variant.parse("onnxruntime")), **given))
    exec(code, names)  # noqa: S102 - it is what a user runs
    names["golden"].close()
    assert capsys.readouterr().out == "the answers match the golden ones\n"
    assert called == ["libraries", [("CUDAExecutionProvider", sessions.CUDA_OPTIONS)]]


def test_the_lines_that_load_a_cuda_graph_replay_what_was_captured(monkeypatch, tmp_path, capsys):
    torch = pytest.importorskip("torch")
    graphs = []

    class Graph:
        """On a CPU a graph is the function itself."""

        def replay(self):
            graphs.append(self)

    stands = {
        "CUDAGraph": Graph,
        "graph": lambda graph: io.BytesIO(),
        "Stream": io.BytesIO,
        "stream": lambda stream: stream,
    }
    for name, value in (stands | {"synchronize": lambda: None}).items():
        monkeypatch.setattr(torch.cuda, name, value)
    run_lines(tmp_path, monkeypatch, [[0.0, 1.0, 2.0]], [[[0.0, 1.0, 2.0]]], variant="cudagraph")
    assert capsys.readouterr().out == "the answers match the golden ones\n"
    assert len(graphs) == 1
