"""A device's topics on a broker: the only place that defines topics, their QoS and retain flags."""

import re
from dataclasses import dataclass
from typing import Literal

from benchd.daemon.errors import UsageError
from benchd.daemon.machine import identity

ROOT = "benchd/v1"
Kind = Literal["status", "info", "health", "telemetry", "event"]


@dataclass(frozen=True)
class Topics:
    """The topics of one device. Raises UsageError for an id that is not a lower-case slug of `a-z 0-9 _ -`."""

    device_id: str

    def __post_init__(self) -> None:
        identity.checked(self.device_id)

    @property
    def root(self) -> str:
        """Return the prefix of all topics of the device, including the final `/`."""
        return f"{ROOT}/{self.device_id}/"

    def of(self, kind: Kind) -> str:
        """Return the device's topic of this kind."""
        return self.root + kind

    def latest(self, case_id: str) -> str:
        """Return the topic of the last result of a case."""
        return f"{self.root}latest/{case_id}"

    def shipped(self, name: str) -> str:
        """Return the topic for the state of a shipped folder."""
        return f"{self.root}shipped/{name}"

    def may_answer(self, topic: str) -> bool:
        """Return whether a response topic belongs to this device, which never publishes elsewhere."""
        leaf = topic.removeprefix(f"{self.root}resp/")
        return leaf != topic and re.fullmatch(r"[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+){0,3}", leaf) is not None

    def result(self, run_id: str) -> str:
        """Return the topic of one Record; raise UsageError for an id that is not a single plain topic level."""
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", run_id):
            raise UsageError(f"run id {run_id!r}: start with a letter or digit; '.', '-' and '_' may follow")
        return f"{ROOT}/{self.device_id}/result/{run_id}"

    def command(self, verb: str) -> str:
        """Return the topic for commands of this verb."""
        return f"{ROOT}/{self.device_id}/cmd/{verb}"

    def response(self, client: str) -> str:
        """Return the topic for answers to a client, whose name may have several levels."""
        return f"{ROOT}/{self.device_id}/resp/{client}"


SHARED_KINDS = ("result", "event", "telemetry")  # each message goes to one collector of the group
# sent to every collector, because shared subscriptions do not receive retained messages
RETAINED_KINDS = ("status", "info", "health", "latest", "shipped")
NAMED_KINDS = ("latest", "shipped")  # one topic per case, or per folder


def collector_filters(group: str = "") -> list[tuple[str, int]]:
    """Return the topic filters of a collector, with the QoS to request; collectors of one `group` split the work."""
    group = f"$share/{group}/{ROOT}" if group else ROOT
    wanted = [(f"{group}/+/{kind}{'/#' if kind == 'result' else ''}", kind) for kind in SHARED_KINDS]
    wanted += [(f"{ROOT}/+/{kind}{'/+' if kind in NAMED_KINDS else ''}", kind) for kind in RETAINED_KINDS]
    return [(topic, 0 if kind == "telemetry" else 1) for topic, kind in wanted]


@dataclass(frozen=True)
class Address:
    """A topic of a device: `kind` is its first level, `leaf` the rest, possibly empty."""

    device_id: str
    kind: str
    leaf: str = ""


def parse(topic: str) -> Address | None:
    """Return the device, kind and rest of a topic; None for a topic of a different application."""
    match = re.fullmatch(rf"{ROOT}/([a-z0-9][a-z0-9_-]*)/([a-z]+)(?:/([^/]+))?", topic)
    return Address(match[1], match[2], match[3] or "") if match else None
