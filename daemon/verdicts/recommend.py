"""Decides from records which variant of each model to ship, and why the others are excluded; pure."""

import math
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from benchd.daemon.records import Check, Energy, Record, Requests, all_variants
from benchd.daemon.runtimes import PACKAGES, RUNTIMES
from benchd.daemon.verdicts import accuracy, doubts, sameness
from benchd.daemon.verdicts.demand import RATE_SHARE, Demand, answering, shortfall
from benchd.daemon.verdicts.effects import ALPHA, FEWEST_PROCESSES, rounds_effect, welch_effect
from benchd.daemon.verdicts.figures import (
    dropped_half,
    energy_error_share,
    largest_energy_j,
    largest_power_w,
    latency_ms,
    memory_mib,
)
from benchd.daemon.verdicts.results import process_medians_ms
from benchd.daemon.verdicts.statistics import Interval

Objective = Literal["latency", "energy", "throughput"]
MIN_AGREEMENT = 0.98
"""The smallest share of images, excluding ties, for which a shipped variant must give float64's class."""

INT8_DROP = 0.01
"""The largest accuracy that a shipped int8 variant may lose, if there are labels; otherwise its agreement is tested."""

LONGER = "measure longer, for example with --preset standard"
FALLBACKS = {"weak_typing", "provider_fallback"}
CHEATS = {
    "repeated_input_faster": "answers repeated inputs faster",
    "output_changed": "gave different answers while it was timed",
}

OBJECTIVES: tuple[Objective, ...] = ("latency", "energy", "throughput")
Place = tuple[str, str, str]
"""Where a case ran: device_id, `cpu` or `cuda`, and the power mode, which is empty if there is none."""


class Requirements(Struct, frozen=True, kw_only=True):
    """The limits that a variant must meet to ship, and the objective that ranks those that do; None means no limit.

    `min_agreement` defaults to MIN_AGREEMENT of the images that are not ties, or to half of all images if most are
    ties.
    """

    max_latency_ms: float | None = None
    max_energy_j: float | None = None
    max_power_w: float | None = None
    max_memory_bytes: float | None = None
    min_agreement: float | None = None
    max_accuracy_drop: float | None = None
    demand: Demand | None = None
    objective: Objective = "latency"


class Decision(Struct, frozen=True, kw_only=True):
    """The decision on one model, by variant names. `ship` is None if no variant can be chosen.

    `max_latency_ms` is the limit, whose figure the line prints. `rests_on_joules` is set if energy ranks the variants
    or is limited. `candidates` are ranked, best first; `tied` are those that cannot be distinguished from the best;
    `excluded` gives the reason for each other variant. `ratio` is the runner-up's figure divided by the best one's; if
    both have at least three processes, it is the ratio of their geometric means, with its 95 % interval. With fewer
    processes, or with any `unsettled` variant, nothing is shipped: `fastest` is then the best variant, if the intervals
    within processes distinguish it. `unsettled` are variants that are excluded because they ran at a different rate,
    and that could be better than the best. `mixed` is the reason if the variants are not all of the same model: then
    nothing is shipped.
    """

    subject: str
    objective: Objective = "latency"
    max_latency_ms: float | None = None
    rests_on_joules: bool = False
    ship: str | None = None
    fastest: str | None = None
    ratio: float | None = None
    ratio_interval: Interval | None = None
    candidates: dict[str, Record] = {}
    tied: list[str] = []
    excluded: dict[str, str] = {}
    unsettled: list[str] = []
    mixed: str | None = None


class RankedFigure(Struct, frozen=True):
    """The figure that ranks a variant (smaller is better), or the ratio of two such figures, with its interval."""

    point: float
    low: float
    high: float


def decide(records: Sequence[Record], requirements: Requirements) -> list[Decision]:
    """Return one Decision for each model, and for each of its options, batch sizes, scenarios and places.

    If a case has several records in the same place, the newest counts. Batch sizes compete if the objective is
    throughput, which replaces latency in `offline`. Training is ignored, because it cannot be shipped.
    """
    known = [record for record in records if record.case.direction == "inference"]
    demand = requirements.demand
    latest = newest(known)
    candidates = answering(in_time(latest), demand) if demand else latest
    where = place_names(map(place, candidates))
    groups = _groups(candidates, lambda record: _subject(record, requirements.objective, demand) + where[place(record)])
    decisions = [_decide(subject, group, requirements) for subject, group in groups.items()]
    return [
        msgspec.structs.replace(decision, excluded=decision.excluded | _superseded(group, known))
        for decision, group in zip(decisions, groups.values(), strict=True)
    ]


def _groups(records: Iterable[Record], subject: Callable[[Record], str]) -> dict[str, list[Record]]:
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(subject(record), []).append(record)
    return groups


def unable(records: Iterable[Record]) -> dict[str, str]:
    """Return by key why records cannot win: because of their own faults, or variants of different models."""
    known = list(records)
    groups = _groups(newest(known), lambda record: f"{place(record)} {_subject(record, 'latency', None)}")
    reasons = {record.key: why for record in known if (why := disqualified(record))}
    for group in groups.values():
        named = {record.key: record for record in group}
        stale = _stale(named)
        if mixed := _mixed(named, stale):
            reasons = dict.fromkeys(named.keys() - stale.keys(), mixed) | reasons
    return reasons


def _mixed(named: Mapping[str, Record], stale: Container[str]) -> str | None:
    """Return why the measured variants, apart from the `stale` ones, are not all of the same model, else None."""
    return sameness.model_difference(
        record for name, record in named.items() if record.status == "ok" and name not in stale
    )


def place(record: Record) -> Place:
    """Return where the record was measured; only records from the same place compete."""
    return record.device_id, record.environment.device, record.environment.power_mode or ""


def place_names(places: Iterable[Place]) -> dict[Place, str]:
    """Return texts that distinguish these places, such as ` on cuda at 15W`; empty if there is only one place."""
    unnamed = set(places)
    of_many = [len({place[i] for place in unnamed}) > 1 for i in range(3)]
    words = ("on", "on", "at")
    return {place: "".join(f" {words[i]} {place[i]}" for i in range(3) if of_many[i] and place[i]) for place in unnamed}


def newest(records: Iterable[Record]) -> list[Record]:
    """Return the newest record of each case in each place."""
    return list({(place(record), record.case_id): record for record in in_time(records)}.values())


def in_time(records: Iterable[Record]) -> list[Record]:
    """Return the records, oldest first; within a boot by the monotonic clock, because the wall clock may be set."""
    known = list(records)
    ends: dict[str, str] = {}
    for record in known:
        ends[record.boot_id] = max(record.t_wall, ends.get(record.boot_id, ""))
    return sorted(known, key=lambda record: (ends[record.boot_id], record.t_mono_ns, record.t_wall))


def _of_another_scope(named: Mapping[str, Record]) -> dict[str, str]:
    """Return the records whose energy scope differs from the majority's, because such joules are not comparable."""
    scopes = {name: record.energy.scope for name, record in named.items() if record.energy}
    if len(set(scopes.values())) < 2:
        return {}
    usual = Counter(scopes.values()).most_common(1)[0][0]
    return {name: f"energy scope is {scope}, not {usual}" for name, scope in scopes.items() if scope != usual}


def _at_other_rates(named: Mapping[str, Record], objective: Objective) -> dict[str, str]:
    """Return the servers not run at the lowest requested rate; latencies at different rates are not comparable.

    If each server searched for its highest rate, they are ranked by those rates, but not by energy, because a request's
    share of the idle power depends on the rate.
    """
    rates = {name: (_is_by_rate(record), record.requests.rate_hz) for name, record in named.items() if record.requests}
    all_found, least_hz = min(rates.values(), default=(True, 0.0))
    if all_found and objective != "energy":
        return {}
    least = f"not at {least_hz:.4g}: measure it with --rate {least_hz:.4g}"
    return {
        name: f"was measured at {rate_hz:.4g} requests per second, {least}"
        for name, (is_found, rate_hz) in rates.items()
        if (is_found, rate_hz) != (all_found, least_hz)
    }


def _is_by_throughput(record: Record, objective: Objective) -> bool:
    is_of_rates = record.case.scenario == "offline" or _is_by_rate(record)
    return objective == "throughput" or (objective == "latency" and is_of_rates)


def _is_by_rate(record: Record) -> bool:
    """Return whether this is a server ranked by the highest rate that it found, not by the latency at that rate."""
    return record.case.load is not None and record.case.load.rate_hz is None and record.requests is not None


def _subject(record: Record, objective: Objective, demand: Demand | None) -> str:
    """Return a name for the common properties of all competing variants."""
    case = record.case
    parts = [case.model, *(f"{option}={value}" for option, value in sorted(case.options.items()))]
    parts += [] if _is_by_throughput(record, objective) and not demand else [f"b{case.batch_size}"]
    parts += [] if demand else case.usage
    parts += [f"seed={case.seed}"] if case.seed else []
    parts += [f"threads={case.threads}"] if case.threads else []
    return " ".join([*parts, *([f"for {demand}"] if demand else case.demand)])


def _decide(subject: str, group: Sequence[Record], requirements: Requirements) -> Decision:
    objective = requirements.objective
    named = {variant_name(record) if requirements.demand else _name(record, objective): record for record in group}
    excluded = {name: reason for name, record in named.items() if (reason := why_not(record, requirements))}
    stale = _stale(named)
    excluded = stale | excluded
    if mixed := _mixed(named, stale):
        return Decision(subject=subject, excluded=excluded, mixed=mixed)
    if objective == "energy":
        excluded |= _of_another_scope({name: record for name, record in named.items() if name not in excluded})
    elsewhere = _at_other_rates({name: one for name, one in named.items() if name not in excluded}, objective)
    excluded |= elsewhere
    figures = {name: figure(record, objective) for name, record in named.items() if name not in excluded}
    ranked = sorted(figures, key=lambda name: figures[name].point)
    if not ranked:
        return Decision(subject=subject, excluded=excluded)
    best, others = ranked[0], ranked[1:]
    leads = {name: lead(named[best], named[name], objective) for name in others}
    tied = [best, *(name for name in others if not _is_behind(figures[name], figures[best], leads[name], objective))]
    winner = best if len(tied) == 1 else None
    has_enough = len(_process_figures(named[best], objective)) >= FEWEST_PROCESSES
    is_confirmed = not elsewhere and has_enough and all(leads.values())
    first = leads[others[0]] if others else None
    return Decision(
        subject=subject,
        objective=objective,
        max_latency_ms=requirements.max_latency_ms,
        rests_on_joules=objective == "energy" or bool(requirements.max_energy_j or requirements.max_power_w),
        ship=winner if is_confirmed else None,
        fastest=None if is_confirmed else winner,
        ratio=first.point if first else figures[others[0]].point / figures[best].point if others else None,
        ratio_interval=Interval(first.low, first.high) if first else None,
        candidates={name: named[name] for name in ranked},
        tied=tied,
        excluded=excluded,
        unsettled=[*elsewhere],
    )


def lead(best: Record, other: Record, objective: Objective) -> RankedFigure | None:
    """Return the other's figure divided by the best one's, with its 95 % interval; None with fewer than 3 processes.

    Each other variant is judged at 5 %, because shipping one of several equal variants takes false differences from all
    others.
    """
    times = [_process_figures(record, objective) for record in (best, other)]
    if min(map(len, times)) < FEWEST_PROCESSES or min(map(min, times)) <= 0.0:
        return None
    effect = rounds_effect(*times) if _ran_in_rounds(best, other, times) else welch_effect(*times)
    interval = effect.interval(1.0 - ALPHA)
    ratio = RankedFigure(1.0 + effect.share, 1.0 + interval.low, 1.0 + interval.high)
    return _with_bars(ratio, best, other) if objective == "energy" else ratio


def _ran_in_rounds(best: Record, other: Record, times: Sequence[Sequence[float]]) -> bool:
    """Return whether the processes alternated: each one of either record ended before the next of either began."""
    counts = {len(best.processes), len(other.processes), *map(len, times)}
    if best.suite_id != other.suite_id or len(counts) > 1:
        return False
    sides = zip(best.processes, other.processes, strict=True)
    rounds = [[process.window for process in pair if process.window] for pair in sides]
    return all(
        early.end_ns <= late.start_ns for before, after in pairwise(rounds) for early in before for late in after
    )


def _with_bars(lead: RankedFigure, best: Record, other: Record) -> RankedFigure:
    """Return an energy lead, with its interval widened by both error bars, which apply to all processes equally."""
    bars = [energy_error_share(record.energy) or 0.0 for record in (best, other)]
    reach = math.hypot(math.log(lead.high / lead.point), *(math.log1p(bar) for bar in bars))
    return RankedFigure(lead.point, lead.point * math.exp(-reach), lead.point * math.exp(reach))


def _process_figures(record: Record, objective: Objective) -> list[float]:
    if objective == "energy":
        return [process.energy.gross_per_inference_j for process in record.processes if process.energy]
    share = 1.0 / record.case.batch_size if _is_by_throughput(record, objective) else 1.0
    if _is_by_rate(record):
        return [1e3 * share / process.requests.rate_hz for process in record.processes if process.requests]
    return [time_ms * share for time_ms in process_medians_ms([record])]


def _is_behind(other: RankedFigure, best: RankedFigure, lead: RankedFigure | None, objective: Objective) -> bool:
    """Return whether the other is distinguishable from the best one; for joules, also beyond the error bars."""
    is_apart = other.low > best.high
    return is_apart if lead is None else lead.low > 1.0 and (is_apart or objective != "energy")


def _stale(named: Mapping[str, Record]) -> dict[str, str]:
    """Return the variants whose records are not comparable with this model's newest ones, and why."""
    ended = {name: record for name, record in named.items() if record.status == "ok"}
    last = in_time(ended.values())[-1:]
    newest_name = next((name for name, record in ended.items() if record in last), "")
    reasons = ((name, _than(record, newest)) for name, record in ended.items() for newest in last if record != newest)
    return {name: f"measured {why} than {newest_name}; measure it again" for name, why in reasons if why}


def _than(older: Record, newer: Record) -> str | None:
    """Return how the older measurement differs; if models differ within a run, all variants are excluded instead."""
    changed = sameness.environment_difference(older.environment, newer.environment)
    other = sameness.other_model(older, newer) if older.suite_id != newer.suite_id else None
    return f"in {changed}" if changed else f"with {other}" if other else None


def _superseded(group: Sequence[Record], known: Iterable[Record]) -> dict[str, str]:
    """Return older records of these cases with different weights, one per set of weights, and how they differ."""
    last = {(place(record), record.case_id): record for record in group}
    reasons: dict[tuple[str, str], tuple[str, str]] = {}
    for record in known:
        newer = last.get((place(record), record.case_id))
        if newer and record.model and newer.model and record.model.weights_sha256 != newer.model.weights_sha256:
            other = sameness.other_network(record.model, newer.model) or "different weights"
            reasons[record.case_id, record.model.weights_sha256] = (
                f"{variant_name(record)} of {record.t_wall}",
                f"a newer record has {other}",
            )
    return dict(reasons.values())


def _name(record: Record, objective: Objective) -> str:
    name = variant_name(record)
    return f"{name} b{record.case.batch_size}" if _is_by_throughput(record, objective) else name


def variant_name(record: Record) -> str:
    """Return the variant's name with the kernels that ran and any requested ONNX Runtime provider or DLA."""
    label, dla = record.case.variant.label, record.case.dla
    if record.kernels_ran:
        label = label.replace("custom", f"custom ({record.kernels_ran})", 1)
    requested = record.case.provider if dla is None else f"dla {dla}"
    return f"{label} ({requested})" if requested else label


def why_not(record: Record, requirements: Requirements) -> str | None:
    """Return the first reason not to ship the record, else None."""
    reasons = (
        disqualified(record),
        shortfall(record, requirements.demand) if requirements.demand else None,
        _marked(record, _too_slow(record, requirements.max_latency_ms)),
        _above("energy", largest_energy_j(record), requirements.max_energy_j, "J per inference"),
        _above("power", largest_power_w(record), requirements.max_power_w, "W"),
        _above("memory", memory_mib(record), _mib(requirements.max_memory_bytes), "MiB"),
        _disagrees(record, requirements.min_agreement),
        _loses_accuracy(record, requirements.max_accuracy_drop),
        _unmeasured_energy(record, requirements.objective),
    )
    return next((reason for reason in reasons if reason), None)


def _marked(record: Record, reason: str | None) -> str | None:
    """Return a reason that is based on a time, with any doubt about that time appended."""
    doubt = doubts.words(doubts.of(record))
    return f"{reason} ({doubt})" if reason and doubt else reason


def disqualified(record: Record) -> str | None:
    """Return why the record cannot win under any requirements, else None."""
    if record.status != "ok" or record.timing is None:
        return f"{record.status}: {record.reason}"
    reason = impossible(record) or wrong(record) or _unchecked(record) or void(record) or _fallback(record)
    return reason or _marked(record, _missed(record) or _overloaded(record))


def _missed(record: Record) -> str | None:
    """Return why a server does not meet its load's deadline, else None."""
    load, requests = record.case.load, record.requests
    if load is None or load.deadline_ms is None or requests is None or requests.met:
        return None
    goal = f"{load.deadline_ms:.4g} ms at p{load.percentile:g}"
    counts = f"{requests.late} late and {requests.dropped} dropped of {requests.asked}"
    if requests.met is None:
        return f"too few requests to tell whether it meets {goal} ({counts}): {LONGER}"
    return f"misses {goal} at {requests.rate_hz:.4g} requests per second ({counts})"


def _overloaded(record: Record) -> str | None:
    """Return why a server's latencies are only those of the requests that it did not drop, else None."""
    load, requests = record.case.load, record.requests
    if load is None or requests is None or requests.dropped <= (1.0 - load.percentile / 100.0) * requests.asked:
        return None
    return _dropped(requests)


def _dropped(requests: Requests) -> str:
    return f"dropped {requests.dropped} of {requests.asked} requests: lower --rate"


def unfit(record: Record) -> str | None:
    """Return why a successful record's time is not that of the requested case, else None; `compare` uses it too."""
    reason = wrong(record) or _unchecked(record) or _fallback(record) or _disagrees(record, None)
    at_own_rate = "was measured with --find-rate: measure both at the same --rate" if _is_by_rate(record) else None
    return reason or at_own_rate or _overloaded(record)


def impossible(record: Record) -> str | None:
    """Return an impossible value in the record that would break a ratio or a logarithm, else None."""
    if record.timing and record.timing.median_ms <= 0:
        return f"reports an impossible time of {record.timing.median_ms:g} ms"
    if record.requests and dropped_half(record):
        return _marked(record, _dropped(record.requests))
    counts = [record.requests, *(process.requests for process in record.processes)]
    least_hz = min((requests.rate_hz for requests in counts if requests), default=math.inf)
    if least_hz <= 0:
        return f"reports an impossible rate of {least_hz:g} requests per second"
    return f"reports an impossible batch size of {record.case.batch_size}" if record.case.batch_size < 1 else None


def wrong(record: Record) -> str | None:
    """Return why the time is not that of the model (its answers are wrong or vary), else None."""
    if record.check and record.check.verdict == "failed":
        return f"fails its numerical check{_because(record.check.note)}"
    return next((words for flag, words in CHEATS.items() if flag in record.flags), None)


def _unchecked(record: Record) -> str | None:
    return "was not checked" if record.check is None else None


def void(record: Record) -> str | None:
    """Return why the check of a record proves nothing, else None."""
    return f"its check is void{_because(record.check.note)}" if record.check and record.check.void else None


def _because(note: str) -> str:
    return f": {note}" if note else ""


def _fallback(record: Record) -> str | None:
    fallbacks = FALLBACKS & set(record.flags)
    return f"did not run as requested ({', '.join(sorted(fallbacks))})" if fallbacks else None


def _too_slow(record: Record, limit: float | None) -> str | None:
    if limit is not None and latency_ms(record) is None:
        if record.requests and record.requests.dropped:
            counts = f"{record.requests.dropped} of {record.requests.asked} requests were dropped"
            return f"has no p99 to compare with {limit:.4g} ms ({counts}): {LONGER}, or lower --rate"
        return f"has no interval to compare with {limit:.4g} ms: {LONGER}"
    return _above(_limited(record), latency_ms(record), limit, "ms")


def _limited(record: Record) -> str:
    """Return the name of the figure that a limit on the latency applies to."""
    return "p99" if record.timing and record.timing.p99_ms else "latency"


def _above(quantity: str, value: float | None, limit: float | None, unit: str) -> str | None:
    if limit is None:
        return None
    if value is None:
        return f"{quantity} was not measured"
    return f"{quantity} {value:.4g} {unit} is above {limit:.4g} {unit}" if value > limit else None


def _disagrees(record: Record, least: float | None) -> str | None:
    """Return why too few images get float64's class or, if there is a limit, why their share is unknown; else None."""
    check = record.check
    labels_decide = least is None and record.case.variant.precision == "int8" and record.accuracy
    if check is None or check.void or labels_decide:
        return None
    if check.agreeing is None or check.argmax_disagreements is None:
        return None if least is None else f"has no agreement to compare with {least:.4g}: {_no_classes(check)}"
    share = MIN_AGREEMENT if least is None else least
    if check.agreeing < share * check.decided:
        return f"agreement on {check.agreeing} of {check.decided} images is below {share:.4g}"
    if 2 * check.decided >= check.images:
        return None
    same = check.images - check.argmax_disagreements
    if same > check.images / 2 if least is None else same >= check.images * least:
        return None
    below = "" if least is None else f", which is below {least:.4g}"
    return f"it agrees with float64 on the class of {same} of {check.images} images, most of them ties{below}"


def _no_classes(check: Check) -> str:
    if check.argmax_disagreements is None:
        return "its outputs are not class scores"
    return "float64 gives nearly all images the same class"


def _loses_accuracy(record: Record, limit: float | None) -> str | None:
    if limit is None and record.case.variant.precision == "int8" and record.accuracy:
        limit = INT8_DROP
    if limit is None:
        return None
    reason = accuracy.why_dropped(record.accuracy, limit)
    why_none = record.missing.get("accuracy")
    return f"{reason} ({why_none})" if reason and record.accuracy is None and why_none else reason


def _unmeasured_energy(record: Record, objective: Objective) -> str | None:
    if objective != "energy":
        return None
    if record.energy is None:
        return f"energy was not measured ({record.missing.get('energy', 'no reason given')})"
    least_j = min(record.energy.energy_j, record.energy.gross_per_inference_j)
    return f"reports an impossible energy of {least_j:g} J" if least_j <= 0 else None


def _mib(size: float | None) -> float | None:
    return None if size is None else size / 2**20


def figure(record: Record, objective: Objective) -> RankedFigure:
    """Return the figure that ranks the variant: milliseconds or joules per inference."""
    if objective == "energy" and record.energy:
        joules = record.energy.gross_per_inference_j
        error = joules * (energy_error_share(record.energy) or 0.0)
        return RankedFigure(joules, joules - error, joules + error)
    if record.timing is None:
        raise ValueError(f"{record.case_id} was not timed")
    share = 1.0 / record.case.batch_size if _is_by_throughput(record, objective) else 1.0
    if record.requests and _is_by_rate(record):
        rates_hz = [process.requests.rate_hz for process in record.processes if process.requests]
        # the processes' rates are known only to within a step of the search
        low = 1e3 * share / (max(rates_hz) * (1 + RATE_SHARE)) if rates_hz else 0.0
        high = 1e3 * share / (min(rates_hz) * (1 - RATE_SHARE)) if rates_hz else math.inf
        return RankedFigure(1e3 * share / record.requests.rate_hz, low, high)
    timing = record.timing  # without an interval, it ties with all others
    low = 0.0 if timing.low_ms is None else timing.low_ms
    high = math.inf if timing.high_ms is None else timing.high_ms
    return RankedFigure(timing.median_ms * share, low * share, high * share)


def line(decision: Decision) -> str:
    """Return the decision as one line of text."""
    if decision.ship:
        figures = _figures(decision.candidates[decision.ship], decision.max_latency_ms)
        words = [decision.ship, *figures, *(f"({more})" for more in _beside(decision))]
        return f"{decision.subject}: ship: {'  '.join(words)}"
    if decision.fastest:
        figures = _figures(decision.candidates[decision.fastest], decision.max_latency_ms)
        best = "least energy" if decision.objective == "energy" else "fastest"
        verdict = f"{best} here ({of_processes(decision)}): {decision.fastest}; {_more(decision)} confirms it"
        return f"{decision.subject}: {verdict} ({', '.join([*figures, *_beside(decision)])})"
    if not decision.tied:
        return f"{decision.subject}: nothing to ship{_because(decision.mixed or '')}"
    beside = [of_processes(decision), *_flagged(decision, decision.tied)]
    sides = [figure(decision.candidates[name], decision.objective) for name in decision.tied[:2]]
    if not all(math.isfinite(side.high) for side in sides):
        order = f"{decision.tied[0]} leads, and {_ratio(decision, decision.tied[1])}"
        return f"{decision.subject}: inconclusive: {order} ({'; '.join(beside)}); {_more(decision)} decides"
    *others, last = decision.tied
    first = min(decision.tied, key=lambda name: _order(decision.candidates[name]))
    return (
        f"{decision.subject}: inconclusive: {', '.join(others)} and {last} cannot be told apart here: "
        f"{_noise(decision)} ({'; '.join(beside)}); {first} is the simplest"
    )


def _noise(decision: Decision) -> str:
    """Return how much the first two tied variants differ, and the uncertainty of that difference."""
    best, other = (decision.candidates[name] for name in decision.tied[:2])
    ratio = lead(best, other, decision.objective)
    if ratio:
        difference, noise = ratio.point - 1.0, (ratio.high - ratio.low) / 2.0
    else:
        sides = [figure(record, decision.objective) for record in (best, other)]
        difference = sides[1].point / sides[0].point - 1.0
        noise = sum(side.high - side.low for side in sides) / 2.0 / sides[0].point
    who = "they" if len(decision.tied) == 2 else "the first two"
    return f"{who} differ by {_percent(difference)}; the noise is ±{_percent(noise)}"


def _more(decision: Decision) -> str:
    """Return the option that gives the decision enough processes."""
    return f"--processes {max(5, 2 * _fewest(decision) + 1)}"


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %" if share < 1.0 else f"{100 * share:.0f} %"


def _beside(decision: Decision) -> list[str]:
    """Return the lead over the runner-up, with any qualifications."""
    named = list(decision.candidates)[:2]
    runs = {decision.candidates[name].suite_id for name in named}
    changed = sameness.files_changed(decision.candidates[name] for name in named)
    words = [_ratio(decision, named[1])] if len(named) > 1 else []
    words += ["from different runs"] if len(runs) > 1 else []
    words += [f"{', '.join(changed)} changed, but the exact answers did not"] if changed else []
    words += [f"{', '.join(decision.unsettled)} may be better"] if decision.unsettled else []
    return words + _flagged(decision, named)


def _ratio(decision: Decision, runner_up: str) -> str:
    interval, ratio = decision.ratio_interval, decision.ratio or 1.0
    digits = 3 if ratio >= 1.1 else 4
    more = "as much energy" if decision.objective == "energy" else "as long"
    if interval is None:
        return f"{runner_up} takes {ratio:.{digits}g}x {more}, no interval"
    return f"{runner_up} takes {ratio:.{digits}g}x [{interval.low:.{digits}g}, {interval.high:.{digits}g}] {more}"


def _flagged(decision: Decision, names: Sequence[str]) -> list[str]:
    """Return the flags that cast doubt on these variants' times, or on their joules if the decision rests on those."""
    flags = {name: doubts.of(decision.candidates[name], joules=decision.rests_on_joules) for name in names}
    notes = [f"{name} {doubts.words(of_one)}" for name, of_one in flags.items() if of_one]
    return [f"doubtful: {'; '.join(notes)}"] if notes else []


def of_processes(decision: Decision) -> str:
    """Return the smallest number of processes among the variants, in words."""
    fewest = _fewest(decision)
    return f"{fewest} processes" if fewest > 1 else "one process"


def _fewest(decision: Decision) -> int:
    return min(len(_process_figures(record, decision.objective)) for record in decision.candidates.values())


def _order(record: Record) -> tuple[int, int, str]:
    """Return the sort key that breaks ties: the order in which `benchd list` prints the variants."""
    return list(all_variants()).index(record.case.variant), record.case.batch_size, variant_name(record)


def exclusions(decision: Decision) -> list[str]:
    """Return one line for each excluded variant, with the reason."""
    return [f"not {name}: {reason}" for name, reason in decision.excluded.items()]


def untried(decision: Decision) -> list[str]:
    """Return the names of variants that the user's module could also run but that were not requested."""
    record = next(iter(decision.candidates.values()), None)
    if record is None or record.model is None or not record.case.model.startswith("own."):
        return []
    if record.case.model == f"own.{Path(record.model.weights).stem}":  # an ONNX file has a fixed precision
        return []
    tried = {name.partition(" ")[0] for name in [*decision.candidates, *decision.excluded]}
    device, versions = record.environment.device, record.environment.versions
    cannot = {name for name, runtime in RUNTIMES.items() if runtime.device not in (None, device)}
    # packages that are not in any other extra
    apart = {package.name for package in PACKAGES.values() if package.extra == package.name}
    cannot |= {name for name, runtime in RUNTIMES.items() if runtime.package in apart - versions.keys()}
    return [
        variant.name
        for variant in all_variants()
        if variant.kernels == "torch"
        and variant.precision != "int8"
        and variant.label not in tried
        and variant.backend not in cannot
        and variant.runs_nowhere is None
    ]


def _figures(record: Record, max_latency_ms: float | None) -> list[str]:
    latency = f"{record.timing.median_ms:.4g} ms" if record.timing else ""
    if record.requests:
        at_rate = f"{record.requests.rate_hz:.4g} requests per second"
        latency = at_rate if _is_by_rate(record) else f"{latency} at {at_rate}"
    if max_latency_ms is not None:
        latency += f", {_limited(record)} {latency_ms(record):.4g} of {max_latency_ms:.4g} ms"
    share = [f"{record.accuracy.metric} {accuracy.figure(record.accuracy)}"] if record.accuracy else []
    return [latency, _energy(record.energy), f"check ok{agreement(record.check)}", *share]


def agreement(check: Check | None) -> str:
    """Return, after a comma, how many of the images that are not ties get float64's class; empty if all do."""
    if check is None or not check.argmax_disagreements or check.agreeing is None:
        return ""
    if not check.decided:
        return f", all ties ({check.ties - check.tie_disagreements} of {check.ties} images agree)"
    ties = f" ({check.ties - check.tie_disagreements} of {check.ties} ties)" if check.ties else ""
    return f", {check.agreeing} of {check.decided} images agree{ties}"


def _energy(energy: Energy | None) -> str:
    share = energy_error_share(energy)
    if energy is None or share is None:
        return "energy not measured"
    return f"{1e3 * energy.gross_per_inference_j:.4g} mJ ±{100 * share:.2g} %"
