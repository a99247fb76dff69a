"""Which code a user's module is: its file and what it imports, of installed packages its own alone."""

import sys
import zipfile

import msgspec
import pytest
from worker_jobs import NET, job, user_module

from benchd.daemon.worker import workload

CODE = """
from pathlib import Path
from benchd.daemon.worker import user_code
import net
print(user_code.sha256(Path(net.__file__)))
"""


@pytest.fixture
def digest(tmp_path, printed):
    """Return a function that imports net.py of the test's folder, with its imports, and returns the digest."""
    (tmp_path / "net.py").write_text("import helper, installed, json")
    (tmp_path / "helper.py").write_text("STRIDE = 1")
    installed = tmp_path / "site-packages" / "installed.py"
    installed.parent.mkdir()
    installed.write_text("STRIDE = 1")
    code = f"import sys; sys.path.insert(0, {str(installed.parent)!r})\n{CODE}"
    return lambda: printed(code).strip()


@pytest.mark.parametrize(
    ("name", "is_other"),
    [("net.py", True), ("helper.py", True), ("site-packages/installed.py", False), ("unrelated.py", False)],
)
def test_a_file_that_is_run_and_not_installed_counts(digest, tmp_path, name, is_other):
    before = digest()
    with (tmp_path / name).open("a") as file:
        file.write("\nSTRIDE = 2")
    assert (digest() != before) is is_other


@pytest.mark.parametrize(("name", "is_other"), [("lent/blocks.py", True), ("installed.py", False)])
def test_of_installed_packages_only_the_module_s_own_counts(tmp_path, monkeypatch, name, is_other):
    site = tmp_path / "site-packages"
    (site / "lent").mkdir(parents=True)
    (site / "lent/__init__.py").write_text("import installed\nfrom lent import blocks")
    for edited in ("lent/blocks.py", "installed.py"):
        (site / edited).write_text("STRIDE = 1")
    (site / "lent/model.py").write_text(NET.format(build="pass", forward="pass"))
    a_job = msgspec.structs.replace(job(tmp_path, module="lent.model:build"), module_folder=str(site))
    monkeypatch.setattr(sys, "path", list(sys.path))

    def built():
        for module in ("lent", "lent.model", "lent.blocks", "installed"):
            monkeypatch.delitem(sys.modules, module, raising=False)
        return workload.build(a_job).facts.code_sha256

    before = built()
    (site / name).write_text("STRIDE = 22")
    assert (built() != before) is is_other


def test_a_module_without_a_file_of_its_own_is_left_out(digest, tmp_path):
    with zipfile.ZipFile(tmp_path / "helpers.zip", "w") as archive:
        archive.write(tmp_path / "helper.py", "helper.py")
    (tmp_path / "helper.py").unlink()
    (tmp_path / "net.py").write_text(f"import sys; sys.path.insert(0, '{tmp_path}/helpers.zip'); import helper")
    assert len(digest()) == 64


def test_the_same_code_in_another_folder_is_the_same(tmp_path, monkeypatch):
    def built(folder):
        monkeypatch.delitem(sys.modules, "net", raising=False)  # a worker has imported no other before
        return workload.build(job(folder, module=user_module(folder)))

    (tmp_path / "other").mkdir()
    one, other = built(tmp_path), built(tmp_path / "other")
    assert one.facts.code_sha256 == other.facts.code_sha256
    assert one.source.scope != other.source.scope
