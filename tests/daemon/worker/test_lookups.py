"""Whole numbers are drawn within the tables that they index, whatever leads from the input to the table."""

from contextlib import suppress

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence

from benchd.daemon.worker import lookups
from benchd.daemon.worker.structures import Tensors

TABLE = torch.randn(50, 4)


def refused(_):
    raise ValueError


FOLLOWED = {
    "embedding": (lambda ids: functional.embedding(ids, TABLE), (0, 49)),
    "by name": (lambda ids: functional.embedding(input=ids, weight=TABLE), (0, 49)),
    "torch's own": (lambda ids: torch.embedding(TABLE, ids), (0, 49)),
    "operator": (lambda ids: torch.ops.aten.embedding.default(TABLE, ids), (0, 49)),
    "bag": (lambda ids: functional.embedding_bag(ids, TABLE), (0, 49)),
    "moved up": (lambda ids: TABLE[ids + 2], (0, 47)),
    "from 1": (lambda ids: TABLE[ids - 1], (1, 50)),
    "columns of one table": (lambda ids: TABLE[ids + torch.tensor([0, 10, 20, 30])], (0, 19)),
    "hashed": (lambda ids: TABLE[ids % 50], (0, 49)),
    "behind a slice": (lambda ids: TABLE[:, ids], (0, 3)),
    "behind an ellipsis": (lambda ids: TABLE[..., None, ids], (0, 3)),
    "gather": (lambda ids: TABLE.gather(0, index=ids), (0, 49)),
    "take": (lambda ids: torch.take(TABLE, ids), (0, 199)),
    "index_select": (lambda ids: TABLE.index_select(0, ids[0].int()), (0, 49)),
    "one_hot": (lambda ids: functional.one_hot(ids, 7), (0, 6)),
    "labels": (lambda ids: functional.cross_entropy(torch.randn(2, 9), ids[:, 0]), (0, 8)),
    "scatter": (lambda ids: torch.zeros(2, 33).scatter_(1, ids, 1.0), (0, 32)),
    "remapped": (lambda ids: TABLE[torch.arange(20).flip(0)[ids]], (0, 19)),
    "smallest of two": (lambda ids: (TABLE[ids], torch.zeros(9)[ids]), (0, 8)),
    "with a token in front": (lambda ids: TABLE[torch.cat([torch.zeros_like(ids[:, :1]), ids], 1)], (0, 49)),
    "row by row": (lambda ids: [TABLE[row] for row in ids], (0, 49)),
    "masked": (lambda ids: TABLE[ids * torch.tensor([1, 0, 1, 1])], (0, 49)),
    "every second": (lambda ids: TABLE[ids * 2 + 1], (0, 24)),
    "summed up": (lambda ids: TABLE[ids.cumsum(1)], (0, 12)),
    "added up": (lambda ids: TABLE[ids.sum(1)], (0, 12)),
    "the largest": (lambda ids: TABLE[ids.max(1).values], (0, 49)),
    "where the largest is": (lambda ids: TABLE[ids.max(1).indices], None),
    "packed": (lambda ids: pack_padded_sequence(torch.ones(2, 6, 3), ids[:, 0], True, enforce_sorted=False), (1, 6)),
    "positions of a mask": (lambda mask: TABLE[mask.cumsum(1) * mask], None),
    "compared": (lambda mask: TABLE[(mask > 0).long()], None),
    "multiplied": (lambda mask: mask[..., None] * TABLE[:4], None),
    "until an error": (lambda ids: refused(TABLE[ids]), (0, 49)),
}


class Calls(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        return self.function(*inputs)


@pytest.mark.parametrize(("function", "expected"), FOLLOWED.values(), ids=FOLLOWED)
def test_an_input_stays_within_the_smallest_table_that_it_indexes(function, expected):
    ones = torch.ones(2, 4, dtype=torch.int64)
    span = lookups.rows(Calls(function), ones, ["ids"]).get("ids")
    assert span == expected
    for end in expected or ():
        with suppress(ValueError):
            function(torch.full_like(ones, end))


@pytest.mark.parametrize("function", [lambda a, b: TABLE[a + b], lambda a, b: TABLE[a - b + 20]])
def test_two_inputs_that_lead_to_one_index_share_its_table(function):
    both = Tensors({"a": torch.ones(2, 4, dtype=torch.int64), "b": torch.ones(2, 4, dtype=torch.int64)})
    spans = lookups.rows(Calls(function), both, ["a", "b"])
    assert spans["a"][1] > 10
    for a in spans["a"]:
        for b in spans["b"]:
            function(torch.tensor(a), torch.tensor(b))


def test_an_index_that_an_input_masks_is_drawn_over_its_table_and_the_mask_is_not():
    both = Tensors({"ids": torch.ones(2, 4, dtype=torch.int64), "keep": torch.ones(2, 4, dtype=torch.int64)})
    spans = lookups.rows(Calls(lambda ids, keep: functional.embedding(ids * keep, TABLE)), both, ["ids", "keep"])
    assert spans == {"ids": (0, 49)}


class Scripted(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(50, 4)

    def forward(self, ids, labels, steps):
        return self.table(ids).sum() + functional.one_hot(labels, 7).sum() + steps


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_the_whole_numbers_of_torchscript_are_tried():
    ones = torch.ones(2, 4, dtype=torch.int64)
    names = ("ids", "labels", "steps")
    given = Tensors({name: ones if name != "labels" else ones[:, :1] for name in names})
    spans = lookups.rows(torch.jit.script(Scripted()), given, names)
    assert spans == {"ids": (0, 49), "labels": (0, 6)}
