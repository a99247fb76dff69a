"""Answers of any form as tensors by path, and batches of several inputs as one."""

from collections import namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from benchd.daemon.errors import UnfitModel
from benchd.daemon.worker import structures
from benchd.daemon.worker.structures import Tensors

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


def test_answers_are_put_together_item_by_item_or_batch_by_batch():
    def answer(boxes, loss):
        return {"logits": np.full((2, 3), loss), "boxes": np.ones((boxes, 4)), "loss": np.array(loss)}

    found = structures.gathered([answer(5, 1.0), answer(3, 2.0)], [2, 2])
    assert {path: value.shape for path, value in found.items()} == {
        "logits": (4, 3),
        "boxes of batch 0": (1, 5, 4),
        "boxes of batch 1": (1, 3, 4),
        "loss": (2,),
    }
    second = structures.of_batch(found, 1, 2, 4)
    assert {path: value.shape for path, value in second.items()} == {"logits": (2, 3), "boxes": (3, 4), "loss": ()}
    assert second["loss"] == 2.0


def test_a_last_batch_that_is_smaller_is_put_behind_the_others():
    found = structures.gathered([{"output": np.zeros((2, 3))}, {"output": np.ones((1, 3))}], [2, 1])
    assert found["output"].tolist() == [[0] * 3, [0] * 3, [1] * 3]


def test_a_complex_number_is_two():
    assert structures.numbers(torch.tensor([1 + 2j])).tolist() == [[1.0, 2.0]]


def test_float32_alone_follows_the_precision():
    batch = Tensors({"x": ONE, "ids": torch.ones(2, dtype=torch.int64), "t": ONE.double()})
    cast = structures.cast(batch, torch.float16)
    assert [value.dtype for value in structures.values(cast)] == [torch.float16, torch.int64, torch.float64]


def test_several_inputs_are_cut_and_given_together():
    batch = Tensors({"x": torch.arange(6.0).view(3, 2), "ids": torch.arange(3)})
    assert len(batch) == 3
    assert [part.tolist() for part in structures.values(batch[1:])] == [[[2, 3], [4, 5]], [1, 2]]
    assert structures.spread(lambda x, ids, more: (ids, more))(batch, 7)[1] == 7


def test_a_loss_is_of_the_first_output_of_floats():
    answer = {"ids": torch.arange(2), "loss": torch.tensor(1.0), "logits": torch.ones(2, 3, 4)}
    assert structures.first_scores(answer).shape == (2, 12)
    with pytest.raises(UnfitModel, match="a loss needs an output"):
        structures.first_scores({"ids": torch.arange(2)})


def test_numbers_are_a_copy_because_the_next_run_may_overwrite_the_tensor():
    answer = torch.ones(3, dtype=torch.float64)
    kept = structures.numbers(answer)
    answer.zero_()
    assert kept.tolist() == [1.0, 1.0, 1.0]
