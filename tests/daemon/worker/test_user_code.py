"""What a user's module is made from: its file and what it imports, opens and names."""

import json
import sys
import zipfile

import pytest
from worker_jobs import NET, changed, job, user_module

from benchd.daemon.worker import user_code, workload

CODE = """
import json
from pathlib import Path
from benchd.daemon.worker import user_code
user_code.watch()
import net
print(json.dumps(user_code.read(Path(net.__file__))))
"""


@pytest.fixture
def read(tmp_path, printed):
    """Return a function that imports net.py of the test's folder, with its imports, and returns what it read."""
    (tmp_path / "net.py").write_text("import helper, installed, json")
    (tmp_path / "helper.py").write_text("STRIDE = 1")
    installed = tmp_path / "site-packages" / "installed.py"
    installed.parent.mkdir()
    installed.write_text("STRIDE = 1")
    code = f"import sys; sys.path.insert(0, {str(installed.parent)!r})\n{CODE}"
    return lambda **variables: json.loads(printed(code, **variables))


@pytest.mark.parametrize(("name", "is_other"), [("helper.py", True), ("site-packages/installed.py", False)])
def test_a_file_that_is_run_and_not_installed_counts(read, tmp_path, name, is_other):
    before = read()
    assert before.keys() == {"net.py", "helper.py"}
    with (tmp_path / name).open("a") as file:
        file.write("\nSTRIDE = 2")
    after = read()
    assert [file for file in before if before[file] != after[file]] == [name] * is_other


OPENS = """
import installed, os, numpy
from pathlib import Path
data = Path(__file__).parent / 'data'
installed.load(data / 'a')
(data / 'b').read_text()
numpy.fromfile(data / 'c')
numpy.memmap(data / 'd', mode='r')
os.open(data / 'e', os.O_RDONLY)
open(data / 'written', 'w')
open('/proc/self/status')
open(0)
"""


def test_each_file_that_the_code_opens_to_read_counts(read, tmp_path):
    (tmp_path / "site-packages" / "installed.py").write_text("load = open\nopen(__file__)")
    (tmp_path / "data").mkdir()
    for name in "abcde":
        (tmp_path / "data" / name).write_bytes(bytes(8))
    (tmp_path / "net.py").write_text(OPENS)
    before = read()
    assert before.keys() == {"net.py", *(f"data/{name}" for name in "abcde")}
    (tmp_path / "data" / "c").write_bytes(bytes(16))
    after = read()
    assert [name for name in before if before[name] != after[name]] == ["data/c"]


def test_many_files_of_a_folder_count_as_one(read, tmp_path):
    images = tmp_path / "images"
    images.mkdir()
    for number in range(user_code.MOST_FILES):
        (images / f"{number}.png").write_bytes(bytes([number]))
    (tmp_path / "net.py").write_text(
        "from pathlib import Path\n[path.read_bytes() for path in Path(__file__).parent.glob('images/*')]"
    )
    before = read()
    assert before.keys() == {"net.py", "images/"}
    (images / "7.png").write_bytes(b"edited")
    assert read()["images/"] != before["images/"]


def test_a_variable_that_the_source_names_counts_and_its_value_is_not_kept(read, tmp_path):
    (tmp_path / "net.py").write_text(
        "import os\ndef forward():\n    os.environ.get('FAST'), os.environ[\"MODE\"], os.getenv( 'SEED', '')"
    )
    first, second = read(FAST="a secret", SEED="1"), read(FAST="another", SEED="1")
    assert first["$MODE"] == second["$MODE"] == "unset"
    assert first["$SEED"] == second["$SEED"]
    assert first["$FAST"] != second["$FAST"]
    assert len(first["$FAST"]) == 4


@pytest.mark.parametrize(("name", "is_other"), [("lent/blocks.py", True), ("installed.py", False)])
def test_of_installed_packages_only_the_module_s_own_counts_and_as_one(tmp_path, monkeypatch, name, is_other):
    site = tmp_path / "site-packages"
    (site / "lent").mkdir(parents=True)
    (site / "lent/__init__.py").write_text("import installed\nfrom lent import blocks")
    for edited in ("lent/blocks.py", "installed.py"):
        (site / edited).write_text("STRIDE = 1")
    (site / "lent/model.py").write_text(NET.format(build="pass", forward="pass"))
    a_job = changed(job(tmp_path, module="lent.model:build"), module_folder=str(site))
    monkeypatch.setattr(sys, "path", list(sys.path))

    def built():
        for module in ("lent", "lent.model", "lent.blocks", "installed"):
            monkeypatch.delitem(sys.modules, module, raising=False)
        return workload.build(a_job).facts.read["lent"]

    before = built()
    (site / name).write_text("STRIDE = 22")
    assert (built() != before) is is_other


def test_a_module_in_an_archive_counts_as_that(read, tmp_path):
    with zipfile.ZipFile(tmp_path / "helpers.zip", "w") as archive:
        archive.write(tmp_path / "helper.py", "helper.py")
    (tmp_path / "helper.py").unlink()
    (tmp_path / "net.py").write_text(f"import sys; sys.path.insert(0, '{tmp_path}/helpers.zip'); import helper")
    assert read().keys() == {"net.py", "helpers.zip"}


def test_the_same_code_in_another_folder_is_the_same(tmp_path, monkeypatch):
    def built(folder):
        monkeypatch.delitem(sys.modules, "net", raising=False)  # a worker has imported no other before
        return workload.build(job(folder, module=user_module(folder)))

    (tmp_path / "other").mkdir()
    first, second = built(tmp_path), built(tmp_path / "other")
    assert first.facts.read["net.py"] == second.facts.read["net.py"]
    assert first.source.scope != second.source.scope
