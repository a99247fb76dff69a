"""Commands as no sender would write them, through the gate and the plan: each is refused or one of the six verbs."""

import json

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from simulations import counts

from benchd.daemon.config import Config, Suite
from benchd.daemon.delivery.commands import MAX_BYTES, PARAMETERS, VERBS, Gate
from benchd.daemon.delivery.connection import IncomingMessage
from benchd.daemon.delivery.topics import Topics
from benchd.daemon.errors import UsageError
from benchd.daemon.measuring.plan import Machine
from benchd.daemon.service.agenda import Agenda
from benchd.daemon.service.facts import Facts
from benchd.daemon.service.schedule import StartedSuite
from benchd.models.catalog import MODELS

TOPICS = Topics("d")
WALL_S = 1_790_000_000.0
SUITE = Suite(name="nightly", models=["square"], variants=["eager"])
VALID = (
    *((verb, {"client": "me"}) for verb in ("cancel", "list", "reload", "status", "replay")),
    ("run", {"suite": "nightly", "sent_s": WALL_S}),
    ("cancel", {"suite_id": "0123456789abcdef"}),
    ("replay", {"log": "0123456789abcdef", "from": 7, "to": 9}),
    ("run", {"models": ["vim_tiny", "square"], "variants": ["eager", "compile-amp"], "batch_sizes": [1, 4]}),
    ("run", {"models": ["snn_onepass"], "options": {"time_steps": [4, 8], "decay": [0.95]}, "scenarios": ["offline"]}),
    ("run", {"models": ["snn_stbif_resnet18"], "options": {"level": [8]}, "directions": ["training"]}),
)
NUMBERS = (-1, 0, 2**31, 2**63, -(2**63), 10**400, 1e308, 5e-324, 0.1)
TEXTS = ("../../etc/passwd", "\0", "#", "+", "$SYS/x", "benchd/v1/d/status", "x" * 5000, "os:system", "square")
NESTS = ([[]] * 100, [1] * 3000, ["square"] * 3000, {"size": list(range(3000)), "x": []}, {"time_steps": [10**9]})
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(NUMBERS + TEXTS)
ODD = st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)) | st.sampled_from(NESTS)
FIELDS = {field.name for kind in PARAMETERS.values() for field in msgspec.structs.fields(kind)}
NAMES = st.sampled_from([*sorted(FIELDS), "weights"])
TOPIC = st.sampled_from([f"{TOPICS.root}cmd/{verb}" for verb in (*VERBS, "shutdown", "", "RUN", "run/x")]) | st.text()
RESPONSES = st.none() | st.sampled_from([f"{TOPICS.root}resp/me/1", f"{TOPICS.root}resp/#", "$SYS/x"]) | st.text()


@st.composite
def commands(draw):
    """A valid command with a few odd fields, of which some bytes are replaced, on its topic or on any other."""
    verb, valid = draw(st.sampled_from(VALID))
    body = json.dumps({"id": "1"} | valid | draw(st.dictionaries(NAMES, ODD, max_size=3))).encode()
    first, last = sorted(draw(st.tuples(*[st.integers(0, len(body))] * 2)))
    body = draw(st.just(body) | st.just(body[:first] + draw(st.binary()) + body[last:]) | st.binary())
    return draw(st.just(f"{TOPICS.root}cmd/{verb}") | TOPIC), body


def carried_out(message):
    """Return whether the service does what a message says, as far as the measurement; all else is a refusal."""
    command = Gate(TOPICS, "all").take(message, 1000.0, WALL_S)
    assert command.answer_to is None or command.answer_to.startswith(f"{TOPICS.root}resp/")
    if command.refusal:
        return False
    assert command.verb in VERBS
    assert not message.retained
    assert len(message.body) <= MAX_BYTES
    if command.verb == "replay":
        assert command.parameters.first >= 1
    return command.verb != "run" or begun(command.parameters)


def begun(given):
    """Return whether a pass begins; it is of known models and survives a restart."""
    agenda = Agenda(Config(suite=[SUITE]), Machine("cpu", has_cxx=True), Facts())
    try:
        entry = agenda.begin(given.as_suite() if given.suite is None else agenda.named(given.suite))
    except UsageError:
        return False
    assert {case_id.split(",")[0] for case_id in entry.left} <= set(MODELS)
    assert msgspec.json.decode(msgspec.json.encode(entry), type=StartedSuite) == entry
    return True


@counts(200, 400)
def test_no_message_raises_an_error_or_gets_past_the_verbs(count):
    @settings(max_examples=count, derandomize=True, deadline=None)
    @given(commands(), st.booleans(), RESPONSES)
    @example((f"{TOPICS.root}cmd/run", b"[" * MAX_BYTES), False, None)
    @example((f"{TOPICS.root}cmd/run", b"x" * (MAX_BYTES + 1)), False, None)
    def arrives(command, retained, response_topic):
        carried_out(IncomingMessage(*command, WALL_S, retained, response_topic, b"\0\xff"))

    arrives()


@pytest.mark.parametrize(("verb", "given"), VALID)
def test_what_is_valid_is_carried_out(verb, given):
    body = msgspec.json.encode({"id": "1"} | given)
    assert carried_out(IncomingMessage(f"{TOPICS.root}cmd/{verb}", body, WALL_S))
