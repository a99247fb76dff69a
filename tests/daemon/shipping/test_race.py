"""The race's loop over a script of processes: who leaves, who is confirmed, when it stops, and how it goes on."""

import io
import math
import random
import re
from dataclasses import dataclass, field

import msgspec
import pytest
from records_made import ENERGY, PASSED, blocks, timing
from sessions_made import session

from benchd.daemon.measuring.plan import PlannedCase
from benchd.daemon.measuring.protocol import Golden, Outcome, Pack, PackedFiles, unmeasured
from benchd.daemon.measuring.supervisor import NOT_RUN, Supervisor
from benchd.daemon.records import Case, Inputs, Memory, ModelFacts, ProcessResult, Variant
from benchd.daemon.shipping import folder as shipping
from benchd.daemon.shipping import race
from benchd.daemon.shipping.manifest import ShipLimits
from benchd.daemon.shipping.race import Race
from benchd.daemon.shipping.racing import AGAINST_FAR, FEW, LOOKS, PROMISED, PROMISED_AT_MOST

MODEL = ModelFacts(options={}, input_shape=[3], parameters=1, weights="w", weights_sha256="w", data="random")
PACKED = PackedFiles(inputs=[], outputs=[], golden=Golden(1, 1, {}), preprocessing="none", provider="CPU")
REFUSED = unmeasured("failed", f"{NOT_RUN}: Resource temporarily unavailable")
FAILED = msgspec.structs.replace(PASSED, passed=False, note="wrong")


@dataclass
class Script(Supervisor):
    """Processes that take their times from a script: by variant, in ms, drawn around it by one in a thousand.

    A list has the time of each process, the last of all further ones; so has `energies_mj` the energy.
    """

    times_ms: dict[str, float | list[float]] = field(default_factory=dict)
    energies_mj: list[float | None] = field(default_factory=lambda: [None])
    failing: tuple[str, ...] = ()
    not_running: tuple[str, ...] = ()
    interrupt_after: float = math.inf
    starting_until: float = math.inf
    failing_later: tuple[str, ...] = ()
    blocks_ms: dict[str, list[float]] = field(default_factory=dict)
    edited_after: float = math.inf
    data_edited_after: float = math.inf
    flags: list[str] = field(default_factory=list)
    ran: list[str] = field(default_factory=list)
    interleaved: list[str] = field(default_factory=list)
    announced: list[tuple[int, int]] = field(default_factory=list)

    def can_interleave(self, entries):
        return True

    def _abreast(self, turns):
        self.interleaved += [turn.planned.case.variant.label for turn in turns if turn.is_interleaved]
        yield from ((turn, self.process(turn)) for turn in turns)

    def process(self, turn):
        variant = turn.planned.case.variant.label
        self.ran.append(variant)
        self.announced.append((turn.index, turn.planned.limits.processes))
        if len(self.ran) > self.interrupt_after:
            self.session.interrupted = True
            return Outcome(process=ProcessResult(status="aborted"))
        if len(self.ran) > self.starting_until:
            return REFUSED
        if variant in self.not_running:
            return Outcome(process=ProcessResult(status="unsupported", reason="pip install onnx onnxscript"))
        number, times_ms = self.ran.count(variant) - 1, self.times_ms[variant]
        given_ms = of_process(times_ms, number) if isinstance(times_ms, list) else times_ms
        time_ms, energy_mj = given_ms * math.exp(0.001 * random.gauss(0.0, 1.0)), of_process(self.energies_mj, number)
        energy = energy_mj and msgspec.structs.replace(ENERGY, energy_err_j=0.0, gross_per_inference_j=energy_mj / 1e3)
        result = ProcessResult(status="ok", timing=timing(time_ms), memory=Memory(rss_peak_bytes=2**28), energy=energy)
        if variant in self.blocks_ms:
            result.blocks = in_turns(self.blocks_ms[variant])
        fails = variant in self.failing or (variant in self.failing_later and ".confirm." in turn.name)
        code = "edited" if len(self.ran) > self.edited_after else "as it was"
        model = msgspec.structs.replace(MODEL, read={"benchd": code})
        packed = PACKED if isinstance(turn.recipe, Pack) else None
        projections = [1.7] if len(self.ran) > self.data_edited_after else [1.0]
        answers = {"outputs": ["scores 10"], "projections": projections, "inputs_sha256": "i"}
        check = msgspec.structs.replace(FAILED if fails else PASSED, **answers)
        return Outcome(process=result, check=check, model=model, packed=packed, flags=[*self.flags])


def in_turns(medians_ms):
    bounds_ns = list(range(len(medians_ms) + 1))
    return blocks(medians_ms, bounds_ns=bounds_ns, starts_ns=bounds_ns[:-1])


def of_process(figures, number):
    return figures[min(number, len(figures) - 1)]


def course(folder, times_ms, *, minutes=60.0, asked=None, labels=None, data=None, **script):
    """Return a race of these variants in the folder, and its script."""
    cases = [Case(model="square", variant=Variant.parse(name)) for name in times_ms]
    entries = [
        PlannedCase(case, "ship", race.LIMITS, True, None, inputs=Inputs(labels=labels, data=data)) for case in cases
    ]
    supervisor = Script(session(folder), entries, times_ms=times_ms, **script)
    return Race(supervisor, asked or ShipLimits(), minutes, io.StringIO()), supervisor


def test_processes_go_where_the_answer_is_open(tmp_path):
    racing, script = course(tmp_path, {"eager": 10.0, "compile": 4.0, "onnxruntime": 4.2})
    outcome = racing.run()
    assert (outcome.winner, outcome.runner_up) == ("compile", "onnxruntime")
    assert outcome.verdict.answer == "slower"
    assert script.ran.count("eager") == 1
    assert len(racing.named("compile").confirmed) == FEW - 1  # all behind the first round, when two were left


def test_the_last_two_measure_in_turns_and_a_winner_alone_does_not(tmp_path):
    racing, script = course(tmp_path, {"eager": 10.0, "compile": 4.0, "onnxruntime": 4.2})
    racing.run()
    assert (script.interleaved.count("compile"), script.interleaved.count("onnxruntime")) == (FEW - 1, FEW - 1)
    assert "eager" not in script.interleaved
    _, alone = course(tmp_path / "far", {"eager": 10.0, "compile": 4.0})
    Race(alone, ShipLimits(), 60.0, io.StringIO()).run()
    assert (alone.interleaved.count("compile"), alone.interleaved.count("eager")) == (AGAINST_FAR, AGAINST_FAR)


def test_two_that_measured_in_turns_are_compared_block_by_block(tmp_path):
    blocks_ms = {"compile": [4.0, 4.0, 90.0], "onnxruntime": [6.0, 6.0, 6.0]}
    racing, _ = course(tmp_path, {"compile": 4.0, "onnxruntime": 4.2}, blocks_ms=blocks_ms)
    assert racing.run().verdict.effect == pytest.approx(0.5)


def test_a_runner_up_that_is_far_behind_needs_few_processes(tmp_path):
    racing, script = course(tmp_path, {"eager": 10.0, "compile": 4.0})
    assert racing.run().winner == "compile"
    assert (script.ran.count("compile"), script.ran.count("eager")) == (1 + PROMISED, 1 + AGAINST_FAR)


def test_what_fails_its_check_leaves_and_is_no_runner_up(tmp_path):
    racing, script = course(tmp_path, {"eager": 10.0, "compile": 4.0}, failing=("compile",))
    outcome = racing.run()
    assert (outcome.winner, outcome.runner_up, script.ran.count("compile")) == ("eager", None, 1)
    assert "numerical check" in racing.named("compile").left


def test_of_those_that_are_the_same_the_simplest_wins(tmp_path):
    racing, _ = course(tmp_path, {"onnxruntime": 4.0, "eager": 4.0}, asked=ShipLimits(min_effect=0.05))
    outcome = racing.run()
    assert (outcome.winner, sorted(outcome.tied)) == ("eager", ["eager", "onnxruntime"])


def test_limits_that_nothing_meets_name_the_nearest_and_by_how_much(tmp_path):
    racing, _ = course(tmp_path, {"eager": 10.0, "compile": 4.0}, asked=ShipLimits(max_latency_ms=3.0))
    outcome = racing.run()
    assert outcome.winner is None
    assert "compile comes closest" in outcome.reason
    assert "above 3 ms, by 3" in outcome.reason


def test_each_round_says_the_figure_that_a_limit_judges_and_how_many_processes_miss_it(tmp_path):
    _, script = course(tmp_path, {"eager": [28.0, 36.0] * 9, "compile": [20.0] * 18})
    out = io.StringIO()
    Race(script, ShipLimits(max_latency_ms=33.0), 60.0, out).run()
    lines = out.getvalue().splitlines()
    second = lines.index(next(line for line in lines if line.startswith("round 2: ")))
    latency = re.fullmatch(
        r"  latency: (?=.*eager 2\d\S* to 3\d\S* ms in 2 processes, 1 above 33 ms).*", lines[second + 1]
    )
    assert latency
    assert "ms in 2 processes, none above 33 ms" in latency[0]


@pytest.mark.parametrize(("flags", "words"), [(["busy_machine"], " (busy machine)"), ([], "")])
def test_beside_each_ratio_and_reason_of_a_busy_machine_it_says_so(tmp_path, flags, words):
    times_ms = {"eager": 10.0, "compile": 4.0, "onnxruntime": 4.2}
    for limits in (ShipLimits(), ShipLimits(max_latency_ms=3.0)):
        out, (_, script) = io.StringIO(), course(tmp_path / f"{limits.max_latency_ms}", times_ms, flags=flags)
        outcome = Race(script, limits, 60.0, out).run()
        of_figures = [line for line in out.getvalue().splitlines() if " ms" in line or "x the time" in line]
        assert of_figures
        assert all(line.endswith(words) and ("busy" in line) == bool(words) for line in of_figures)
        assert outcome.flags == flags if outcome.winner else outcome.reason.endswith(words)


def test_what_lies_at_a_limit_is_not_told_to_take_more_time(tmp_path):
    racing, script = course(tmp_path, {"eager": 4.0}, asked=ShipLimits(max_memory_bytes=2**28))
    reason = racing.run().reason
    assert len(script.ran) == LOOKS[-1]
    assert re.search(
        r"eager: memory 256 MiB \(256 .* in \d+ processes, none above 256 MiB\) may or may not stay within 256 MiB",
        reason,
    )
    assert "more time will not help: change the limit" in reason
    assert "more rounds" not in reason


@pytest.mark.parametrize(
    ("energies_mj", "winner"), [([40.0] * 3 + [None] + [40.0], "eager"), ([40.0] * 2 + [None], None)]
)
def test_one_process_without_energy_excludes_nobody_and_most_without_it_meet_no_limit(energies_mj, winner, tmp_path):
    racing, _ = course(tmp_path, {"eager": 10.0}, asked=ShipLimits(max_energy_j=0.05), energies_mj=energies_mj)
    assert racing.run().winner == winner


@pytest.mark.parametrize("later_ms", [[36.0], [36.0, 28.0] * 9], ids=["slower", "between two levels"])
def test_a_winner_whose_promise_may_break_a_limit_does_not_ship(later_ms, tmp_path):
    racing, script = course(tmp_path, {"eager": [28.0] * 3 + later_ms}, asked=ShipLimits(max_latency_ms=33.0))
    outcome = racing.run()
    assert (outcome.winner, outcome.is_open) == (None, False)
    assert outcome.reason.startswith("nothing meets the limits; eager comes closest: latency 3")
    assert racing.named("eager").left.startswith("won the race, but in fresh processes it ")
    if len(later_ms) > 1:
        assert racing.named("eager").left.endswith("above 33 ms) may or may not stay within 33 ms")
        assert len(script.ran) == 1 + PROMISED_AT_MOST


def test_a_winner_whose_interval_is_wider_than_its_time_does_not_ship(tmp_path):
    """Not even behind as many processes as may confirm; the next start measures all of them again."""
    times_ms = {"eager": [4.0] + [2.0, 8.0] * 9}
    racing, script = course(tmp_path, times_ms, flags=["busy_machine"])
    outcome = racing.run()
    assert (outcome.winner, len(script.ran)) == (None, 1 + PROMISED_AT_MOST)
    assert script.announced == [(0, 1), *((number, 1 + PROMISED_AT_MOST) for number in range(1, 19))]
    assert re.fullmatch(
        r"eager took [12]\.\d+ to [78]\.\d+ ms in 18 fresh processes \(jumps between two speeds\), and an "
        r"interval wider than the time itself is no promise: stop other programs, or give fewer --threads; the same "
        r"command starts over \(busy machine\)",
        outcome.reason,
    )
    assert not course(tmp_path, times_ms)[0].named("eager").raced


def test_a_winner_far_within_its_limit_ships_however_far_apart_its_times_are(tmp_path):
    racing, script = course(tmp_path, {"eager": [0.4] + [0.3, 1.9] * 9}, asked=ShipLimits(max_latency_ms=50.0))
    outcome = racing.run()
    assert (outcome.winner, len(script.ran), outcome.flags[-1]) == ("eager", 1 + PROMISED, "wide_interval")


def test_when_the_time_is_up_it_says_what_is_open_and_how_long_that_takes(tmp_path):
    racing, script = course(tmp_path, {"eager": 4.0, "compile": 4.0}, minutes=1e-9)
    outcome = racing.run()
    assert (outcome.winner, outcome.is_open, len(script.ran)) == (None, True, 2)
    assert re.search(
        r"\w+ and \w+ cannot be told apart yet; about \d+ more rounds \(\S+ minutes\) would settle it", outcome.reason
    )


@pytest.mark.parametrize("after", [0, 4, 16])
def test_an_interrupted_race_goes_on_and_measures_nothing_twice(tmp_path, after):
    times_ms = {"eager": 10.0, "compile": 4.0, "onnxruntime": 4.2}
    random.seed(after)
    first, before = course(tmp_path, times_ms, interrupt_after=after)
    assert first.run().is_open
    second, behind = course(tmp_path, times_ms)
    assert second.run().winner == "compile"
    random.seed(after)
    whole, once = course(tmp_path / "whole", times_ms)
    assert whole.run().winner == "compile"
    assert len(before.ran) - 1 + len(behind.ran) == len(once.ran)


def test_what_could_not_run_is_tried_again_by_the_same_command(tmp_path):
    first, _ = course(tmp_path, {"onnxruntime": 4.0}, not_running=("onnxruntime",))
    assert "pip install onnx onnxscript" in first.run().reason
    again, script = course(tmp_path, {"onnxruntime": 4.0})
    assert (again.run().winner, len(script.ran)) == ("onnxruntime", 1 + PROMISED)
    behind, script = course(tmp_path, {"onnxruntime": 4.0})
    assert (behind.run().winner, len(script.ran)) == ("onnxruntime", 0)


def test_a_line_that_a_crash_truncated_is_measured_again(tmp_path):
    times_ms = {"eager": 10.0, "compile": 4.0}
    course(tmp_path, times_ms, interrupt_after=2)[0].run()
    log = tmp_path / race.LOG
    log.write_bytes(log.read_bytes()[:-20])
    racing, script = course(tmp_path, times_ms)
    assert sum(len(candidate.raced) for candidate in racing.candidates) == 1
    assert racing.run().winner == "compile"
    assert course(tmp_path, times_ms)[0].measured_s > 0.0
    assert len(script.ran) == 1 + PROMISED + AGAINST_FAR


def test_a_race_of_another_plan_begins_anew(tmp_path):
    course(tmp_path, {"eager": 10.0, "compile": 4.0}, interrupt_after=2)[0].run()
    racing, _ = course(tmp_path, {"eager": 10.0, "onnxruntime": 4.0})
    assert not any(candidate.raced for candidate in racing.candidates)


@pytest.mark.parametrize("edited", ["labels.txt", "images/0/a.png"])
def test_a_race_with_other_labels_or_images_begins_anew(tmp_path, edited):
    for path in (tmp_path / "labels.txt", tmp_path / "images/0/a.png"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("1\n")
    given = {"labels": str(tmp_path / "labels.txt"), "data": f"imagefolder:{tmp_path / 'images'}"}
    times_ms = {"eager": 10.0, "compile": 4.0}
    course(tmp_path, times_ms, interrupt_after=2, **given)[0].run()
    assert any(candidate.raced for candidate in course(tmp_path, times_ms, **given)[0].candidates)
    (tmp_path / edited).write_text("22\n")
    assert not any(candidate.raced for candidate in course(tmp_path, times_ms, **given)[0].candidates)


@pytest.mark.parametrize("failing", [("compile",), ("compile", "onnxruntime")])
def test_who_left_as_behind_one_that_fails_later_comes_back(tmp_path, failing):
    times_ms = {"eager": 10.0} | dict.fromkeys(failing, 4.0)
    racing, _ = course(tmp_path, times_ms, failing_later=failing)
    assert racing.run().winner == "eager"
    assert len(racing.named("eager").confirmed) == PROMISED
    again, behind = course(tmp_path, times_ms, failing_later=failing)
    assert (again.run().winner, behind.ran) == ("eager", [])


def test_a_runner_up_that_fails_when_it_is_confirmed_makes_way_for_the_next(tmp_path):
    racing, script = course(tmp_path, {"eager": 10.0, "compile": 4.0, "onnxruntime": 4.2})
    script.failing_later = ("onnxruntime",)
    outcome = racing.run()
    assert (outcome.winner, outcome.runner_up) == ("compile", "eager")
    assert "numerical check" in racing.named("onnxruntime").left


def test_another_model_ends_a_race_and_the_next_begins_anew(tmp_path):
    times_ms = {"eager": 10.0, "compile": 4.0}
    racing, script = course(tmp_path, times_ms)
    script.edited_after = 3
    outcome = racing.run()
    assert outcome.is_open
    assert "starts over" in outcome.reason
    again, _ = course(tmp_path, times_ms)
    assert not any(candidate.raced for candidate in again.candidates)
    assert again.run().winner == "compile"


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ({}, ""),
        ({"edited_after": 1 + PROMISED}, "benchd changed"),
        ({"data_edited_after": 1 + PROMISED}, "its exact answers to the same inputs differ"),
    ],
)
def test_a_model_that_is_edited_behind_its_race_does_not_ship(tmp_path, monkeypatch, script, reason):
    monkeypatch.setattr(shipping, "_run_load", lambda *_: None)
    times_ms, out = {"onnxruntime": 4.0}, tmp_path / "out"
    racing, supervisor = course(tmp_path / "race", times_ms, **script)
    outcome = racing.run()
    if not reason:
        shipped = shipping.ship(racing, outcome, supervisor, ShipLimits(), out)
        assert shipped.promised.latency_ms == pytest.approx(4.0, rel=0.01)
        return
    with pytest.raises(shipping.NotShipped, match=rf"^.*{reason}.*the same command starts over$"):
        shipping.ship(racing, outcome, supervisor, ShipLimits(), out)
    assert not out.exists()
    assert not course(tmp_path / "race", times_ms)[0].named("onnxruntime").raced


def test_files_that_fail_their_check_do_not_ship(tmp_path):
    racing, supervisor = course(tmp_path / "race", {"onnxruntime": 4.0})
    outcome = racing.run()
    supervisor.failing = ("onnxruntime",)
    with pytest.raises(shipping.NotShipped, match=r"the files for onnxruntime give different answers: wrong$"):
        shipping.ship(racing, outcome, supervisor, ShipLimits(), tmp_path / "out")


@pytest.mark.parametrize(("name", "begins_anew"), [("OMP_WAIT_POLICY", True), ("EDITOR", False)])
def test_other_variables_that_a_worker_heeds_begin_anew(tmp_path, monkeypatch, name, begins_anew):
    times_ms = {"eager": 10.0, "compile": 4.0}
    monkeypatch.delenv(name, raising=False)
    course(tmp_path, times_ms, interrupt_after=2)[0].run()
    monkeypatch.setenv(name, "passive")
    racing, _ = course(tmp_path, times_ms)
    assert any(candidate.raced for candidate in racing.candidates) is not begins_anew
