"""Measurements of one model: what they must share, and the words for each thing that they do not."""

import msgspec
import pytest
from records_made import PASSED

from benchd.daemon.records import Case, InputSpec, ModelFacts
from benchd.daemon.verdicts.one_model import difference, other_answers

FACTS = ModelFacts(
    options={},
    input_shape=[3, 8, 8],
    parameters=7,
    weights="random, seed 0",
    weights_sha256="a",
    code_sha256="c",
    data="256 of the 900 images of imagefolder:x",
)


def other(**fields):
    return msgspec.structs.replace(FACTS, **fields)


def test_the_same_facts_are_one_model_whatever_is_not_known():
    larger = other(data="all 900 images of imagefolder:x, fewer than the 1024 asked for")
    assert difference([FACTS, None, FACTS, other(code_sha256=None), larger]) is None
    assert difference([]) is None


@pytest.mark.parametrize(
    ("one", "two", "words"),
    [
        (FACTS, other(code_sha256="d", weights_sha256="b"), "its code was edited meanwhile: "),
        (FACTS, other(weights_sha256="b"), "its weights differ each time it is built: seed all random numbers"),
        (FACTS, other(parameters=8), "its weights differ each time it is built: "),
        (other(weights="w.pt"), other(weights="w.pt", weights_sha256="b"), "w.pt was replaced meanwhile: "),
        (FACTS, other(weights="w.pt", weights_sha256="b"), "other weights (random, seed 0 and w.pt): "),
        (
            other(weights="net.onnx", weights_sha256="c"),
            other(weights="net.onnx", weights_sha256="d", code_sha256="d"),
            "net.onnx was replaced meanwhile: ",
        ),
        (FACTS, other(data="random unit, seed 0"), "other inputs ("),
        (FACTS, other(inputs=[InputSpec("x", None, [3, 8, 9])]), "other inputs ("),
    ],
)
def test_what_differs_is_named_with_what_to_do(one, two, words):
    assert difference([one, other_code(one), two]).startswith(words)


def other_code(facts):
    """Return the same as of a record that is older than the hash of the code: it hides nothing between two others."""
    return msgspec.structs.replace(facts, code_sha256=None)


@pytest.mark.parametrize(
    ("fields", "batch_size", "differs"),
    [
        ({"projections": [1.7]}, 1, True),
        ({"projections": [1.7]}, 4, False),
        ({"projections": [1.7], "images": 64}, 1, False),
        ({"projections": [1.7], "reference": "float32"}, 1, False),
        ({"projections": [1.0 + 1e-9]}, 1, False),
        ({"projections": []}, 1, False),
    ],
)
def test_answers_of_another_model_are_told_by_what_answers_the_same_inputs(fields, batch_size, differs):
    first, later = (msgspec.structs.replace(PASSED, **given) for given in ({"projections": [1.0]}, fields))
    found = other_answers([(Case(model="net"), first), (Case(model="net", batch_size=batch_size), later)])
    assert bool(found) is differs
    assert other_answers([(Case(model="net"), None), (Case(model="net"), first)]) is None
