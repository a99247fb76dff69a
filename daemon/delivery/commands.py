"""The only commands that the service accepts over MQTT: six verbs with typed, named parameters.

Parameters are never paths, modules or shell commands. Anything else is refused with a reason that quotes at most the
name of an unknown parameter.
"""

import re
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Literal, get_args

import msgspec
from msgspec import Struct

from benchd.daemon.config import NAME, BatchSize, Commands, Suite
from benchd.daemon.delivery.connection import IncomingMessage
from benchd.daemon.delivery.log import LAST_SEQ
from benchd.daemon.delivery.topics import Topics
from benchd.daemon.errors import UsageError
from benchd.daemon.records import Direction, OptionValue

Verb = Literal["run", "cancel", "list", "reload", "status", "replay"]
VERBS: tuple[Verb, ...] = get_args(Verb)
WithoutLoad = Literal["single_stream", "offline", "periodic", "wake_up", "cold_start", "sustained", "pipeline"]
"""The scenarios that a command may list; only a configured suite can define the load of a `server`."""

MAX_BYTES = 64 * 1024
MAX_AGE_S = 60.0  # maximum difference between `sent_s` and the time of arrival
REMEMBER_S = 86400.0
REMEMBER = 10_000
RATE_PER_S, BURST = 2.0, 20
LISTS = ("models", "variants", "batch_sizes", "options", "directions", "scenarios")
FLOOD = f"more than {RATE_PER_S:g} commands per second; further commands are dropped"

# followed by the id, it forms a topic that `Topics.may_answer` allows
CLIENT = r"[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+){0,2}"


class Parameters(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of every command. Repetitions have the same `id`; `sent_s` is the time of sending, in Unix seconds.

    Without MQTT 5 properties, the answer is published under `resp/<client>/<id>`.
    """

    id: Annotated[str, msgspec.Meta(extra_json_schema={"pattern": f"^{NAME}$"})]
    sent_s: float | None = None
    client: Annotated[str, msgspec.Meta(extra_json_schema={"pattern": f"^{CLIENT}$"})] | None = None


class RunParameters(Parameters, frozen=True, kw_only=True):
    """`run`: the name of a configured suite, or lists as in `[[suite]]` with a preset (default `quick`)."""

    suite: str | None = None
    models: list[str] = []
    variants: list[str] = []
    batch_sizes: list[BatchSize] = []
    options: dict[str, list[OptionValue]] = {}
    directions: list[Direction] = []
    scenarios: list[WithoutLoad] = []
    preset: str | None = None

    def __post_init__(self) -> None:
        if self.suite is not None and (self.has_lists or self.preset is not None):
            raise ValueError("a suite already defines its lists and preset: give either a suite, or lists and a preset")

    @property
    def has_lists(self) -> bool:
        """Return whether any list is given."""
        return any(getattr(self, name) for name in LISTS)

    def as_suite(self) -> Suite:
        """Return the lists as a suite; raise UsageError if there are none, which would mean the whole plan."""
        if not self.has_lists:
            raise UsageError(
                "give a suite, or lists such as models and variants; the command `list` returns the suites"
            )
        lists = {name: getattr(self, name) for name in LISTS}
        return Suite(**lists, preset="quick" if self.preset is None else self.preset)


class CancelParameters(Parameters, frozen=True, kw_only=True):
    """`cancel`: stops the run with this `suite_id`, or all runs."""

    suite_id: str | None = None


class ReplayParameters(Parameters, frozen=True, kw_only=True):
    """`replay`: slowly resends the lines numbered `from` to `to` of this `log`, by default of the results' log."""

    log: str = ""
    first: Annotated[int, msgspec.Meta(ge=1, le=LAST_SEQ)] = msgspec.field(default=1, name="from")
    last: Annotated[int, msgspec.Meta(ge=1, le=LAST_SEQ)] = msgspec.field(default=LAST_SEQ, name="to")


PARAMETERS: dict[Verb, type[Parameters]] = {
    "run": RunParameters,
    "cancel": CancelParameters,
    "list": Parameters,
    "reload": Parameters,
    "status": Parameters,
    "replay": ReplayParameters,
}


class _Sender(Struct, frozen=True):
    """The sender of an invalid command, as far as known."""

    id: str = ""
    client: str | None = None


@dataclass(frozen=True)
class Command:
    """A command to execute before `expires_s`, unless `refusal` says why not.

    `answer_to` is the topic for its answer, or None if the sender is unknown or does not want one.
    """

    id: str
    verb: str
    parameters: Parameters | None
    answer_to: str | None
    correlation: bytes | None
    expires_s: float
    refusal: str = ""


class Gate:
    """Accepts commands that are well-formed, recent, new and within the rate limit; remembers a limited number of ids.

    `boottime_s` and `wall_s` are CLOCK_BOOTTIME and Unix time in seconds.
    """

    def __init__(self, topics: Topics, allowed: Commands = "suites") -> None:
        self._topics, self._allowed = topics, allowed
        self._seen: OrderedDict[str, float] = OrderedDict()
        self._tokens, self._refilled_s = float(BURST), 0.0
        self._flooded = False

    def take(self, arrived: IncomingMessage, boottime_s: float, wall_s: float) -> Command | None:
        """Return the command, possibly refused; None in a flood, after the first refusal."""
        flooded, before = not self._token(boottime_s), self._flooded
        self._flooded = flooded
        if flooded and before:
            return None
        verb = next((known for known in VERBS if known == arrived.topic.rpartition("/")[2]), None)
        given, unreadable = _parameters(arrived.body, PARAMETERS[verb] if verb else Parameters)
        reason = FLOOD if flooded else _misplaced(arrived, verb) or unreadable
        if given:
            forbidden = _forbidden(given, self._allowed)
            reason = reason or forbidden or _stale(given, wall_s) or self._repeated(given.id, boottime_s)
        sender = given or _sender(arrived.body)
        answer_to, expires_s = self._answer_to(arrived, sender), boottime_s + arrived.expire_s
        return Command(sender.id, verb or "", given, answer_to, arrived.correlation, expires_s, reason or "")

    def remembered(self, waiting: Iterable[str]) -> list[str]:
        """Return the ids to keep across a restart, except those of waiting commands, which do not survive it."""
        lost = set(waiting)
        return [command_id for command_id in self._seen if command_id not in lost]

    def remember(self, ids: Sequence[str], boottime_s: float) -> None:
        """Restore the ids stored before a restart; times from different boots are not comparable."""
        self._seen.update(dict.fromkeys(ids, boottime_s))

    def forget(self, command_id: str) -> None:
        """Accept this id again, because its command was refused after all."""
        self._seen.pop(command_id, None)

    def _token(self, now_s: float) -> bool:
        self._tokens = min(float(BURST), self._tokens + (now_s - self._refilled_s) * RATE_PER_S)
        self._refilled_s = now_s
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True

    def _repeated(self, command_id: str, now_s: float) -> str | None:
        while self._seen and (len(self._seen) >= REMEMBER or next(iter(self._seen.values())) < now_s - REMEMBER_S):
            self._seen.popitem(last=False)
        if command_id in self._seen:
            return "a command with this id is waiting or was already executed"
        self._seen[command_id] = now_s
        return None

    def _answer_to(self, arrived: IncomingMessage, sender: Parameters | _Sender) -> str | None:
        """Return the topic for the answer, or None if the sender did not give a topic of this device."""
        own = f"{self._topics.root}resp/{sender.client}/{sender.id}" if sender.client else None
        topics = (arrived.response_topic, own)
        return next((topic for topic in topics if topic and self._topics.may_answer(topic)), None)


def _misplaced(arrived: IncomingMessage, verb: Verb | None) -> str | None:
    reasons = {
        "a retained command would run again at every connection; publish it without retain": arrived.retained,
        f"more than {MAX_BYTES} bytes": len(arrived.body) > MAX_BYTES,
        f"unknown verb; known: {', '.join(VERBS)}": verb is None,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _parameters(body: bytes, kind: type[Parameters]) -> tuple[Parameters | None, str | None]:
    """Return the parameters of a verb, or why they are invalid."""
    try:
        command = msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        # msgspec reports the place and the type, and quotes at most an unknown key from the sender
        return None, f"invalid parameters: {str(error)[:200]}"
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None, "not JSON"
    if not re.fullmatch(NAME, command.id):
        return None, "id: use at most 40 letters, digits, '.', '-' and '_', starting with a letter or digit"
    if command.client is not None and not re.fullmatch(CLIENT, command.client):
        return None, "client: use letters, digits, '.', '-' and '_' in at most three levels"
    return command, None


def _forbidden(parameters: Parameters, allowed: Commands) -> str | None:
    if allowed == "off":
        return 'this device does not accept commands: [mqtt] commands = "off" in its configuration'
    if allowed == "suites" and isinstance(parameters, RunParameters) and parameters.suite is None:
        return 'only configured suites may be run here; [mqtt] commands = "all" in the configuration allows lists'
    return None


def _sender(body: bytes) -> _Sender:
    """Return the id and the client of an invalid command, as far as these are valid."""
    with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        sender = msgspec.json.decode(body, type=_Sender)
        return sender if re.fullmatch(NAME, sender.id) else _Sender()
    return _Sender()


def _stale(parameters: Parameters, wall_s: float) -> str | None:
    if parameters.sent_s is not None and abs(wall_s - parameters.sent_s) > MAX_AGE_S:
        return f"sent_s differs from this device's clock by more than {MAX_AGE_S:g} s"
    return None
