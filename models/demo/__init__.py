"""The trained nets that ship with benchd, and the weights and images of a case; torch-free.

Each is a catalogued model with the options that its checkpoint was trained with, using the full-size code with fewer
layers and channels. README.md describes what they learnt and how well; `train` recreates them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from benchd.daemon.errors import UsageError
from benchd.models import catalog
from benchd.models.catalog import OptionValue

FOLDER = Path(__file__).parent
IMAGES = FOLDER / "digits.safetensors"
CALIBRATION = FOLDER / "calibration.safetensors"
"""512 of the digits that the nets were trained on, none of which are in IMAGES."""
DEMO, RANDOM = "demo", "random"
# options that do not depend on the weights: the number of steps, and the form of the scan
_FREE = ("time_steps", "scan")


@dataclass(frozen=True)
class Checkpoint:
    """A file of trained weights, and the model options that differ from their defaults."""

    path: Path
    options: Mapping[str, OptionValue] = field(default_factory=dict)


_QANN = FOLDER / "qann.safetensors"
_VIM = {"dim": 64, "depth": 4, "patch_size": 4, "stride": 4, "image_size": 32, "num_classes": 10}
CHECKPOINTS: Mapping[str, Checkpoint] = MappingProxyType(
    {
        "vim_tiny": Checkpoint(FOLDER / "vim.safetensors", _VIM),
        "snn_onepass": Checkpoint(FOLDER / "onepass.safetensors"),
        "qann_resnet18": Checkpoint(_QANN, {"width": 16}),
        "snn_stbif_resnet18": Checkpoint(_QANN, {"width": 16}),
    }
)


def complete(model: str, options: Mapping[str, OptionValue]) -> dict[str, OptionValue]:
    """Return `options` with the missing ones filled in from the model's checkpoint.

    Raises UsageError for a model without a checkpoint, or an option that differs from the checkpoint's.
    """
    if model not in CHECKPOINTS:
        raise UsageError(f"--weights {DEMO}: {model} has none; choose one of {', '.join(CHECKPOINTS)}")
    completed = dict(sorted({**CHECKPOINTS[model].options, **options}.items()))
    for name, value, trained in _untrained(model, completed):
        raise UsageError(f"option {name}={value}: the weights {DEMO} of {model} have {name}={trained}; leave it out")
    return completed


def _untrained(model: str, options: Mapping[str, OptionValue]) -> list[tuple[str, OptionValue, OptionValue]]:
    """Return the options that differ from the checkpoint's, as (name, value, value in training)."""
    entry = catalog.entry(model)
    chosen, trained = entry.resolve(options), entry.resolve(CHECKPOINTS[model].options)
    return [
        (name, chosen[name], trained[name]) for name in chosen if name not in _FREE and chosen[name] != trained[name]
    ]


def sources(
    model: str, options: Mapping[str, OptionValue], weights: str | None, data: str | None
) -> tuple[str | None, str | None]:
    """Return the weights and the data for a case, given the requested ones: "demo", a path, or None for random.

    If neither is requested, a model with its checkpoint's options uses the trained weights and their images.
    """
    if weights is None and data in {None, DEMO} and model in CHECKPOINTS and not _untrained(model, options):
        weights = DEMO
    if weights == DEMO and data is None:
        data = DEMO
    return None if weights == RANDOM else weights, data
