import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from jetson_trees import ORIN_NANO, build
from machines import desktop, orin_nano, write

from benchd.daemon.machine.sysfs import KernelFile
from benchd.daemon.sampling.sources import SAMPLERS, Watcher, load
from benchd.daemon.sampling.sources.procfs import PAGE_BYTES, Procfs

ZERO = (0, 0, 0, 0, 0, 0, 0, 0)


def set_cpu(root, fields, guest=0):
    write(root, {"proc/stat": f"cpu  {' '.join(map(str, fields))} {guest} 0\ncpu0 1 2 3 4 5 6 7 8 0 0\n"})


def set_process(root, pid, *, state="R", faults=0, utime=0, stime=0, pages=100):
    fields = [state, *["0"] * 8, str(faults), "7", str(utime), str(stime), *["0"] * 8, str(pages), *["0"] * 20]
    write(root, {f"proc/{pid}/stat": f"{pid} (a) name (x) {' '.join(fields)}\n"})


def values(samples):
    return {(sample.metric, sample.rail): sample.value for sample in samples}


class Reader:
    """A sampler of this root that was found available."""

    def __init__(self, root):
        self._procfs = Procfs(root)
        assert self._procfs.unavailable() is None
        self.watch = self._procfs.watch

    def read(self):
        return values(self._procfs.sample())


@pytest.fixture
def orin(tmp_path):
    set_cpu(orin_nano(tmp_path), ZERO)
    return tmp_path


@pytest.fixture
def pc(tmp_path):
    set_cpu(desktop(tmp_path), ZERO)
    return tmp_path


def test_shares_of_the_time_since_the_last_reading(orin):
    sampler = Reader(orin)
    #            user nice system idle iowait irq softirq steal
    set_cpu(orin, (30, 5, 10, 40, 10, 1, 2, 2))
    by_metric = sampler.read()
    assert by_metric["cpu_utilization_percent", ""] == pytest.approx(50.0)
    assert by_metric["cpu_steal_percent", ""] == pytest.approx(2.0)
    set_cpu(orin, (30, 5, 10, 140, 10, 1, 2, 2))
    assert sampler.read()["cpu_utilization_percent", ""] == 0.0


def test_clocks_of_clusters_and_their_mean_over_cpus(orin):
    write(orin, {"sys/devices/system/cpu/cpufreq/policy4/scaling_cur_freq": "729600\n"})
    by_metric = Reader(orin).read()
    assert by_metric["cpu_clock_hz", "policy0"] == 1036.8e6
    assert by_metric["cpu_clock_hz", "policy4"] == 729.6e6
    assert by_metric["cpu_clock_hz", ""] == pytest.approx((4 * 1036.8e6 + 2 * 729.6e6) / 6)


def test_the_clock_of_a_cluster_that_is_switched_off_is_left_out(orin):
    write(orin, {"sys/devices/system/cpu/cpufreq/policy4/affected_cpus": "\n"})
    by_metric = Reader(orin).read()
    assert {rail for metric, rail in by_metric if metric == "cpu_clock_hz"} == {""}
    write(orin, {"sys/devices/system/cpu/cpufreq/policy0/scaling_cur_freq": "729600\n"})
    assert Reader(orin).read()["cpu_clock_hz", ""] == 729.6e6


def test_clocks_from_cpuinfo_where_there_is_no_cpufreq(pc):
    by_metric = Reader(pc).read()
    assert by_metric["cpu_clock_hz", ""] == pytest.approx(3.0e9)
    assert not [rail for metric, rail in by_metric if rail]


def test_a_file_of_many_records_is_read_to_its_end():
    file = KernelFile(Path("/proc/self/smaps"))
    assert len(file.read(2**20)) < len(file.read_all())
    mappings = Path("/proc/self/maps").read_bytes().count(b"\n")
    assert file.read_all().count(b"\nSize: ") == pytest.approx(mappings, abs=5)


def test_memory_that_only_some_kernels_tell_of(tmp_path):
    build(tmp_path, ORIN_NANO)
    set_cpu(tmp_path, ZERO)
    by_metric = Reader(tmp_path).read()
    assert by_metric["swap_used_bytes", ""] == 500000 * 1024
    assert by_metric["nvmap_used_bytes", ""] == 102400 * 1024


def test_major_faults_are_a_rate(orin):
    set_process(orin, 77, faults=100)
    sampler = Reader(orin)
    sampler.watch(77)
    before_ns = time.monotonic_ns()
    assert ("process_major_faults_per_s", "") not in sampler.read()
    set_process(orin, 77, faults=300)
    rate = sampler.read()["process_major_faults_per_s", ""]
    assert rate >= 200 / ((time.monotonic_ns() - before_ns) / 1e9)
    assert sampler.read()["process_major_faults_per_s", ""] == 0.0


def test_the_watched_process_and_its_end(orin):
    sampler = Reader(orin)
    sampler.watch(77)
    assert ("process_rss_bytes", "") not in sampler.read()  # never was
    set_process(orin, 77, utime=10, stime=5, pages=300)
    sampler.watch(77)
    by_metric = sampler.read()
    assert by_metric["process_rss_bytes", ""] == 300 * PAGE_BYTES
    assert ("process_cpu_percent", "") not in by_metric
    set_process(orin, 77, utime=10, stime=5, pages=200)
    assert sampler.read()["process_cpu_percent", ""] == 0.0
    set_process(orin, 77, state="Z", pages=0)
    assert ("process_rss_bytes", "") not in sampler.read()


def test_a_real_process_that_works_then_ends():
    code = "import sys\nfor line in sys.stdin:\n  sum(range(3_000_000)); print(flush=True)"
    sampler = Reader(Path("/"))
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        sampler.watch(child.pid)
        sampler.read()
        child.stdin.write(b"\n")
        child.stdin.flush()
        child.stdout.readline()
        by_metric = sampler.read()
        assert by_metric["process_cpu_percent", ""] > 0.0
        assert by_metric["process_rss_bytes", ""] > 2**20
        child.stdin.close()
        child.wait()
        assert ("process_rss_bytes", "") not in sampler.read()


@pytest.mark.parametrize("content", ["", "cpu  1 2\n", "cpu a b c d e f g h\n"])
def test_a_file_of_another_form_is_unavailable(content, orin):
    write(orin, {"proc/stat": content})
    assert "stat" in Procfs(orin).unavailable()


def test_the_real_machine():
    procfs = Procfs()
    assert procfs.unavailable() is None
    procfs.watch(os.getpid())
    before = time.monotonic_ns()
    samples = list(procfs.sample())
    after = time.monotonic_ns()
    metrics = {sample.metric for sample in samples}
    assert {"memory_available_bytes", "swap_used_bytes", "process_rss_bytes"} <= metrics
    assert all(before <= sample.t_ns <= after and sample.source == "procfs" for sample in samples)


def test_the_table_holds_samplers_with_their_own_names(tmp_path):
    write(tmp_path, {"script.json": '{"metrics": []}'})
    for name in SAMPLERS:
        sampler = load(f"{name}={'cuda' if name in ('nvml', 'gpm') else tmp_path / 'script.json'}")
        assert sampler.name == name
    assert isinstance(load("procfs"), Watcher)


def test_a_kernel_file_is_opened_anew_after_a_failure(tmp_path):
    file = KernelFile(tmp_path / "file")
    with pytest.raises(FileNotFoundError):
        file.read()
    write(tmp_path, {"file": "1"})
    assert file.read() == b"1"
    write(tmp_path, {"file": "22"})
    assert file.read() == b"22"
