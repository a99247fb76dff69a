"""The inputs of an own model, as text and as what they mean."""

import numpy as np
import pytest

from benchd.daemon.errors import UsageError
from benchd.daemon.measuring.user_inputs import inputs_of, of_module
from benchd.daemon.records import InputSpec


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("3x224x224", InputSpec("", None, [3, 224, 224])),
        ("ids=int64:16", InputSpec("ids", "int64", [16])),
        ("int64:16", InputSpec("", "int64", [16])),
        ("scale=float32:", InputSpec("scale", "float32", [])),
        ("serving_default_x:0=3x4", InputSpec("serving_default_x:0", None, [3, 4])),
        ("16=5", InputSpec("16", None, [5])),
        ("ids=int64:16:0-999", InputSpec("ids", "int64", [16], span=(0, 999))),
        ("lengths=int64::1-10", InputSpec("lengths", "int64", [], span=(1, 10))),
        ("16:-1-1", InputSpec("", None, [16], span=(-1, 1))),
        ("16:-5..-1", InputSpec("", None, [16], span=(-5, -1))),
        ("16:0.1-5e2", InputSpec("", None, [16], span=(0.1, 500.0))),
        ("rate=int64:()=16000", InputSpec("rate", "int64", [], batch_axis=None, span=(16000, 16000))),
        ("()", InputSpec("", None, [], batch_axis=None)),
        ("anchors=(10x4):0-1", InputSpec("anchors", None, [10, 4], batch_axis=None, span=(0, 1))),
        ("state=2xNx8", InputSpec("state", None, [2, 8], batch_axis=1)),
        ("x=@of/x.npy", InputSpec("x", file="of/x.npy")),
        ("float32:(@x.npy)", InputSpec("", "float32", batch_axis=None, file="x.npy")),
    ],
)
def test_an_input_is_a_name_a_type_and_sizes(text, spec):
    assert inputs_of([text]) == [spec]
    assert inputs_of([str(spec)]) == [spec]


def test_inputs_without_a_name_come_first():
    assert [str(spec) for spec in inputs_of(["mask=bool:16", "3x4"])] == ["3x4", "mask=bool:16"]


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (["ids=int65:16"], "unknown type of an input 'int65'; did you mean 'int64'"),
        (["ids="], r"--input ids=: expected \[NAME=\]\[TYPE:\]SIZES\[:LOW-HIGH\], "),
        (["=3x4"], r"--input =3x4: expected"),
        (["3x0"], "--input 3x0: every size must be at least 1"),
        (["3xfour"], r"--input 3xfour: expected .* or \[NAME=\]\[TYPE:\]@FILE, as in 3x224x224"),
        (["3,4"], "--input 3,4: expected"),
        (["x=3", "x=4"], "--input x: given twice"),
        (["x=NxN"], "--input x=NxN: expected"),
        (["x=(2xN)"], r"--input x=\(2xN\): expected"),
        (["16:5-1"], r"--input 16:5-1: give two numbers from .*, the lower one first"),
        (["x=int8:4:0-300"], "--input x=int8:4:0-300: give two whole numbers from -128 to 127, the lower one first"),
        (["x=int64:4:0.5-1"], "give two whole numbers"),
        (["16:0-1e400"], "give two numbers"),
        (["x=uint8:()=-3"], r"--input x=uint8:\(\)=-3: give a whole number from 0 to 255$"),
        (["x=(4)=1e400"], r"give a number from -3\.3e\+38 to 3\.3e\+38$"),
        (["x=99999999999x999"], "it takes .* GiB, but this machine has .* GiB of memory"),
    ],
)
def test_what_is_no_input_is_said(texts, words):
    with pytest.raises(UsageError, match=words):
        of_module(inputs_of(texts))


@pytest.mark.parametrize(
    ("items", "size", "words"), [(8, 0, "not a complete .npy file"), (10**12, 4 * 10**12, "it takes .* GiB")]
)
def test_a_file_of_numbers_that_it_lacks_or_no_memory_holds_is_refused(items, size, words, tmp_path):
    with (tmp_path / "x.npy").open("wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": (items,)})
        file.truncate(file.tell() + size)  # sparse
    with pytest.raises(UsageError, match=words):
        of_module(inputs_of([f"x=@{tmp_path}/x.npy"]))
