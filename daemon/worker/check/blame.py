"""Finds out whether the model itself caused a failed check, because its float32 answers differ from float64's."""

from functools import partial

import numpy as np

from benchd.daemon.records import Variant
from benchd.daemon.worker import backends, operations
from benchd.daemon.worker.backends import LoadedModel
from benchd.daemon.worker.check import agreement
from benchd.daemon.worker.check.agreement import ERROR_CAP, Observation, Rule
from benchd.daemon.worker.check.observe import observe
from benchd.daemon.worker.check.truth import Truth
from benchd.daemon.worker.structures import Batch
from benchd.models import catalog


def of_model(right: Truth, exact: Observation, images: Batch) -> str:
    """Return why plain float32 PyTorch differs from the `exact` answers to these images; empty if it does not.

    A cast, an autocast, random numbers or a jump in the model affects every variant.
    """
    double, rule = right.reference, Rule("fp32", right.rule.spiking, right.rule.trained)
    workload, job, size = double.workload, double.job, double.job.case.batch_size
    if job.onnx and (half := getattr(workload.plain, "casts_to", "")):
        return f"{job.onnx.name} itself casts to {half}, which a runtime may leave out"
    if right.why_fp32 or job.case.model in catalog.MODELS:  # the void checks of these models are due to rounding
        return ""
    limits = right.limits if rule == right.rule else double.bounds(rule)
    single = backends.load(Variant(), workload.source, double.device, images[:size])
    plain = observe(single, workload.plain, images, size, job.case.seed)
    judged = agreement.judge(exact, plain, limits, rule)
    if judged.passed:
        return ""
    start = int(np.argmax(agreement.off(exact, plain, limits, rule).any(axis=1))) // size * size
    rows = range(start, start + size)

    def run(loaded: LoadedModel) -> Observation:
        return observe(loaded, workload.plain, images[start : start + size], size, job.case.seed, rows)

    exact_form = double.loaded(workload.reference().to(double.device))
    parted = operations.parting(partial(run, single), partial(run, exact_form), ERROR_CAP["fp32"])
    if parted:
        return f"the model's own operation {parted} is the first that differs between float32 and float64"
    return "" if judged.void else "the model itself is off in plain float32"
