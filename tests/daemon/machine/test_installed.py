"""The line that adds an extra to what is installed: in folders as pip, pipx and uv leave them."""

import json
import sys

import pytest

from benchd.daemon.machine import installed

WHEEL = {"url": "file:///srv/me/my%20wheels/benchd-0.1.0-py3-none-any.whl", "archive_info": {}}
CHECKOUT = {"url": "file:///srv/me/benchd", "dir_info": {"editable": True}}
PIP = f"{sys.executable} -m pip install"


class Distribution:
    """What importlib.metadata gives of an installation with this record of where it came from."""

    def __init__(self, origin):
        self._origin = origin

    def read_text(self, name):
        return self._origin and json.dumps(self._origin)


@pytest.mark.parametrize(
    ("origin", "by", "line"),
    [
        (None, "", f"{PIP} 'benchd[cpu]'"),
        (WHEEL, "", f"{PIP} '/srv/me/my wheels/benchd-0.1.0-py3-none-any.whl[cpu]'"),
        (CHECKOUT, "", f"{PIP} -e '/srv/me/benchd[cpu]'"),
        (None, "pipx_metadata.json", "pipx install --force 'benchd[cpu]'"),
        (WHEEL, "uv-receipt.toml", "uv tool install --force '/srv/me/my wheels/benchd-0.1.0-py3-none-any.whl[cpu]'"),
    ],
)
def test_an_extra_is_added_as_benchd_was_installed(monkeypatch, tmp_path, origin, by, line):
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(installed, "distributions", lambda name: [Distribution(origin)])
    if by:
        (tmp_path / by).touch()
    assert installed.adding("cpu") == line
    monkeypatch.setattr(installed, "distributions", lambda name: [Distribution(origin)] if name != "pip" else [])
    assert by or installed.adding("cpu").startswith(f"uv pip install --python {sys.executable} ")
