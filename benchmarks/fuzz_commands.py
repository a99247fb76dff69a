"""Commands as no sender would write them, against the gate and the plan that the service puts them through.

Each is a valid command that was changed in a few places, as bytes or as JSON. What gets through must be one of the six
verbs with a plan of the catalogue's cases; whatever else happens has to be a refusal.
"""

import os
import random
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from benchd.daemon.config import Config, Suite
from benchd.daemon.delivery.commands import MAX_BYTES, VERBS, Command, Gate, Parameters
from benchd.daemon.delivery.outbox import Outbox
from benchd.daemon.delivery.session import Arrived
from benchd.daemon.delivery.topics import Topics
from benchd.daemon.errors import UsageError
from benchd.daemon.measuring.plan import Machine
from benchd.daemon.service.agenda import MAX_PASSES, Agenda
from benchd.daemon.service.schedule import Progress, State
from benchd.models.catalog import MODELS

TOPICS = Topics("d")
WALL_S = 1_790_000_000.0
SUITE = Suite(name="nightly", models=["square"], variants=["eager"])
FIELDS = [field.name for field in msgspec.structs.fields(Parameters)]
VALID: tuple[dict[str, Any], ...] = (
    {"client": "me"},
    {"suite": "nightly", "sent_s": WALL_S},
    {"suite_id": "0123456789abcdef"},
    {"since_seq": 7},
    {
        "models": ["vim_tiny", "square"],
        "variants": ["eager", "compile-amp"],
        "batch_sizes": [1, 4],
        "preset": "standard",
    },
    {"models": ["snn_onepass"], "options": {"time_steps": [4, 8], "decay": [0.95]}, "scenarios": ["offline"]},
    {"models": ["snn_stbif_resnet18"], "options": {"level": [8]}, "directions": ["training"]},
)
ODD: tuple[Any, ...] = (
    *(
        None,
        True,
        -1,
        0,
        2**31,
        2**63,
        2**64,
        -(2**63),
        10**400,
        1e308,
        5e-324,
        0.1,
        "",
        "../../etc/passwd",
        "\0",
        "\ud7ff",
    ),
    *("#", "+", "$SYS/x", "benchd/v1/d/status", "x" * 5000, "os:system", "vim_tiny", "square", "custom-cudagraph-fp16"),
    *([], {}, [[]] * 100, [1] * 3000, ["square"] * 3000, {"size": list(range(3000)), "x": []}, {"time_steps": [10**9]}),
)
REFUSED = "refused"
RESPONSES = (None, f"{TOPICS.root}resp/me/1", f"{TOPICS.root}resp/#", "benchd/v1/other/resp/me", "", "$SYS/x")


class Fuzzed(NamedTuple):
    """What became of the commands; memory in bytes, between the first tenth and the end."""

    refused: int
    done: dict[str, int]
    growth_bytes: int


class Broken(AssertionError):
    """A command that did what none may."""


def fuzz(count: int, seed: int, folder: Path) -> Fuzzed:
    """Put `count` commands through, with an outbox in `folder`; raises whatever the service would have died of.

    The error says which command it was.
    """
    chance = random.Random(seed)  # noqa: S311 - no secret
    outcomes: Counter[str] = Counter()
    begun_bytes = _rss_bytes()
    with Outbox(folder / "fuzz.db") as outbox:
        device = _Device(outbox)
        for number in range(count):
            if number == count // 10:
                begun_bytes = _rss_bytes()
            arrived = _arrived(chance, number)
            try:
                outcomes[device.take(arrived, float(number))] += 1
            except Exception as error:
                raise Broken(f"command {number} of seed {seed}, {arrived!r:.2000}: {error!r}") from error
    refused = outcomes.pop(REFUSED)
    return Fuzzed(refused, dict(outcomes), _rss_bytes() - begun_bytes)


class _Device:
    """What the service does with a command, without what it measures then."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox, self._gate = outbox, Gate(TOPICS)
        self._agenda = Agenda(Config(suite=[SUITE]), Machine("cpu", has_cxx=True), State())

    def take(self, arrived: Arrived, boottime_s: float) -> str:
        """Return the verb that was carried out, or that it was refused; raise Broken for what none may do."""
        found = self._gate.take(arrived, boottime_s, WALL_S)
        if found is None:
            raise Broken("dropped, though no flood")
        if found.answer_to is not None and not found.answer_to.startswith(f"{TOPICS.root}resp/"):
            raise Broken(f"an answer to {found.answer_to}")
        if not isinstance(found, Command):
            return REFUSED
        if found.verb not in VERBS or arrived.retained or len(arrived.body) > MAX_BYTES:
            raise Broken(f"carried out: {found.verb}")
        return found.verb if self._obey(found.verb, found.parameters) else REFUSED

    def _obey(self, verb: str, given: Parameters) -> bool:
        if verb == "replay":
            self._outbox.send_again(given.since_seq)
        return verb != "run" or self._begin(given)

    def _begin(self, given: Parameters) -> bool:
        if len(self._agenda.state.passes) == MAX_PASSES:
            self._agenda.cancel(None)
        try:
            begun = self._agenda.begin(self._agenda.named(given.suite) if given.suite else given.as_suite())
        except UsageError:
            return False
        unknown = {case_id.split(",")[0] for case_id in begun.left} - set(MODELS)
        if unknown:
            raise Broken(f"cases of {unknown}")
        if msgspec.json.decode(msgspec.json.encode(begun), type=Progress) != begun:
            raise Broken("a pass that a restart would not find again")
        return True


def _arrived(chance: random.Random, number: int) -> Arrived:
    verb = chance.choice([*VERBS, "run", "run", "shutdown", "", "RUN"])
    given = {"id": str(number), **chance.choice(VALID)}
    for _ in range(chance.choice((0, 1, 1, 2, 5))):
        _change(chance, given)
    body = _json(given)
    for _ in range(chance.choice((0, 0, 1, 3, 20))):
        body = _changed(chance, body)
    return Arrived(
        topic=f"{TOPICS.root}cmd/{verb}",
        body=body[: MAX_BYTES + 1],
        retained=chance.random() < 0.05,
        response_topic=chance.choice(RESPONSES),
        correlation=chance.choice((None, b"", b"\0\xff")),
    )


def _change(chance: random.Random, given: dict[str, Any]) -> None:
    """Give one field an odd value, or put one inside its list."""
    name, odd = chance.choice([*FIELDS, "weights"]), chance.choice(ODD)
    inner = given.get(name)
    if isinstance(inner, list) and chance.random() < 0.7:
        given[name] = [*inner, odd]
    elif isinstance(inner, dict) and chance.random() < 0.7:
        given[name] = {**inner, chance.choice(("size", "scan", "p_scale", "\0")): [odd]}
    else:
        given[name] = odd


def _json(given: dict[str, Any]) -> bytes:
    try:
        return msgspec.json.encode(given)
    except OverflowError:  # an integer that msgspec does not write
        return repr(given).replace("'", '"').encode("utf-8", "replace")


def _changed(chance: random.Random, body: bytes) -> bytes:
    """Flip, take away, repeat or put in some bytes."""
    at, length = chance.randrange(len(body) + 1), chance.choice((1, 1, 2, 8, 100))
    inserted = chance.choice((b"", body[at : at + length] * chance.choice((1, 2, 300)), chance.randbytes(length)))
    return body[:at] + inserted + body[at + chance.choice((0, length)) :]


def _rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
