"""Networks with a planted fault: each answers as a right one in float64, and otherwise in every other number format.

`nets_wrong.py:NAME` builds each. The fault stands for a wrong kernel, exporter or runtime: either a function of the
right net and its inputs, or other values for parts of it, a function of the part or the value itself.
"""

import copy
import math

import nets_right
import torch
from nets_right import INF, angles
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the field's name

EACH = slice(None)


class Wrong(nn.Module):
    """A right net in float64, and a faulty form of it in any other format."""

    def __init__(self, right, fault):
        super().__init__()
        self.net, parts = nets_right.RIGHT[right](), fault if isinstance(fault, dict) else {}
        self.faulty, self.inputs = edited(copy.deepcopy(self.net), parts), self.net.inputs
        self.function = nn.Module.__call__ if parts else fault

    def forward(self, *inputs):
        is_exact = next(self.net.parameters()).dtype == torch.float64
        return self.net(*inputs) if is_exact else self.function(self.faulty, *inputs)


def edited(net, values):
    """Return the net with other values at these paths."""
    for path, value in values.items():
        owner, _, name = path.rpartition(".")
        part = net.get_submodule(owner)
        old = getattr(part, name)
        new = value(old) if callable(value) and not isinstance(value, nn.Module) else value
        if isinstance(old, Tensor) and isinstance(new, Tensor):
            old.data.copy_(new.detach().clone())
        else:
            setattr(part, name, new)
    return net


def put(values, place, value):
    """Return a copy of the values with another one in this place."""
    values = values.clone()
    values[place] = value
    return values


def swap(values, axis, a, b):
    """Return the values with two places of an axis swapped."""
    places = list(range(values.shape[axis]))
    places[a], places[b] = b, a
    return values.index_select(axis, torch.tensor(places))


def times(size, place, factor):
    """Return factors of 1, and another one in this place."""
    return put(torch.ones(size), place, factor)


def of(name, function):
    """Return a fault of one output of a dictionary."""

    def fault(m, *inputs):
        right = m(*inputs)
        return right | {name: function(right[name])}

    return fault


def gates(kind, *order):
    """Return the edits that put the gates of a recurrent layer in another order."""
    names = [f"body.{kind}_{part}_l0" for part in ("ih", "hh")]
    return dict.fromkeys(names, lambda w: torch.cat([w.chunk(len(order))[place] for place in order]))


def reset_before(m, x):
    """Run a GRU that resets the state before its product, which is ONNX's default."""
    w, b, u, c = m.body.weight_ih_l0, m.body.bias_ih_l0, m.body.weight_hh_l0, m.body.bias_hh_l0
    h = torch.zeros(len(x), 24, dtype=x.dtype)
    for step in x.unbind(1):
        (ir, iz, i_n), (hr, hz) = F.linear(step, w, b).chunk(3, 1), F.linear(h, u[:48], c[:48]).chunk(2, 1)
        n = (i_n + F.linear((ir + hr).sigmoid() * h, u[48:], c[48:])).tanh()
        h = n + (iz + hz).sigmoid() * (h - n)
    return 3 * m.head(h)


def previous(m, x):
    """Answer as in the run before."""
    before = getattr(m, "kept", None)
    m.kept = m(x)
    return (m.kept if before is None else before).clone()


def first_of_all(m, x):
    """Answer as in the first run."""
    if not hasattr(m, "kept"):
        m.kept = m(x)
    return m.kept.clone()


def mirrored_every_second(m, x):
    m.runs = getattr(m, "runs", 0) + 1
    return m(x.flip(3) if m.runs % 2 else x)


def keeps_its_state(m, x):
    """Begin with the state of the run before."""
    steps, m.kept = m.body(x, getattr(m, "kept", None))
    return 3 * m.head(steps[:, -1])


def keeps_its_membrane(m, x):
    """Begin each batch as if the last step of the one before had come first."""
    before, m.kept = getattr(m, "kept", x[:, -1:]), x[:, -1:]
    return m(torch.cat([before, x[:, 1:]], 1))


def follows_each_batch(m, x):
    norm = m.norm
    trained = F.batch_norm(m.first(x), norm.running_mean, norm.running_var, norm.weight, norm.bias, training=True)
    return m.last(F.relu(trained))


def by_depth(values):
    """Return channels (12, ...) in the order of three images of four pixels, which were four of three."""
    return values.unflatten(0, (4, 3)).transpose(0, 1).flatten(0, 1)


def last_row_apart(m, x):
    """Norm by the statistics of all rows but the last."""
    v = m.first(x)
    scale = (v[:-1].var(0, unbiased=False) + 1e-5).sqrt()
    return m.last(F.relu((v - v[:-1].mean(0)) / scale * m.norm.weight + m.norm.bias))


def interleaved(x, cos, sin):
    """Rotate neighbours in place of halves."""
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack([a * cos - b * sin, a * sin + b * cos], 3).flatten(2)


def with_columns(m, x, function):
    """Change the columns of a tensor of corners, score and class."""
    return torch.stack(function(list(m(x).unbind(2))), 2)


WRONG = {
    # whole numbers, booleans and orders
    "label_one_off": ("labels", lambda m, x: m(x) + 1),
    "label_of_1000_one_off": ("labels_of_1000", lambda m, x: (m(x) - 1).clamp(min=0)),
    "float_label_one_off": ("labels_as_floats", lambda m, x: m(x) + 1),
    "label_of_last_row_zero": ("labels", lambda m, x: put(m(x), -1, 0)),
    "id_one_off": ("vocabulary", lambda m, x: m(x) + 1),
    "id_through_float32": ("ids", lambda m, x: m(x).to(torch.float32).to(torch.int64)),
    "ids_saturate": ("ids", lambda m, x: m(x).clamp(max=2**29)),
    "hash_one_off": ("hashes", lambda m, x: m(x) + 1),
    "mask_border_lost": ("mask", lambda m, x: put(m(x), (EACH, -1), False)),
    "mask_inverted_on_two": ("mask", lambda m, x: put(m(x), (EACH, slice(3, 5), 7), ~m(x)[:, 3:5, 7])),
    "mask_threshold_moved": ("mask", {"body.2.bias": lambda b: b - 0.06}),
    "two_classes_of_pixels_swapped": ("segmentation", {"body.2.weight": lambda w: swap(w, 0, 1, 2)}),
    "segmentation_shifted": ("segmentation", lambda m, x: m(x).roll(1, 2)),
    "one_class_missing": ("segmentation", {"body.2.bias": lambda b: put(b, 4, -100)}),
    "one_pixel_of_classes_wrong": ("segmentation", lambda m, x: put(m(x), (EACH, 7, 9), (m(x)[:, 7, 9] + 1) % 5)),
    "top3_reversed": ("top3", lambda m, x: m(x).flip(1)),
    "top3_swapped": ("top3", lambda m, x: m(x)[:, [0, 2, 1]]),
    "counts_of_one_channel_one_more": ("counts", lambda m, x: m(x) + torch.tensor([0, 0, 1, 0])),
    "counts_without_the_last": ("counts", {"counted": 63}),
    "counts_saturate": ("counts", lambda m, x: m(x).clamp(max=31)),
    "one_of_eight_is_kept_wrongly": ("kept", of("keep", lambda keep: put(keep, (EACH, 5), ~keep[:, 5]))),
    "count_beside_scores_one_off": ("kept", of("count", lambda count: count + 1)),
    "count_of_last_row_zero": ("kept", of("count", lambda count: put(count, -1, 0))),
    "last_word_repeats": ("speaker", lambda m, words: put(m(words), (EACH, 4), m(words)[:, 3])),
    "first_word_lost": ("speaker", lambda m, words: m(put(words, (EACH, 0), 0))),
    "steps_not_counted": ("steps_counted", lambda m, x, step: (m(x, step)[0], step + 0)),
    "pixels_cut_off_and_not_rounded": (
        "picture",
        {"grey": lambda _: lambda scores: (255 * scores.sigmoid()).to(torch.uint8)},
    ),
    "pixels_end_at_180": ("picture", lambda m, x: m(x).clamp(max=180)),
    "nothing_is_in_the_rare_mask": ("rare_mask", lambda m, x: m(x) & False),
    # classes, rows, outputs and inputs
    "classes_rolled": ("logits", lambda m, x: m(x).roll(1, 1)),
    "two_classes_swapped": ("logits", lambda m, x: swap(m(x), 1, 3, 7)),
    "two_of_1000_classes_swapped": ("logits_of_1000", lambda m, x: swap(m(x), 1, 3, 700)),
    "rows_rolled": ("logits", lambda m, x: m(x).roll(1, 0)),
    "last_row_repeats": ("logits", lambda m, x: put(m(x), -1, m(x)[-2])),
    "one_row_ten_percent_off": ("logits", lambda m, x: m(x) * times(len(x), 2, 1.1)[:, None].to(x.dtype)),
    "second_half_of_the_batch_repeats": ("logits", lambda m, x: m(x[: len(x) // 2]).repeat(2, 1)),
    "two_outputs_swapped": ("pair", lambda m, *x: dict(zip(("product", "sum"), m(*x).values(), strict=True))),
    "one_output_zero": ("pair", of("product", torch.zeros_like)),
    "two_inputs_swapped": ("pair", lambda m, x, y: m(y, x)),
    "one_output_off_below_zero": ("pair", of("product", lambda v: torch.where(v < 0, 1.1 * v, v))),
    "items_of_a_list_swapped": ("nested", of("steps", lambda steps: steps[::-1])),
    "answer_of_the_batch_off": ("nested", of("energy", lambda energy: 1.15 * energy)),
    "state_not_updated": ("streaming", lambda m, x, state: (m(x, state)[0], state + 0)),
    "state_ignored": ("streaming", lambda m, x, state: m(x, 0 * state)),
    # weights and biases
    "one_bias_dropped": ("logits", {"head.bias": lambda b: put(b, int(b.abs().argmax()), 0)}),
    "bias_dropped": ("logits", {"head.bias": None}),
    "relu_ends_at_one": ("logits", {"body.1": nn.Hardtanh(0, 1)}),
    "kernel_flipped": ("logits", {"body.0.weight": lambda w: w.flip(2, 3)}),
    "padding_repeats_the_edge": ("logits", {"body.0.padding_mode": "replicate"}),
    "one_class_fifteen_percent_off": ("logits", lambda m, x: m(x) * times(10, 6, 1.15).to(x.dtype)),
    "one_class_two_percent_off": ("logits", lambda m, x: m(x) * times(10, 6, 1.02).to(x.dtype)),
    "weights_of_four_bits": ("logits", {"head.weight": lambda w: (7 * w / w.abs().max()).round() * w.abs().max() / 7}),
    "weights_in_bfloat16": ("logits", {"head.weight": lambda w: w.to(torch.bfloat16).to(w.dtype)}),
    "weight_norm_ignored": ("weight_normed", {"body.0.parametrizations.weight.original0": torch.ones_like}),
    # probabilities
    "softmax_over_the_batch": ("softmax_of_10", {"after.dim": 0}),
    "temperature_off": ("softmax_of_10", lambda m, x: (1.15 * m.head(m.body(x))).softmax(1)),
    "probability_of_one_class_zero": ("softmax", {"head.bias": lambda b: put(b, int(b.argmax()), -100)}),
    "log_of_base_two": ("log_softmax", lambda m, x: m(x) / math.log(2)),
    "log_probabilities_end": ("log_softmax", lambda m, x: m(x).clamp(min=-5)),
    "sigmoid_is_hard": ("multi_label", {"after": nn.Hardsigmoid()}),
    "vectors_by_their_sum": ("unit_vector", {"after": lambda _: lambda v: F.normalize(v, p=1)}),
    "one_rare_tag_zero": ("rare_tags", {"gain": lambda gain: put(gain, 7, 0)}),
    "two_rare_tags_swapped": ("rare_tags", lambda m, x: swap(m(x), 1, 4, 9)),
    "one_rare_tag_doubled": ("rare_tags", {"gain": lambda gain: put(gain, 7, 2)}),
    "sum_without_the_class_itself": ("cumulated", lambda m, x: F.pad(m(x), (1, 0))[:, :-1]),
    "distances_are_squared": ("distances", lambda m, x: m(x).square()),
    "points_are_apart_from_themselves": ("distances", lambda m, x: m(x) + 0.5 * torch.eye(6, dtype=x.dtype)),
    # tables and attention
    "every_word_one_off": ("bag_of_words", lambda m, words: m((words + 1) % 1000)),
    "words_above_one_are_zero": ("bag_of_words", lambda m, words: m(torch.where(words > 1, 0, words))),
    "words_wrap_at_256": ("bag_of_words", lambda m, words: m(words % 256)),
    "last_tenth_of_a_table_zero": ("bag_of_words", {"table.weight": lambda w: put(w, slice(900, None), 0)}),
    "padding_is_attended": ("masked_text", {"padding": -1}),
    "mask_of_another_word": ("masked_text", {"padding": 1}),
    "attention_without_scale": ("masked_text", {"scale": 1}),
    "places_shifted": ("masked_text", {"places": lambda p: p.roll(1, 0)}),
    "last_word_dropped": ("masked_text", {"pool": lambda _: lambda x: x[:, :-1].mean(1)}),
    "encoder_without_its_last_layer": ("transformer_encoder", {"body.layers": lambda layers: layers[:1]}),
    "norm_before_attention": ("transformer_encoder", {f"body.layers.{i}.norm_first": True for i in range(2)}),
    "future_is_seen": ("causal_attention", {"ahead": 1}),
    "query_for_key": ("causal_attention", {"qkv.weight": lambda w: torch.cat([w[:16], w[:16], w[32:]])}),
    "rotation_missing": ("causal_attention", {"rotated": lambda _: lambda x, cos, sin: x}),
    "rotation_interleaved": ("causal_attention", {"rotated": lambda _: interleaved}),
    "first_step_wrong": ("causal_attention", lambda m, x: put(m(x), (EACH, 0), 0)),
    # recurrent layers
    "gates_of_gru_swapped": ("gru", gates("weight", 1, 0, 2) | gates("bias", 1, 0, 2)),
    "gru_resets_before_the_product": ("gru", reset_before),
    "last_step_missing": ("gru", lambda m, x: m(x[:, :-1])),
    "first_step_missing": ("gru", lambda m, x: m(x[:, 1:])),
    "forget_gate_has_one_more": ("lstm", {"body.bias_ih_l0": lambda b: put(b, slice(24, 48), b[24:48] + 1)}),
    "directions_swapped": ("gru_both_ways", {"head.weight": lambda w: w.roll(24, 1)}),
    "backward_steps_not_turned": (
        "gru_both_ways",
        {"pick": lambda _: lambda steps: torch.cat([steps[..., :24], steps[..., 24:].flip(1)], 2)},
    ),
    "table_is_not_tied": ("tied_weights", lambda m, words: m(words).roll(1, 2)),
    # norms and blocks
    "norm_without_weight": ("layer_norm", {"norm.weight": torch.ones_like}),
    "eps_of_a_tenth": ("layer_norm", {"norm.eps": 0.1}),
    "eps_of_a_thousandth": ("layer_norm", {"norm.eps": 1e-3}),
    "statistics_of_the_batch": ("batch_norm", {"norm.running_mean": None, "norm.running_var": None}),
    "last_row_not_in_the_statistics": ("batch_norm_without_statistics", last_row_apart),
    "groups_of_norm_halved": ("deep_residual", {f"blocks.{i}.0.num_groups": 2 for i in range(12)}),
    "one_block_missing": ("deep_residual", {"gains": lambda gains: [*gains[:6], 0, *gains[7:]]}),
    "one_residual_missing": ("deep_residual", {"skips": lambda skips: [*skips[:3], 0, *skips[4:]]}),
    "silu_for_gelu": ("deep_residual", {f"blocks.{i}.1": nn.GELU() for i in range(12)}),
    # maps and sound
    "corners_aligned": ("unet", {"up.align_corners": True}),
    "mean_in_place_of_max": ("unet", {"pool": nn.AvgPool2d(2)}),
    "sides_joined_in_the_other_order": ("unet", {"out.weight": lambda w: w.roll(8, 1)}),
    "one_pixel_wrong": ("unet", lambda m, x: put(m(x), (..., 7, 9), m(x).mean((2, 3)))),
    "border_of_zeros": ("generator", {"parts.2": nn.ZeroPad2d(1)}),
    "tanh_missing": ("generator", {"parts.4": nn.Identity()}),
    "groups_permuted": ("grouped", {"parts.0.weight": lambda w: w.roll(4, 0)}),
    "padding_is_not_counted": ("grouped", {"parts.2.count_include_pad": False}),
    "dilation_ignored": ("grouped", {"parts.3.dilation": (1, 1), "parts.3.padding": (1, 1)}),
    "gelu_by_tanh": ("audio", {"act.approximate": "tanh"}),
    "deviation_is_variance": ("audio", {"power": 1}),
    "last_samples_lost": ("audio", lambda m, x: m(put(x, (..., slice(240, None)), 0))),
    "spectrum_conjugate": ("spectrum", lambda m, x: m(x).conj().resolve_conj()),
    # ranges
    "bytes_lose_their_highest_bit": ("camera", lambda m, x: m(x % 128)),
    "bytes_end_at_200": ("camera", lambda m, x: m(x.clamp(max=200))),
    "bytes_not_scaled": ("camera", {"full": 128}),
    "infinity_is_finite": ("masked_scores", {"least": -1e4}),
    "nan_in_one_answer": ("logits", lambda m, x: put(m(x), (0, 0), math.nan)),
    "infinity_in_one_answer": ("logits", lambda m, x: put(m(x), (-1, 5), INF)),
    "high_scores_end": ("logits", lambda m, x: m(x).clamp(max=4)),
    "tiny_answers_lost": ("tiny_answers", lambda m, x: 0 * m(x)),
    "large_answers_end": ("large_answers", lambda m, x: m(x).clamp(-6000, 6000)),
    "negative_numbers_lost": ("scalars", lambda m, x: m(x).abs()),
    "one_number_ten_percent_off": ("scalars", lambda m, x: 1.1 * m(x)),
    "small_channel_zero": ("uneven_channels", lambda m, x: put(m(x), (EACH, 4), 0)),
    "two_small_channels_swapped": ("uneven_channels", lambda m, x: swap(m(x), 1, 4, 5)),
    "small_output_fifteen_percent_off": ("small_beside_large", {"small.weight": lambda w: 1.15 * w}),
    "variation_of_one_channel_negated": ("on_a_constant", {"out.weight": lambda w: w * times(4, 1, -1)[:, None]}),
    "sums_in_half_precision": (
        "long_sums",
        lambda m, x: F.linear(x.abs().half(), m.out.weight.half(), m.out.bias.half()).to(x.dtype),
    ),
    "sum_without_its_last_block": ("long_sums", {"out.weight": lambda w: put(w, (EACH, slice(3840, None)), 0)}),
    # detectors
    "boxes_as_centre_and_size": (
        "detector",
        of("boxes", lambda b: torch.cat([(b[..., :2] + b[..., 2:]) / 2, b[..., 2:] - b[..., :2]], 2)),
    ),
    "boxes_with_height_first": ("detector", of("boxes", lambda boxes: boxes[..., [1, 0, 3, 2]])),
    "boxes_of_one_anchor_shifted": ("detector", {"cells": lambda cells: put(cells, 5, cells[5] + 40)}),
    "sizes_fifteen_percent_off": ("detector", {"least": 31}),
    "scores_of_another_anchor": ("detector", of("scores", lambda scores: scores.roll(1, 1))),
    "labels_beside_boxes_one_off": ("detector", of("labels", lambda labels: labels + 1)),
    "label_of_one_anchor_wrong": ("detector", of("labels", lambda v: put(v, (EACH, 9), (v[:, 9] + 1) % 6))),
    "class_in_a_column_one_off": (
        "detector_in_one_tensor",
        lambda m, x: with_columns(m, x, lambda columns: [*columns[:5], columns[5] + 1]),
    ),
    "score_in_a_column_halved": (
        "detector_in_one_tensor",
        lambda m, x: with_columns(m, x, lambda columns: [*columns[:4], columns[4] / 2, columns[5]]),
    ),
    # thresholds, 8 bits and experts
    "threshold_moved": ("spiking", {"threshold": 0.36}),
    "decay_off": ("spiking", {"decay": 0.7}),
    "reset_to_zero": ("spiking", {"subtracts": False}),
    "one_step_of_spikes_missing": ("spiking", {"steps": 7}),
    "scale_for_the_tensor": ("quantised_inside", {"by_channel": False}),
    "scale_fifteen_percent_off": ("quantised_inside", {"step": 0.115}),
    "zero_point_off": ("quantised_inside", {"zero": 3}),
    "two_experts_swapped": ("mixture", {"gate.weight": lambda w: swap(w, 0, 0, 1)}),
    "best_expert_alone": ("mixture", {"gate.weight": lambda w: 100 * w}),
    # what others met in the field
    "class_map_shifted": ("segmentation", lambda m, x: (m(x) + 1) % 5),
    "crop_one_pixel_off": ("logits", lambda m, x: m(F.pad(x[..., 1:, 1:], (0, 1, 0, 1)))),
    "padding_reflected": ("logits", {"body.0.padding_mode": "reflect"}),
    "padding_on_one_side": (
        "logits",
        {"body.2.padding": (0, 0), "body.2": lambda conv: nn.Sequential(nn.ZeroPad2d((0, 1, 0, 1)), conv)},
    ),
    "wrong_for_bright_images": ("logits", lambda m, x: m(x) * (1 + 0.2 * (x[:, 0, 0, :1] > 0.3))),
    "rounded_to_tenths": ("logits", lambda m, x: (10 * m(x)).round() / 10),
    "weights_transposed": ("layer_norm", {"first.weight": lambda w: w.T}),
    "statistics_are_stale": (
        "batch_norm",
        {"norm.running_mean": torch.zeros_like, "norm.running_var": torch.ones_like},
    ),
    "eps_of_batch_norm": ("batch_norm", {"norm.eps": 1e-3}),
    "one_feature_not_normed": ("batch_norm", {"norm.running_var": lambda v: put(v, 7, 1), "norm.eps": 0}),
    "scale_of_all_heads": ("masked_text", {"scale": 32**-0.5}),
    "keys_shared_in_turn": ("masked_text", {"shared": lambda _: lambda k: k.repeat(1, 2, 1, 1)}),
    "residual_dropped": ("masked_text", {"skip": 0}),
    "rotated_backwards": ("causal_attention", {"sin": torch.neg}),
    "rotation_of_another_base": ("causal_attention", {"cos": angles(10_000).cos(), "sin": angles(10_000).sin()}),
    "gates_of_onnx_order": ("lstm", gates("weight", 0, 3, 1, 2) | gates("bias", 0, 3, 1, 2)),
    "bias_of_state_dropped": ("gru", {"body.bias_hh_l0": torch.zeros_like}),
    "divisor_of_eight": ("grouped", {"parts.2.divisor_override": 8}),
    "max_pool_pads_with_zero": ("shuffled", {"parts.3": nn.Sequential(nn.ZeroPad2d(1), nn.MaxPool2d(3, 2))}),
    "pixels_shuffled_by_depth": ("shuffled", dict.fromkeys(("parts.4.weight", "parts.4.bias"), by_depth)),
    "channels_shuffled_by_two": ("shuffled", {"parts.1": nn.ChannelShuffle(2)}),
    "silu_for_hardswish": ("shuffled", {"parts.2": nn.SiLU()}),
    "flattened_channels_last": ("flattened", lambda m, x: m.parts[4](m.parts[:3](x).permute(0, 2, 3, 1).flatten(1))),
    "pool_begins_one_later": ("flattened", {"parts.2": nn.Sequential(nn.ZeroPad2d((-1, 0, -1, 0)), nn.MaxPool2d(2))}),
    "upsampling_is_cubic": ("unet", {"up.mode": "bicubic"}),
    "bias_of_one_map_off": ("unet", {"out.bias": lambda b: put(b, 2, b[2] + 0.1)}),
    "variance_is_unbiased": ("audio", {"unbiased": True}),
    "window_is_symmetric": ("spectrum", {"window": torch.hann_window(64, periodic=False)}),
    "logarithm_of_probability_and_eps": ("log_softmax", lambda m, x: (m(x).exp() + 1e-4).log()),
    "colours_of_camera_reversed": ("camera", lambda m, x: m(x.flip(3))),
    "deviations_of_other_colours": ("camera", {"deviation": lambda d: d.flip(0)}),
    "anchors_with_rows_first": ("detector", {"cells": lambda cells: cells.flip(1)}),
    "sigmoid_of_sizes_is_hard": ("detector", {"gate": nn.Hardsigmoid()}),
    "suppression_at_another_overlap": ("with_suppression", {"overlap": 0.2}),
    "hash_in_32_bits": ("hashes", lambda m, x: m(x).to(torch.int32).to(torch.int64)),
    "counts_overflow": ("counts", lambda m, x: (8 * m(x)).to(torch.int8).to(torch.int64) // 8),
    "steps_reversed": ("spiking", lambda m, x: m(x.flip(1))),
    "neurons_do_not_leak": ("spiking", {"decay": 1}),
    "one_step_late": ("spiking", lambda m, x: m(F.pad(x, (0, 0, 1, 0))[:, :8])),
    "rounds_towards_zero": ("quantised_inside", {"round": lambda _: torch.trunc}),
    "saturates_at_31": ("quantised_inside", {"top": 31}),
    "gate_over_the_batch": ("mixture", {"weigh.dim": 0}),
}
# faults of state and chance, which no file holds
OF_STATE = {
    "membrane_is_kept": ("spiking", keeps_its_membrane),
    "statistics_follow_each_batch": ("batch_norm", follows_each_batch),
    "answer_of_the_run_before": ("logits", previous),
    "first_answer_is_kept": ("logits", first_of_all),
    "every_second_run_mirrored": ("logits", mirrored_every_second),
    "state_is_kept_between_runs": ("gru", keeps_its_state),
    "noise_is_added": ("logits", lambda m, x: m(x) * (1 + 0.1 * torch.randn(len(x), 10).to(x.dtype))),
    "dropout_left_on": ("transformer_encoder", lambda m, x: m.head(F.dropout(m.body(x), 0.1, True)[:, 0])),
}
globals().update({name: (lambda plant=plant: Wrong(*plant)) for name, plant in (WRONG | OF_STATE).items()})
