"""The cost of every model against what torch counts, against real tensors, and against known figures."""

from math import prod

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchd.daemon.errors import UsageError
from benchd.models import catalog, cost


def images(name, batch, options):
    return torch.rand(batch, *catalog.entry(name).image_shape(options))


def counted(module, inputs, *, backward=False):
    with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(backward):
        output = module.train(backward)(inputs)
        if backward:
            output.sum().backward()
    return counter.get_total_flops()


def seen(module, layers, inputs):
    """Return how many numbers each of `layers` reads and returns in a run, in pairs."""
    sizes = []
    hooks = [
        layer.register_forward_hook(lambda _, args, output: sizes.append((args[0].numel(), _first(output).numel())))
        for layer in layers
    ]
    with torch.no_grad():
        module(inputs)
    for hook in hooks:
        hook.remove()
    assert len(sizes) == len(layers)
    return [sum(column) for column in zip(*sizes, strict=True)]


def _first(output):
    return output[0] if isinstance(output, tuple) else output


SMALL_VIM = {"dim": 64, "depth": 4, "patch_size": 4, "stride": 4, "image_size": 32, "num_classes": 10}


def beside_projections(dim, tokens, *, backward=False):
    """Return what torch counts in a Vim for two images beside its projections, `tokens` being those scanned.

    In plain PyTorch the scan multiplies its 16 states with C, and makes three products of its backward pass; the x
    projection has columns of zeros up to a multiple of 16.
    """
    inner, states, zeros = 2 * dim, 16, -(dim // 16) % 16
    scans, projections = (4, 3) if backward else (1, 1)
    return 2 * 2 * inner * tokens * (scans * states + projections * zeros)


@pytest.mark.parametrize(
    ("name", "options", "scanned"),
    [
        ("vim_tiny", {"depth": 2}, 2 * 197 + 198),
        ("vim_tiny", {"depth": 3, "patch_size": 100, "stride": 100}, 2 * 2 * 5 + 6),
        ("vim_small", {"depth": 2, "patch_size": 14, "stride": 50}, 2 * 26 + 28),
        ("vim_base", SMALL_VIM, 3 * 2 * 65 + 66),
        ("snn_onepass", {}, 0),
        ("snn_onepass", {"encoding": "rate", "time_steps": 3, "batch_norm": True}, 0),
        ("qann_resnet18", {"width": 7}, 0),
        ("snn_stbif_resnet18", {"width": 16}, 0),
        ("snn_stbif_resnet18", {"level": 6, "time_steps": 3, "width": 8}, 0),
        ("square", {"size": 9}, 0),
    ],
    ids=str,
)
def test_matrix_flops_are_what_torch_counts(name, options, scanned):
    module = catalog.build(name, **options)
    own = cost.cost(name, options, 2, "fp32", "inference")
    # among an even number of tokens the class token is off the centre: our forward scan takes one beyond it
    beyond = 2 * 2 * 768 * (24 + 32 + 24) if name == "vim_small" else 0
    beside = beside_projections(catalog.entry(name).resolve(options)["dim"], scanned) if scanned else 0
    assert counted(module, images(name, 2, options)) == own.matrix_flops + beyond + beside


@pytest.mark.parametrize(
    ("name", "options"),
    [(name, {}) for name in catalog.MODELS]
    + [("vim_tiny", {"patch_size": 32, "stride": 24}), ("snn_onepass", {"batch_norm": True})]
    + [("vim_tiny", SMALL_VIM), ("vim_small", {"dim": 20, "depth": 1}), ("snn_stbif_resnet18", {"width": 5})],
    ids=str,
)
def test_parameters_are_those_of_the_module(name, options):
    with torch.device("meta"):
        module = catalog.build(name, **options)
    numbers = sum(parameter.numel() for parameter in module.parameters())
    assert cost.parameters(name, options) == numbers
    assert cost.cost(name, options, 5, "fp32", "inference").parameters_bytes == 4 * numbers
    assert cost.cost(name, options, 5, "bf16", "inference").parameters_bytes == 2 * numbers


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("vim_tiny", {"depth": 3, "stride": 64}),
        ("snn_onepass", {"time_steps": 2}),
        ("snn_onepass", {"encoding": "rate", "time_steps": 2}),
        ("qann_resnet18", {"width": 9}),
        ("snn_stbif_resnet18", {"time_steps": 3, "width": 6}),
        ("square", {"size": 9}),
    ],
    ids=str,
)
def test_training_is_forward_and_backward(name, options):
    module, inputs = catalog.build(name, **options), images(name, 2, options)
    if name == "square":
        inputs.requires_grad_()
    own = cost.cost(name, options, 2, "fp32", "training")
    beside = beside_projections(192, 2 * 2 * 17 + 18, backward=True) if name == "vim_tiny" else 0
    assert counted(module, inputs, backward=True) == own.matrix_flops + beside
    once = cost.cost(name, options, 2, "fp32", "inference")
    assert own.elementwise_flops == 3 * once.elementwise_flops
    assert own.exponentials == once.exponentials
    assert own.parameters_bytes == 3 * once.parameters_bytes
    assert own.bytes > once.bytes


def test_bytes_of_vim_are_parameters_images_logits_and_the_residual_stream():
    module, inputs = catalog.build("vim_tiny", stride=64), images("vim_tiny", 2, {})
    residual, _ = seen(module, [block.norm for block in module.layers], inputs)
    own = cost.cost("vim_tiny", {"stride": 64}, 2, "fp16", "inference")
    assert own.bytes == own.parameters_bytes + 2 * (inputs.numel() + 2 * 1000) + 2 * 4 * residual
    learned = cost.cost("vim_tiny", {"stride": 64}, 2, "fp32", "training")
    crossing = 4 * residual * (3 + 2)  # written, read twice; its gradient written and read
    assert learned.bytes == 3 * own.parameters_bytes * 2 + 4 * 2 * (inputs.numel() + 2 * 1000) + crossing


def test_bytes_of_onepass_are_parameters_images_logits_and_pooled_counts():
    module, inputs = catalog.build("snn_onepass", kernels="custom", time_steps=3), images("snn_onepass", 2, {})
    _, pooled = seen(module, [module.lif1, module.lif2], inputs)
    own = cost.cost("snn_onepass", {"time_steps": 3}, 2, "fp16", "inference")
    assert own.bytes == own.parameters_bytes + 2 * (inputs.numel() + 2 * 10) + 2 * pooled


@pytest.mark.parametrize("width", [64, 12])
@pytest.mark.parametrize("name", ["qann_resnet18", "snn_stbif_resnet18"])
def test_bytes_of_the_resnets_are_parameters_images_logits_and_codes(name, width):
    steps = 8 if name == "snn_stbif_resnet18" else 1
    module, inputs = catalog.build("qann_resnet18", width=width), images("qann_resnet18", 2, {})
    blocks = [block for stage in (module.layer1, module.layer2, module.layer3, module.layer4) for block in stage]
    entering, leaving = seen(module, blocks, inputs)
    inner, _ = seen(module, [block.conv2 for block in blocks], inputs)
    last, _ = seen(module, [module.avgpool], inputs)
    _, pooled = seen(module, [module.maxpool], inputs)
    codes = (pooled + inner + leaving) + (2 * entering + inner + last)
    own = cost.cost(name, {"width": width}, 2, "bf16", "inference")
    assert own.bytes == own.parameters_bytes + 2 * (inputs.numel() + 2 * 10) + steps * codes


def test_square_reads_and_writes_each_number_and_learns_its_input():
    once, learned = (cost.cost("square", {"size": 9}, 2, "fp32", direction) for direction in ("inference", "training"))
    assert (once.bytes, once.elementwise_flops, once.matrix_flops) == (2 * 4 * 162, 162, 0)
    assert learned.bytes == 5 * 4 * 162  # input twice, output and its gradient, the input's gradient


def test_the_published_figures_of_vim_tiny():
    own = cost.cost("vim_tiny", {}, 1, "fp16", "inference")
    token = 384  # inner channels
    spared = 197 - 1, 2 * 197 - 198  # tokens that the last layer need not gate and scan
    # 72.6 M count a gate for each direction and the last layer whole
    gates = 24 * 197 * token
    assert own.exponentials + token * (spared[0] + 19 * spared[1]) + gates == 48 * 197 * token * 20 == 72_622_080
    projections = 2 * token * (192 * 2 * spared[0] + (44 + 12) * spared[1])
    assert (own.matrix_flops + projections) / 1e9 == pytest.approx(2.56, abs=0.005)
    assert own.elementwise_flops / 1e9 == pytest.approx(0.4, abs=0.05)
    assert own.parameters_bytes / 2e6 == pytest.approx(7.15, abs=0.01)


@pytest.mark.parametrize("direction", ["inference", "training"])
@pytest.mark.parametrize("name", catalog.MODELS)
def test_a_batch_costs_its_images_and_the_parameters_once(name, direction):
    one_image, four, none = (cost.cost(name, {}, batch, "fp32", direction) for batch in (1, 4, 0))
    assert (four.flops, four.exponentials) == (4 * one_image.flops, 4 * one_image.exponentials)
    assert none.bytes == one_image.parameters_bytes == four.parameters_bytes
    assert four.bytes - none.bytes == 4 * (one_image.bytes - none.bytes) > 0


@pytest.mark.parametrize(("precision", "numbers"), [("fp32", 4), ("amp", 4), ("fp16", 2), ("bf16", 2)])
def test_a_precision_decides_the_bytes_of_a_number(precision, numbers):
    size = prod(catalog.entry("square").image_shape({}))
    assert cost.cost("square", {}, 3, precision, "inference").bytes == 3 * 2 * numbers * size


def test_what_the_catalog_does_not_hold_has_no_cost():
    with pytest.raises(UsageError, match=r"own\.net\.build"):
        cost.cost("own.net.build", {}, 1, "fp32", "inference")
    with pytest.raises(UsageError, match="time_steps=0"):
        cost.cost("snn_onepass", {"time_steps": 0}, 1, "fp32", "inference")
