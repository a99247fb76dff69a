"""Answers of any form as tensors by path, and batches of several inputs as one."""

from collections import namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from benchd.daemon.errors import UnfitModel
from benchd.daemon.worker import structures

ONE, TWO = torch.ones(2, 3), torch.zeros(2)
Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Found:
    logits: torch.Tensor
    boxes: list
    nothing: None = None


@pytest.mark.parametrize(
    ("answer", "paths"),
    [
        (ONE, ["output"]),
        (2.5, ["output"]),
        ((ONE, TWO), ["0", "1"]),
        ([ONE, (TWO, None)], ["0", "1[0]"]),
        ({"logits": ONE, "aux": {"deep": [TWO]}}, ["logits", "aux.deep[0]"]),
        (Found(ONE, [TWO, ONE]), ["logits", "boxes[0]", "boxes[1]"]),
        (Pair(ONE, True), ["left", "right"]),
        ({3: ONE}, ["3"]),
    ],
    ids=["tensor", "number", "tuple", "list", "dict", "dataclass", "named tuple", "number as key"],
)
def test_each_tensor_of_an_answer_has_its_path(answer, paths):
    assert list(structures.tensors(answer)) == paths


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({"a": ONE, "name": "cat"}, "returns str at name: return dense tensors"),
        (ONE.to_sparse(), "returns a torch.sparse_coo tensor: return"),
        ((ONE, np.ones(2)), "returns numpy.ndarray at 1: return"),
        (None, "the model returns nothing"),
        ({}, "the model returns nothing"),
        ({"a.b": ONE, "a": {"b": TWO}}, r"two values with the path a\.b"),
    ],
)
def test_what_is_no_answer_is_named(answer, words):
    with pytest.raises(UnfitModel, match=words):
        structures.tensors(answer)


def test_a_last_batch_that_is_smaller_is_put_behind_the_others():
    outputs = structures.gathered([{"output": np.zeros((2, 3))}, {"output": np.ones((1, 3))}], [2, 1])
    assert outputs["output"].tolist() == [[0] * 3, [0] * 3, [1] * 3]


def test_a_complex_number_is_two():
    assert structures.numbers(torch.tensor([1 + 2j])).tolist() == [[1.0, 2.0]]


def test_numbers_are_a_copy_because_the_next_run_may_overwrite_the_tensor():
    answer = torch.ones(3, dtype=torch.float64)
    numbers = structures.numbers(answer)
    answer.zero_()
    assert numbers.tolist() == [1.0, 1.0, 1.0]
