"""Compares the cost of a spiking net with that of the same net without spikes, each in its best checked variant; pure.

Both have the same weights and ran on the same machine. Only variants that are ranked in the decision on their net are
used, so that the ratio reflects the spikes and not a variant that nobody would deploy. A ratio below 1 favours the
spiking net.
"""

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from benchd.daemon.records import OptionValue, Record
from benchd.daemon.verdicts import doubts, sameness
from benchd.daemon.verdicts.recommend import Requirements, decide, figure, lead, newest, place, variant_name
from benchd.daemon.verdicts.statistics import Interval
from benchd.models import catalog

Quantity = Literal["latency", "energy"]
Ranked = dict[Quantity, set[str]]
_UNITS: dict[Quantity, tuple[float, str]] = {"latency": (1.0, "ms"), "energy": (1e3, "mJ")}


class Ratio(Struct, frozen=True):
    """The best spiking variant's figure divided by the best ANN variant's, each in ms or J per inference.

    `interval` is the 95 % interval, None with fewer than three processes on a side. `mark` says whether other programs
    disturbed them.
    """

    spiking_variant: str
    ann_variant: str
    spiking: float
    ann: float
    ratio: float
    interval: Interval | None
    mark: str = ""


class SpikingComparison(Struct, frozen=True):
    """The ratios of one spiking net on one machine, by quantity: each a Ratio or the reason why it is unknown."""

    subject: str
    ratios: dict[Quantity, Ratio | str]

    @property
    def line(self) -> str:
        """Return the comparison as one line of text."""
        return f"{self.subject}: {'; '.join(f'{name} {_words(name, ratio)}' for name, ratio in self.ratios.items())}"


def comparisons(records: Sequence[Record]) -> list[SpikingComparison]:
    """Return a comparison for each spiking net whose ANN was also measured: at batch 1, for each T and machine.

    Records without a model, whose weights and T are unknown, are left out, and so are nets that are not ranked.
    """
    usual = [record for record in newest(records) if _is_usual(record)]
    nets: dict[tuple[object, ...], list[Record]] = {}
    for record in usual:
        nets.setdefault((record.case.model, _setup(record), _time_steps(record)), []).append(record)
    pairs = [(net, anns) for net in nets.values() if (anns := nets.get((_ann(net[0]), _setup(net[0]), None)))]
    paired = {side[0].case.model for pair in pairs for side in pair}
    ranked = _ranked([record for record in usual if record.case.model in paired])
    return [
        _comparison(*pair, ranked)
        for pair in pairs
        if any(_best(side, quantity, ranked) for side in pair for quantity in ranked)
    ]


def _is_usual(record: Record) -> bool:
    case = record.case
    is_alone = case.streams == 1 and not case.beside
    is_at_batch_1 = (case.direction, case.scenario, case.batch_size) == ("inference", "single_stream", 1)
    return record.model is not None and is_at_batch_1 and is_alone


def _ranked(records: Sequence[Record]) -> Ranked:
    """Return the keys of the ranked records in the decisions on these records, by objective."""
    return {
        quantity: {
            record.key
            for decision in decide(records, Requirements(objective=quantity))
            for record in decision.candidates.values()
        }
        for quantity in _UNITS
    }


def _ann(record: Record) -> str:
    entry = catalog.find(record.case.model)
    return entry.ann if entry else ""


def _time_steps(record: Record) -> OptionValue | None:
    return record.model.options.get("time_steps") if record.model else None


def _setup(record: Record) -> tuple[object, ...]:
    """Return the properties that a spiking net shares with its ANN: machine, weights, and the quantisers' level."""
    model = record.model
    return *place(record), record.case.threads, model and (model.weights_sha256, model.options.get("level"))


def _comparison(spiking: Sequence[Record], anns: Sequence[Record], ranked: Ranked) -> SpikingComparison:
    subject = f"SNN/ANN b1 T {_time_steps(spiking[0])}: {spiking[0].case.model} over {_ann(spiking[0])}"
    return SpikingComparison(subject, {quantity: _ratio(spiking, anns, quantity, ranked) for quantity in _UNITS})


def _ratio(spiking: Sequence[Record], anns: Sequence[Record], quantity: Quantity, ranked: Ranked) -> Ratio | str:
    if quantity == "energy" and not all(any(record.energy for record in side) for side in (spiking, anns)):
        return "not measured"
    snn, ann = (_best(side, quantity, ranked) for side in (spiking, anns))
    if snn is None or ann is None:
        return f"not known: no checked, comparable variant of {(spiking if snn is None else anns)[0].case.model}"
    if differs := _difference(snn, ann, quantity):
        return f"not known: {differs}"
    snn_value, ann_value, over = figure(snn, quantity).point, figure(ann, quantity).point, lead(ann, snn, quantity)
    ratio, interval = (over.point, Interval(over.low, over.high)) if over else (snn_value / ann_value, None)
    return Ratio(variant_name(snn), variant_name(ann), snn_value, ann_value, ratio, interval, doubts.mark([snn, ann]))


def _best(side: Sequence[Record], quantity: Quantity, ranked: Ranked) -> Record | None:
    fit = [record for record in side if record.key in ranked[quantity]]
    return min(fit, key=lambda record: figure(record, quantity).point, default=None)


def _difference(snn: Record, ann: Record, quantity: Quantity) -> str | None:
    """Return why the two figures differ in machine, code or energy scope, else None."""
    if differs := sameness.environment_difference(snn.environment, ann.environment):
        return f"measured in {differs}"
    if sameness.files_changed([snn, ann]):
        return f"{variant_name(snn)} and {variant_name(ann)} were measured with different code; measure both again"
    if quantity == "energy" and snn.energy and ann.energy and snn.energy.scope != ann.energy.scope:
        return f"its scope is {snn.energy.scope} and {ann.energy.scope}"
    return None


def _words(quantity: Quantity, ratio: Ratio | str) -> str:
    if isinstance(ratio, str):
        return ratio
    scale, unit = _UNITS[quantity]
    interval = "no interval"
    if ratio.interval:
        low, high = ratio.interval.low, ratio.interval.high
        interval = f"[{low:.3g}, {high:.3g}]{', cannot be told apart' if low <= 1.0 <= high else ''}"
    sides = ((ratio.spiking_variant, ratio.spiking), (ratio.ann_variant, ratio.ann))
    quotient = " over ".join(f"{name} {scale * value:.4g} {unit}" for name, value in sides)
    return f"{ratio.ratio:.3g}x {interval} ({quotient}){ratio.mark}"
