"""The sides of `benchd compare --live` as they are given on the command line."""

from dataclasses import replace

import pytest

from benchd.daemon.commands import compare
from benchd.daemon.errors import UsageError
from benchd.daemon.measuring import user_model
from benchd.daemon.measuring.paired import Request

NOTHING_CHOSEN: list[list[str]] = [[], []]


def test_two_modules_without_a_case_are_compared_in_eager(tmp_path):
    (tmp_path / "net.py").write_text("def build(): ...\n")
    module = user_model.module(f"{tmp_path}/net.py:build", ["8"])
    request = Request([], "quick", 0.005, modules=[module, module])
    assert [each.cases for each in compare._requests(request, NOTHING_CHOSEN)] == [["eager"]]
    with pytest.raises(UsageError, match="two --python, --module or --nir"):
        compare._requests(replace(request, modules=[module]), NOTHING_CHOSEN)
