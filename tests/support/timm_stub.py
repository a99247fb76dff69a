"""A package named timm with two tiny nets: what benchd calls of the real one, with its signatures and file layout."""

from pathlib import Path

_FILES = {
    "__init__.py": "from timm.models import create_model\n",
    "data/__init__.py": """
from torchvision import transforms

def resolve_model_data_config(model, args=None, pretrained_cfg=None, use_test_size=False, verbose=False):
    names = ("input_size", "interpolation", "mean", "std", "crop_pct", "crop_mode")
    return {name: model.pretrained_cfg[name] for name in names}

def create_transform(input_size=224, is_training=False, *, interpolation="bilinear", mean, std, crop_pct, crop_mode):
    assert not is_training and interpolation == "bicubic" and crop_mode == "center"
    side = input_size[-1]
    return transforms.Compose([
        transforms.Resize(int(side / crop_pct), transforms.InterpolationMode.BICUBIC),
        transforms.CenterCrop(side),
        transforms.ToTensor(),
        transforms.Normalize(mean, std),
    ])
""",
    "models/__init__.py": """
from timm.models import tiny
from timm.models._registry import entrypoints

def create_model(model_name, pretrained=False, pretrained_cfg=None, checkpoint_path="", **kwargs):
    assert not pretrained, "this would download"
    name, _, tag = model_name.partition(".")
    if tag not in ("", "a1_in1k"):
        raise RuntimeError(f"Invalid pretrained tag ({tag}) for {name}.")
    return entrypoints[name](pretrained=pretrained, **kwargs)
""",
    "models/_registry.py": """
entrypoints = {}

def register_model(fn):
    entrypoints[fn.__name__] = fn
    return fn
""",
    "models/tiny.py": '''
import torch
from torch import nn
from timm.models._registry import register_model

def _cfg(**kwargs):
    return {
        "num_classes": 10, "input_size": (3, 24, 24), "interpolation": "bicubic", "crop_pct": 0.75,
        "crop_mode": "center", "mean": (0.5, 0.4, 0.3), "std": (0.5, 0.6, 0.7), **kwargs,
    }

class Convolutional(nn.Module):
    def __init__(self, num_classes=10):
        super().__init__()
        self.num_classes = num_classes
        self.conv, self.bn = nn.Conv2d(3, 8, 3, 2), nn.BatchNorm2d(8)
        nn.init.zeros_(self.bn.weight)  # as timm's ResNets do with the last one of a branch
        self.fc = nn.Linear(8, num_classes)
        self.pretrained_cfg = _cfg()

    def forward(self, x):
        return self.fc(self.bn(self.conv(x)).relu().mean((2, 3)))

class Positional(nn.Module):
    def __init__(self, num_classes=10, img_size=24):
        super().__init__()
        self.num_classes = num_classes
        self.patch_embed = nn.Conv2d(3, 8, 8, 8)
        self.pos_embed = nn.Parameter(torch.randn(1, 8, img_size // 8, img_size // 8))
        self.fc = nn.Linear(8, num_classes)
        self.pretrained_cfg = _cfg(fixed_input_size=True)

    def forward(self, x):
        return self.fc((self.patch_embed(x) + self.pos_embed).relu().mean((2, 3)))

@register_model
def tiny_conv(pretrained: bool = False, **kwargs) -> Convolutional:
    """A net that takes any size."""
    return Convolutional(**kwargs)

@register_model
def tiny_vit(pretrained: bool = False, **kwargs) -> Positional:
    """A net whose positions are parameters."""
    return Positional(**kwargs)
''',
}


def written(folder: Path) -> Path:
    """Write the package into `folder` and return that, for PYTHONPATH."""
    for name, text in _FILES.items():
        path = folder / "timm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder
