"""The scenarios, one file each by its name in benchd.daemon.records: its step, its loop, and its part of the record.

A scenario's module has `SCENARIO`, an instance of its subclass of `base.Scenario`. What it puts into a record beyond
parts is combined over the processes in benchd.daemon.measuring.recording, which is free of torch.
"""

import importlib

from benchd.daemon import records
from benchd.daemon.worker.scenarios.base import Scenario


def of(name: records.Scenario) -> Scenario:
    """Return the scenario of this name."""
    scenario: Scenario = importlib.import_module(f"{__name__}.{name}").SCENARIO
    return scenario
