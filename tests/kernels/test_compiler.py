"""C files become libraries: once, under a lock, with torch's threads, and with the reason where that cannot be."""

import ctypes
import os
import tempfile
from pathlib import Path

import pytest
import torch
from disks import ext4_without_power

from benchd.daemon.machine.folders import sync
from benchd.kernels import compiler
from benchd.kernels.dispatch import Unavailable

SOURCE = """
#include <omp.h>
__attribute__((visibility("default"))) int count(int threads) {
    int seen = 0;
    #pragma omp parallel num_threads(threads) reduction(+:seen)
    seen += 1;
    return seen;
}
__attribute__((visibility("default"))) double fused(double a, double b, double c) { return a * b + c; }
"""


@pytest.fixture
def source(tmp_path, monkeypatch):
    monkeypatch.setenv("CACHE_DIRECTORY", str(tmp_path / "cache"))
    path = tmp_path / "op" / "native.c"
    path.parent.mkdir()
    path.write_text(SOURCE)
    return path


def kept(source):
    return sorted(source.parents[1].glob("cache/native/*.so"))


def test_a_library_is_compiled_once_and_runs_on_the_threads_it_is_given(source):
    assert [compiler.load(source).count(n) for n in (1, 2)] == [1, 2]
    (library,) = kept(source)
    before = library.stat().st_mtime_ns
    compiler.load.cache_clear()
    assert compiler.load(source).count(2) == 2
    assert library.stat().st_mtime_ns == before


def test_a_changed_source_or_flag_is_another_library(source):
    compiler.load(source)
    compiler.load(source, compiler.EXACT)
    source.write_text(SOURCE + "/* changed */")
    compiler.load.cache_clear()
    compiler.load(source)
    assert len(kept(source)) == 3


def test_exact_code_rounds_twice(source):
    library = compiler.load(source, compiler.EXACT)
    library.fused.restype = ctypes.c_double
    library.fused.argtypes = [ctypes.c_double] * 3
    a = 1 + 2**-30
    assert library.fused(a, a, -(a * a)) == 0.0


def test_torch_and_the_kernels_share_one_openmp_runtime(source):
    def mapped():
        return {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "gomp" in line}

    before = mapped()  # torch's, and that of a package which another test has imported
    compiler.load(source).count(2)
    assert mapped() == before
    assert before


def test_no_compiler_and_broken_code_say_so(source, monkeypatch):
    broken = source.with_name("broken.c")
    broken.write_text("int f( {")
    with pytest.raises(Unavailable, match=r"cannot compile a native kernel: .*error"):
        compiler.load(broken)
    assert kept(source) == []
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(Unavailable, match="install gcc or set CC"):
        compiler.load(source)


FORKS = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # from Python 3.12 on


def loading(source, user=None):
    """Fork a process that loads the library, as this user; return its id."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            if user is not None and not os.geteuid():
                os.setuid(user)
            compiler.load.cache_clear()
            code = int(compiler.load(source).count(1) != 1)
        finally:
            os._exit(code)
    return child


def loaded(source, user=None):
    return has_loaded(loading(source, user))


def has_loaded(child):
    return os.waitpid(child, 0)[1] == 0


@FORKS
def test_processes_that_come_at_once_compile_one_library(source):
    children = [loading(source) for _ in range(3)]
    assert [has_loaded(child) for child in children] == [True] * 3
    assert len(kept(source)) == 1


@FORKS
def test_a_library_and_a_lock_of_another_user_are_used_read_only(monkeypatch):
    with tempfile.TemporaryDirectory() as name:
        source = Path(name, "op", "native.c")
        monkeypatch.setenv("CACHE_DIRECTORY", str(Path(name, "cache")))
        source.parent.mkdir()
        source.write_text(SOURCE)
        assert loaded(source)
        (library,) = kept(source)
        Path(f"{library}.lock").chmod(0o444)
        Path(name).chmod(0o755)
        before = library.stat().st_mtime_ns
        assert loaded(source, user=65534)
        assert library.stat().st_mtime_ns == before


@FORKS
@pytest.mark.parametrize("damage", [b"", b"\x7fELF"])
def test_a_damaged_library_is_compiled_again(source, damage):
    assert loaded(source)
    (library,) = kept(source)
    library.write_bytes(damage)
    assert loaded(source)
    assert kept(source) == [library]


@FORKS
def test_a_power_cut_takes_no_library_that_was_compiled(source, tmp_path, monkeypatch):
    disk = tmp_path / "disk"
    with ext4_without_power(tmp_path / "image", disk) as cut:
        monkeypatch.setenv("CACHE_DIRECTORY", str(disk))
        os.sync()
        assert loaded(source)
        (library,) = disk.glob("native/*.so")
        content = library.read_bytes()
        # what any other write does seconds later: it commits names and sizes, not another file's content
        (disk / "other").touch()
        sync(disk / "other")
        cut()
        assert library.read_bytes() == content


def test_a_library_that_cannot_be_loaded_is_unavailable(source, monkeypatch):
    empty = source.with_name("cc")
    empty.write_text('#!/bin/sh\nwhile [ $# -gt 1 ]; do [ "$1" = -o ] && : > "$2"; shift; done\n')
    empty.chmod(0o755)
    monkeypatch.setenv("CC", str(empty))
    with pytest.raises(Unavailable, match=r"cannot be loaded: .*file too short"):
        compiler.load(source)


@FORKS
def test_threads_are_torch_s_and_one_after_a_fork():
    assert compiler.threads() == torch.get_num_threads()
    child = os.fork()
    if child == 0:
        os._exit(compiler.threads())
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
