"""Cases that compete are measured in rounds, one process of each: real workers."""

from itertools import pairwise

import pytest
from sessions_made import session
from worker_jobs import user_module

from benchd.daemon.config import LimitsConfig, Suite
from benchd.daemon.measuring import plan, user_model
from benchd.daemon.measuring.plan import Machine, in_rounds
from benchd.daemon.measuring.session import Sink
from benchd.daemon.measuring.supervisor import Supervisor

CPU = Machine("cpu", has_cxx=True)
LIMITS = LimitsConfig(warm_up_cap_s=0.1, measure_cap_s=0.1, check_images=1)
PROCESSES = 3
HALF_FAILS = "if images.dtype == torch.bfloat16: raise RuntimeError('no half')"


class Begun(Sink):
    """Keeps the variant of each process in order; interrupts the session when the `last` one imports torch."""

    def __init__(self, last=None):
        self.seen, self.last, self.session = [], last, None

    def stage(self, planned, process, stage, done=""):
        if stage == "import":
            self.seen.append((process, planned.case.variant.name))
            self.session.interrupted = len(self.seen) == self.last


def suite(**fields):
    given = {"models": ["square"], "variants": ["eager", "bf16"], "options": {"size": [16]}, "preset": "quick"}
    return Suite(**given | {"processes": PROCESSES} | fields)


def planned(own=None, **fields):
    return plan.plan([suite(**fields)], LIMITS, CPU, own)


def run(folder, entries, *, last=None, **fields):
    """Return the records of a run and the order of its processes."""
    begun = Begun(last)
    with session(folder, [begun]) as begun.session:
        supervisor = Supervisor(begun.session, entries, **fields)
        supervisor.run()
    return {record.case.variant.name: record for record in supervisor.records}, begun.seen


def test_each_round_has_one_process_of_each_and_rates_are_probed_in_the_first_and_the_last(tmp_path):
    records, runs = run(tmp_path, planned())
    assert [process for process, _ in runs] == [0, 0, 1, 1, 2, 2]
    assert all({first[1], second[1]} == {"eager", "bf16"} for first, second in zip(runs[::2], runs[1::2], strict=True))
    assert [*records] == ["eager", "bf16"]
    rounds = zip(*([process.window for process in record.processes] for record in records.values()), strict=True)
    for early, late in pairwise(rounds):
        assert max(window.end_ns for window in early) < min(window.start_ns for window in late)
    in_order = [records[name].processes[process] for process, name in runs]
    assert [process.probes is not None for process in in_order] == [True] * 2 + [False] * 2 + [True] * 2


def test_each_case_of_an_own_module_has_a_floor_whoever_probed_the_rates(tmp_path):
    """The second of three cases with the same settings probes nothing."""
    own = user_model.module(user_module(tmp_path), [])
    entries = planned(own, models=[], options={}, variants=["eager"], batch_sizes=[1, 2, 3], processes=1)
    with session(tmp_path, []) as bench_session:
        supervisor = Supervisor(bench_session, entries)
        supervisor.run()
    assert [process.probes is not None for record in supervisor.records for process in record.processes].count(
        False
    ) == 1
    assert all(record.floor and record.neurobench for record in supervisor.records)


def test_one_that_fails_leaves_the_later_rounds(tmp_path):
    own = user_model.module(user_module(tmp_path, forward=HALF_FAILS), [])
    records, runs = run(tmp_path, planned(own, models=[], options={}, processes=2))
    assert (records["bf16"].status, records["eager"].status) == ("failed", "ok")
    assert len(records["eager"].processes) == 2
    assert sorted(runs) == [(0, "bf16"), (0, "eager"), (1, "eager")]


@pytest.mark.parametrize("needs_all", [False, True])
def test_an_interrupt_ends_the_round(tmp_path, needs_all):
    """In the first process of the second round: the other case has one, and with `needs_all` that is too few."""
    records, runs = run(tmp_path, planned(), last=3, needs_all=needs_all)
    assert len(runs) == 3
    running, waiting = records.pop(runs[-1][1]), records.popitem()[1]
    assert [process.status for process in running.processes] == ["ok", "aborted"]
    assert waiting.status == ("aborted" if needs_all else "ok")
    assert waiting.processes[0].timing
    assert waiting.timing is None if needs_all else waiting.timing == waiting.processes[0].timing


@pytest.mark.parametrize(
    ("fields", "sizes"),
    [
        ({}, [2]),
        ({"processes": 1}, [1, 1]),
        ({"batch_sizes": [1, 4]}, [2, 2]),
        ({"batch_sizes": [1, 4], "scenarios": ["offline"]}, [4]),
        ({"options": {"size": [16, 32]}}, [2, 2]),
        ({"threads": [1, 2]}, [2, 2]),
        ({"scenarios": ["single_stream", "wake_up"]}, [2, 2]),
        ({"models": ["square", "vim_tiny"], "options": {}}, [2, 2]),
    ],
)
def test_those_compete_that_differ_in_the_variant_alone(fields, sizes):
    groups = in_rounds(planned(**fields))
    assert [len(group) for group in groups] == sizes
    in_groups = [entry.case.case_id for group in groups for entry in group]
    assert sorted(in_groups) == sorted(entry.case.case_id for entry in planned(**fields))


def test_the_batches_of_a_search_are_measured_one_after_the_other():
    searched = plan.plan([suite(scenarios=["offline"])], LIMITS, CPU, search=True)
    assert all(entry.is_searched for entry in searched)
    assert {len(group) for group in in_rounds(searched)} == {1}
