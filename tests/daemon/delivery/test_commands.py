"""Whatever arrives on a command topic: six verbs with typed parameters are let through, everything else is refused."""

import math
from typing import get_args

import pytest

from benchd.daemon.delivery import commands
from benchd.daemon.delivery.commands import BURST, MAX_BYTES, Gate
from benchd.daemon.delivery.connection import IncomingMessage
from benchd.daemon.delivery.topics import Topics
from benchd.daemon.records import SCENARIOS

TOPICS = Topics("d")
NOW_S, WALL_S = 1000.0, 1_790_000_000.0


@pytest.fixture
def gate():
    return Gate(TOPICS, "all")


def arrived(verb, body=b'{"id":"1"}', **fields):
    return IncomingMessage(**{"topic": f"benchd/v1/d/cmd/{verb}", "body": body, "arrived_s": 0.0} | fields)


def test_a_command_may_list_every_scenario_but_a_server():
    assert get_args(commands.WithoutLoad) == tuple(name for name in SCENARIOS if name != "server")


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (arrived("run", retained=True), "a retained command would run again"),
        (arrived("shutdown"), "unknown verb; known: run, cancel"),
        (arrived("run", b"x" * (MAX_BYTES + 1)), "more than 65536 bytes"),
        (arrived("run", b"{}"), "missing required field `id`"),
        (arrived("run", b'{"id":"../../etc"}'), "id: use at most 40 letters"),
        (arrived("run", b'{"id":".1"}'), "use at most 40 letters, digits"),
        (arrived("run", b'{"id":"%s"}' % (b"x" * 41)), "at most 40 letters"),
        (arrived("run", b'{"id":"1","weights":"/etc/passwd"}'), "unknown field `weights`"),
        (arrived("run", b'{"id":"1","module":"os:system"}'), "unknown field `module`"),
        (arrived("run", b'{"id":"1","onnx":"/etc/benchd/net.onnx"}'), "unknown field `onnx`"),
        (arrived("replay", b'{"id":"1","suite_id":"0123456789abcdef"}'), "unknown field `suite_id`"),
        (arrived("status", b'{"id":"1","models":["square"]}'), "unknown field `models`"),
        (arrived("cancel", b'{"id":"1","suite":"s"}'), "unknown field `suite`"),  # not all runs
        (arrived("run", b'{"id":"1","suite":"s","preset":"quick"}'), "give either a suite, or lists and a preset"),
        (arrived("run", b'{"id":"1","scenarios":["server"]}'), "Invalid enum value 'server' - at `$.scenarios"),
        (arrived("run", b'{"id":"1","batch_sizes":[NaN]}'), "not JSON"),
        (arrived("run", b'{"id":"1","batch_sizes":["1; rm"]}'), "Expected `int`"),
        (arrived("run", b"[" * 60_000), "invalid parameters: Expected `object`"),
        (arrived("replay", b'{"id":"1","from":9223372036854775808}'), "<= 999999999999999999"),
        (arrived("run", b'{"id":"\xff\xfe"}'), "not JSON"),
        (arrived("run", b'{"id":"1","sent_s":%d}' % (WALL_S - 61)), "sent_s differs from"),
        (arrived("run", b'{"id":"1","sent_s":%d}' % (WALL_S + 61)), "sent_s differs from"),
    ],
)
def test_what_is_refused_says_why(gate, message, words):
    assert words in gate.take(message, NOW_S, WALL_S).refusal


@pytest.mark.parametrize(
    "message",
    [
        arrived("run", b"x" * (MAX_BYTES + 1), response_topic="benchd/v1/d/resp/me/1", correlation=b"7"),
        arrived("run", b'{"id":"1","client":"me"}', retained=True, correlation=b"7"),
        arrived("shutdown", b'{"id":"1","client":"me"}', correlation=b"7"),
    ],
)
def test_who_can_be_answered_is_told_of_every_refusal(gate, message):
    command = gate.take(message, NOW_S, WALL_S)
    assert command.refusal
    assert (command.answer_to, command.correlation) == ("benchd/v1/d/resp/me/1", b"7")


def test_what_the_broker_has_left_of_an_expiry_counts_from_its_arrival(gate):
    assert gate.take(arrived("run", expire_s=10), NOW_S, WALL_S).expires_s == NOW_S + 10
    assert gate.take(arrived("run", b'{"id":"2"}'), NOW_S, WALL_S).expires_s == math.inf


def test_a_repetition_is_refused_for_a_day_and_over_a_restart(gate):
    gate.take(arrived("run"), NOW_S, WALL_S)
    repeated = gate.take(arrived("run"), NOW_S + 1, WALL_S)
    assert repeated.refusal == "a command with this id is waiting or was already executed"
    after = Gate(TOPICS, "all")
    after.remember(gate.remembered([]), NOW_S)
    assert after.take(arrived("run"), NOW_S + 80_000, WALL_S).refusal
    assert not gate.take(arrived("run"), NOW_S + 86_402, WALL_S).refusal


def test_a_flood_is_refused_once_and_the_memory_stays_bounded(gate):
    parsed = [gate.take(arrived("status", b'{"id":"%d"}' % n), NOW_S, WALL_S) for n in range(10_000)]
    assert sum(command is not None and not command.refusal for command in parsed) == BURST
    assert parsed[BURST].refusal.startswith("more than 2 commands per second")
    assert parsed[BURST + 1 :] == [None] * (10_000 - BURST - 1)
    assert not gate.take(arrived("status", b'{"id":"x"}'), NOW_S + 1, WALL_S).refusal
    for number in range(20_000):
        gate.take(arrived("status", b'{"id":"n%d"}' % number), NOW_S + number, WALL_S)
    assert len(gate.remembered([])) <= commands.REMEMBER


@pytest.mark.parametrize(
    "topic",
    [
        "benchd/v1/other/resp/x",
        "benchd/v1/d/cmd/run",
        "benchd/v1/d/resp/#",
        "benchd/v1/d/resp/+",
        "foo",
        "benchd/v1/d/respo/x",
        "benchd/v1/d/resp",
        "benchd/v1/d/resp/",
        "$SYS/x",
        "benchd/v1/d/resp/a/b/c/d/e",
        "benchd/v1/d/resp/a\0b",
        "benchd/v1/d/resp/../status\n",
    ],
)
def test_no_answer_goes_where_a_message_wants_it(gate, topic):
    assert gate.take(arrived("status", response_topic=topic), NOW_S, WALL_S).answer_to is None
    named = arrived("status", b'{"id":"2","client":"me"}', response_topic=topic, correlation=b"7")
    command = gate.take(named, NOW_S, WALL_S)
    assert (command.answer_to, command.correlation) == ("benchd/v1/d/resp/me/2", b"7")


def test_an_answer_goes_to_the_response_topic_with_its_correlation_or_to_the_client_s(gate):
    message = arrived("status", response_topic="benchd/v1/d/resp/me/7", correlation=b"\0\xff")
    command = gate.take(message, NOW_S, WALL_S)
    assert (command.answer_to, command.correlation) == ("benchd/v1/d/resp/me/7", b"\0\xff")
    command = gate.take(arrived("status", b'{"id":"2","client":"me"}'), NOW_S, WALL_S)
    assert command.answer_to == "benchd/v1/d/resp/me/2"
    assert gate.take(arrived("status", b'{"id":"3","client":"a/#"}'), NOW_S, WALL_S).answer_to is None


@pytest.mark.parametrize(
    ("allowed", "verb", "body", "words"),
    [
        ("off", "run", b'{"id":"1","suite":"s"}', 'commands = "off"'),
        ("off", "status", b'{"id":"1"}', 'commands = "off"'),
        ("suites", "run", b'{"id":"1","models":["vim_tiny"]}', 'commands = "all"'),
        ("suites", "run", b'{"id":"1","suite":"","models":["vim_tiny"]}', "give either a suite"),
        ("suites", "run", b'{"id":"1","suite":"s"}', None),
        ("suites", "replay", b'{"id":"1"}', None),
        ("all", "run", b'{"id":"1","models":["vim_tiny"]}', None),
    ],
)
def test_a_device_accepts_only_commands_that_its_configuration_allows(allowed, verb, body, words):
    command = Gate(TOPICS, allowed).take(arrived(verb, body), NOW_S, WALL_S)
    assert not command.refusal if words is None else words in command.refusal
