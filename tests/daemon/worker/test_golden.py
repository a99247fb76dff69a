"""How far the answers of a shipped folder are off, row by row."""

from math import inf, nan

import numpy as np
import pytest

from benchd.daemon.worker import golden


@pytest.mark.parametrize(
    ("answer", "exact", "off"),
    [
        ([[0.0, 0.0], [0.5, 0.0]], [[0.0, 0.0], [0.0, 0.0]], [0.0, 0.5]),
        ([[2.0, -inf], [1.0, -inf]], [[2.0, -inf], [2.0, -inf]], [0.0, 0.5]),
        ([[1.0, -inf], [-inf, 1.0]], [[1.0, 2.0], [1.0, 2.0]], [inf, inf]),
        ([[1.0, 2.0], [1.0, inf]], [[1.0, -inf], [1.0, -inf]], [inf, inf]),
        ([[nan, -inf], [nan, nan]], [[1.0, -inf], [nan, 1.0]], [nan, nan]),
        (np.zeros((0, 4)), np.zeros((0, 4)), []),
        (np.zeros((2, 0)), np.zeros((2, 0)), [0.0, 0.0]),
        (3.0, 2.0, 0.5),
    ],
)
def test_infinities_of_a_mask_are_right_where_they_are_the_same(answer, exact, off):
    found = golden._off({"y": np.array(answer)}, np.array(exact), "y")
    np.testing.assert_array_equal(found, off)
