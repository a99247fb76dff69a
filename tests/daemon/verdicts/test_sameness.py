"""Measurements of one model: what they must share, what decides it, and the words for what changed it."""

from typing import NamedTuple

import msgspec
import pytest
from records_made import PASSED

from benchd.daemon.records import Check, InputSpec, ModelFacts
from benchd.daemon.verdicts.sameness import files_changed, model_difference

FACTS = ModelFacts(
    options={},
    input_shape=[3, 8, 8],
    parameters=7,
    weights="of the module",
    weights_sha256="a",
    read={"net.py": "c", "helper.py": "h", "table.npy": "t", "$NET_FAST": "unset"},
    data="256 of the 900 images of imagefolder:x",
)
ANSWERED = msgspec.structs.replace(PASSED, outputs=["output 10"], projections=[1.0, 2.0], inputs_sha256="i")
OTHERS = [1.0, 2.2]


class Measured(NamedTuple):
    model: ModelFacts | None
    check: Check | None


def measured(*, check=ANSWERED, model=FACTS, read=(), **fields):
    fields |= {"read": model.read | dict(read)} if read else {}
    return Measured(msgspec.structs.replace(model, **fields), check)


def answered(projections, **fields):
    return msgspec.structs.replace(ANSWERED, projections=projections, **fields)


def test_what_is_of_one_model():
    larger = measured(data="all 900 images of imagefolder:x, fewer than the 1024 asked for")
    assert model_difference([measured(), Measured(None, None), measured(), measured(check=None), larger]) is None
    assert model_difference([]) is None


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (measured(weights_sha256="b"), "different weights: they differ each time the model is built: seed"),
        (measured(weights_sha256="b", read={"net.py": "d"}), "different weights: net.py changed; "),
        (measured(parameters=8), "a different number of parameters (7 and 8); "),
        (measured(weights="w.pt"), "different weights (of the module and w.pt); "),
        (measured(data="random unit, seed 0"), "different inputs ("),
        (measured(inputs=[InputSpec("x", None, [3, 8, 9])]), "different inputs ("),
    ],
)
def test_facts_that_differ_are_named_with_what_to_do(other, words):
    difference = model_difference([measured(), measured(), other])
    assert difference.startswith(words)
    assert difference.endswith("; measure every variant again with the same model")


@pytest.mark.parametrize(
    ("read", "cause"),
    [
        ({"helper.py": "edited"}, "helper.py changed"),
        ({"table.npy": "replaced"}, "table.npy changed"),
        ({"$NET_FAST": "6b86"}, "$NET_FAST changed"),
        ({"helper.py": "edited", "$NET_FAST": "6b86"}, "$NET_FAST, helper.py changed"),
        (
            {},
            "neither its files nor its weights changed, so a variable, a file that it reads or its builder did",
        ),
        ({"late.py": "read by one alone"}, "neither its files nor its weights changed, so a variable"),
    ],
)
def test_other_answers_to_the_same_inputs_are_of_another_model_and_what_changed_it_is_named(read, cause):
    difference = model_difference([measured(), measured(check=answered(OTHERS), read=read)])
    assert difference.startswith(f"its exact answers to the same inputs differ by 0.089 of their size: {cause}")


def test_answers_of_another_file_name_both_files():
    first = measured(read={"two.py": "a"}, check=answered([1.0, 2.0]))
    second = measured(read={"slow.py": "b"}, check=answered(OTHERS))
    first.model.read.pop("net.py", None), second.model.read.pop("net.py", None)
    assert "it was built from slow.py, not from two.py" in model_difference([first, second])


def test_an_edit_that_leaves_the_exact_answers_leaves_the_model():
    edited = measured(read={"net.py": "a comment"}, check=answered([1.0, 2.0 + 1e-9]))
    assert model_difference([measured(), edited]) is None
    assert files_changed([measured(), edited]) == ["net.py"]


@pytest.mark.parametrize(
    "check",
    [
        None,
        answered(OTHERS, inputs_sha256="of another batch"),
        answered(OTHERS, reference="float32"),
        answered([]),
    ],
)
def test_where_no_answers_are_comparable_the_code_decides(check):
    assert model_difference([measured(), measured(check=check)]) is None
    edited = measured(check=check, read={"helper.py": "edited"})
    assert model_difference([measured(), edited]).startswith("different code or data: helper.py changed; ")


def test_answers_are_compared_with_the_first_to_the_same_inputs():
    """The first record answered other inputs, as of another batch."""
    of_batch = {"inputs_sha256": "of another batch"}
    records = [
        measured(),
        measured(check=answered([5.0, 5.0], **of_batch)),
        measured(check=answered(OTHERS, **of_batch)),
    ]
    assert model_difference(records[:2]) is None
    assert model_difference(records).startswith("its exact answers to the same inputs differ")


def test_each_output_counts_alone_and_one_less_is_another_network():
    outputs = ["scores 10", "offset 1"]
    two = answered([1e6, 1e6, 1.0, 2.0], outputs=outputs)
    difference = model_difference([measured(check=two), measured(check=answered([1e6, 1e6, *OTHERS], outputs=outputs))])
    assert "differ by 0.089 of their size in offset" in difference
    difference = model_difference([measured(check=two), measured()])
    assert difference.startswith("different outputs (output 10, where the other has offset 1, scores 10)")


def test_rounding_may_move_a_spike():
    spiking = [measured(check=answered(values, rule="codes")) for values in ([1.0, 2.0], [1.0, 2.05])]
    assert model_difference(spiking) is None
    assert model_difference([measured(), measured(check=answered([1.0, 2.05]))]) is not None
