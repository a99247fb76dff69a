"""The models that benchd knows by name: a torch-free table, and `build`, which imports torch."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from benchd.daemon.errors import UsageError, unknown

if TYPE_CHECKING:
    from torch import nn

OptionValue = int | float | bool | str
Kernels = Literal["torch", "custom", "custom-int8"]
"""The kernels that a model uses: the best of plain PyTorch, our own, or our own with int8 weights on a CPU."""

NO_INT8 = "our kernels convolve only the integers of spiking and quantised nets; onnxruntime-int8 quantises others"
TRAINING = "training can be measured with eager and, for the ST-BIF net, with custom"


# finite numbers that fit a record
_WITHIN: Mapping[type, Any] = {
    int: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)],
    float: Annotated[float, msgspec.Meta(ge=-1.7e308, le=1.7e308)],
}


@dataclass(frozen=True)
class ModelOption:
    """A typed option of a model; `minimum` is inclusive, and `choices`, if given, is the complete list."""

    default: OptionValue
    help: str
    choices: tuple[OptionValue, ...] = ()
    minimum: float | None = None

    def parse(self, name: str, value: OptionValue) -> OptionValue:
        """Return `value`, which may be command line text, in the option's type; raise UsageError if it is invalid."""
        kind = type(self.default)
        try:
            parsed: OptionValue = msgspec.convert(value, _WITHIN.get(kind, kind), strict=False)
        except (msgspec.ValidationError, OverflowError):
            raise UsageError(f"option {name}={value}: expected {kind.__name__}") from None
        if self.choices and parsed not in self.choices:
            raise UsageError(f"option {name}={value}: choose one of {', '.join(map(str, self.choices))}")
        if self.minimum is not None and not float(parsed) >= self.minimum:
            raise UsageError(f"option {name}={value}: must be at least {self.minimum:g}")
        return parsed


@dataclass(frozen=True)
class Model:
    """A catalogued model: its builder, input and options.

    `factory` is "module:function"; the function takes `name`, `kernels` and the options as keywords and returns an
    nn.Module in eval mode. `input_shape` is the shape of one image, in which the name of an option stands for its
    value; it is empty if the built module defines the shape. `inputs` is the distribution of seeded random images:
    "unit" for uniform in [0, 1), "normal" for standard normal (a normalised image). Spiking and quantised models are
    judged by their flipped codes, all others by their outputs. `refuse` returns why a combination of options makes no
    sense, else None. `custom_kernels` are the devices on which the model can run our kernels; `custom_int8` is set if
    they support int8 weights on a CPU, `custom_training` if they have gradients. `ann` is the model with the same
    weights but without spikes. `cost` names the formula in `cost.py` that counts its operations. `is_planned` includes
    the model in plans that do not list models, and `batch_size` is the default of plans without batch sizes.
    """

    summary: str
    factory: str
    input_shape: tuple[int | str, ...]
    inputs: Literal["unit", "normal"]
    judged_by: Literal["outputs", "codes"]
    dataset: Literal["imagenet", "cifar10", "none"] = "none"
    options: Mapping[str, ModelOption] = field(default_factory=dict)
    refuse: Callable[[Mapping[str, Any]], str | None] = lambda options: None
    custom_kernels: tuple[Literal["cpu", "cuda"], ...] = ()
    custom_int8: bool = False
    custom_training: bool = False
    ann: str = ""
    cost: str = ""
    is_planned: bool = False
    batch_size: int = 1

    def resolve(self, options: Mapping[str, OptionValue]) -> dict[str, OptionValue]:
        """Return the values of all options, including defaults; raise UsageError for an invalid one."""
        for name in options:
            if name not in self.options:
                raise unknown("option", name, sorted(self.options))
        values = {name: option.parse(name, options.get(name, option.default)) for name, option in self.options.items()}
        reason = self.refuse(values)
        if reason:
            raise UsageError(reason)
        return values

    def without_defaults(self, options: Mapping[str, OptionValue]) -> dict[str, OptionValue]:
        """Return the options that differ from their defaults: these are part of the case's name."""
        return {name: value for name, value in options.items() if value != self.options[name].default}

    def image_shape(self, options: Mapping[str, OptionValue]) -> tuple[int, ...]:
        """Return the shape of one input with these options, without the batch axis."""
        values = self.resolve(options)
        return tuple(int(values[size]) if isinstance(size, str) else size for size in self.input_shape)


_VIM_OPTIONS = {
    "patch_size": ModelOption(16, "side of a patch in pixels", minimum=1),
    "stride": ModelOption(16, "distance between patches in pixels; more than 16 gives a shorter sequence", minimum=1),
    "scan": ModelOption("serial", "form of the scan; both are exact", choices=("serial", "two_level")),
    "depth": ModelOption(24, "number of layers", minimum=1),
    "image_size": ModelOption(224, "side of the image in pixels", minimum=1),
    "num_classes": ModelOption(1000, "number of classes; a checkpoint sets it", minimum=1),
}
_ONEPASS_OPTIONS = {
    "time_steps": ModelOption(8, "T, the number of time steps", minimum=1),
    "decay": ModelOption(0.95, "membrane decay per step", minimum=0.0),
    "threshold": ModelOption(1.0, "a neuron fires if v >= threshold"),
    "reset": ModelOption("zero", "effect of firing on v", choices=("zero", "subtract")),
    "encoding": ModelOption("repeat", "the image at every step, or Bernoulli spikes", choices=("repeat", "rate")),
    "p_scale": ModelOption(1.0, "rate encoding fires if u < clamp(p_scale * x, 0, 1)", minimum=0.0),
    "batch_norm": ModelOption(False, "batch norm after each convolution"),
}
_RESNET_OPTIONS = {
    "level": ModelOption(8, "quantisation level L: codes 0..L//2-1", minimum=4),
    "width": ModelOption(64, "channels of the first stage; each further stage doubles them", minimum=1),
}


def _too_few_steps(options: Mapping[str, Any]) -> str | None:
    """Return why T is too small, if it is: the input is spread over L//2-1 steps and would be truncated."""
    step = options["level"] // 2 - 1
    if options["time_steps"] >= step:
        return None
    return f"time_steps={options['time_steps']} is below {step}, the minimum for level {options['level']}"


def _patch_too_large(options: Mapping[str, Any]) -> str | None:
    if options["patch_size"] <= options["image_size"]:
        return None
    return f"patch_size={options['patch_size']} is larger than the image, {options['image_size']} pixels"


_BOTH: tuple[Literal["cpu", "cuda"], ...] = ("cpu", "cuda")


def _vim(size: str, dim: int, parameters: str, **more: Any) -> Model:
    return Model(
        f"Vision Mamba {size}, {parameters} parameters, 224x224 ImageNet",
        "benchd.models.vim:build",
        (3, "image_size", "image_size"),
        "normal",
        "outputs",
        "imagenet",
        {"dim": ModelOption(dim, "channels per token", minimum=1), **_VIM_OPTIONS},
        _patch_too_large,
        custom_kernels=_BOTH,
        cost="vim",
        **more,
    )


MODELS: Mapping[str, Model] = MappingProxyType(
    {
        "snn_onepass": Model(
            "spiking OnePass CNN (LIF), CIFAR-10",
            "benchd.models.snn_onepass:build",
            (3, 32, 32),
            "unit",
            "codes",
            "cifar10",
            _ONEPASS_OPTIONS,
            custom_kernels=_BOTH,
            custom_int8=True,
            cost="onepass",
            is_planned=True,
            batch_size=64,
        ),
        "qann_resnet18": Model(
            "quantised ResNet-18, CIFAR-10: the source of the ST-BIF net",
            "benchd.models.stbif:build_qann",
            (3, 32, 32),
            "normal",
            "codes",
            "cifar10",
            _RESNET_OPTIONS,
            custom_kernels=("cpu",),
            custom_int8=True,
            cost="resnet",
        ),
        "snn_stbif_resnet18": Model(
            "ST-BIF spiking ResNet-18 converted from the quantised one, CIFAR-10",
            "benchd.models.stbif:build_snn",
            (3, 32, 32),
            "normal",
            "codes",
            "cifar10",
            _RESNET_OPTIONS
            | {"time_steps": ModelOption(8, "T, the number of time steps; at least level//2-1", minimum=1)},
            _too_few_steps,
            custom_kernels=_BOTH,
            custom_int8=True,
            custom_training=True,
            ann="qann_resnet18",
            cost="resnet",
            is_planned=True,
        ),
        # after the spiking ones, whose first row comes sooner
        "vim_tiny": _vim("tiny", 192, "7 M", is_planned=True),
        "vim_small": _vim("small", 384, "26 M"),
        "vim_base": _vim("base", 768, "98 M"),
        "square": Model(
            "torch.square of a tensor: the microbenchmark",
            "benchd.models.square:build",
            ("size", "size"),
            "normal",
            "outputs",
            options={"size": ModelOption(1024, "side of the square tensor", minimum=1)},
            cost="square",
        ),
    }
)

NIR = Model(
    "a spiking net of your own in the exchange format NIR",
    "benchd.models.nir:build",
    (),
    "normal",
    "codes",
    options={
        "time_steps": ModelOption(16, "T, the number of time steps of inputs that benchd draws", minimum=1),
        "dt": ModelOption(1e-4, "length of a time step, in the unit of the file's time constants", minimum=1e-12),
        "reset": ModelOption(
            "zero",
            "effect of a spike: v = v_reset or v -= v_threshold, at once or in the next step",
            choices=("zero", "subtract", "delayed_zero", "delayed_subtract"),
        ),
        "current": ModelOption(
            "new", "v integrates the synaptic current after or before its update", choices=("new", "old")
        ),
        "fires": ModelOption("above", "a neuron fires above the threshold, or also at it", choices=("above", "at")),
        "gain": ModelOption(
            "absolute", "r and w_in as in the equations, or scaled to one step", choices=("absolute", "per_step")
        ),
        "readout": ModelOption("steps", "the answer: the output of every step, or their sum", choices=("steps", "sum")),
    },
)
"""The options of `--nir`, whose nets are not in the catalog."""

_OWN_SIZE = {"image_size": ModelOption(0, "side of the images in pixels; 0 for the model's own", minimum=0)}
LIBRARIES: Mapping[str, Model] = MappingProxyType(
    {
        "torchvision": Model(
            "torchvision's models by name, as in torchvision:resnet18",
            "benchd.models.torchvision_net:build",
            (),
            "normal",
            "outputs",
            "imagenet",
            _OWN_SIZE,
        ),
        "timm": Model(
            "timm's models by name, as in timm:resnet18, if timm is installed",
            "benchd.models.timm_net:build",
            (),
            "normal",
            "outputs",
            "imagenet",
            _OWN_SIZE,
        ),
    }
)


def find(name: str) -> Model | None:
    """Return the model with this name, from the catalog or a library as in `torchvision:resnet18`, else None.

    `libraries.refuse_unknown` checks whether the library has the model.
    """
    library, colon, _ = name.partition(":")
    return LIBRARIES.get(library) if colon else MODELS.get(name)


def trains(name: str, variant: str) -> bool:
    """Return whether training is measured on this variant of the model; a user's own module trains on eager."""
    custom = name in MODELS and MODELS[name].custom_training
    return variant == "eager" or (custom and variant == "custom")


def entry(name: str) -> Model:
    """Return the model with this name; raise UsageError if it is unknown."""
    model = find(name)
    if model is None:
        raise unknown("model", name, MODELS)
    return model


def build(name: str, *, kernels: Kernels = "torch", **options: Any) -> nn.Module:
    """Return the model `name` in eval mode, in float32, with seeded random weights from torch's global generator.

    The state dict is the same for all `kernels`. Raises UsageError, or benchd.kernels.dispatch.Unavailable if the
    kernels cannot run here.
    """
    model = entry(name)
    module, function = model.factory.split(":")
    factory = getattr(importlib.import_module(module), function)
    return factory(name=name, kernels=kernels, **model.resolve(options)).eval()
