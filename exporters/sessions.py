"""ONNX Runtime sessions that run on the requested provider, or not at all.

By default ONNX Runtime silently falls back to a different provider, and its two distributions overwrite each other's
files.
"""

import json
import os
import sys
import tempfile
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple

from benchd.exporters import code
from benchd.exporters.tegra import install, is_tegra

Provider = Literal["cpu", "cuda", "tensorrt"]
Level = Literal["ORT_ENABLE_ALL", "ORT_ENABLE_EXTENDED", "ORT_ENABLE_BASIC", "ORT_DISABLE_ALL"]

PROVIDERS: dict[Provider, str] = {
    "cpu": "CPUExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "tensorrt": "TensorrtExecutionProvider",
}
LOWER: tuple[Level, ...] = ("ORT_ENABLE_EXTENDED", "ORT_ENABLE_BASIC", "ORT_DISABLE_ALL")
"""Graph optimisation levels below the default; at the last one, the file runs as written, node by node."""
DISTRIBUTIONS = ("onnxruntime", "onnxruntime-gpu")
EXACT_INT8 = "session.x64quantprecision"
# no TF32, as with torch here, and no algorithm search in every session
CUDA_OPTIONS = {"use_tf32": "0", "cudnn_conv_algo_search": "HEURISTIC"}
_ERRORS_ONLY = 3
_TIMED = "_kernel_time"


class SessionError(Exception):
    """ONNX Runtime cannot run a file, at least on the requested provider; the message says why."""


class OnnxRuntimeUnavailable(SessionError):
    """ONNX Runtime is not installed correctly; the message gives the command to run."""


def why_not() -> str | None:
    """Return why ONNX Runtime cannot be used here, as far as known without importing it, else None."""
    version = installed()
    if len(version) > 1:
        both = " ".join(version)
        return f"{both} overwrite each other's files: pip uninstall -y {both}, then pip install the one you want"
    if find_spec("onnxruntime") is None:
        return f"ONNX Runtime is not installed: {install('onnxruntime')}; for CUDA {cuda_build()}"
    return None


def cuda_build() -> str:
    """Return the command to install the build with the CUDA and TensorRT providers."""
    if sys.version_info < (3, 11) and not is_tegra():
        return "use Python 3.11 or newer: the last onnxruntime-gpu for 3.10 needs CUDA 12, and torch includes CUDA 13"
    return install("onnxruntime-gpu")


def installed() -> dict[str, str]:
    """Return the version of each installed ONNX Runtime distribution; if there are two, one overwrote the other."""
    return code.versions(*DISTRIBUTIONS)


def open_session(
    path: Path,
    provider: Provider = "cpu",
    *,
    threads: int | None = None,
    options: dict[str, Any] | None = None,
    level: Level = "ORT_ENABLE_ALL",
    spin: bool = True,
    edited: bytes | None = None,
) -> Any:
    """Return an onnxruntime.InferenceSession of the file on this provider, which never falls back to another.

    `threads` limits the CPU threads within an operator; None uses all CPUs of this process. `options` are provider
    options, `level` is the graph optimisation level, and without `spin` waiting threads sleep, which halves the CPU
    time of a network of many small operators. `edited` is loaded instead of the file. Raises OnnxRuntimeUnavailable,
    or SessionError if the file cannot be loaded, with the lower level at which it can.
    """
    settings = _settings(threads)
    if not spin:
        settings.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if edited:
        settings.add_session_config_entry("session.model_external_initializers_file_folder_path", str(path.parent))
    return _session(path, provider, settings, options or {}, level, edited)


def _settings(threads: int | None) -> Any:
    settings = _onnxruntime().SessionOptions()
    settings.intra_op_num_threads = threads or len(os.sched_getaffinity(0))
    settings.inter_op_num_threads = 1
    settings.log_severity_level = _ERRORS_ONLY
    # without VNNI, byte products overflow in 16 bits: weights of more than 7 bits need the exact but slower kernels
    settings.add_session_config_entry(EXACT_INT8, "1")
    return settings


def _session(
    path: Path,
    provider: Provider,
    settings: Any,
    options: dict[str, Any],
    level: Level = "ORT_ENABLE_ALL",
    edited: bytes | None = None,
) -> Any:
    ort = _onnxruntime()
    name = PROVIDERS[provider]
    if name not in ort.get_available_providers():
        raise OnnxRuntimeUnavailable(f"this onnxruntime {ort.__version__} has no {name}: {cuda_build()}")
    if provider != "cpu" and hasattr(ort, "preload_dlls"):
        ort.preload_dlls()  # loads the CUDA libraries from torch's wheels
    if provider == "tensorrt" and find_spec("tensorrt"):
        import_module("tensorrt")  # loads libnvinfer from its wheel, where the provider does not look
    settings.graph_optimization_level = getattr(ort.GraphOptimizationLevel, level)
    try:
        session = ort.InferenceSession(edited or str(path), settings, [(name, options)], enable_fallback=0)
    except Exception as error:  # its exception classes have no common base
        reason = str(error).strip().split("\n")[0].rstrip(".")
        if level not in LOWER and provider != "tensorrt":  # another TensorRT build would take minutes
            reason += _below(path, provider, settings, options)
        raise SessionError(f"{path.name}: ONNX Runtime {ort.__version__} cannot load it: {reason}") from error
    if session.get_providers()[0] != name:
        raise SessionError(f"{path.name}: ONNX Runtime loaded it on {session.get_providers()[0]}, not on {name}")
    session.disable_fallback()
    return session


def _below(path: Path, provider: Provider, settings: Any, options: dict[str, Any]) -> str:
    """Return the highest optimisation level at which the file loads, as advice; empty if there is none."""
    for level in LOWER:
        with suppress(SessionError):
            _session(path, provider, settings, options, level)
            return f"; its graph optimiser breaks the file, which loads with graph_optimization_level {level}"
    return ""


class Node(NamedTuple):
    """A node of the optimised graph that has run."""

    name: str
    place: str
    provider: str
    operator: str


def profiled(path: Path, provider: Provider, feeds: dict[str, Any], options: dict[str, Any]) -> list[Node]:
    """Return the nodes that ran, in order, in a run of a separate session."""
    return [node for node, _ in timed(path, provider, feeds, options, runs=1)[0]]


def timed(
    path: Path,
    provider: Provider,
    feeds: dict[str, Any],
    options: dict[str, Any],
    runs: int,
    threads: int | None = None,
    optimised: Path | None = None,
) -> list[list[tuple[Node, float]]]:
    """Return each node that ran and its ms, for each of `runs` in a separate session, after a warm-up run.

    The session's optimised graph is saved as `optimised`.
    """
    with tempfile.TemporaryDirectory() as folder:
        settings = _settings(threads)
        settings.enable_profiling = True
        settings.profile_file_prefix = f"{folder}/profile"
        if optimised:
            settings.optimized_model_filepath = str(optimised)
        session = _session(path, provider, settings, options)
        for _ in range(1 + runs):
            session.run(None, feeds)
        events = json.loads(Path(session.end_profiling()).read_text())
    model_runs = [event for event in events if event.get("cat") == "Session" and event["name"] == "model_run"]
    return [
        [
            (_node(event), event["dur"] / 1000)
            for event in events
            if _is_node(event) and run["ts"] <= event["ts"] <= run["ts"] + run["dur"]
        ]
        for run in model_runs[1:]
    ]


def _is_node(event: dict[str, Any]) -> bool:
    return event.get("cat") == "Node" and str(event["name"]).endswith(_TIMED)


def _node(event: dict[str, Any]) -> Node:
    name = event["name"].removesuffix(_TIMED)
    return Node(name, *(event["args"][key] for key in ("node_index", "provider", "op_name")))


def _onnxruntime() -> Any:
    reason = why_not()
    if reason:
        raise OnnxRuntimeUnavailable(reason)
    try:
        return import_module("onnxruntime")
    except ImportError as error:
        raise OnnxRuntimeUnavailable(f"onnxruntime cannot be imported: {error}") from error
