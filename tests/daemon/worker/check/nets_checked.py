"""The verdict on each net of a corpus in each variant that a CPU runs, by the worker's own code in this process."""

from pathlib import Path

from worker_jobs import build_and_load, changed, job

from benchd.daemon.errors import BenchdError
from benchd.daemon.measuring.plan import PRESETS
from benchd.daemon.records import Check, Variant
from benchd.daemon.worker.check import checking as check
from benchd.exporters.onnx import ExportError

SHARED = ("eager", "fp16", "bf16")
PLAIN = (*SHARED, "amp")
FILES = ("onnxruntime", "onnxruntime-fp16", "openvino")
INT8 = ("int8", "onnxruntime-int8", "openvino-int8")
HERE = Path(__file__).parent


def checked(folder: Path, corpus: str, name: str, variant: str, *, batch_size: int = 4, seed: int = 0) -> Check:
    """Return the check of the net `name` of a corpus; raise what the worker raises where there is none."""
    module, parsed = f"{HERE / corpus}.py:{name}", Variant.parse(variant)
    a_job = job(folder, module=module, variant=parsed, batch_size=batch_size, seed=seed)
    a_job = changed(a_job, limits=PRESETS["quick"], calibration="random")
    built, loaded = build_and_load(a_job)
    return check.check_and_answers(built, loaded, a_job).check


def verdict(folder: Path, corpus: str, name: str, variant: str, **fields: int) -> str:
    """Return the verdict and the note, or why the variant does not run."""
    try:
        check_result = checked(folder, corpus, name, variant, **fields)
    except (BenchdError, ExportError) as error:
        return f"none: {error}"
    return f"{check_result.verdict}: {check_result.note}"
