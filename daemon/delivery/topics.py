"""Where on a broker the messages of a device go: the only place that spells topics, their QoS and retain flags."""

import re
from dataclasses import dataclass
from typing import Literal

from benchd.daemon.errors import UsageError
from benchd.daemon.machine import identity

ROOT = "benchd/v1"
Kind = Literal["status", "info", "health", "telemetry", "event"]
RESULT_QOS = 1  # and not retained: each result has a topic of its own, so retained ones would pile up on the broker


def is_name(text: str) -> bool:
    """Say whether this is one plain level of a topic, as clients and collectors call themselves."""
    return re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", text) is not None


@dataclass(frozen=True)
class Topics:
    """The topics of one device. Raises UsageError for an id that is no lower-case slug of `a-z 0-9 _ -`."""

    device_id: str

    def __post_init__(self) -> None:
        identity.checked(self.device_id)

    @property
    def root(self) -> str:
        """Return what all topics of the device begin with, `/` included."""
        return f"{ROOT}/{self.device_id}/"

    def of(self, kind: Kind) -> str:
        """Return the one topic of this kind."""
        return self.root + kind

    def latest(self, case_id: str) -> str:
        """Return the topic of the last result of a case."""
        return f"{self.root}latest/{case_id}"

    @property
    def incoming(self) -> list[tuple[str, int]]:
        """Return the filters of what the device itself listens to, its own status first, with the QoS to ask for."""
        return [(self.of("status"), 1), (f"{self.root}cmd/+", 1), (f"{self.root}ack/+", 1)]

    def may_answer(self, topic: str) -> bool:
        """Say whether a response topic is one of the device's own: no message makes it publish anywhere else."""
        leaf = topic.removeprefix(f"{self.root}resp/")
        return leaf != topic and re.fullmatch(r"[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+){0,3}", leaf) is not None

    def result(self, run_id: str) -> str:
        """Return the topic of one Record; raise UsageError for an id that is no single plain topic level."""
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", run_id):
            raise UsageError(f"run id {run_id!r}: use letters, digits, '.', '-' and '_', a letter or digit first")
        return f"{ROOT}/{self.device_id}/result/{run_id}"

    def ack(self, collector: str) -> str:
        """Return the topic on which a collector tells the device what it has stored."""
        return f"{ROOT}/{self.device_id}/ack/{collector}"

    def command(self, verb: str) -> str:
        """Return the topic that takes commands of this verb."""
        return f"{ROOT}/{self.device_id}/cmd/{verb}"

    def response(self, client: str) -> str:
        """Return the topic on which a client asks to be answered; its name may have levels of its own."""
        return f"{ROOT}/{self.device_id}/resp/{client}"


SHARED_KINDS = ("result", "event", "telemetry")  # each message to one collector of the group
RETAINED_KINDS = (
    "status",
    "info",
    "health",
    "latest",
)  # to every collector: a shared subscription gets no retained messages


def collector_filters(*, shared: bool) -> list[tuple[str, int]]:
    """Return the topic filters of a collector, with the QoS to ask for; `shared` splits the work among several."""
    group = f"$share/ingest/{ROOT}" if shared else ROOT
    wanted = [(f"{group}/+/{kind}{'/#' if kind == 'result' else ''}", kind) for kind in SHARED_KINDS]
    wanted += [(f"{ROOT}/+/{kind}{'/+' if kind == 'latest' else ''}", kind) for kind in RETAINED_KINDS]
    return [(topic, 0 if kind == "telemetry" else 1) for topic, kind in wanted]


@dataclass(frozen=True)
class Address:
    """A topic of a device: `kind` is its first level, `leaf` what follows, empty where nothing does."""

    device_id: str
    kind: str
    leaf: str = ""


def parse(topic: str) -> Address | None:
    """Return the device, kind and rest of a topic; None for one that is not ours."""
    match = re.fullmatch(rf"{ROOT}/([a-z0-9][a-z0-9_-]*)/([a-z]+)(?:/([^/]+))?", topic)
    return Address(match[1], match[2], match[3] or "") if match else None
