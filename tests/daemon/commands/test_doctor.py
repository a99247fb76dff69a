import io
import json
import os
import subprocess
import sys
from importlib.util import find_spec

import jetson_trees
import pytest
from machines import desktop, write

from benchd.daemon.commands import doctor
from benchd.daemon.measuring import capabilities
from benchd.daemon.runtimes import PACKAGES
from benchd.daemon.sampling.sources import SAMPLERS
from benchd.exporters import code

TORCH = """
import warnings
__version__ = "9.9.0"
class version:
    cuda = {cuda!r}
class cuda:
    @staticmethod
    def is_available():
        {warn}
        return {gpu!r} is not None
    @staticmethod
    def get_device_name():
        return {gpu!r}
"""


@pytest.fixture
def torch_of(tmp_path, monkeypatch):
    """Put another torch before the real one on the path of child processes."""

    def install(source=None, *, cuda=None, gpu=None, warn="pass"):
        write(tmp_path / "children", {"torch/__init__.py": source or TORCH.format(cuda=cuda, gpu=gpu, warn=warn)})
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'children'}:{os.environ.get('PYTHONPATH', '')}")

    return install


@pytest.fixture
def machine(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor.ForeignUse, "cpus", lambda _: 0.0)
    root = desktop(tmp_path / "root")
    write(root, {"proc/stat": "cpu  1 2 3 4 5 6 7 8 0 0\n"})
    return root


def findings(root, **options):
    return {finding.name: finding for finding in capabilities.examine(root, **options)}


def distribution(folder, name, number):
    write(folder, {f"{name.replace('-', '_')}-{number}.dist-info/METADATA": f"Name: {name}\nVersion: {number}\n"})


def test_every_sampler_runtime_and_program_has_a_line(machine, torch_of):
    torch_of()
    out = io.StringIO()
    assert doctor.run(out, machine, as_json=False) == 0
    lines, (can, cannot) = out.getvalue().splitlines()[:-3], out.getvalue().splitlines()[-2:]
    names = [line.split()[1] for line in lines]
    runtimes = ["torch", "torchvision", "cuda", "triton", "onnxruntime", "openvino", "torchao", "tensorrt"]
    assert names == [*(name for name in SAMPLERS if name != "fake"), *runtimes, "cc", "c++", "mosquitto"]
    assert {line.split()[0] for line in lines} <= {"yes", "no"}
    assert can.startswith("can measure: eager, ")
    assert cannot.startswith("cannot: cudagraph, ")
    assert cannot.endswith("; energy, because none of ina3221, ina238, nvml, rapl, jtop is usable")


def test_a_busy_machine_is_said_last(machine, torch_of, monkeypatch):
    torch_of()
    monkeypatch.setattr(doctor.ForeignUse, "cpus", lambda _: 1.0)
    out = io.StringIO()
    doctor.run(out, machine, as_json=False)
    warning = "busy machine: other processes use 1 CPU: times measured now may be far too long"
    assert out.getvalue().splitlines()[-1] == warning


def test_json_says_the_same(machine, torch_of):
    torch_of(cuda="13.0", gpu="NVIDIA H200")
    out = io.StringIO()
    assert doctor.run(out, machine, as_json=True) == 0
    (cuda,) = (finding for finding in json.loads(out.getvalue()) if finding["name"] == "cuda")
    assert cuda == {"name": "cuda", "kind": "runtime", "usable": True, "detail": "13.0 on NVIDIA H200", "cure": ""}


def test_what_is_not_usable_says_what_to_do(machine, torch_of):
    torch_of()
    for finding in capabilities.examine(machine):
        assert finding.detail
        assert finding.usable or finding.remedy or finding.kind == "source", finding


@pytest.mark.parametrize(
    ("need", "code"), [([], 0), (["procfs"], 0), (["torch", "procfs"], 0), (["cuda"], 7), (["procfs", "cuda"], 7)]
)
def test_the_exit_code_tells_whether_what_is_needed_is_there(need, code, machine, torch_of):
    torch_of()
    assert doctor.run(io.StringIO(), machine, as_json=False, need=need) == code


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("raise ImportError('libcudart.so.13: cannot open shared object file')", "libcudart.so.13"),
        ("import os; os._exit(3)", "exit status 3"),
        ("import time; time.sleep(60)", "longer than 0.5 s"),
    ],
)
def test_a_torch_that_does_not_import_measures_nothing(source, why, machine, torch_of):
    torch_of(source)
    by_name = findings(machine, probe_timeout_s=0.5 if "sleep" in source else 60.0)
    assert (by_name["torch"].usable, by_name["cuda"].usable) == (False, False)
    assert why in by_name["torch"].detail


def test_a_torchvision_of_another_torch_is_told_with_the_pair_that_loads(machine, torch_of, tmp_path):
    torch_of(cuda=None)
    error = "raise RuntimeError('operator torchvision::nms does not exist')"
    write(tmp_path / "children", {"torchvision/__init__.py": error})
    finding = findings(machine)["torchvision"]
    assert (finding.usable, finding.detail) == (False, "operator torchvision::nms does not exist")
    assert "torch torchvision --index-url https://download.pytorch.org/whl/cpu" in finding.remedy
    write(tmp_path / "children", {"torchvision/__init__.py": "__version__ = '9.8.0'"})
    assert (findings(machine)["torchvision"].usable, findings(machine)["torchvision"].detail) == (True, "9.8.0")


def test_why_cuda_cannot_be_used(machine, torch_of):
    torch_of(cuda=None)
    assert "CPU-only" in findings(machine)["cuda"].detail
    torch_of(cuda="13.0", warn="warnings.warn('the driver is too old')")
    assert "kernel module" in findings(machine)["cuda"].detail
    write(machine, {"dev/nvidia0": ""})
    cuda = findings(machine)["cuda"]
    assert cuda.detail == "the driver is too old"
    assert "CUDA 13.0" in cuda.remedy


@pytest.mark.skipif(os.geteuid() == 0, reason="root may open everything")
def test_a_device_that_may_not_be_opened_names_the_group(machine, torch_of):
    torch_of(cuda="13.0")
    write(machine, {"dev/nvidia0": ""})
    (machine / "dev/nvidia0").chmod(0)
    cuda = findings(machine)["cuda"]
    assert "no permission to open " in cuda.detail
    assert "usermod -aG video,render" in cuda.remedy


def test_a_jetson_is_told_what_to_type_for_its_jetpack(tmp_path, torch_of, monkeypatch):
    jetson_trees.build(tmp_path, jetson_trees.ORIN_NANO)
    torch_of(cuda=None)
    monkeypatch.setattr(capabilities, "find_spec", lambda name: None if name != "torch" else find_spec(name))
    by_name, index = findings(tmp_path), "pip install --no-deps --index-url https://pypi.jetson-ai-lab.io/jp6/cu126"
    assert by_name["onnxruntime"].remedy == f"{index} onnxruntime-gpu && pip install onnxruntime-gpu"
    assert by_name["triton"].remedy == f"{index} triton && pip install triton"
    three = "torch torchvision triton"
    assert by_name["cuda"].remedy.endswith(f"{index} {three} && pip install {three}")
    assert by_name["tensorrt"].remedy == PACKAGES["tensorrt"].on_board
    torch_of(cuda="12.6")
    assert findings(tmp_path)["cuda"].remedy == "sudo apt install nvidia-jetpack"


@pytest.mark.parametrize(
    ("name", "jetpack", "mode"),
    [
        ("orin_nano", "6.1 to 6.2.1", "the fastest is MAXN_SUPER: sudo nvpmodel -m 2"),
        ("orin_nx", "6.1 to 6.2.1", "the fastest is MAXN: sudo nvpmodel -m 0"),
        ("agx_orin_7", "7.2", "the fastest is MAXN: sudo nvpmodel -m 0"),
    ],
)
def test_a_board_names_its_release_and_its_fastest_mode(tmp_path, torch_of, name, jetpack, mode):
    torch_of()
    by_name = findings(jetson_trees.build(tmp_path, jetson_trees.BOARDS[name]))
    assert (by_name["jetpack"].detail, by_name["power mode"].remedy) == (jetpack, mode)


def test_a_rail_that_fails_beside_the_others_is_named(tmp_path, torch_of):
    torch_of()
    root = jetson_trees.build(tmp_path, jetson_trees.ORIN_NANO)
    jetson_trees.set_rail(root, "VDD_SOC", "garbage", 1)
    finding = findings(root)["ina3221"]
    assert finding.usable
    assert finding.detail.startswith("all of its values can be read except: rail VDD_SOC: ")


def test_two_onnx_runtimes_are_refused(machine, torch_of, tmp_path, monkeypatch):
    torch_of()
    distribution(tmp_path / "two", "onnxruntime", "1.23.0")
    distribution(tmp_path / "two", "onnxruntime-gpu", "1.22.0")
    monkeypatch.syspath_prepend(tmp_path / "two")
    monkeypatch.setattr(code, "_version", code._version.__wrapped__)  # another test may have asked already
    finding = findings(machine)["onnxruntime"]
    assert (finding.usable, finding.detail) == (False, "installed twice: onnxruntime, onnxruntime-gpu")
    assert finding.remedy.startswith("pip uninstall -y onnxruntime onnxruntime-gpu")


def test_nothing_installed():
    """In a process whose path holds no package, as those that are imported already stay."""
    code = (
        "import sys; from pathlib import Path\n"
        "from benchd.daemon.commands import doctor; from benchd.daemon.sampling import sources\n"
        "for name in sources.SAMPLERS.values(): __import__(name.partition(':')[0])\n"
        "sys.path.clear()\n"
        "sys.exit(doctor.run(sys.stdout, Path('/'), as_json=True))\n"
    )
    environment = {**os.environ, "PATH": "", "CC": "no-such-cc", "CXX": "no-such-c++"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 7, done.stderr
    by_name = {finding["name"]: finding for finding in json.loads(done.stdout)}
    absent = ["torch", "cuda", "triton", "onnxruntime", "tensorrt", "cc", "c++"]
    assert [name for name in absent if by_name[name]["usable"]] == []
    assert by_name["cc"]["detail"] == "no-such-cc is not on the PATH"


def test_this_machine_without_torch_in_this_process(torch_of):
    torch_of()
    code = (
        "import sys; from pathlib import Path\n"
        "from benchd.daemon.commands import doctor\n"
        "code = doctor.run(sys.stderr, Path('/'), as_json=False)\n"
        "print(code, {'torch', 'numpy', 'onnxruntime', 'tensorrt', 'triton'} & set(sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "0 set()\n"
    assert "yes  torch" in done.stderr
