"""Finds out whether measurements share an environment and a model, and what differs; pure.

Measurements share a model if their options, weights, inputs and exact answers are equal.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, Protocol

import msgspec

from benchd.daemon.machine.environment import comparable
from benchd.daemon.records import OF_MODULE, Check, Environment, ModelFacts

NAMED = 5


def environment_difference(one: Environment, other: Environment) -> str | None:
    """Return how the environments differ in ways that prevent a comparison, else None."""
    names = list(environment_differences(one, other))
    more = f", and {len(names) - NAMED} more" if names[NAMED:] else ""
    return f"a different environment ({', '.join(names[:NAMED])}{more})" if names else None


def environment_differences(one: Environment, other: Environment) -> Iterator[str]:
    """Yield each difference as `name: value and value`."""
    return (f"{name}: {was} and {now}" for name, was, now in environment_changes(one, other))


def environment_changes(one: Environment, other: Environment) -> Iterator[tuple[str, str, str]]:
    """Yield the name of each difference and both values as text."""
    if one.comparable_part == other.comparable_part:
        return
    before, after = _compared(one), _compared(other)
    was, now = (_flat(msgspec.structs.asdict(environment)) for environment in (one, other))
    unknown = _unknown(one, other) | _unknown(other, one)
    for name in before | after:
        if before.get(name, "unset") != after.get(name, "unset") and name not in unknown:
            yield name, _word(was, name), _word(now, name)


def _unknown(one: Environment, other: Environment) -> set[str]:
    """Return the names that only `other` has: a later benchd, or a worker that got further, records more facts."""
    variables = (other.variables or {}).keys() if one.variables is None else set[str]()
    return {*variables} | (other.software.keys() - one.software.keys()) | (other.system.keys() - one.system.keys())


def _compared(environment: Environment) -> dict[str, Any]:
    facts = _flat(comparable(environment))
    # otherwise the driver is L4T
    return {name: fact for name, fact in facts.items() if name != "driver" or environment.l4t is None}


def _flat(facts: dict[str, Any]) -> dict[str, Any]:
    """Return the facts, with each group, such as `versions`, merged into the top level."""
    facts = facts | {"variables": facts["variables"] or {}}
    groups = [value for value in facts.values() if isinstance(value, dict)]
    return {name: value for name, value in facts.items() if not isinstance(value, dict)} | {
        name: value for group in groups for name, value in group.items()
    }


def _word(facts: dict[str, Any], name: str) -> str:
    """Return a value as text for human readers; a variable or a package may be unset."""
    value = facts.get(name, "unset")
    return "unknown" if value is None else " ".join(value) if isinstance(value, list) else str(value)


OTHER_SHARE = {"codes": 0.05}
OTHER_SHARE_EXACT = 1e-4
"""A difference of exact answers that proves a different network; larger if rounding may shift a spike."""


class Measurement(Protocol):
    """A record, or one process of it."""

    @property
    def model(self) -> ModelFacts | None: ...  # noqa: D102
    @property
    def check(self) -> Check | None: ...  # noqa: D102


def model_difference(measured: Iterable[Measurement]) -> str | None:
    """Return which measurement has a different model, what changed it and what to do; None if all models are the same.

    Each is compared with the first measurement, and with the first that has the same check inputs.
    """
    firsts: dict[object, Measurement] = {}
    for candidate in measured:
        for inputs in dict.fromkeys((None, _answered(candidate.check))) if candidate.model else ():
            if words := model_differs(firsts.setdefault(inputs, candidate), candidate):
                return f"{words}; measure every variant again with the same model"
    return None


def model_differs(record: Measurement, other: Measurement) -> str | None:
    """Return how the second measurement's model differs from the first's and what changed it, else None.

    If both were checked on the same inputs, their exact answers decide: a code change that does not affect the answers
    does not change the model.
    """
    if record.model is None or other.model is None:
        return None
    words = other_model(record, other) or answers_off(record.check, other.check)
    if words is None:
        return None
    why = _changed_by(record.model, other.model, files_changed([record, other]))
    return f"{words}: {why}" if why else words


def other_model(record: Measurement, other: Measurement) -> str | None:
    """Return which facts show a different model or, if exact answers cannot tell, that the code differs; else None."""
    a, b = record.model, other.model
    if a is None or b is None:
        return None
    words = other_network(a, b)
    if words is None and _model_inputs(a) != _model_inputs(b):
        words = f"different inputs ({_model_inputs(a)} and {_model_inputs(b)})"
    if words is None and a.weights_sha256 != b.weights_sha256:
        words = "different weights"
    is_answered = _answered(record.check) == _answered(other.check) is not None
    return words or ("different code or data" if not is_answered and files_changed([record, other]) else None)


def other_network(model: ModelFacts, other: ModelFacts) -> str | None:
    """Return how `other` is a different network from `model`, ignoring code and the values of weights; else None."""
    if model.options != other.options:
        names = sorted(
            name for name in model.options | other.options if model.options.get(name) != other.options.get(name)
        )
        changes = ", ".join(f"{n} {model.options.get(n)} and {other.options.get(n)}" for n in names)
        return f"different options ({changes})"
    if model.weights != other.weights:
        return f"different weights ({model.weights} and {other.weights})"
    if model.parameters != other.parameters:
        return f"a different number of parameters ({model.parameters} and {other.parameters})"
    return None


def answers_off(a: Check | None, b: Check | None) -> str | None:
    """Return how B's exact answers differ from A's; None if rounding explains it or they are not comparable.

    Each output is judged separately, because a wrong one may be tiny compared with another.
    """
    if a is None or b is None or _answered(a) != _answered(b) or _answered(a) is None:
        return None
    if a.outputs != b.outputs:
        names = [", ".join(sorted({*own.outputs} - {*other.outputs})) or "fewer" for own, other in ((b, a), (a, b))]
        return f"different outputs ({names[0]}, where the other has {names[1]})"
    limit = max(OTHER_SHARE.get(check.rule, OTHER_SHARE_EXACT) for check in (a, b))
    parts = zip(a.outputs, _by_output(a), _by_output(b), strict=True)
    off = [(math.dist(x, y) / size if (size := math.hypot(*x)) else math.inf, name) for name, x, y in parts if x != y]
    share, name = max(off, default=(0.0, ""))
    where = f" in {name.partition(' ')[0]}" if len(a.outputs) > 1 else ""
    return f"its exact answers to the same inputs differ by {share:.2g} of their size{where}" if share > limit else None


def files_changed(measured: Iterable[Measurement]) -> list[str]:
    """Return the files and variables that several of these models read, and that were not always the same.

    A file that only one of them read is no evidence: a process that ended early has read less.
    """
    hashes: dict[str, set[str]] = {}
    for name, digest in chain.from_iterable(result.model.read.items() for result in measured if result.model):
        hashes.setdefault(name, set()).add(digest)
    return sorted(name for name, digests in hashes.items() if len(digests) > 1)


def _answered(check: Check | None) -> tuple[str, str, int] | None:
    """Return the facts that must be equal for exact answers to be comparable; None if there are no answers."""
    if check is None or not (check.inputs_sha256 and check.outputs and check.projections):
        return None
    return check.inputs_sha256, check.reference, len(check.projections) // len(check.outputs)


def _by_output(check: Check) -> Iterator[Sequence[float]]:
    per_output = len(check.projections) // len(check.outputs)
    return (check.projections[place * per_output : (place + 1) * per_output] for place in range(len(check.outputs)))


def _changed_by(model: ModelFacts, other: ModelFacts, names: Sequence[str]) -> str:
    """Return what changed one model into the other, among `names` if any; empty if their facts already say so."""
    if names:
        return f"{', '.join(names)} changed"
    if other_network(model, other) or _model_inputs(model) != _model_inputs(other):
        return ""
    before, after = sorted({*model.read} - {*other.read}), sorted({*other.read} - {*model.read})
    if before and after:
        return f"it was built from {', '.join(after)}, not from {', '.join(before)}"
    if model.weights_sha256 == other.weights_sha256:
        return "neither its files nor its weights changed, so a variable, a file that it reads or its builder did"
    if model.weights.startswith(("random", OF_MODULE)):
        return "they differ each time the model is built: seed every random number generator that `build` uses"
    return f"{model.weights} was replaced"


def _model_inputs(facts: ModelFacts) -> tuple[list[str] | list[int], str]:
    """Return the model's inputs; for a set of images only its name, because a larger batch takes more of the images."""
    images = facts.data.rpartition(" images of ")[2].partition(", fewer than ")[0]
    return [str(spec) for spec in facts.inputs] or facts.input_shape, images
