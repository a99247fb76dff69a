"""Packages of a test that are not in the environment: installed once into the folder that a variable names."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


def installed(variable: str, target: str, *packages: str) -> None:
    """Make these packages importable, without what they depend on; skip the test if the variable is not set."""
    if variable not in os.environ:
        pytest.skip(f"make {target} runs it", allow_module_level=True)
    folder = Path(os.environ[variable]).absolute()
    if not folder.exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder, *packages]
        subprocess.run(command, check=True)
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


HUB = (
    *("transformers>=5", "huggingface-hub>=1.31,<2", "tokenizers", "regex", "hf-xet", "tqdm"),
    *("torchmetrics", "lightning-utilities", "pycocotools"),
)
"""What the nets of the Hub and the metrics of detectors need beside the environment."""
