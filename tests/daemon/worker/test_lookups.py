"""Integers are drawn within the range that the model accepts, whatever it does with them."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence

from benchd.daemon.worker import lookups
from benchd.daemon.worker.structures import Tensors

TABLE = torch.randn(50, 4)
RNN = nn.GRU(3, 2, batch_first=True)


def refused(_):
    raise ValueError


LIMITED = {
    "embedding": (lambda ids: functional.embedding(ids, TABLE), (0, 49)),
    "moved up": (lambda ids: TABLE[ids + 2], (0, 47)),
    "columns of one table": (lambda ids: TABLE[ids + torch.tensor([0, 10, 20, 30])], (0, 19)),
    "hashed": (lambda ids: TABLE[ids % 50], None),
    "one_hot": (lambda ids: functional.one_hot(ids, 7), (0, 6)),
    "labels": (lambda ids: functional.cross_entropy(torch.randn(len(ids), 9), ids[:, 0]), (0, 8)),
    "smallest of two": (lambda ids: (TABLE[ids], torch.zeros(9)[ids]), (0, 8)),
    "every second": (lambda ids: TABLE[ids * 2 + 1], (0, 24)),
    "summed up": (lambda ids: TABLE[ids.cumsum(1)], (0, 12)),
    "where the largest is": (lambda ids: TABLE[ids.max(1).indices], None),
    "lengths": (
        lambda ids: RNN(pack_padded_sequence(torch.ones(len(ids), 6, 3), ids[:, 0], True, enforce_sorted=False)),
        (1, 6),
    ),
    "compared": (lambda ids: TABLE[(ids > 0).long()], None),
    "one batch size": (lambda ids: TABLE[ids.view(2, 2, 2)], (0, 49)),
    "an error": (lambda ids: refused(TABLE[ids]), None),
}


class Calls(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        return self.function(*inputs)


@pytest.mark.parametrize("sizes", [{50, 9, 4}, set()], ids=["known sizes", "unknown sizes"])
@pytest.mark.parametrize(("function", "expected"), LIMITED.values(), ids=LIMITED)
def test_the_span_of_an_input_is_what_the_model_accepts(function, expected, sizes):
    ones = torch.ones(2, 4, dtype=torch.int64)
    assert lookups.spans([Calls(function)], ones, ["ids"], ["ids"], sizes).get("ids") == expected


def test_the_spans_of_two_inputs_hold_together():
    both = Tensors({"a": torch.ones(2, 4, dtype=torch.int64), "b": torch.ones(2, 4, dtype=torch.int64)})
    spans = lookups.spans([Calls(lambda a, b: TABLE[a + b])], both, ["a", "b"], ["a", "b"], set())
    assert spans["a"][1] > 10
    assert spans["a"][1] + spans["b"][1] < len(TABLE)


def test_bytes_that_are_all_accepted_have_no_span():
    ones = torch.ones(2, 4, dtype=torch.uint8)
    assert lookups.spans([Calls(lambda x: torch.zeros(256)[x.int()])], ones, ["x"], ["x"], set()) == {}
    assert lookups.spans([Calls(lambda x: torch.zeros(9)[x.int()])], ones, ["x"], ["x"], set()) == {"x": (0, 8)}


class Scripted(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(50, 4)

    def forward(self, ids, steps):
        return self.table(ids).sum() + steps


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_torchscript_is_tried_like_any_module():
    ones = torch.ones(2, 4, dtype=torch.int64)
    names = ("ids", "steps")
    spans = lookups.spans([torch.jit.script(Scripted())], Tensors(dict.fromkeys(names, ones)), names, names, {50, 4})
    assert spans == {"ids": (0, 49)}
