import os
import sys

import msgspec
import pytest
from machines import desktop, orin_nano, write

from benchd.daemon.machine.environment import describe, fingerprint, variables
from benchd.daemon.verdicts.sameness import environment_differences as differences


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """A folder that is the whole PATH, and a function that puts a tool there."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))

    def tool(name, script):
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)

    return tool


def test_an_orin_nano(tmp_path, tools):
    tools("nvpmodel", "echo 'NV Power Mode: 25W'; echo 1")
    environment = describe("cuda", None, orin_nano(tmp_path), {"MALLOC_MMAP_MAX_": "0"})
    assert (environment.machine, environment.os, environment.kernel) == (
        "aarch64",
        "Ubuntu 22.04.5 LTS",
        "5.15.148-tegra",
    )
    assert (environment.board, environment.soc) == ("NVIDIA Jetson Orin Nano Developer Kit", "tegra234")
    assert (environment.cpu_model, environment.cpu_governor, environment.cpu_max_hz) == (
        "Cortex-A78AE",
        "schedutil",
        1510.4e6,
    )
    assert (environment.gpu, environment.driver) == ("tegra234 integrated GPU", "L4T R36.4.3")
    assert (environment.power_mode, environment.power_limit_w, environment.clocks_locked) == ("25W", 25.0, False)
    assert (environment.l4t, environment.jetpack) == ("R36.4.3", None)
    assert environment.memory_bytes == 7800000 * 1024
    assert environment.allocator["MALLOC_MMAP_MAX_"] == "0"


def test_a_container_on_a_board_has_the_board_s_gpu_though_nvidia_smi_answers(tmp_path, tools):
    tools("nvidia-smi", "echo 'Orin (nvgpu), 595.78, [N/A]'")
    root = orin_nano(tmp_path)
    (root / "etc/nv_tegra_release").unlink()
    environment = describe("cuda", None, root)
    assert (environment.gpu, environment.driver, environment.l4t, environment.is_tegra) == (
        "tegra234 integrated GPU",
        None,
        None,
        True,
    )


@pytest.mark.parametrize(
    ("board", "mode", "power_limit_w"),
    [
        ("NVIDIA Jetson Orin Nano Developer Kit", "MAXN_SUPER", None),
        ("NVIDIA Jetson Orin NX Engineering Reference Developer Kit", "10W", 10.0),
        ("NVIDIA Jetson AGX Orin Developer Kit", "MODE_30W", 30.0),
    ],
)
def test_the_orins(board, mode, power_limit_w, tmp_path, tools):
    tools("nvpmodel", f"echo 'NVPM WARN: fan mode is not set!'; echo 'NV Power Mode: {mode}'; echo 2")
    root = orin_nano(tmp_path)
    write(root, {"proc/device-tree/model": f"{board}\0", "sys/class/devfreq/17000000.gpu/governor": "nvhost_podgov\n"})
    environment = describe("cuda", None, root)
    assert (environment.board, environment.power_mode, environment.power_limit_w) == (board, mode, power_limit_w)
    assert (environment.gpu_governor, environment.gpu_max_hz) == ("nvhost_podgov", 624.75e6)


def test_what_jetpack_installed_is_told_where_no_wheel_brings_it(tmp_path, tools, monkeypatch):
    packages = {
        "nvidia-jetpack": "6.2.1+b38",
        "cuda-cudart-12-6": "12.6.68-1",
        "cuda-cudart-dev-12-6": "12.6.0-1",
        "libcudnn9-cuda-12": "9.3.0.75-1",
        "libcudnn9-dev-cuda-12": "9.9.9.9-1",
        "libnvinfer10": "10.3.0.30-1+cuda12.5",
        "libnvinfer-bin": "1.0-1",
    }
    stanzas = [
        f"Package: {name}\nStatus: install ok installed\nSection: libs\nVersion: {number}\nDescription: it\n more\n"
        for name, number in packages.items()
    ]
    removed = "Package: libnvinfer8\nStatus: deinstall ok config-files\nVersion: 8.5.2-1\n"
    write(tmp_path, {"var/lib/dpkg/status": "\n".join([*stanzas, removed])})
    monkeypatch.setattr(sys, "path", [])  # no wheel is installed
    environment = describe("cuda", None, orin_nano(tmp_path))
    assert environment.jetpack == "6.2.1+b38"
    libraries = {name: environment.versions[name] for name in ("cuda", "cudnn", "tensorrt")}
    assert libraries == {"cuda": "12.6.68-1", "cudnn": "9.3.0.75-1", "tensorrt": "10.3.0.30-1+cuda12.5"}


def test_the_thermal_state(tmp_path, tools):
    thermal = "sys/class/thermal"
    zones = [("cpu-thermal", "46125"), ("gpu-thermal", "44531"), ("cv0-thermal", "-256000"), ("cpu-thermal", "47000")]
    for i, (name, temperature) in enumerate(zones):
        write(tmp_path, {f"{thermal}/thermal_zone{i}/type": name, f"{thermal}/thermal_zone{i}/temp": temperature})
    write(tmp_path, {f"{thermal}/thermal_zone9/type": "soc2-thermal"})  # its reading fails
    for i, (name, level) in enumerate([("pwm-fan", "2"), ("cpufreq-cpu0", "0"), ("devfreq-17000000.gpu", "3")]):
        write(tmp_path, {f"{thermal}/cooling_device{i}/type": name, f"{thermal}/cooling_device{i}/cur_state": level})
    environment = describe("cpu", None, tmp_path)
    assert environment.temperature_c == {"cpu-thermal": 47.0, "gpu-thermal": 44.531}
    assert environment.cooling == {"pwm-fan": 2, "devfreq-17000000.gpu": 3}


@pytest.mark.parametrize("governor", ["performance", "schedutil"])
def test_jetson_clocks_locks_cpu_and_gpu(governor, tmp_path, tools):
    root = orin_nano(tmp_path, governor=governor)
    assert describe("cpu", None, root).clocks_locked is False
    for policy in ("policy0", "policy4"):
        write(root, {f"sys/devices/system/cpu/cpufreq/{policy}/scaling_min_freq": "1510400\n"})
    assert describe("cpu", None, root).clocks_locked is True
    assert describe("cuda", None, root).clocks_locked is False
    write(root, {"sys/class/devfreq/17000000.gpu/min_freq": "624750000\n"})
    assert describe("cuda", None, root).clocks_locked is True


def test_a_desktop(tmp_path, tools):
    tools("nvidia-smi", "echo 'NVIDIA GeForce RTX 4090, 560.35.03, 450.00 W'; echo 'NVIDIA RTX 3060, 560.35.03, 170 W'")
    environment = describe("cuda", 4, desktop(tmp_path))
    assert (environment.os, environment.board, environment.soc) == (
        "Debian GNU/Linux 12 (bookworm)",
        "ASRock X570 Taichi",
        None,
    )
    assert environment.cpu_model == "AMD Ryzen 7 5800X 8-Core Processor"
    assert (environment.gpu, environment.driver) == ("NVIDIA GeForce RTX 4090", "560.35.03")
    assert (environment.cpu_governor, environment.cpu_max_hz, environment.clocks_locked) == (None, None, None)
    assert (environment.power_mode, environment.power_limit_w, environment.threads) == ("balanced", 450.0, 4)
    assert (environment.l4t, environment.jetpack, environment.gpu_governor, environment.gpu_max_hz) == (
        None,
        None,
        None,
        None,
    )


def test_the_gpu_that_is_measured_is_the_one_that_is_told(tmp_path, tools):
    second, first = "echo 'NVIDIA RTX 3060, 560.35.03, 170 W'", "echo 'NVIDIA H200, 560.35.03, 700 W'"
    tools("nvidia-smi", f'case "$*" in *--id=GPU-1a2b*) {second};; *) {first};; esac')
    environment = describe("cuda", 4, desktop(tmp_path), gpu_uuid="GPU-1a2b")
    assert (environment.gpu, environment.power_limit_w) == ("NVIDIA RTX 3060", 170.0)
    assert describe("cuda", 4, tmp_path).gpu == "NVIDIA H200"


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("PYTHONMALLOC", "debug", "debug"),
        ("NVIDIA_TF32_OVERRIDE", "0", "0"),
        ("TORCH_PASSWD", "x", None),
        ("ORT_PWD", "x", None),
        ("TORCH_AUTH", "x", None),
        ("MKL_PASS", "x", None),
        ("TORCH_COOKIE", "x", None),
        ("PYTHONPATH", "/a", None),
        ("PYTHONHASHSEED", "0", None),
        ("TORCHINDUCTOR_CACHE_DIR", "/srv/me/inductor", None),
        ("CUDA_HOME", "/usr/local/cuda-12.6", None),
        ("HOME", "/srv/me", None),
        ("MALLOC_MMAP_MAX_", "0", None),  # as benchd itself sets it
        ("MALLOC_ARENA_MAX", "2", "2"),
        ("KMP_AFFINITY", "granularity=fine,compact,1,0", "granularity=fine,compact,1,0"),
        ("LD_PRELOAD", "/usr/lib/libjemalloc.so.2:/opt/a/libtrace.so", ".../libjemalloc.so.2:.../libtrace.so"),
        ("TORCH_STORE", "tcp://me:word@host:1", "tcp://host:1"),
        ("TORCH_EXTRA", "hf_abcdefghijklmnop12345", "#"),
        ("TORCH_EXTRA", "AKIAIOSFODNN7EXAMPLE", "#"),
        ("TORCH_EXTRA", "https://host/x?sig=abc&token=def", "https://host/x"),
        (
            "CUDA_VISIBLE_DEVICES",
            "GPU-8f3a2b1c-0000-1111-2222-333344445555",
            "GPU-8f3a2b1c-0000-1111-2222-333344445555",
        ),
        ("PYTORCH_CUDA_ALLOC_CONF", *["expandable_segments:True,max_split_size_mb:128"] * 2),
    ],
)
def test_a_record_names_what_changes_a_time_and_neither_secrets_nor_folders(name, value, shown):
    ours = {"MALLOC_MMAP_MAX_": "0"}
    recorded = variables({name: value}, ours).get(name)
    if shown == "#":
        assert len(recorded) == 9
        assert recorded != variables({name: value + "x"}, ours)[name]
    else:
        assert recorded == shown


CPU = "sys/devices/system/cpu"
SETTINGS = {
    "microcode": ("proc/cpuinfo", "microcode\t: {}\nflags\t: fpu hypervisor avx\n", "0x1", "0x2b"),
    "smt": (f"{CPU}/smt/control", "{}\n", "on", "off"),
    "no_turbo": (f"{CPU}/intel_pstate/no_turbo", "{}\n", "0", "1"),
    "boost": (f"{CPU}/cpufreq/boost", "{}\n", "0", "1"),
    "spectre_v2": (f"{CPU}/vulnerabilities/spectre_v2", "{}\n", "Mitigation: Retpolines", "Vulnerable"),
    "huge_pages": ("sys/kernel/mm/transparent_hugepage/enabled", "always [{}] never\n", "madvise", "always"),
    "numa_nodes": ("sys/devices/system/node/online", "{}\n", "0", "0-1"),
    "numa_policy": ("proc/self/numa_maps", "55bd12ba3000 {} file=/bin/a N0=2\n55bd12ba5000 x\n", "default", "bind:0"),
    "cpu_limit": ("sys/fs/cgroup/a.slice/cpu.max", "{} 100000\n", "max", "200000"),
    "cpuset": ("sys/fs/cgroup/a.slice/b.scope/cpuset.cpus.effective", "{}\n", "0-7", "0-3"),
    "memory_limit": ("sys/fs/cgroup/a.slice/b.scope/memory.max", "{}\n", "max", "2147483648"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_of_the_system_is_in_the_fingerprint(name, tmp_path, tools):
    write(tmp_path, {"proc/self/cgroup": "0::/a.slice/b.scope\n", "sys/fs/cgroup/cpuset.cpus.effective": "0-7\n"})
    write(tmp_path, {file: content.format(value) for file, content, value, _ in SETTINGS.values()})
    before = describe("cpu", None, tmp_path)
    file, content, value, other = SETTINGS[name]
    write(tmp_path, {file: content.format(other)})
    after = describe("cpu", None, tmp_path)
    limits = {"max": "none", "200000": "2 CPUs"}
    assert (before.system[name], after.system[name]) == (limits.get(value, value), limits.get(other, other))
    assert list(differences(before, after)) == [f"{name}: {before.system[name]} and {after.system[name]}"]
    assert before.comparable_part != after.comparable_part


def test_the_limits_of_a_cgroup_of_version_1(tmp_path, tools):
    folder = "sys/fs/cgroup"
    write(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/not/mounted\n3:cpuset:/\n1:cpu,cpuacct:/in\n0::/\n",
            f"{folder}/cpu/cpu.cfs_quota_us": "-1\n",
            f"{folder}/cpu/in/cpu.cfs_quota_us": "30000\n",
            f"{folder}/cpu/in/cpu.cfs_period_us": "50000\n",
            f"{folder}/cpuset/cpuset.effective_cpus": "0-1\n",
            f"{folder}/memory/memory.limit_in_bytes": "9223372036854771712\n",
        },
    )
    system = describe("cpu", None, tmp_path).system
    assert (system["cpu_limit"], system["cpuset"], system["memory_limit"]) == ("0.6 CPUs", "0-1", "none")


def test_the_command_line_has_no_folders_and_no_password(tmp_path, tools, monkeypatch):
    words = ["/opt/x/bin/bench-once", "--output", "/srv/me/out", "--mqtt", "mqtt://me:word@broker", "--weights", "a b"]
    monkeypatch.setattr(sys, "argv", words)
    wanted = ".../bench-once --output .../out --mqtt mqtt://broker --weights 'a b'"
    assert describe("cpu", None, tmp_path).command == wanted


def test_this_machine():
    environment = describe("cpu", None)
    assert environment.fingerprint == fingerprint(environment) == describe("cpu", None).fingerprint
    assert environment.cpu_count == len(os.sched_getaffinity(0))
    assert environment.kernel == os.uname().release
    assert environment.versions["python"] == sys.version.split()[0].rstrip("+")
    assert {"benchd", "torch", "numpy", "msgspec"} <= set(environment.versions)
    assert environment.memory_bytes > 2**20


@pytest.mark.parametrize(
    "change",
    [
        {"kernel": "6.6"},
        {"cpu_governor": "performance"},
        {"power_mode": "MAXN"},
        {"device": "cuda"},
        {"clocks_locked": True},
        {"allocator": {"MALLOC_ARENA_MAX": "1"}},
        {"versions": {"torch": "2.8.0"}},
        {"memory_bytes": 2**36},
        {"swap_bytes": 2**36},
        {"jetpack": "6.2"},
        {"cpu_flags": ["sve"]},
        {"variables": {"ONEDNN_MAX_CPU_ISA": "SSE41"}},
        {"software": {"cpu_capability": "AVX2"}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_the_fingerprint_tells_what_makes_a_difference(change, tmp_path, tools):
    environment = describe("cpu", None, orin_nano(tmp_path))
    assert fingerprint(msgspec.structs.replace(environment, **change)) != environment.fingerprint


def test_the_fingerprint_leaves_out_what_makes_none(tmp_path, tools):
    environment = stamped(
        msgspec.structs.replace(describe("cpu", None, orin_nano(tmp_path)), swap_bytes=3900000 * 1024)
    )
    same = msgspec.structs.replace(
        environment,
        memory_bytes=environment.memory_bytes - 2**20,
        swap_bytes=environment.swap_bytes - 2**19,
        driver="another",
        gpu="another",
        gpu_governor="another",
        gpu_max_hz=1.0,
        power_limit_w=1.0,
        temperature_c={"cpu-thermal": 90.0},
        cooling={"pwm-fan": 5},
        threads=1,
        load=9.0,
        command="benchd run",
        affinity="0",
    )
    assert fingerprint(same) == environment.fingerprint
    on_gpu = msgspec.structs.replace(environment, device="cuda")
    for change in ({"driver": "another"}, {"power_limit_w": 7.0}, {"gpu_max_hz": 1.0}):
        assert fingerprint(on_gpu) != fingerprint(msgspec.structs.replace(on_gpu, **change))


@pytest.mark.parametrize("ours", [{"versions": {"benchd": "9"}}, {"software": {"benchd_sources": "a1"}}])
def test_an_upgrade_of_benchd_changes_the_second_part_alone(ours, tmp_path, tools):
    environment = msgspec.structs.replace(describe("cpu", None, tmp_path), versions={"benchd": "1"}, software={})
    before, after = (stamped(side) for side in (environment, msgspec.structs.replace(environment, **ours)))
    assert before.fingerprint != after.fingerprint
    assert before.comparable_part == after.comparable_part
    assert list(differences(before, after)) == []


def stamped(environment):
    return msgspec.structs.replace(environment, fingerprint=fingerprint(environment))
