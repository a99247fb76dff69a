"""The scenarios, one file each, named as in benchd.daemon.records: the step, the loop, and the part of the record.

A scenario's module has `SCENARIO`, an instance of its subclass of `base.Scenario`. Record fields other than parts are
combined over the processes in benchd.daemon.measuring.recording, which does not import torch.
"""

import importlib

from benchd.daemon import records
from benchd.daemon.worker.scenarios.base import Scenario


def of(name: records.Scenario) -> Scenario:
    """Return the scenario with this name."""
    scenario: Scenario = importlib.import_module(f"{__name__}.{name}").SCENARIO
    return scenario
