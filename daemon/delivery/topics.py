"""Where on a broker the messages of a device go: the only place that spells topics, their QoS and retain flags."""

import re
from dataclasses import dataclass

from benchd.daemon.errors import UsageError

ROOT = "benchd/v1"
RESULT_QOS = 1  # and not retained: each result has a topic of its own, so retained ones would pile up on the broker


@dataclass(frozen=True)
class Topics:
    """The topics of one device. Raises UsageError for an id that is no lower-case slug of `a-z 0-9 _ -`."""

    device_id: str

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z0-9][a-z0-9_-]*", self.device_id):
            raise UsageError(
                f"device id {self.device_id!r}: use lower-case letters, digits, '-' and '_', a letter or digit first"
            )

    def result(self, run_id: str) -> str:
        """Return the topic of one Record; raise UsageError for an id that is no single plain topic level."""
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", run_id):
            raise UsageError(f"run id {run_id!r}: use letters, digits, '.', '-' and '_', a letter or digit first")
        return f"{ROOT}/{self.device_id}/result/{run_id}"
