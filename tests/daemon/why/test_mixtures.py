"""What two environments differ in, and mixtures of them, with real interpreters and planted packages."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from packages_made import environment, package
from records_made import made

from benchd.daemon.errors import Full, UsageError
from benchd.daemon.records import encode
from benchd.daemon.why import environments
from benchd.daemon.why.environments import EnvironmentSide


@pytest.fixture
def planted(tmp_path):
    """Return a function that plants packages, `name=version` or `name=(version, [requirement])`, as one side."""

    def side(name, **versions):
        folder = tmp_path / name
        pairs = {each: (given, []) if isinstance(given, str) else given for each, given in versions.items()}
        packages = [package(folder, each, *given) for each, given in pairs.items()]
        return EnvironmentSide(environment(packages))

    return side


def names(found):
    return [difference.name for difference in found[0]]


def test_versions_absence_and_other_files_of_one_version_are_differences(planted):
    a, b = planted("a", same="1.0", newer="1.0", gone="1.0"), planted("b", same="1.0", newer="2.0", added="3.0")
    changed = package(Path(a.installed.packages[0].root).with_name("c"), "same", "1.0", content="# edited\n")
    others = [each for each in b.installed.packages if each.name != "same"]
    differences = environments.differences(a, EnvironmentSide(environment([changed, *others])))
    assert sorted(names(differences)) == [
        "added absent → 3.0",
        "gone 1.0 → absent",
        "newer 1.0 → 2.0",
        "same 1.0, different files",
    ]
    assert environments.differences(a, a)[0] == []


def test_packages_that_refuse_each_others_versions_are_one_difference_and_a_need_is_known(planted):
    a = planted("a", torch=("1.0", []), vision=("1.0", ["torch==1.0"]), numpy="1.0", user="1.0")
    b = planted("b", torch=("2.0", ["numpy>=2"]), vision=("2.0", ["torch==2.0"]), numpy="2.0", user="2.0")
    differences, needs = environments.differences(a, b)
    both = "torch 1.0 → 2.0 + vision 1.0 → 2.0"
    assert names((differences,)).index("numpy 1.0 → 2.0") < names((differences,)).index(both)
    assert {name for name, needed in needs.items() if needed} == {both}
    assert needs[both] == {"numpy 1.0 → 2.0"}


def test_variables_and_parts_of_the_case_are_differences_and_can_be_taken_over_one_by_one(planted):
    a, b = planted("a"), planted("b")
    a = EnvironmentSide(a.installed, {"OMP_NUM_THREADS": "2", "ONLY_A": "1"}, "square,eager,b1,size=16,threads=2")
    b = EnvironmentSide(b.installed, {"OMP_NUM_THREADS": "1"}, "square,fp16,b1,size=16")
    differences, _ = environments.differences(a, b)
    assert names((differences,)) == [
        "OMP_NUM_THREADS 2 → 1",
        "ONLY_A 1 → absent",
        "eager → fp16",
        "threads=2 → default",
    ]
    assert environments.mixed(a, b, differences[:1]) == EnvironmentSide(
        a.installed, {"OMP_NUM_THREADS": "1", "ONLY_A": "1"}, a.case
    )
    assert environments.mixed(a, b, differences) == b


def test_a_mixture_imports_the_chosen_packages_alone_and_leaves_both_sides_as_they_were(planted, tmp_path):
    a, b = planted("a", old="1.0", kept="1.0"), planted("b", old="2.0", kept="1.0", added="1.0")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.py")}
    differences, _ = environments.differences(a, b)
    chosen = [difference for difference in differences if difference.name.startswith("old")]
    python = environments.mixture(tmp_path / "mixture", a.installed, chosen)
    code = "import importlib.metadata as m; print({d.metadata['Name']: d.version for d in m.distributions()})"
    done = subprocess.run(
        [python, "-I", "-c", f"import old; print(old.VERSION); {code}"], capture_output=True, text=True, check=True
    )
    assert (
        done.stdout == "2.0\n{'old': '2.0', 'kept': '1.0'}\n" or done.stdout == "2.0\n{'kept': '1.0', 'old': '2.0'}\n"
    )
    assert {path: path.read_bytes() for path in before} == before


def test_this_environment_can_be_made_again(tmp_path):
    installed = environments.installed(sys.executable)
    python = environments.mixture(tmp_path / "mixture", installed, [])
    again = environments.installed(python)
    assert again.version == installed.version
    assert {each.key: each.version for each in again.packages} == {
        each.key: each.version for each in installed.packages if each.files
    }


@pytest.mark.parametrize(
    ("read", "text", "told"),
    [
        (environments.pins, "numpy>=1\n", "lock:1: 'numpy>=1': expected NAME==VERSION, as pip freeze writes"),
        (environments.pins, "\n-e .\n", "lock:2: '-e .': expected NAME==VERSION"),
        (environments.variables, "A=b\0c\n", "expected NAME=VALUE"),
        (environments.variables, "OMP\n", "lock:1: 'OMP': expected NAME=VALUE"),
        (environments.variables, "=3\n", "lock:1: '=3': expected NAME=VALUE"),
        (environments.variables, "A=1\n2B=3\n", "lock:2: '2B=3': expected NAME=VALUE"),
    ],
)
def test_a_line_of_another_kind_is_named(read, text, told, tmp_path):
    path = tmp_path / "lock"
    path.write_text(text)
    with pytest.raises(UsageError) as refused:
        read(path)
    assert told in str(refused.value)


def test_the_lines_of_a_lock_file_are_read_with_their_comments_hashes_and_markers(tmp_path):
    path = tmp_path / "lock"
    path.write_text(
        "\ufeff# comment\nnumpy==2.0.1 \\\n    --hash=sha256:abc\nuvicorn[standard]==0.3 ; python_version > '3'\n"
        "numpy==1.0 ; python_version < '3'\npywin32==306 ; sys_platform == 'win32'\n"
    )
    assert environments.pins(path) == ["numpy==2.0.1", "uvicorn==0.3"]


def test_asking_for_pip_leaves_the_distutils_of_setuptools_alone(tmp_path):
    code = (
        "from benchd.daemon.errors import UsageError; from benchd.daemon.why import environments; import sys\n"
        "here = environments.installed(sys.executable)\n"
        f"try: environments.with_pins(here, ['no-such-package==1.0'], __import__('pathlib').Path({str(tmp_path)!r}), "
        "['--no-index'])\n"
        "except UsageError: import setuptools\n"
        "else: raise SystemExit('it was installed')\n"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_file_of_results_stands_for_the_packages_and_variables_of_its_newest_record(tmp_path):
    path = tmp_path / "records.jsonl"
    described = msgspec.structs.replace(
        made().environment,
        versions={"python": "3.11.2", "benchd": "0.1.0", "numpy": "2.0.1"},
        allocator={"MALLOC_TOP_PAD_": "1"},
        variables={"OMP_PROC_BIND": "true"},
    )
    path.write_bytes(b"".join(encode(made(run_id=name, environment=described)) + b"\n" for name in ("one", "two")))
    assert environments.pins(path) == ["numpy==2.0.1"]
    assert environments.variables(path) == {"MALLOC_TOP_PAD_": "1", "OMP_PROC_BIND": "true"}


def test_interpreters_of_two_versions_and_packages_without_a_list_of_files_are_refused(planted):
    a, b = planted("a", one="1.0"), planted("b", one="2.0")
    other = EnvironmentSide(environment([], version="3.9.1"))
    with pytest.raises(UsageError, match=r"environments with the same Python version"):
        environments.differences(a, other)
    unlisted = [package(Path(each.root), each.name, each.version, listed=False) for each in b.installed.packages]
    with pytest.raises(UsageError, match=r"one 2.0 in .* was not installed by pip"):
        environments.differences(a, EnvironmentSide(environment(unlisted)))


def test_a_full_disk_is_named(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "symlink_to", fail)
    with pytest.raises(Full, match=f"{tmp_path}: No space left on device; free some space"):
        environments.mixture(tmp_path, environments.installed(sys.executable), [])
