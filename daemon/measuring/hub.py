"""Finds nets from the Hugging Face Hub, named `hf:ORG/NAME`, in local folders and cached snapshots; never downloads."""

import importlib.util
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from benchd.daemon.errors import NotAvailable, UsageError
from benchd.daemon.records import HUB

_NAME = re.compile(r"[A-Za-z0-9_][\w.-]*(/[A-Za-z0-9_][\w.-]*)?")


def is_named(text: str) -> bool:
    """Return whether `text` refers to a net from the Hub."""
    return text.startswith(f"{HUB}:")


def only(models: Iterable[object]) -> str | None:
    """Return the net from the Hub if `models` is its name or a list with only its name, else None."""
    alone = (model[0] if isinstance(model, list) and len(model) == 1 else model for model in models)
    return next((name for name in alone if isinstance(name, str) and is_named(name)), None)


def folder(text: str) -> Path:
    """Return the folder for `hf:FOLDER`, or the cached folder for `hf:ORG/NAME`.

    Raises UsageError for an invalid name or a folder that cannot be loaded, NotAvailable for an absent folder.
    """
    name = text.partition(":")[2]
    if not _NAME.fullmatch(name):
        raise UsageError(f"{text}: expected {HUB}:ORG/NAME, or {HUB}:FOLDER with a subfolder of the current folder")
    if importlib.util.find_spec("transformers") is None:
        raise NotAvailable(f"{text}: the package transformers is not installed: pip install transformers")
    path = Path(name).resolve() if Path(name, "config.json").is_file() else _cached(name)
    if path is None:
        raise NotAvailable(
            f"{text}: not a folder here, and not in the cache {_cache()}; fetch it with: hf download {name}"
        )
    if (path / "adapter_config.json").is_file():
        raise UsageError(f"{text}: this is an adapter; merge it into its base model and save the result")
    if not any(path.glob("*.safetensors")):
        raise UsageError(f"{text}: no .safetensors file, and benchd does not load pickles; save it with safetensors")
    return path


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    home = os.environ.get("HF_HOME") or Path(base, "huggingface")
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home, "hub"))


def _cached(name: str) -> Path | None:
    """Return the newest cached snapshot, None if there is none."""
    repository = _cache() / f"models--{name.replace('/', '--')}"
    with suppress(OSError):
        commit = (repository / "refs" / "main").read_text(encoding="utf-8").strip()
        snapshot = repository / "snapshots" / commit
        if re.fullmatch("[0-9a-f]{40}", commit) and (snapshot / "config.json").is_file():
            return snapshot
    return None
