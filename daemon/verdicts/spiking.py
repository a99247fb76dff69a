"""What a spiking net costs over the same net without spikes, each by its best checked variant; pure.

Both have the same weights and ran on one machine, so that the ratio is that of the spikes and not of a variant that
nobody would deploy. A ratio below 1 is a gain of the spiking net.
"""

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from benchd.daemon.records import OptionValue, Record
from benchd.daemon.verdicts import one_environment
from benchd.daemon.verdicts.recommend import Requirements, figure, lead, newest, place, variant_name, why_not
from benchd.daemon.verdicts.statistics import Interval
from benchd.models import catalog

Quantity = Literal["latency", "energy"]
_UNITS: dict[Quantity, tuple[float, str]] = {"latency": (1.0, "ms"), "energy": (1e3, "mJ")}


class Ratio(Struct, frozen=True):
    """The best spiking variant's figure over that of the best ANN's, in ms or J per inference.

    `interval` is that of 95 %, None with fewer than three processes on a side.
    """

    spiking_variant: str
    ann_variant: str
    spiking: float
    ann: float
    ratio: float
    interval: Interval | None


class Comparison(Struct, frozen=True):
    """The ratios of one spiking net on one machine by quantity, or the reason why there is none."""

    subject: str
    ratios: dict[Quantity, Ratio | str]

    @property
    def line(self) -> str:
        """Return the comparison in one line."""
        return f"{self.subject}: {'; '.join(f'{name} {_words(name, one)}' for name, one in self.ratios.items())}"


def comparisons(records: Sequence[Record]) -> list[Comparison]:
    """Return a comparison for each spiking net whose ANN was measured too: at batch 1, for each T and machine."""
    nets: dict[tuple[object, ...], list[Record]] = {}
    for record in filter(_is_usual, newest(records)):
        nets.setdefault((record.case.model, _setup(record), _time_steps(record)), []).append(record)
    pairs = [(nets.get((_ann(net[0]), _setup(net[0]), None)), net) for net in nets.values()]
    return [_comparison(spiking, anns) for anns, spiking in pairs if anns]


def _is_usual(record: Record) -> bool:
    case = record.case
    is_alone = case.streams == 1 and not case.beside
    return (case.direction, case.scenario, case.batch_size) == ("inference", "single_stream", 1) and is_alone


def _ann(record: Record) -> str:
    entry = catalog.find(record.case.model)
    return entry.ann if entry else ""


def _time_steps(record: Record) -> OptionValue | None:
    return record.model.options.get("time_steps") if record.model else None


def _setup(record: Record) -> tuple[object, ...]:
    """Return what a spiking net shares with its ANN: the machine, the weights, and the level of its quantisers."""
    model = record.model
    return *place(record), record.case.threads, model and (model.weights_sha256, model.options.get("level"))


def _comparison(spiking: Sequence[Record], anns: Sequence[Record]) -> Comparison:
    subject = f"SNN/ANN b1 T {_time_steps(spiking[0])}: {spiking[0].case.model} over {_ann(spiking[0])}"
    return Comparison(subject, {quantity: _ratio(spiking, anns, quantity) for quantity in _UNITS})


def _ratio(spiking: Sequence[Record], anns: Sequence[Record], quantity: Quantity) -> Ratio | str:
    """Return the ratio of the best ones, or why there is none."""
    if quantity == "energy" and not all(any(one.energy for one in side) for side in (spiking, anns)):
        return "not measured"
    snn, ann = (_best(side, quantity) for side in (spiking, anns))
    if snn is None or ann is None:
        return f"not known: no checked variant of {(spiking if snn is None else anns)[0].case.model}"
    if differs := one_environment.difference(snn.environment, ann.environment):
        return f"not known: measured in {differs}"
    if quantity == "energy" and snn.energy and ann.energy and snn.energy.scope != ann.energy.scope:
        return f"not known: its scope is {snn.energy.scope} and {ann.energy.scope}"
    ours, theirs, over = figure(snn, quantity).point, figure(ann, quantity).point, lead(ann, snn, quantity)
    interval = Interval(1.0 + over.low, 1.0 + over.high) if over else None
    return Ratio(variant_name(snn), variant_name(ann), ours, theirs, ours / theirs, interval)


def _best(side: Sequence[Record], quantity: Quantity) -> Record | None:
    fit = [record for record in side if why_not(record, Requirements(objective=quantity)) is None]
    return min(fit, key=lambda record: figure(record, quantity).point, default=None)


def _words(quantity: Quantity, found: Ratio | str) -> str:
    if isinstance(found, str):
        return found
    scale, unit = _UNITS[quantity]
    interval = "without interval"
    if found.interval:
        low, high = found.interval.low, found.interval.high
        interval = f"[{low:.3g}, {high:.3g}]{', not told apart' if low <= 1.0 <= high else ''}"
    sides = ((found.spiking_variant, found.spiking), (found.ann_variant, found.ann))
    of = " over ".join(f"{name} {scale * value:.4g} {unit}" for name, value in sides)
    return f"{found.ratio:.3g}x {interval} ({of})"
