"""The verdict of the check on made-up answers: right ones at the edge of each limit, and every way to be wrong."""

import numpy as np
import pytest

from benchd.daemon.worker.check import agreement
from benchd.daemon.worker.check.agreement import Observation, Rule
from benchd.daemon.worker.check.truth import NOISE

IMAGES, CLASSES = 64, 10
SMOOTH = Rule("fp32", spiking=False, trained=True)
ROUNDING = {name: 2.0**-bits for name, (bits, _) in agreement.HOLDS.items()}


def drawn(seed=0, scale=1.0):
    return scale * np.random.default_rng(seed).normal(size=(IMAGES, CLASSES))


def of(values, codes=None):
    return Observation({"output": np.asarray(values, float)}, codes)


def moved(exact, noise, seed):
    signs = np.random.default_rng(seed)

    def off(values):
        return values + noise * np.abs(values[np.isfinite(values)]).max() * signs.choice([-1, 1], size=values.shape)

    return {name: off(values) if noise else values for name, values in exact.outputs.items()}


def judged(exact, observed, noisy, rule):
    """Judge answers against exact ones, of which these noisy ones are what rounding leaves."""
    return agreement.judge(
        exact, observed, agreement.bounds(exact, [(exact, observation) for observation in noisy], rule), rule
    )


def verdict(observed, *, noise=0.0, number_format="fp32", spiking=False, trained=True, exact=None, noisy_codes=()):
    """Judge against answers of which rounding moves each by up to `noise` times the largest."""
    exact = of(drawn()) if exact is None else exact
    noisy_codes = noisy_codes or [exact.codes] * 2
    noisy = [Observation(moved(exact, noise, seed), codes) for seed, codes in enumerate(noisy_codes)]
    observed = observed if isinstance(observed, Observation) else of(observed)
    return judged(exact, observed, noisy, Rule(number_format, spiking, trained))


@pytest.mark.parametrize(
    ("images", "differing", "passed"), [(64, 4, True), (64, 5, False), (4, 1, True), (4, 2, False)]
)
def test_int8_is_judged_by_classes_as_far_as_chance_does_not_explain_them(images, differing, passed):
    scores = np.eye(CLASSES)[np.arange(images) % CLASSES]
    wrong = scores.copy()
    wrong[:differing] += 0.6 * np.eye(CLASSES)[(np.arange(differing) + 1) % CLASSES] - 0.5 * scores[:differing]
    check = verdict(of(wrong), number_format="int8", exact=of(scores), noise=0.2)
    assert (check.passed, check.argmax_disagreements) == (passed, differing)


def off_by(share, images=slice(None)):
    """Return answers of which one of each of these images is off, in another channel than the next image's."""
    values = drawn()
    off = share * np.abs(values).max() * np.eye(CLASSES)[np.arange(IMAGES) % CLASSES]
    values[images] += off[images]
    return values


@pytest.mark.parametrize(
    ("share", "noise", "number_format", "passed"),
    [
        (1.9e-5, 0.0, "fp32", True),  # the floor
        (2.1e-5, 0.0, "fp32", False),
        (8.9e-5, 6e-5, "fp32", True),  # 1.5 times the noise
        (9.1e-5, 6e-5, "fp32", False),
        (1.4e-4, 1e-4, "fp16", True),
        (1.6e-4, 1e-4, "fp16", False),
        (7.4e-2, 5e-2, "bf16", True),
        (7.6e-2, 5e-2, "bf16", False),
    ],
)
def test_a_smooth_network_may_be_off_by_little_more_than_rounding(share, noise, number_format, passed):
    for images in (slice(None), slice(7, 8)):
        check = verdict(off_by(share, images), noise=noise, number_format=number_format)
        assert check.passed is passed
        assert check.verdict == ("passed" if passed else "failed")
        assert check.error_share == pytest.approx(share)


@pytest.mark.parametrize("number_format", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("spiking", [False, True])
@pytest.mark.parametrize(
    "wrong",
    [
        lambda values: np.roll(values, 1, axis=0),  # the answer to another image
        lambda values: 10 * values,
        np.negative,
        np.zeros_like,
        lambda values: np.roll(values, 1, axis=1),
        lambda values: np.where(np.arange(CLASSES) < 5, 0.0, values),
        lambda values: np.where(np.arange(IMAGES)[:, None] == 5, np.nan, values),
        lambda values: np.where(np.arange(IMAGES)[:, None] == 5, np.inf, values),
        lambda values: np.random.default_rng(9).permuted(values, axis=1),
    ],
)
def test_wrong_answers_fail_in_every_format(wrong, number_format, spiking):
    noise = {"fp32": 1e-7, "fp16": 1e-3, "bf16": 5e-3}[number_format]
    check = verdict(wrong(drawn()), noise=noise, number_format=number_format, spiking=spiking)
    assert check.verdict == "failed"
    assert check.note
    assert np.isfinite([check.max_abs_error, check.error_share, check.mean_error_share]).all()


def test_answers_that_hardly_differ_are_told_apart_all_the_same():
    same = of(1000.0 + drawn(scale=1e-3))  # one part in a million lies between two images: less than the cap
    assert verdict(np.roll(same.outputs["output"], 1, axis=0), exact=same).verdict == "failed"
    assert verdict(same, exact=same).verdict == "passed"


def test_a_constant_output_beside_others_may_be_off_by_rounding():
    both = Observation({"output": drawn(), "anchors": np.full((IMAGES, 3), 7.0)}, None)
    right, wrong = (
        Observation(both.outputs | {"anchors": np.full((IMAGES, 3), value)}, None) for value in (7.00001, 7.01)
    )
    assert verdict(right, exact=both, noise=1e-6).passed
    assert not verdict(wrong, exact=both, noise=1e-6).passed


def test_a_network_that_answers_all_inputs_alike_cannot_be_checked():
    constant = of(np.full((IMAGES, 3), 7.0))
    check = verdict(np.full((IMAGES, 3), 7.0), exact=constant)
    assert (check.verdict, check.note) == ("void", agreement.SAME_ANSWERS)
    assert verdict(np.full((IMAGES, 3), 8.0), exact=constant).verdict == "failed"


def test_what_a_model_rules_out_with_an_infinity_has_to_be_ruled_out():
    exact = np.where(np.arange(CLASSES) % 3 == np.arange(IMAGES)[:, None] % 3, -np.inf, drawn())
    for number_format, noise in (("fp32", 0.0), ("fp32", 2e-5), ("fp16", 1e-3)):
        assert verdict(exact, exact=of(exact), noise=noise, number_format=number_format).passed
        for wrong in (
            np.nan_to_num(exact, neginf=-1e9),
            np.roll(exact, 1, axis=0),
            np.where(exact < 0, -np.inf, exact),
        ):
            check = verdict(wrong, exact=of(exact), noise=noise, number_format=number_format)
            assert check.verdict == "failed"
            assert np.isfinite([check.max_abs_error, check.error_share]).all()


@pytest.mark.parametrize("values", [np.nan, np.full(CLASSES, np.inf)])
def test_a_reference_that_is_not_finite_is_named(values):
    exact = drawn()
    exact[3, : np.size(values)] = values
    check = verdict(exact, exact=of(exact))
    assert check.verdict == "failed"
    assert "not finite in float64 itself for 1 of 64: give different inputs or weights" in check.note


@pytest.mark.parametrize(("images", "passed"), [(2, True), (3, False)])
def test_a_spike_may_carry_two_images_anywhere_in_float32(images, passed):
    check = verdict(off_by(0.5, slice(images)), spiking=True)
    assert (check.passed, check.images_off, check.images_off_allowed) == (passed, images, 2)
    assert not verdict(off_by(0.5, slice(1)), spiking=False).passed


def test_a_network_that_rounding_carries_far_off_is_allowed_more_such_images_within_a_quarter():
    exact = of(drawn())
    for noisy_images, allowed in ((0, 2), (2, 6), (6, 14), (30, 16)):
        noisy = [of(off_by(0.5, slice(noisy_images)))] * 2
        check = judged(exact, of(off_by(0.5, slice(allowed))), noisy, SMOOTH)
        assert check.images_off_allowed == (allowed if noisy_images else 0)
        assert check.passed is (noisy_images > 0)


@pytest.mark.parametrize(("share", "passed"), [(0.199, True), (0.201, False)])
def test_half_precision_of_spikes_is_held_against_the_mean_of_rounding(share, passed):
    noisy = of(off_by(0.2, slice(0, IMAGES, 2)))  # 0.1 on average, with a deviation of 0.1
    check = judged(of(drawn()), of(off_by(share)), [noisy] * 2, Rule("bf16", spiking=True, trained=True))
    assert check.passed is passed
    assert check.tolerance == pytest.approx(0.2)
    assert check.images_off_allowed == IMAGES, "the mean alone decides"


@pytest.mark.parametrize(("trained", "wanted"), [(False, "void"), (True, "failed")])
@pytest.mark.parametrize("answers", [drawn, lambda: drawn(5)])
def test_where_rounding_hides_which_image_was_answered_random_weights_are_void(answers, trained, wanted):
    check = verdict(answers(), noise=0.3, number_format="bf16", spiking=True, trained=trained)
    assert check.verdict == wanted
    assert not check.passed
    assert "rounding alone changes the output by" in check.note


def test_no_rounding_makes_numbers_that_are_not_finite_void():
    broken = np.where(np.arange(IMAGES)[:, None] == 5, np.nan, drawn())
    assert verdict(broken, noise=0.3, number_format="bf16", spiking=True, trained=False).verdict == "failed"
    assert verdict(9 * drawn(), noise=0.3, number_format="bf16", spiking=True, trained=False).verdict == "failed"


def codes(flips, features=1000):
    values = np.zeros((IMAGES, features), np.int8)
    values[:, :flips] = 1
    return values


@pytest.mark.parametrize(
    ("flips", "noise", "number_format", "passed"),
    [
        (0, (0, 0), "fp32", True),
        (1, (0, 0), "fp32", False),  # one of a thousand, in every image
        (0, (0, 0), "fp16", True),
        (1, (0, 0), "fp16", False),
        (69, (20, 60), "bf16", True),  # 40 on average, with a deviation of 20
        (71, (20, 60), "bf16", False),
    ],
)
def test_codes_may_flip_as_rounding_flips_them(flips, noise, number_format, passed):
    check = verdict(
        of(drawn(), codes(flips)),
        exact=of(drawn(), codes(0)),
        noisy_codes=[codes(count) for count in noise],
        number_format=number_format,
        spiking=True,
    )
    assert (check.passed, check.rule) == (passed, "codes")


def labels(differing=0, kind=np.int64):
    values = (np.arange(IMAGES * 4) % 7).reshape(IMAGES, 4).astype(kind)
    values[:differing, 1] += 1
    return values


@pytest.mark.parametrize(
    ("differing", "noisy", "number_format", "passed"),
    [
        (0, 0, "fp32", True),
        (3, 0, "fp32", False),
        (2, 0, "bf16", True),
        (IMAGES, 0, "bf16", False),
        (8, 8, "bf16", True),
        (IMAGES, 8, "bf16", False),
    ],
)
def test_whole_numbers_are_equal_or_not(differing, noisy, number_format, passed):
    """One of four labels of these images is another one, in the variant and in the noise."""
    exact, noise, observed = (Observation({"labels": labels(count)}, None) for count in (0, noisy, differing))
    check = judged(exact, observed, [noise] * 2, Rule(number_format, spiking=False, trained=True))
    assert check.passed is passed, check.note
    assert check.argmax_disagreements is None


def test_whole_numbers_beyond_the_precision_of_floats_are_compared():
    large = Observation({"hashes": 2**62 + np.arange(IMAGES)}, None)
    wrong = Observation({"hashes": 2**62 + 1 + np.arange(IMAGES)}, None)
    assert judged(large, large, [large], SMOOTH).passed
    assert not judged(large, wrong, [large], SMOOTH).passed


def test_answers_smaller_than_what_is_allowed_are_told():
    exact = np.where(np.arange(CLASSES) < 3, 1e-4, 1.0) * drawn()
    assert verdict(exact, exact=of(exact), noise=1e-2, number_format="bf16").note == (
        "33% of the answers are smaller than the allowed error"
    )
    assert verdict(drawn(), noise=1e-5, number_format="bf16").note == ""


@pytest.mark.parametrize(
    ("observed", "words"),
    [
        (of(drawn()[:, :9]), "the output is 64x9, but 64x10 in float64"),
        (Observation({"scores": drawn()}, None), "the output is nothing, but 64x10 in float64"),
        (of(drawn(), codes(0, 875)), "875 codes per image, but 1000 in float64"),
    ],
)
def test_answers_of_another_form_fail_in_words(observed, words):
    check = verdict(observed, exact=of(drawn(), codes(0)), spiking=True)
    assert check.verdict == "failed"
    assert words in check.note


def test_every_output_is_judged_by_its_own_size():
    exact = Observation({"boxes": drawn(scale=1e6), "scores": drawn(1)}, None)
    wrong = Observation({"boxes": drawn(scale=1e6), "scores": 1.001 * drawn(1)}, None)
    assert "the output scores is off by more than 2.0e-05 of the largest" in judged(exact, wrong, [exact], SMOOTH).note
    assert judged(exact, exact, [exact], SMOOTH).passed


def channels(large, *, axis, small=1.0, wrong=None):
    """Return answers with four channels, all large but the last one, which `wrong` replaces."""
    values = drawn(scale=large).reshape(IMAGES, -1, 5)[:, :, :4]
    last = small * np.abs(drawn(3)).reshape(IMAGES, -1, 5)[:, :, :1]
    values = np.concatenate([values[:, :, :3], last if wrong is None else wrong(last)], axis=2)
    return np.moveaxis(values, 2, axis)


@pytest.mark.parametrize(("number_format", "large"), [("fp32", 1e6), ("fp16", 1e4), ("bf16", 1e3)])
@pytest.mark.parametrize("axis", [1, 2])
@pytest.mark.parametrize("wrong", [np.zeros_like, np.negative, lambda values: np.roll(values, 1, axis=0)])
def test_small_values_beside_large_ones_are_judged_by_their_own_size(number_format, large, axis, wrong):
    def rounded(values):
        signs = np.random.default_rng(int(axis)).choice([-1, 1], size=values.shape)
        return values * (1 + ROUNDING[number_format] * signs)

    exact, rule = of(channels(large, axis=axis)), Rule(number_format, spiking=False, trained=True)
    noisy = [of(rounded(exact.outputs["output"]))]
    check = judged(exact, of(channels(large, axis=axis, wrong=wrong)), noisy, rule)
    assert check.verdict == "failed"
    assert f"on average in channel 3 of axis {axis}" in check.note
    assert judged(exact, of(channels(large, axis=axis, wrong=rounded)), noisy, rule).passed


def test_a_fault_along_an_axis_in_the_middle_is_found():
    """Joints of people: (image, person, (x, y, score), joint), where every score is turned round."""
    draw = np.random.default_rng(0)
    places, scores = 640 * draw.random((8, 2, 2, 5)), draw.random((8, 2, 1, 5))
    exact, wrong = (of(np.concatenate([places, part], axis=2)) for part in (scores, 1 - scores))
    assert verdict(wrong, exact=exact, noise=1e-6, number_format="fp16").verdict == "failed"
    assert verdict(exact, exact=exact, noise=1e-6, number_format="fp16").passed


def softmax(logits):
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


@pytest.mark.parametrize("number_format", ["fp16", "bf16"])
def test_a_class_that_peaks_in_few_images_is_no_fault(number_format):
    """Most classes are near 0 in most images."""
    off = {"fp16": 1e-3, "bf16": 8e-3}[number_format]
    draw = np.random.default_rng(1)
    logits = 4 * draw.normal(size=(40, 200))
    jitter = [off * np.abs(logits).max() * draw.normal(size=logits.shape) / 3 for _ in range(3)]
    exact, rule = softmax(logits), Rule(number_format, spiking=False, trained=False)
    limits = agreement.bounds(of(exact), [(of(exact), of(softmax(logits + noise))) for noise in jitter[:2]], rule)
    for rows in (slice(None), slice(8, 12), slice(12, 13)):
        check = agreement.judge(of(exact[rows]), of(softmax(logits + jitter[2])[rows]), limits, rule)
        assert check.passed, check.note
        assert not agreement.judge(of(exact[rows]), of(np.roll(exact, 1, axis=0)[rows]), limits, rule).passed


def head(seed, number_format="bf16"):
    """Return a thousand scores of a random head over inner values that hardly differ, exact and with rounding noise."""
    draw = np.random.default_rng(seed)
    weights = draw.normal(size=(192, 1000)) / np.sqrt(192)
    inner = draw.normal(size=192) + 0.2 * draw.normal(size=(8, 192))

    def off(times):
        return of((inner + times * ROUNDING[number_format] * draw.normal(size=192)) @ weights)

    return of(inner @ weights), [off(1.0) for _ in range(NOISE[0])], off(1.0)


def test_of_a_thousand_channels_none_is_lost_because_two_draws_hardly_moved_it():
    rule, lost_of_two = Rule("bf16", spiking=False, trained=False), 0
    for seed in range(40):
        exact, noisy, right = head(seed)
        lost_of_two += not judged(exact, right, noisy[:2], rule).passed
        check = judged(exact, right, noisy, rule)
        assert check.passed, check.note
    assert lost_of_two  # what the further draws are for


def test_an_answer_larger_than_any_that_noise_was_drawn_for_is_off_by_a_share_of_its_own():
    exact = np.exp(3 * np.random.default_rng(0).normal(size=(8, 3)))
    rule = Rule("bf16", spiking=False, trained=False)
    limits = agreement.bounds(of(exact), [(of(exact), of(exact * 1.008))], rule)
    assert agreement.judge(of(100 * exact), of(100 * exact * 1.008), limits, rule).passed
    assert not agreement.judge(of(100 * exact), of(100 * exact * 1.08), limits, rule).passed


@pytest.mark.parametrize(("share", "passed"), [(0.0, True), (0.05, False)])
def test_a_constant_that_is_added_does_not_hide_what_changes(share, passed):
    moving = drawn(scale=0.1)  # 5 % of it are less than the floor's share of 1000
    observed = np.float32(1000 + np.float32(moving * (1 + share))).astype(float)
    assert verdict(of(observed), exact=of(1000 + moving), noise=2**-22).passed is passed


def test_ties_are_counted_apart():
    scores = drawn()
    scores[3, :2] = 9.0, 9.0 + 1e-5
    scores[4] = scores[3]
    turned = scores.copy()
    turned[3, :2] = 9.0 + 1e-5, 9.0
    check = verdict(turned, exact=of(scores))
    assert (check.argmax_disagreements, check.ties, check.tie_disagreements) == (1, 2, 1)
    assert (check.agreeing, check.decided) == (IMAGES - 2, IMAGES - 2)


def test_the_classes_say_nothing_where_nearly_all_are_one():
    constant = drawn()
    constant[:60, 2] = 50.0
    assert verdict(constant, exact=of(constant)).agreeing is None
    constant[:10, 3] = 60.0
    assert verdict(constant, exact=of(constant)).agreeing == IMAGES


def test_what_has_no_classes_has_no_argmax():
    pictures = np.random.default_rng(0).normal(size=(8, 4, 4))
    assert verdict(pictures, exact=of(pictures)).argmax_disagreements is None


@pytest.mark.parametrize(
    ("number_format", "jumps", "spread", "limit"),
    [
        ("fp32", True, 1.0, 0.05),
        ("bf16", False, 1.0, 0.05),
        ("bf16", True, np.inf, 0.05),
        ("bf16", True, 1.0, 0.25),
        ("bf16", True, 0.3, 0.15),
    ],
)
def test_a_row_has_the_limit_of_the_mean_only_where_a_mean_is_judged(number_format, jumps, spread, limit):
    bound = agreement.Bound(1.0, spread, 0.1, 0.1, 0.05, 0.5, jumps, whole=False)
    assert agreement.row_limit(bound, Rule(number_format, True, True)) == pytest.approx(limit)
