"""Command line options for a case, from the annotated fields of a Suite: name, type, help, unit and bounds."""

import inspect
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
import typer

from benchd.daemon.commands import arguments, completion
from benchd.daemon.config import Suite
from benchd.daemon.errors import UsageError
from benchd.daemon.measuring import plan
from benchd.daemon.records import Inputs, Option

PARSERS: dict[str, Callable[[str], object]] = {
    "weights": plan.named_weights,
    "labels": lambda text: str(Path(text).resolve()),
    "accuracy": arguments.image_count,
    "calibration": arguments.calibrated_with,
}
"""Parsers for fields whose value is neither text, numbers nor one of a few words."""

UNITS: dict[str, Mapping[str, float]] = {"ms": arguments.LATENCY_UNITS, "Hz": arguments.RATE_UNITS}
REPEATED = ("inputs",)  # options that must be repeated, because their values may contain commas
Holds = Literal["one", "list", "dict"]
HOLDS: dict[Any, Holds] = {list: "list", dict: "dict"}


@dataclass(frozen=True)
class OfferedField:
    """A field that a command offers, with its own help if given, and limited to one value if `single`."""

    name: str
    help: str = ""
    single: bool = False


@dataclass(frozen=True)
class _Field:
    """An annotated field of a suite: its annotations, and the type of a value."""

    name: str
    option: Option
    item: Any
    holds: Holds
    bounds: msgspec.Meta | None

    @property
    def flag(self) -> str:
        return self.option.flag or f"--{self.name.replace('_', '-')}"

    @property
    def is_number(self) -> bool:
        """Return whether values are plain numbers, which typer parses."""
        return self.item in (int, float) and not self.option.unit and self.name not in PARSERS

    def value(self, given: Any) -> Any:
        """Return the value of a text, or of a number that typer has already parsed."""
        if self.name in PARSERS:
            return PARSERS[self.name](given)
        if self.option.unit:
            return arguments.quantity(self.flag, given, UNITS[self.option.unit])
        if get_origin(self.item) is Literal:
            return arguments.choices(self.flag.removeprefix("--"), [given], get_args(self.item))[0]
        return given

    def read(self, given: Any, *, single: bool) -> Any:
        """Return the field's value; raise UsageError with the option's name."""
        if self.holds == "dict":
            return arguments.options(given)
        if self.holds == "one":
            return self.value(given)
        if single:
            return [self.value(given)]
        if self.item is int:
            return arguments.whole_numbers(self.flag, given)
        return given if self.name in REPEATED else [self.value(part) for part in arguments.names(self.flag, given)]


@cache
def fields() -> Mapping[str, _Field]:
    """Return a suite's fields that are options, by name: workload options first, then inputs."""
    hints = get_type_hints(Suite, include_extras=True)
    names = sorted(hints, key=Inputs.__struct_fields__.__contains__)
    return {name: field for name in names if (field := _field(name, hints[name]))}


def _field(name: str, hint: Any) -> _Field | None:
    extras = getattr(hint, "__metadata__", ())
    option = next((extra for extra in extras if isinstance(extra, Option)), None)
    if option is None:
        return None
    kind = _plain(hint)
    holds = HOLDS.get(get_origin(kind), "one")
    return _Field(name, option, _plain(get_args(kind)[0]) if holds == "list" else kind, holds, _bounds(hint))


def _plain(hint: Any) -> Any:
    """Return the type without its bounds and without None."""
    if get_origin(hint) is Annotated:
        return _plain(get_args(hint)[0])
    if get_origin(hint) in (Union, types.UnionType):
        return _plain(next(part for part in get_args(hint) if part is not type(None)))
    return hint


def _bounds(hint: Any) -> msgspec.Meta | None:
    """Return the bounds in a type, or None."""
    known = (extra for extra in getattr(hint, "__metadata__", ()) if isinstance(extra, msgspec.Meta))
    return next(known, None) or next(filter(None, map(_bounds, get_args(hint))), None)


def of_suite(*chosen: OfferedField | str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command options for these fields, whose values it receives in its parameter `given`, if set."""
    offered = {
        field.name: field for field in (OfferedField(entry) if isinstance(entry, str) else entry for entry in chosen)
    }

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        def run(**values: Any) -> None:
            texts = {name: values.pop(name, None) for name in offered}
            return command(given=_given(texts, offered), **values)

        own = inspect.signature(command).parameters.values()
        ours = [_parameter(field) for field in offered.values()]
        parameters = [
            parameter.replace(kind=parameter.KEYWORD_ONLY)
            for own_parameter in own
            for parameter in (ours if own_parameter.name == "given" else [own_parameter])
        ]
        run.__doc__, run.__name__ = command.__doc__, command.__name__
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        setattr(run, "__signature__", inspect.Signature(parameters))  # noqa: B010 - of no attribute that mypy knows
        return run

    return decorate


def _parameter(chosen: OfferedField) -> inspect.Parameter:
    field = fields()[chosen.name]
    metavar, bounds = field.option.metavar, msgspec.Meta()
    kind: Any = str | None
    if field.item is bool:
        kind = bool
    elif field.holds == "dict" or field.name in REPEATED:
        kind = list[str] | None
    elif field.is_number and (chosen.single or field.holds == "one"):
        kind, metavar = field.item | None, None if field.item is int else metavar
        bounds = field.bounds or bounds
    elif chosen.single and metavar:
        metavar = metavar.partition(",")[0]
    option = typer.Option(
        field.flag,
        help=chosen.help or field.option.help,
        metavar=metavar,
        min=bounds.ge,
        max=bounds.le,
        autocompletion=completion.OF_FIELDS.get(field.name),
    )
    default = False if field.item is bool else None
    return inspect.Parameter(
        chosen.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]
    )


def _given(texts: Mapping[str, Any], offered: Mapping[str, OfferedField]) -> dict[str, Any]:
    """Return the fields whose options were set, with their values."""
    present = {name: text for name, text in texts.items() if text is not None and text is not False and text != []}
    return {name: fields()[name].read(text, single=offered[name].single) for name, text in present.items()}


def suite(given: Mapping[str, object], base: Suite | None = None) -> Suite:
    """Return a suite with these fields and the rest of `base`; raise UsageError for a value out of bounds."""
    others = msgspec.structs.asdict(base) if base else {}
    try:
        return msgspec.convert(others | dict(given), Suite)
    except msgspec.ValidationError as error:
        stated, _, place = str(error).partition(" - at `$.")
        field = fields().get(place.rstrip("`").partition("[")[0])
        raise UsageError(f"{field.flag} {given[field.name]}: {stated}" if field else str(error)) from error
