"""The inputs of an own model, as text and as what they mean."""

import pytest

from benchd.daemon.errors import UsageError
from benchd.daemon.measuring.user_model import inputs_of
from benchd.daemon.records import InputSpec


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("3x224x224", InputSpec("", None, [3, 224, 224])),
        ("ids=int64:16", InputSpec("ids", "int64", [16])),
        ("int64:16", InputSpec("", "int64", [16])),
        ("scale=float32:", InputSpec("scale", "float32", [])),
        ("serving_default_x:0=3x4", InputSpec("serving_default_x:0", None, [3, 4])),
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
        (["ids="], r"--input ids=: expected \[NAME=\]\[TYPE:\]SIZExSIZE"),
        (["=3x4"], r"--input =3x4: expected"),
        (["3x0"], "--input 3x0: every size is at least 1"),
        (["3xfour"], r"--input 3xfour: expected \[NAME=\]\[TYPE:\]SIZExSIZE\.\.\., as in 3x224x224"),
        (["3,4"], r"--input 3,4: expected \[NAME=\]\[TYPE:\]SIZExSIZE"),
        (["x=3", "x=4"], "--input x: given twice"),
    ],
)
def test_what_is_no_input_is_said(texts, words):
    with pytest.raises(UsageError, match=words):
        inputs_of(texts)
