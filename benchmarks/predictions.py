"""Times and costs predicted before the measurement, shown next to the measured ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from benchd.daemon.reporting.tables import markdown_table

HEAD = "Predicted from counted instructions and stubbed launches; for an H100, in CUDA graphs unless it says host."


class Prediction(NamedTuple):
    """The predicted minimum and maximum, in milliseconds, for rows with these columns."""

    what: str
    columns: Mapping[str, Any]
    least_ms: float
    most_ms: float | None


def _kernel(what: str, op: str, shape: list[int], *ms: float, contender: str = "benchd") -> Prediction:
    columns = {"op": op, "shape": shape, "dtype": "fp16", "captured": True, "contender": contender}
    return Prediction(what, columns, ms[0], ms[1] if len(ms) > 1 else None)


def _vim(batch: int, *ms: float) -> Prediction:
    columns = {"model": "vim_tiny", "batch_size": batch, "contender": "custom-cudagraph-fp16"}
    return Prediction(f"vim_tiny fp16, batch {batch}", columns, *ms)


def _host(op: str, us: float) -> Prediction:
    return Prediction(f"{op}, host", {"op": op, "contender": "benchd", "host": True}, 1e-3 * us, 2e-3 * us)


_ONE, _MANY = [1, 197, 384, 16], [64, 197, 384, 16]
PREDICTIONS = (
    _kernel("one scan, batch 1", "selective_scan", _ONE, 0.008, 0.012),
    _kernel("one scan, batch 64", "selective_scan", _MANY, 0.030, 0.045),
    _kernel("mamba-ssm's scan, batch 1", "selective_scan", _ONE, 0.009, 0.016, contender="mamba-ssm"),
    _kernel("mamba-ssm's scan, batch 64, at the least", "selective_scan", _MANY, 0.143, contender="mamba-ssm"),
    _kernel("norm(residual + out_proj(gate)), batch 1", "vim_out_norm", [1, 197, 192], 0.002, 0.004),
    _kernel("norm(residual + out_proj(gate)), batch 64", "vim_out_norm", [64, 197, 192], 0.016, 0.024),
    _kernel("B, C and delta, batch 1", "vim_steps", [1, 197, 192], 0.002, 0.004),
    _kernel("B, C and delta, batch 64", "vim_steps", [64, 197, 192], 0.009, 0.015),
    _kernel("in_proj and both convolutions, batch 1", "vim_in_conv", [1, 197, 192], 0.002, 0.004),
    _kernel("in_proj and both convolutions, batch 64", "vim_in_conv", [64, 197, 192], 0.015, 0.025),
    _vim(1, 0.45, 0.60),
    _vim(4, 0.48, 0.65),
    _vim(64, 3.0, 3.4),
    _host("add_rms_norm", 10),
    _host("bidirectional_scan", 17),
)


def page(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return a table of the predictions with the measured value of each; of several matching rows, the last counts."""
    measured = list(rows)
    cells = [(prediction.what, _expected(prediction), _measured(prediction, measured)) for prediction in PREDICTIONS]
    return "\n".join([HEAD, "", *markdown_table(("what", "predicted ms", "measured ms"), cells)]) + "\n"


def _expected(prediction: Prediction) -> str:
    return (
        f"{prediction.least_ms:.3g} or more"
        if prediction.most_ms is None
        else f"{prediction.least_ms:.3g} to {prediction.most_ms:.3g}"
    )


def _measured(prediction: Prediction, rows: list[Mapping[str, Any]]) -> str:
    of_it = [
        row for row in rows if row.get("median_ms") and all(row.get(k) == v for k, v in prediction.columns.items())
    ]
    return f"{of_it[-1]['median_ms']:.3g} on {of_it[-1]['device']}" if of_it else "-"
