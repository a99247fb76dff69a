"""The sides of `benchd compare --live` as they are given on the command line."""

from dataclasses import replace

import pytest
from onnx_made import written

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
    with pytest.raises(UsageError, match="two --python, --module, --onnx or --nir"):
        compare._requests(replace(request, modules=[module]), NOTHING_CHOSEN)


def test_two_onnx_files_without_a_case_are_compared_on_onnx_runtime(tmp_path):
    file = written(tmp_path, "g (float[N,4] x) => (float[N,4] y) { y = Relu(x) }")
    request = Request([], "quick", 0.005, modules=user_model.of_sides(None, [file, file], None, []))
    assert [each.cases for each in compare._requests(request, NOTHING_CHOSEN)] == [["onnxruntime"]]
    with pytest.raises(UsageError, match="--module and --onnx: give only one of them"):
        user_model.of_sides(["net.py:build"], [file], None, [])
    with pytest.raises(UsageError, match="--input is for --module, --onnx, --nir"):
        user_model.of_sides(None, None, None, ["8"])
