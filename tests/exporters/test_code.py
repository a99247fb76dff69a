"""What benchd's own code is called in a key: every source file counts, whatever lies beside it does not."""

import pytest

from benchd.exporters import code


@pytest.fixture
def digest(tmp_path, monkeypatch):
    """Return a function that computes the digest of a small tree in `tmp_path`."""
    monkeypatch.setattr(code, "ROOT", tmp_path)
    for name in ("models/net.py", "kernels/lif/native.c", "kernels/lif/native.py", "exporters/files.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"this is {name}")
    return code.sha256.__wrapped__


@pytest.mark.parametrize("name", ["models/net.py", "kernels/lif/native.c", "exporters/files.py", "kernels/new.py"])
def test_an_edited_or_a_new_file_makes_other_code(digest, tmp_path, name):
    before = digest()
    (tmp_path / name).write_text("edited")
    assert digest() != before


def test_a_file_that_moves_makes_other_code(digest, tmp_path):
    before = digest()
    (tmp_path / "models/net.py").rename(tmp_path / "kernels/net.py")
    assert digest() != before


def test_compiled_files_and_other_folders_do_not_count(digest, tmp_path):
    before = digest()
    for name in ("models/__pycache__/net.pyc", "daemon/measuring/plan.py"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("another")
    assert digest() == before


def test_a_file_or_a_folder_alone_has_a_digest_of_its_own(digest, tmp_path):
    file, folder = digest("kernels/lif/native.c"), digest("models")
    (tmp_path / "models/net.py").write_text("edited")
    assert digest("kernels/lif/native.c") == file != digest("models") != folder
