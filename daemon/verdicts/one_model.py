"""Whether every process and every variant measured one model: the same code, weights, inputs and exact answers."""

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations

from benchd.daemon.records import OF_MODULE, Case, Check, ModelFacts

OTHER_SHARE = {"codes": 0.05}
OTHER_SHARE_EXACT = 1e-4
"""An output whose exact answers differ by more is of another network; with thresholds rounding may move a spike."""

_AGAIN = "do not change it during a run, and measure every variant again"


def difference(found: Iterable[ModelFacts | None]) -> str | None:
    """Return how these measurements of a model differ though they must agree, and what to do; else None."""
    known = [facts for facts in found if facts]
    return next((words for one, other in combinations(known, 2) for words in _differences(one, other)), None)


def other_answers(found: Iterable[tuple[Case, Check | None]]) -> str | None:
    """Return that the exact answers of one of these checks differ from an earlier one's, and what to do; else None.

    No hash covers a data file that a user's code reads, but what the model answers shows it.
    """
    earlier: dict[object, Check] = {}
    for case, check in found:
        if check is None:
            continue
        alike = case.batch_size, case.seed, check.images, check.rule, check.reference
        if answers_off(earlier.setdefault(alike, check), check):
            return f"its exact answers to the same inputs changed, as if a file that it reads was edited: {_AGAIN}"
    return None


def answers_off(a: Check, b: Check) -> str | None:
    """Return how B's exact answers are others than A's; None if they differ by no more than rounding explains.

    Each output counts alone: a wrong one may be tiny beside the next. Records that name no outputs count as one.
    """
    if a.outputs and b.outputs and a.outputs != b.outputs:
        names = [", ".join(sorted({*one.outputs} - {*other.outputs})) or "fewer" for one, other in ((b, a), (a, b))]
        return f"other outputs: {names[0]}, where A has {names[1]}"
    if not 0 < len(a.projections) == len(b.projections):
        return None
    names = (a.outputs if a.outputs == b.outputs else []) or [""]
    parts = zip(names, _shared_out(a.projections, names), _shared_out(b.projections, names), strict=True)
    limit = OTHER_SHARE.get(b.rule, OTHER_SHARE_EXACT)
    off = [(math.dist(x, y) / size if (size := math.hypot(*x)) else math.inf, name) for name, x, y in parts if x != y]
    share, name = max(off, default=(0.0, ""))
    where = f" in {name.partition(' ')[0]}" if len(names) > 1 else ""
    return f"its exact answers to the same inputs are off by {share:.2g} of A's{where}" if share > limit else None


def _shared_out(projections: Sequence[float], names: Sequence[str]) -> list[Sequence[float]]:
    """Return the projections of each output."""
    each = len(projections) // len(names)
    return [projections[start : start + each] for start in range(0, each * len(names), each)]


def older(found: ModelFacts | None, newer: ModelFacts | None) -> str | None:
    """Return how the model of an earlier measurement differs from that of a later one in another run, else None."""
    if not found or not newer:
        return None
    if found.code_sha256 and newer.code_sha256 and found.code_sha256 != newer.code_sha256:
        return "other code"
    hashes_differ = found.weights_sha256 != newer.weights_sha256
    return other_network(found, newer) or next(_other_inputs(found, newer), "other weights" if hashes_differ else None)


def other_network(one: ModelFacts, other: ModelFacts) -> str | None:
    """Return what makes it a different network, regardless of its code and the values of its weights; else None."""
    if one.options != other.options:
        names = sorted(name for name in one.options | other.options if one.options.get(name) != other.options.get(name))
        return f"other options ({', '.join(f'{n} {one.options.get(n)} and {other.options.get(n)}' for n in names)})"
    if one.weights != other.weights:
        return f"other weights ({one.weights} and {other.weights})"
    if one.parameters != other.parameters:
        return f"another number of parameters ({one.parameters} and {other.parameters})"
    return None


def _differences(one: ModelFacts, other: ModelFacts) -> Iterator[str]:
    if one.code_sha256 and other.code_sha256 and one.code_sha256 != other.code_sha256:
        yield _replaced(one) if one.code_sha256 == one.weights_sha256 else f"its code was edited meanwhile: {_AGAIN}"
    if one.options != other.options:
        yield f"{other_network(one, other)}: measure every variant with the same"
    if (one.weights_sha256, one.parameters) != (other.weights_sha256, other.parameters):
        yield _other_weights(one, other)
    for words in _other_inputs(one, other):
        yield f"{words}: measure every variant with the same"


def _other_inputs(one: ModelFacts, other: ModelFacts) -> Iterator[str]:
    if _inputs(one) != _inputs(other):
        yield f"other inputs ({_inputs(one)} and {_inputs(other)})"


def _replaced(facts: ModelFacts) -> str:
    return f"{facts.weights} was replaced meanwhile: {_AGAIN}"


def _other_weights(one: ModelFacts, other: ModelFacts) -> str:
    if one.weights != other.weights:
        return f"other weights ({one.weights} and {other.weights}): measure every variant with the same"
    if not one.weights.startswith(("random", OF_MODULE)):
        return _replaced(one)
    return (
        "its weights differ each time it is built: seed all random numbers that build draws, do not change the "
        "files it reads, and measure every variant again"
    )


def _inputs(facts: ModelFacts) -> tuple[list[str] | list[int], str]:
    """Return what the model reads; for a set of images its name, because a larger batch takes more of them."""
    images = facts.data.rpartition(" images of ")[2].partition(", fewer than ")[0]
    return [str(spec) for spec in facts.inputs] or facts.input_shape, images
