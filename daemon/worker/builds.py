"""Identifies the builds of this process's libraries and kernels, and the instructions that they use."""

import hashlib
import re
import sys
from pathlib import Path
from typing import Any

import torch

from benchd.daemon.machine.environment import SOURCES
from benchd.daemon.records import Variant
from benchd.daemon.runtimes import FILE_BACKENDS, RUNTIMES
from benchd.exporters import code
from benchd.kernels import compiler
from benchd.kernels.exact_conv2d import layer

_PARTS = {
    "mkl": r"Math Kernel Library Version (\S+)",
    "onednn": r"MKL-DNN v(\S+)",
    "openmp": r"OpenMP (\d+)",
}
_CAPABILITY = re.compile(r"^ *- CPU capability usage.*$", re.MULTILINE)
# Thread runtimes and allocators, which LD_PRELOAD and LD_LIBRARY_PATH may choose.
_CHOSEN = re.compile(r"/lib((?:gomp|iomp5|omp|openblas|mkl_rt|jemalloc|tcmalloc|mimalloc)\b.*\.so.*)$", re.MULTILINE)


def loaded() -> dict[str, str]:
    """Return the builds of torch and its components, of loaded runtimes, of the C kernels and of benchd."""
    config = torch.__config__.show()
    parts = {name: match[1] for name, pattern in _PARTS.items() if (match := re.search(pattern, config))}
    return parts | {
        "torch_commit": torch.version.git_version[:12],
        "torch_build": hashlib.sha256(_CAPABILITY.sub("", config).encode()).hexdigest()[:12],
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "libraries": ", ".join(sorted(set(_CHOSEN.findall(Path("/proc/self/maps").read_text())))) or "none",
        "c_kernels": compiler.description(),
        SOURCES: code.sha256("daemon", "models", "kernels", "exporters")[:12],
        **_runtimes(),
    }


def kernels_ran(variant: Variant, device: torch.device) -> str | None:
    """Return which custom kernels this process has run: "triton", or "c" with the integer kernels, if any."""
    if variant.kernels == "torch":
        return None
    return "triton" if device.type == "cuda" else layer.ran()


def _runtimes() -> dict[str, str]:
    packages = [RUNTIMES[backend].package for backend in FILE_BACKENDS]
    loaded = {name: module for name in packages if (module := sys.modules.get(name))}
    return {f"{name}_build": _build(module) for name, module in loaded.items()}


def _build(module: Any) -> str:
    info: str = module.get_build_info() if hasattr(module, "get_build_info") else module.__version__
    return info.removeprefix("ORT Build Info: ")
