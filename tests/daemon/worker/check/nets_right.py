"""Small networks that are right in every number format, of many kinds: `nets_right.py:NAME` builds each.

Their weights follow from the seed of a case; the answers lie as far apart as those of a trained one.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the field's name

INF = math.inf


class Net(nn.Module):
    """Parts, numbers and functions, any of which a fault may replace, and the function of them that is the answer."""

    def __init__(self, answer, *inputs, **parts):
        super().__init__()
        self.answer, self.inputs = answer, inputs
        for name, part in parts.items():
            is_buffer = isinstance(part, Tensor) and not isinstance(part, nn.Parameter)
            (self.register_buffer if is_buffer else self.__setattr__)(name, part)

    def forward(self, *inputs):
        return self.answer(self, *inputs)


def spread(head, features, between=3.0, classes=1.0):
    """Set a head so that its answers vary by `between` over the rows and by `classes` over the columns."""
    with torch.no_grad():
        answers = head(features)
        scale = between / answers.std(0).mean()
        head.bias.copy_((head.bias - answers.mean(0)) * scale + classes * torch.randn(len(head.bias)))
        head.weight *= scale
    return head


def classifier(after=nn.Identity, classes=10, width=16, between_classes=1.0):
    """Two convolutions and a head, and a function of the scores (batch, classes)."""
    body = nn.Sequential(
        *(nn.Conv2d(3, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, stride=2, padding=1), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten()),
    )
    head = spread(nn.Linear(width, classes), body(torch.randn(64, 3, 16, 16)), 3.0, between_classes)
    after = after() if isinstance(after, type) else after
    return Net(lambda m, x: m.after(m.head(m.body(x))), "3x16x16", body=body, head=head, after=after)


def weight_normed():
    net = classifier()
    nn.utils.parametrizations.weight_norm(net.body[0])
    return net


def best_of(classes, low, high):
    """Return a net that answers with the name, a random whole number, of the best of its classes."""
    head, names = nn.Linear(64, classes), torch.randint(low, high, (classes,))
    return Net(lambda m, x: m.names[m.head(x).argmax(1)], "64", head=head, names=names)


def pixels(classes, answer):
    body = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, classes, 3, padding=1))
    return Net(lambda m, x: answer(5 * m.body(x)), "3x16x16", body=body)


def counted(m, x):
    """Return how many of 64 features fire in each of four groups (batch, 4)."""
    return (m.body(x).reshape(-1, 4, 64)[..., : m.counted] > m.threshold).sum(2)


def detected(m, image):
    """Return boxes (batch, 16, 4) as corners in pixels, scores (batch, 16) and labels, in the anchors' order."""
    maps = F.relu(m.body(image))
    raw = m.boxes(maps).flatten(2).transpose(1, 2)
    centre = m.cells + m.reach * raw[..., :2].tanh()
    size = m.least + 100 * m.gate(raw[..., 2:])
    scores = (4 * m.classes(maps)).softmax(1).flatten(2)
    corners = torch.cat([centre - size / 2, centre + size / 2], 2)
    return {"boxes": corners, "scores": scores.amax(1), "labels": scores.argmax(1)}


def detector(answer=detected):
    rows, columns = torch.meshgrid(torch.arange(4.0), torch.arange(4.0), indexing="ij")
    cells = 80 + 160 * torch.stack([columns.flatten(), rows.flatten()], 1)
    parts = {"body": nn.Conv2d(3, 16, 3, padding=1, stride=4), "boxes": nn.Conv2d(16, 4, 1)}
    parts |= {"classes": nn.Conv2d(16, 6, 1), "gate": nn.Sigmoid(), "cells": cells, "reach": 80, "least": 20}
    return Net(answer, "3x16x16", **parts)


def in_one_tensor(m, image):
    """Return what exporters write: corners, score and class in one tensor of floats (batch, 16, 6)."""
    detections = detected(m, image)
    return torch.cat(
        [detections["boxes"], detections["scores"][..., None], detections["labels"][..., None].to(image.dtype)], 2
    )


def suppressed(m, image):
    """Return the scores (batch, 16), 0 where an anchor overlaps one of a higher score."""
    detections = detected(m, image)
    low, high = (detections["boxes"] / 640).chunk(2, 2)  # areas in pixels are too large for fp16
    inside = torch.minimum(high[:, :, None], high[:, None]) - torch.maximum(low[:, :, None], low[:, None])
    overlap, area = inside.clamp(min=0).prod(3), (high - low).prod(2)
    share = overlap / (area[:, :, None] + area[:, None] - overlap)
    below = detections["scores"][:, :, None] < detections["scores"][:, None]
    return detections["scores"] * ~(below & (share > m.overlap)).any(2)


def with_suppression():
    net = detector(suppressed)
    net.overlap, net.least = 0.1, 150
    return net


def bag_of_words():
    table = nn.Embedding(1000, 32)
    head = spread(nn.Linear(32, 5), table(torch.randint(1000, (64, 16))).mean(1))
    return Net(lambda m, words: m.head(m.table(words).mean(1)), "int64:16", table=table, head=head)


def attended(m, x, hidden):
    """Return what each place (batch, 12, 32) attends to with 4 heads, two for each key; `hidden` are left out."""
    parts = m.qkv(x).split((32, 16, 16), 2)
    q, k, v = (part.unflatten(2, (-1, 8)).transpose(1, 2) for part in parts)
    k, v = m.shared(k), m.shared(v)
    scores = (m.scale * (q @ k.transpose(2, 3))).masked_fill(hidden, -INF)
    return m.out((scores.softmax(m.axis) @ v).transpose(1, 2).flatten(2))


def read(m, words):
    """Return scores (batch, 6) of words, of which 0 is padding that nobody attends to."""
    x = m.words(words) + m.places
    hidden = (words == m.padding) & (words.amax(1, keepdim=True) > 0)
    x = m.norm(m.skip * x + 3 * attended(m, x, hidden[:, None, None]))
    return m.head(m.pool(x))


def masked_text():
    parts = {"words": nn.Embedding(20, 32), "places": nn.Parameter(torch.randn(12, 32)), "qkv": nn.Linear(32, 64)}
    parts |= {"out": nn.Linear(32, 32), "norm": nn.LayerNorm(32), "head": nn.Linear(32, 6)}
    parts |= {"scale": 8**-0.5, "axis": 3, "padding": 0, "skip": 1}
    parts |= {"shared": lambda k: k.repeat_interleave(2, 1), "pool": lambda x: x.mean(1)}
    net = Net(read, "int64:12", **parts)
    spread(net.head, net.norm(net.words(torch.randint(20, (64, 12))) + net.places).mean(1))
    return net


def transformer_encoder():
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True, activation="gelu")
    body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return Net(lambda m, x: m.head(m.body(x)[:, 0]), "12x32", body=body, head=nn.Linear(32, 6))


def angles(base):
    """Return the angle of each of 10 places in each of 8 pairs."""
    return torch.arange(10)[:, None] / base ** (torch.arange(8) / 8)


def halves(x, cos, sin):
    """Return x (batch, 10, 16) with its halves rotated."""
    a, b = x.chunk(2, 2)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], 2)


def causal(m, x):
    """Return (batch, 10, 8) of one head that sees only the past, rotated by place."""
    q, k, v = m.qkv(x).chunk(3, 2)
    scores = m.rotated(q, m.cos, m.sin) @ m.rotated(k, m.cos, m.sin).transpose(1, 2)
    unseen = torch.ones(10, 10, dtype=torch.bool).triu(1 + m.ahead)
    return m.head(scores.masked_fill(unseen, -INF).softmax(2) @ v)


def causal_attention():
    parts = {"qkv": nn.Linear(16, 48), "head": nn.Linear(16, 8), "cos": angles(100).cos(), "sin": angles(100).sin()}
    return Net(causal, "10x16", **parts, rotated=halves, ahead=0)


def recurrent(kind, pick=lambda steps: steps[:, -1], **fields):
    """A recurrent layer over 12 steps and a head on those that are picked."""
    body = kind(16, 24, batch_first=True, **fields)
    head = nn.Linear(48 if body.bidirectional else 24, 6)
    return Net(lambda m, x: 3 * m.head(m.pick(m.body(x)[0])), "12x16", body=body, head=head, pick=pick)


def stepped(m, x, state):
    """Return scores (batch, 4) and the next state (batch, 24), which the caller keeps."""
    state = m.cell(x, state)
    return m.head(state), state


def normed(norm, trained=()):
    """A norm between two layers, with these parts of it drawn as if they were trained."""
    for name, low, high in trained:
        nn.init.uniform_(getattr(norm, name), low, high)
    parts = {"first": nn.Linear(32, 32), "norm": norm, "last": nn.Linear(32, 8)}
    return Net(lambda m, x: m.last(F.relu(m.norm(m.first(x)))), "32", **parts)


def layer_norm():
    return normed(nn.LayerNorm(32), [("weight", 0.5, 1.5), ("bias", -1, 1)])


def batch_norm():
    return normed(nn.BatchNorm1d(32), [("running_mean", -0.5, 0.5), ("running_var", 0.1, 0.6), ("bias", -1, 1)])


def through_blocks(m, image):
    """Return scores (batch, 10) of twelve residual blocks."""
    x = m.stem(image)
    for block, skip, gain in zip(m.blocks, m.skips, m.gains, strict=True):
        x = skip * x + gain * block(x)
    return m.head(x.mean((2, 3)))


def deep_residual():
    def block():
        parts = (nn.GroupNorm(4, 16), nn.SiLU(), nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.Conv2d(16, 16, 1))
        return nn.Sequential(*parts)

    parts = {"stem": nn.Conv2d(3, 16, 1), "head": nn.Linear(16, 10)}
    parts |= {"blocks": nn.ModuleList(block() for _ in range(12)), "skips": [1] * 12, "gains": [1] * 12}
    return Net(through_blocks, "3x8x8", **parts)


def joined(m, image):
    """Return maps (batch, 4, 16, 16) of a deep side and one across."""
    across = F.relu(m.down(image))
    return m.out(torch.cat([across, m.up(F.relu(m.deep(m.pool(across))))], 1))


def unet():
    down, deep, out = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(16, 4, 3, padding=1)
    up = nn.Upsample(scale_factor=2, mode="bilinear")
    return Net(joined, "3x16x16", down=down, deep=deep, out=out, up=up, pool=nn.MaxPool2d(2))


def in_a_row(inputs, *parts):
    return Net(lambda m, x: m.parts(x), inputs, parts=nn.Sequential(*parts))


def generator():
    up = nn.ConvTranspose2d(4, 8, 3, stride=2, padding=1, output_padding=1)
    return in_a_row("4x8x8", up, nn.ReLU(), nn.ReflectionPad2d(1), nn.Conv2d(8, 3, 3), nn.Tanh())


def grouped():
    first, second = nn.Conv2d(8, 16, 3, groups=4, padding=1), nn.Conv2d(16, 8, 3, dilation=2, padding=2)
    return in_a_row("8x9x9", first, nn.LeakyReLU(0.1), nn.AvgPool2d(3, 2, 1), second)


def shuffled():
    parts = (nn.Conv2d(4, 16, 3), nn.ChannelShuffle(4), nn.Hardswish(), nn.MaxPool2d(3, 2, 1), nn.Conv2d(16, 12, 1))
    return in_a_row("4x10x10", *parts, nn.PixelShuffle(2))


def flattened():
    parts = (nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 7))
    return in_a_row("3x9x9", *parts)


def heard(m, sound):
    """Return scores (batch, 5) of the mean and the deviation of maps (batch, 16, 64)."""
    maps = m.act(m.second(m.act(m.first(sound))))
    deviation = maps.var(2, unbiased=m.unbiased).add(1e-5)
    return m.head(torch.cat([maps.mean(2), deviation**m.power], 1))


def audio():
    first, second = nn.Conv1d(1, 16, 9, stride=4, padding=4), nn.Conv1d(16, 16, 5, dilation=2, padding=4)
    parts = {"first": first, "second": second, "head": nn.Linear(32, 5), "act": nn.GELU()}
    return Net(heard, "1x256", **parts, power=0.5, unbiased=False)


def fired(m, x):
    """Return scores (batch, 10) of leaky neurons, which answer x (batch, 8, 24) step by step."""
    v, w, total = 0, 0, 0
    for step in x.unbind(1)[: m.steps]:
        v = m.decay * v + m.first(step)
        spikes = (v >= m.threshold).to(x.dtype)
        v = v - spikes * m.threshold if m.subtracts else v * (1 - spikes)
        w = m.decay * w + m.second(spikes)
        seconds = (w >= m.threshold).to(x.dtype)
        w = w - seconds * m.threshold if m.subtracts else w * (1 - seconds)
        total = total + m.out(seconds)
    return total


def spiking():
    parts = {"first": nn.Linear(24, 64), "second": nn.Linear(64, 64), "out": nn.Linear(64, 10)}
    return Net(fired, "8x24", **parts, threshold=0.3, decay=0.9, steps=8, subtracts=True)


def in_8_bits(m, x):
    """Return scores (batch, 8) of weights and activations that are rounded inside, as in training for int8."""
    for layer in (m.first, m.second):
        step = (layer.weight.abs().amax(1, keepdim=True) if m.by_channel else layer.weight.abs().amax()) / 127
        x = F.relu(F.linear(x, m.round(layer.weight / step) * step, layer.bias))
        x = (m.round(x / 0.1).clamp(-128, m.top) - m.zero) * m.step
    return m.out(x)


def quantised_inside():
    net = Net(in_8_bits, "32", first=nn.Linear(32, 48), second=nn.Linear(48, 48), out=nn.Linear(48, 8))
    net.first.weight.data *= torch.logspace(-1, 1, 48)[:, None]
    net.second.weight.data /= torch.logspace(-1, 1, 48)
    net.by_channel, net.round, net.top, net.zero, net.step = True, torch.round, 127, 0, 0.1
    return net


def mixed(m, x):
    """Return the sum (batch, 6) of experts weighed by a gate."""
    return torch.stack([expert(x) for expert in m.experts], 2).mul(m.weigh(3 * m.gate(x))[:, None]).sum(2)


def mixture():
    experts = nn.ModuleList(nn.Linear(16, 6) for _ in range(4))
    return Net(mixed, "16", gate=nn.Linear(16, 4), experts=experts, weigh=nn.Softmax(1))


def seen(m, image):
    """Return scores (batch, 6) of bytes (batch, 8, 8, 3)."""
    image = (image.to(m.head.weight.dtype) / m.full - m.mean) / m.deviation
    return m.head(F.relu(m.conv(image.permute(0, 3, 1, 2))).mean((2, 3)))


def camera():
    mean, deviation = torch.tensor([0.5, 0.45, 0.4]), torch.tensor([0.2, 0.25, 0.3])
    parts = {"conv": nn.Conv2d(3, 12, 3), "head": nn.Linear(12, 6), "mean": mean, "deviation": deviation}
    return Net(seen, "uint8:8x8x3", **parts, full=255)


def paired(m, left, right):
    left, right = m.left(left), m.right(right).tanh()
    return {"sum": left + right, "product": left * right}


def tied_weights():
    net = Net(lambda m, words: m.head(m.body(m.table(words))[0]), "int64:8", table=nn.Embedding(50, 24))
    net.body, net.head = nn.GRU(24, 24, batch_first=True), nn.Linear(24, 50, bias=False)
    net.head.weight = net.table.weight
    return net


def long_sums():
    net = Net(lambda m, x: m.out(x.abs()), "4096", out=nn.Linear(4096, 4))
    net.out.weight.data.abs_()
    return net


def in_waves(m, sound):
    """Return the complex spectrum (batch, 33) of a filtered sound (batch, 64)."""
    wide = torch.float64 if sound.dtype == torch.float64 else torch.float32
    return torch.fft.rfft(m.filter(sound).to(wide) * m.window, norm=m.norm)


def in_lists(m, x):
    """Return a list of two answers (batch, 8), and a number of the whole batch."""
    first = m.body(x)
    second = m.body(F.pad(first.tanh(), (0, 8)))
    return {"steps": [first, second], "energy": second.square().mean()}


def chosen(m, x):
    """Return scores (batch, 8) with which of them are kept, and how many."""
    scores = m.scores(x).sigmoid()
    keep = scores > m.least
    return {"scores": scores, "keep": keep, "count": keep.sum(1)}


def rare_tags():
    """Probabilities of which most are near 1e-5."""
    net = Net(lambda m, x: m.out(x).sigmoid() * m.gain, "16", out=nn.Linear(16, 12), gain=torch.ones(12))
    net.out.bias.data[3:] -= 11
    return net


def spoken(m, words):
    """Return five more words (batch, 5), each the most probable one after the last."""
    state, tokens = m.table(words).mean(1), []
    for _ in range(5):
        state = m.cell(m.table(words[:, -1]), state)
        words = m.head(m.gain * state).argmax(1, keepdim=True)
        tokens.append(words)
    return torch.cat(tokens, 1)


def speaker():
    parts = {"table": nn.Embedding(40, 24), "cell": nn.GRUCell(24, 24), "head": nn.Linear(24, 40)}
    return Net(spoken, "int64:6", **parts, gain=8)


def apart(m, x):
    """Return the distances (batch, 6, 6) of six points to each other, 0 to themselves."""
    points = m.places(x).unflatten(1, (6, 4))
    square = points.square().sum(2)
    between = square[:, :, None] + square[:, None] - 2 * points @ points.transpose(1, 2)
    return between.clamp(min=0).sqrt()


def grey(scores):
    """Return pixels from 0 to 255."""
    return (255 * scores.sigmoid()).round().to(torch.uint8)


def counted_on(m, x, step):
    """Return scores (batch, 4), and the next state: how many steps each item has seen, in whole numbers."""
    return m.head(x) / (1 + step)[:, None], step + 1


SIZES = torch.tensor([1e4, 1e4, 1.0, 1.0, 1e-3, 1e-3])
RIGHT = {
    "logits": classifier,
    "logits_of_1000": lambda: classifier(classes=1000, width=32),
    "softmax": lambda: classifier(nn.Softmax(1), 1000, 32, 5.0),
    "softmax_of_10": lambda: classifier(nn.Softmax(1)),
    "log_softmax": lambda: classifier(nn.LogSoftmax(1), 100),
    "multi_label": lambda: classifier(nn.Sigmoid(), 20),
    "unit_vector": lambda: classifier(F.normalize, 64),
    "tiny_answers": lambda: classifier(lambda scores: 1e-4 * scores),
    "large_answers": lambda: classifier(lambda scores: 1000 * scores),
    "labels": lambda: classifier(lambda scores: scores.argmax(1)),
    "labels_of_1000": lambda: classifier(lambda scores: scores.argmax(1), 1000, 32),
    "labels_as_floats": lambda: classifier(lambda scores: scores.argmax(1).to(scores.dtype), 1000, 32),
    "top3": lambda: classifier(lambda scores: scores.topk(3, 1).indices),
    "order": lambda: classifier(lambda scores: scores.argsort(1, descending=True)),
    "weight_normed": weight_normed,
    "ids": lambda: best_of(500, 2**24, 2**30),
    "hashes": lambda: best_of(50, 2**61, 2**62),
    "vocabulary": lambda: Net(lambda m, x: m.head(x).argmax(1), "16", head=nn.Linear(16, 200_000)),
    "mask": lambda: pixels(1, lambda scores: scores[:, 0] > 0),
    "segmentation": lambda: pixels(5, lambda scores: scores.argmax(1)),
    "counts": lambda: Net(counted, "32", body=nn.Linear(32, 256), threshold=0, counted=64),
    "detector": detector,
    "detector_in_one_tensor": lambda: detector(in_one_tensor),
    "with_suppression": with_suppression,
    "bag_of_words": bag_of_words,
    "masked_text": masked_text,
    "transformer_encoder": transformer_encoder,
    "causal_attention": causal_attention,
    "gru": lambda: recurrent(nn.GRU),
    "lstm": lambda: recurrent(nn.LSTM),
    "gru_both_ways": lambda: recurrent(nn.GRU, lambda steps: steps, bidirectional=True),
    "streaming": lambda: Net(stepped, "16", "24", cell=nn.GRUCell(16, 24), head=nn.Linear(24, 4)),
    "layer_norm": layer_norm,
    "batch_norm": batch_norm,
    "batch_norm_without_statistics": lambda: normed(nn.BatchNorm1d(32, track_running_stats=False)),
    "deep_residual": deep_residual,
    "unet": unet,
    "generator": generator,
    "grouped": grouped,
    "shuffled": shuffled,
    "flattened": flattened,
    "lazy": lambda: in_a_row("3x8x8", nn.LazyConv2d(8, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(7)),
    "audio": audio,
    "spiking": spiking,
    "quantised_inside": quantised_inside,
    "mixture": mixture,
    "camera": camera,
    "pair": lambda: Net(paired, "16", "16", left=nn.Linear(16, 8), right=nn.Linear(16, 8)),
    "scalars": lambda: Net(lambda m, x: m.out(x)[:, 0], "16", out=nn.Linear(16, 1)),
    "masked_scores": lambda: Net(
        lambda m, x: m.scores(x).masked_fill(x[:, :12] > 1, m.least), "16", scores=nn.Linear(16, 12), least=-INF
    ),
    "tied_weights": tied_weights,
    "uneven_channels": lambda: Net(lambda m, x: m.out(x) * m.sizes, "16", out=nn.Linear(16, 6), sizes=SIZES),
    "small_beside_large": lambda: Net(
        lambda m, x: (1e4 * m.large(x), 1e-3 * m.small(x)), "16", large=nn.Linear(16, 4), small=nn.Linear(16, 4)
    ),
    "on_a_constant": lambda: Net(lambda m, x: 10 + m.out(x), "16", out=nn.Linear(16, 4)),
    "long_sums": long_sums,
    "spectrum": lambda: Net(in_waves, "64", filter=nn.Linear(64, 64), window=torch.hann_window(64), norm="backward"),
    "kept": lambda: Net(chosen, "16", scores=nn.Linear(16, 8), least=0.55),
    "rare_tags": rare_tags,
    "speaker": speaker,
    "distances": lambda: Net(apart, "16", places=nn.Linear(16, 24)),
    "steps_counted": lambda: Net(counted_on, "16", "int64::0-9", head=nn.Linear(16, 4)),
    "picture": lambda: Net(lambda m, x: m.grey(m.out(x)), "3x8x8", out=nn.Conv2d(3, 3, 3, padding=1), grey=grey),
    "rare_mask": lambda: pixels(1, lambda scores: scores[:, 0] > 2.2),
    "cumulated": lambda: Net(lambda m, x: m.out(2 * x).softmax(1).cumsum(1), "16", out=nn.Linear(16, 10)),
    "nested": lambda: Net(in_lists, "16", body=nn.Linear(16, 8)),
}
globals().update(RIGHT)
# int8 leaves the first and the last product in floats
OF_THREE_PRODUCTS = ("logits", "logits_of_1000", "labels", "unet", "deep_residual")
