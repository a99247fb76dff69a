"""Hugging Face Hub nets from a folder, built with the AutoModel class of their architecture.

Nothing is downloaded, no code from the folder is run, and no pickle is read.

    images   pixel_values (B, channels, H, W)             logits; pred_boxes; class and mask logits of queries
    audio    input_values (B, samples) or (B, frames, mels)   logits
    text     input_ids, attention_mask (B, length)        logits, or last_hidden_state of an encoder
"""

import json
import os
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from benchd.daemon.errors import UnfitModel

os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported

import transformers

_TASKS = (
    *("ImageClassification", "ObjectDetection", "SemanticSegmentation", "UniversalSegmentation"),
    *("AudioClassification", "CTC", "SequenceClassification", "TokenClassification"),
)
_ANSWERS = ("logits", "pred_boxes", "class_queries_logits", "masks_queries_logits")
_TRUST: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
_WORDS, _SAMPLES, _SIDE = 128, 16000, 224


class HubNet(nn.Module):
    """A net that returns the outputs its task is judged by, under the Hub's names; inputs are passed by name."""

    preprocess: Any = None

    def __init__(self, net: Any, folder: Path) -> None:
        super().__init__()
        self.net = net
        self.inputs = _inputs(net, folder)
        if net.main_input_name == "pixel_values" and (folder / "preprocessor_config.json").is_file():
            self.preprocess = _Preprocess(transformers.AutoImageProcessor.from_pretrained(folder, **_TRUST))

    def forward(self, **inputs: Tensor) -> dict[str, Tensor]:
        """Return the task's outputs, or the last hidden state of an encoder."""
        answer = self.net(**inputs)
        return {name: answer[name] for name in _ANSWERS if name in answer} or {
            "last_hidden_state": answer["last_hidden_state"]
        }


class _Preprocess:
    """The Hub's image processor as a function from a PIL image to one input."""

    def __init__(self, processor: Any) -> None:
        self._processor = processor

    def __call__(self, image: Any) -> Tensor:
        return cast("Tensor", self._processor(images=image, return_tensors="pt")["pixel_values"][0])


def build(folder: Path) -> HubNet:
    """Return the net in a folder, in float32 and eval mode; raise UnfitModel if some weights are missing."""
    config: Any = transformers.AutoConfig.from_pretrained(folder, **_TRUST)
    config.use_cache = False
    architecture = next(iter(config.architectures or []), "")
    task = next((f"For{task}" for task in _TASKS if architecture.endswith(f"For{task}")), "")
    kind: Any = getattr(transformers, f"AutoModel{task}")
    net, loading_info = kind.from_pretrained(
        folder, config=config, use_safetensors=True, dtype=torch.float32, output_loading_info=True, **_TRUST
    )
    if missing := sorted(loading_info["missing_keys"]):
        raise UnfitModel(f"the checkpoint lacks {len(missing)} weights of {type(net).__name__}, such as {missing[0]}")
    return HubNet(net, folder).eval()


def _inputs(net: Any, folder: Path) -> list[str]:
    """Return the inputs of one item in the format of `--input`, with the sizes given in the folder."""
    config, name = net.config, net.main_input_name
    if name == "pixel_values":
        height, width = _sides(config, folder)
        return [f"{name}={getattr(config, 'num_channels', 3)}x{height}x{width}"]
    if name == "input_values":
        mels = getattr(config, "num_mel_bins", None)
        return [f"{name}={config.max_length}x{mels}" if mels else f"{name}={_SAMPLES}"]
    if name == "input_ids":
        # RoBERTa's positions start after its padding
        words = min(_WORDS, getattr(config, "max_position_embeddings", _WORDS) - 2)
        return [f"{name}=int64:{words}:0-{config.vocab_size - 1}", f"attention_mask=int64:{words}:1-1"]
    raise UnfitModel(f"{type(net).__name__} takes {name}: only images, audio and text are supported here; use --module")


def _sides(config: Any, folder: Path) -> tuple[int, int]:
    """Return the height and width of the images, as given by the processor, else by the net."""
    path = folder / "preprocessor_config.json"
    processor: Any = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    size: Any = processor.get("crop_size") or processor.get("size") or getattr(config, "image_size", _SIDE)
    if isinstance(size, dict):
        edge: Any = size.get("shortest_edge", _SIDE)
        size = [size.get("height", edge), size.get("width", edge)]
    sides = list(map(int, size if isinstance(size, list | tuple) else [size]))
    return sides[0], sides[-1]
