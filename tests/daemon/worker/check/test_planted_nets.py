"""Networks with a planted fault never pass the check, and right ones never fail it, in each variant of a CPU.

The suite judges a part of them; `make test-slow ARGS="-s -k planted_nets"` all, with a row for each.
"""

import sys
from itertools import product
from pathlib import Path

import nets_right
import nets_wrong
import pytest
from nets_checked import FILES, INT8, PLAIN, SHARED, verdict


def each(names, variants):
    """Return each of the names with each of the variants."""
    return {*product(names.split(), variants.split())}


# faults that docs/measuring.md names by these words
NAMED = {
    "It cannot detect a change smaller than the rounding error": each(
        "gelu_by_tanh sums_in_half_precision rounded_to_tenths", "fp16 bf16"
    )
    | each("probability_of_one_class_zero", "fp16 bf16")
    | each("one_class_two_percent_off weights_in_bfloat16 variance_is_unbiased", "bf16")
    | each("first_step_missing state_is_kept_between_runs eps_of_a_thousandth eps_of_batch_norm", "bf16")
    | each("temperature_off sigmoid_of_sizes_is_hard one_row_ten_percent_off", "bf16"),
}
# rounding alone hides which input was answered, so that no verdict is possible
VOID = each("long_sums labels_as_floats picture", "bf16 amp")
NOT_HERE = {
    ("lstm", "amp"): "torch's LSTM in bf16 needs instructions that not every CPU has",
    ("tied_weights", "onnxruntime-fp16"): "ONNX Runtime 1.31 dies while it reads a GRU in half precision after a table",
    ("hashes", "openvino"): "OpenVINO holds whole numbers in 32 bits",
    ("spectrum", "openvino"): "OpenVINO 2026.1 gives a spectrum another shape",
    ("divisor_of_eight", "onnxruntime"): "torch's exporter drops the divisor, and the file is right",
    ("max_pool_pads_with_zero", "onnxruntime"): "ONNX Runtime's optimiser drops the zeros, and the answers are right",
}
EXCUSED = NOT_HERE.keys() | set().union(*NAMED.values())
WRONG = nets_wrong.WRONG | nets_wrong.OF_STATE
SLOW = pytest.mark.slow
# the record's projections of answers with infinities, which are then left out
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning")


def some(names, variants, step):
    """Return each name with each variant but those that are excused; the suite takes every `step`th."""
    pairs = [pair for pair in product(names, variants) if pair not in EXCUSED]
    return [pytest.param(*pair, marks=() if place % step == 0 else SLOW) for place, pair in enumerate(pairs)]


def judged(folder, corpus, name, variant, **fields):
    """Return the verdict, or `none` where the variant refuses the net, and the note."""
    line = verdict(folder, corpus, name, variant, **fields)
    sys.stdout.write(f"{name:36} {variant:16} {line}\n")
    return line.partition(":")[0], line


def is_right(folder, name, variant, **fields):
    kind, note = judged(folder, "nets_right", name, variant, **fields)
    allowed = ("passed", "void") if (name, variant) in VOID else ("passed",)
    assert kind in allowed, note


@pytest.mark.parametrize(("name", "variant"), some(nets_right.RIGHT, PLAIN, 50))
def test_a_right_net_never_fails(tmp_path, name, variant):
    is_right(tmp_path, name, variant)


@SLOW
@pytest.mark.parametrize(("name", "variant"), some(nets_right.RIGHT, FILES, 1))
def test_a_file_of_a_right_net_never_fails(tmp_path, name, variant):
    is_right(tmp_path, name, variant)


@SLOW
@pytest.mark.parametrize(("name", "variant"), some(nets_right.OF_THREE_PRODUCTS, INT8, 1))
def test_a_right_net_never_fails_in_int8(tmp_path, name, variant):
    is_right(tmp_path, name, variant)


@SLOW
@pytest.mark.parametrize("name", ["logits", "unet", "gru", "transformer_encoder", "segmentation"])
def test_a_right_net_never_fails_compiled(tmp_path, name):
    is_right(tmp_path, name, "compile")


@SLOW
@pytest.mark.parametrize("seed", range(1, 6))
@pytest.mark.parametrize(("name", "variant"), some(["softmax", "softmax_of_10", "log_softmax"], PLAIN, 1))
def test_a_right_softmax_passes_whatever_its_weights(tmp_path, name, variant, seed):
    is_right(tmp_path, name, variant, seed=seed)


@pytest.mark.parametrize(("name", "variant"), some(WRONG, SHARED, 80))
def test_a_wrong_net_never_passes(tmp_path, name, variant):
    kind, note = judged(tmp_path, "nets_wrong", name, variant)
    assert kind in ("failed", "void"), note


@SLOW
@pytest.mark.parametrize(("name", "variant"), some(nets_wrong.WRONG, ["onnxruntime"], 1))
def test_a_file_of_a_wrong_net_never_passes(tmp_path, name, variant):
    kind, note = judged(tmp_path, "nets_wrong", name, variant)
    assert kind != "passed", note


def test_what_no_check_sees_is_named_in_the_documents():
    page = Path(__file__).parents[4] / "docs/measuring.md"
    text = " ".join(page.read_text().split())
    assert [words for words in NAMED if words not in text] == []
