"""How far the answers of a shipped folder are off, row by row."""

from math import inf, nan

import numpy as np
import pytest
from manifests_made import manifest

from benchd.daemon.errors import UnfitModel
from benchd.daemon.measuring.protocol import Golden
from benchd.daemon.records import Case, Variant
from benchd.daemon.worker.check import golden


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
        (3.0, [2.0], [0.5]),
        (np.ones((3, 1, 2)), np.ones((1, 3, 1, 2)), [0.0]),
    ],
)
def test_infinities_of_a_mask_are_right_where_they_are_the_same(answer, exact, off):
    mask = golden._off({"y": np.array(answer)}, np.array(exact), "y")
    np.testing.assert_array_equal(mask, off)


@pytest.mark.parametrize(
    ("variant", "rows_off", "most"),
    [
        ("eager", 0, 1e-4),
        ("eager", 2, 1e-4),
        ("amp", 0, 2e-1),
        ("fp16", 0, 5e-2),
        ("bf16", 2, 1.0),  # of a network with thresholds whose mean is judged
        ("onnxruntime-int8", 0, 0.5),
    ],
)
def test_no_tolerance_is_larger_than_the_rule_of_its_number_format(variant, rows_off, most):
    case = Case(model="net", variant=Variant.parse(variant))
    golden._refuse_wide(manifest(case=case, golden=Golden(8, 8, {"y": most}, rows_off)))
    with pytest.raises(UnfitModel, match=r"manifest\.json lets y be off by"):
        golden._refuse_wide(manifest(case=case, golden=Golden(8, 8, {"y": 1.01 * most}, rows_off)))
