"""The rule for an exported file's numbers, at its borders; runs are functions, no file is needed."""

import pytest
import torch
from torch import nn

from benchd.exporters.parity import Differs, compare

IMAGES = torch.tensor([[1.0, 0.0], [0.0, 1.0]]).repeat(4, 1)  # the largest output is 1, the answers 0 1 0 1 ...


class Model(nn.Module):
    """The images themselves; in another precision than float64 some of them are off by `share` or answered wrong."""

    def __init__(self, share=0.0, images=(), wrong=()):
        super().__init__()
        self.off = nn.Parameter(torch.zeros(()))
        self.share, self.images, self.wrong = share, list(images), list(wrong)

    def forward(self, images):
        outputs = images.clone()
        if images.dtype != torch.float64:
            outputs[self.images] += self.share
            outputs[self.wrong] = outputs[self.wrong].flip(1)
        return outputs


def file(share=0.0, images=(), wrong=()):
    """Return a file that is wrong like this."""
    model = Model(share, images, wrong)
    return lambda batch: [model(batch).numpy()]


def batches_of(*parts):
    return [(len(part), (part,)) for part in parts]


def judged(run, judged_by, precision="fp32", plain=None):
    return compare(plain or Model(), run, batches_of(IMAGES), precision, judged_by)


ALL = range(8)


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-4), ("fp16", 2e-2)])
def test_outputs_may_be_off_by_the_tolerance_of_the_precision(precision, tolerance):
    parity = judged(file(0.9 * tolerance, [3]), "outputs", precision)
    assert parity.error_share == pytest.approx(0.9 * tolerance, rel=1e-2)
    assert (parity.images, parity.batch_sizes, parity.argmax_disagreements) == (8, [8], 0)
    with pytest.raises(Differs, match=r"off by .* of the largest output, and 0 of 8 answers differ"):
        judged(file(1.1 * tolerance, [3]), "outputs", precision)


def test_an_error_is_a_share_of_the_largest_output():
    big = batches_of(IMAGES * 1000)
    parity = compare(Model(), file(0.05, [0]), big, "fp32", "outputs")
    assert parity.max_abs_error == pytest.approx(0.05, rel=1e-2)
    assert parity.error_share == pytest.approx(5e-5, rel=1e-2)


def test_codes_are_judged_by_the_image_in_the_middle():
    assert judged(file(0.5, [0, 1, 2]), "codes").error_share == pytest.approx(0.5)
    with pytest.raises(Differs):
        judged(file(0.5, [0, 1, 2, 3, 4]), "codes")


@pytest.mark.parametrize("judged_by", ["outputs", "codes"])
@pytest.mark.parametrize(("share", "agrees"), [(1.9e-3, True), (2.1e-3, False)])
def test_a_file_may_be_twice_as_far_off_as_the_model_in_that_precision(judged_by, share, agrees):
    plain = Model(1e-3, ALL)
    if agrees:
        assert judged(file(share, ALL), judged_by, plain=plain).error_share == pytest.approx(share, rel=1e-2)
    else:
        with pytest.raises(Differs, match=r"the model in fp32 by 1\.0e-03"):
            judged(file(share, ALL), judged_by, plain=plain)


def test_an_overflow_of_the_model_excuses_no_file():
    with pytest.raises(Differs):
        judged(file(float("inf"), ALL), "outputs", plain=Model(float("inf"), ALL))


@pytest.mark.parametrize("eagers", [0, 1])
def test_one_answer_more_than_the_model_s_may_differ(eagers):
    plain = Model(wrong=range(eagers))
    assert judged(file(wrong=range(eagers + 1)), "codes", plain=plain).argmax_disagreements == eagers + 1
    with pytest.raises(Differs, match=f"{eagers + 2} of 8 answers differ"):
        judged(file(wrong=range(eagers + 2)), "codes", plain=plain)


@pytest.mark.parametrize("judged_by", ["outputs", "codes"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_no_number_never_agrees(judged_by, value):
    with pytest.raises(Differs):
        judged(file(value, ALL), judged_by)


def test_batches_are_put_together_and_the_model_stays_as_it_was():
    model = Model()
    batches = batches_of(IMAGES[:1], IMAGES[1:3], IMAGES[3:])
    parity = compare(model, file(), batches, "fp16", "outputs")
    assert (parity.images, parity.batch_sizes, parity.max_abs_error) == (8, [1, 2, 5], 0.0)
    assert model.off.dtype == torch.float32


class Several(nn.Module):
    """Its images, and twice their sum over the batch, where no batch leads."""

    def forward(self, images):
        return images, 2 * images.sum()


@pytest.mark.parametrize("wrong", [0, 1])
def test_each_of_several_outputs_has_to_agree(wrong):
    def run(images):
        outputs = [images.numpy(), 2 * images.sum().numpy()]
        outputs[wrong] = outputs[wrong] + 0.5
        return outputs

    batches = batches_of(IMAGES[:4], IMAGES[4:])
    assert compare(Several(), lambda images: [images.numpy(), 2 * images.sum().numpy()], batches, "fp32", "outputs")
    with pytest.raises(Differs):
        compare(Several(), run, batches, "fp32", "outputs")


class InFloat(nn.Module):
    """Its weights meet float32 alone, whatever the input is."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(2, 2)

    def forward(self, images):
        return self.fc(images.float())


def test_what_float64_cannot_run_is_compared_with_float32():
    model = InFloat()
    parity = compare(model, lambda images: [model(images).detach().numpy()], batches_of(IMAGES), "fp32", "outputs")
    assert parity.max_abs_error == 0.0
    with pytest.raises(Differs):
        compare(model, lambda images: [model(images).detach().numpy() + 1], batches_of(IMAGES), "fp32", "outputs")


@pytest.mark.parametrize(("share", "agrees"), [(0.2, False), (0.6, True)])
def test_classes_are_not_compared_where_rounding_hides_the_model_s_own(share, agrees):
    """A right file of a spiking net with random weights in half precision: no check can give a verdict on it."""
    plain, run = Model(share, ALL, wrong=[]), file(wrong=[2, 3, 5])
    if agrees:
        assert judged(run, "codes", plain=plain).argmax_disagreements == 3
    else:
        with pytest.raises(Differs):
            judged(run, "codes", plain=plain)


class Metres(nn.Module):
    """A net whose logarithm takes positive numbers only."""

    def forward(self, images):
        return images.flatten(1).log()


def test_a_model_whose_own_answer_is_nan_says_so_and_blames_no_file():
    model = Metres()
    with pytest.raises(Differs, match="the model's own answer is NaN for these inputs"):
        compare(model, lambda images: [model(images).numpy()], batches_of(-1 - IMAGES.abs()), "fp32", "outputs")
