"""The application's folders for a user without a home, as in a container."""

import os
import pwd
import stat
import tempfile

import pytest

from benchd.daemon.machine import folders


@pytest.fixture
def homeless(tmp_path, monkeypatch):
    """A user without an entry in passwd and with an empty environment; return where its folders are to be."""

    def has_no_entry(uid):
        raise KeyError(uid)

    for name in ("HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME", "CACHE_DIRECTORY", "STATE_DIRECTORY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", has_no_entry)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"benchd-{os.geteuid()}"


def test_a_user_without_a_home_has_folders_of_its_own_among_the_temporary_files(homeless):
    assert folders.cache() == homeless / ".cache/benchd"
    assert folders.state() == homeless / ".local/state/benchd"
    assert stat.S_IMODE(homeless.stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o777, 0o750])
def test_a_folder_that_others_may_write_or_read_is_refused(homeless, mode):
    """What is loaded from it runs."""
    homeless.mkdir()
    homeless.chmod(mode)
    with pytest.raises(PermissionError, match="not owned exclusively by this user, who has no home: set HOME"):
        folders.cache()


def test_folders_that_are_given_take_no_home(homeless, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "c"))
    monkeypatch.setenv("STATE_DIRECTORY", str(tmp_path / "s"))
    assert (folders.cache(), folders.state()) == (tmp_path / "c/benchd", tmp_path / "s")
    assert not homeless.exists()
