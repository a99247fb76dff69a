"""What a report of many records keeps of each in memory: everything that it shows, and little else."""

from pathlib import Path

import pytest

from benchd.daemon.reporting import report
from benchd.daemon.reporting.essentials import Essentials
from benchd.daemon.verdicts import results
from benchd.daemon.verdicts.recommend import Requirements, decide

MEASURED = Path(__file__).parents[3] / "results" / "amd-epyc-2-threads" / "records.jsonl"


def written(found, form):
    return "".join(report.FORMATS[form](found, decide(found, Requirements())))


@pytest.mark.parametrize("form", list(report.FORMATS))
def test_a_report_of_what_is_kept_is_that_of_the_whole_records(form):
    whole, kept = results.read(MEASURED), results.read(MEASURED, Essentials())
    assert written(kept, form) == written(whole, form)


def test_equal_environments_are_one_and_samples_are_left_out():
    whole, kept = results.read(MEASURED), results.read(MEASURED, Essentials())
    assert len({id(record.environment) for record in kept}) < len(whole) / 10
    assert not any(process.blocks or process.raw or process.probes for record in kept for process in record.processes)
