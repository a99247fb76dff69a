"""What becomes of commands between the link and the agenda: taken in, refused, waited with, carried out, answered."""

import msgspec
import pytest
from links import add, unstarted
from services import state_in

from benchd.daemon.config import Config, DeviceConfig, Suite
from benchd.daemon.delivery.commands import Gate
from benchd.daemon.delivery.connection import IncomingMessage
from benchd.daemon.delivery.topics import Topics
from benchd.daemon.service import agenda as agenda_module
from benchd.daemon.service import remote

TOPICS = Topics("d")
SUITE = Suite(name="s", models=["square"], variants=["eager"])
SETTINGS = Config(device=DeviceConfig(id="d"), suite=[SUITE])


class Asked:
    """A service behind a link that never starts."""

    def __init__(self, state):
        self.state, self.link, self.agenda = state, state.link, state.agenda
        self._asked = 0

    def hear(self, verb, **given):
        """Let a command come in."""
        self._asked += 1
        beside = {"expire_s": given.pop("expire_s")} if "expire_s" in given else {}
        body = msgspec.json.encode({"id": str(self._asked), "client": "me", **given})
        self.link.state.commands.append(IncomingMessage(f"{TOPICS.root}cmd/{verb}", body, 0.0, **beside))

    def answers(self, *, timed=False):
        """Take in what has come; return the answers that there are then, by id."""
        self.state.is_timed = timed
        remote.listen(self.state, self.link)
        remote.carry_out(self.state)
        answers = [*self.link._answers]
        self.link._answers.clear()
        return {answer.topic.rpartition("/")[2]: msgspec.json.decode(answer.body) for answer in answers}


@pytest.fixture
def asked(tmp_path):
    with unstarted(tmp_path, TOPICS) as (link, _), state_in(tmp_path, SETTINGS, link) as state:
        yield Asked(state)


def test_a_run_names_a_suite_or_lists_and_neither_both_nor_nothing(asked):
    asked.state.gate = Gate(TOPICS, "all")
    for given in ({}, {"models": []}, {"preset": "thorough"}):
        asked.hear("run", **given)
    asked.hear("run", models=["square"], variants=["eager"])
    reasons = [answer.get("reason") for answer in asked.answers().values()]
    asked.hear("run", suite="s", models=["square"])
    (both,) = asked.answers().values()
    nothing = "give a suite, or lists such as models and variants; the command `list` returns the suites"
    assert reasons == [nothing] * 3 + [None]
    assert both["reason"].endswith("give either a suite, or lists and a preset")
    assert [run.left for run in asked.agenda.runs] == [["square,eager,b1"]]


def test_a_replay_names_one_of_the_logs_and_no_other(asked):
    add(asked.link, "d", "r1", "r2", "r3")
    events = asked.link.delivery.outgoing["events"].log
    events.append(b'{"event":"a"}')
    for log_id in ("another", asked.link.delivery.records.log.id, events.id):
        asked.hear("replay", log=log_id, **{"from": 1, "to": 2})
    asked.hear("replay")
    other, results, of_events, unnamed = asked.answers().values()
    reason = "this device has no such log; its health lists its logs"
    assert (other["accepted"], other["reason"]) == (False, reason)
    assert (results["rows"], of_events["rows"]) == (2, 1)
    assert unnamed["rows"] == 3


def test_every_pass_of_several_cancels_at_once_is_under_way_no_more(asked):
    running, waiting = (asked.agenda.begin(SUITE).suite_id for _ in range(2))
    asked.hear("cancel", suite_id=running)
    asked.hear("cancel", suite_id=waiting)
    answers = asked.answers(timed=True)
    assert [answer["accepted"] for answer in answers.values()] == [True, True]
    assert not asked.agenda.is_under_way(running)
    assert not asked.agenda.is_under_way(waiting)


def test_a_command_that_expires_while_it_waits_is_refused_when_its_turn_comes(asked):
    asked.hear("run", suite="s", expire_s=0)
    asked.hear("run", suite="s", expire_s=600)
    assert asked.answers(timed=True) == {}
    answers = asked.answers()
    assert (answers["1"]["accepted"], answers["1"]["reason"]) == (False, "it expired while it waited")
    assert answers["2"]["accepted"]
    assert len(asked.agenda.runs) == 1


def test_more_commands_than_may_wait_are_refused_and_none_is_forgotten(asked, monkeypatch):
    monkeypatch.setattr(remote, "MAX_WAITING", 3)
    for _ in range(4):
        asked.hear("list")
    refused = asked.answers(timed=True)
    assert [(key, answer["reason"]) for key, answer in refused.items()] == [("4", "3 commands are already waiting")]
    answers = asked.answers()
    assert [(key, answer["accepted"]) for key, answer in answers.items()] == [("1", True), ("2", True), ("3", True)]
    asked.hear("list", id="4")
    assert asked.answers()["4"]["accepted"], "it was refused, and its sender tries again"


def test_a_run_that_was_refused_may_be_asked_for_again_with_its_id_and_one_that_began_may_not(asked, monkeypatch):
    monkeypatch.setattr(agenda_module, "MAX_PASSES", 1)
    running = asked.agenda.begin(SUITE)
    asked.hear("run", id="r", suite="s")
    assert asked.answers()["r"]["reason"] == "1 runs are already waiting"
    asked.agenda.cancel(running.suite_id)
    asked.hear("run", id="r", suite="s")
    assert asked.answers()["r"]["accepted"]
    asked.hear("run", id="r", suite="s")
    assert asked.answers()["r"]["reason"] == "a command with this id is waiting or was already executed"
    assert len(asked.agenda.runs) == 1


def test_a_run_that_a_restart_lost_while_it_waited_may_be_asked_for_again(asked):
    asked.hear("list", id="done")
    assert asked.answers()["done"]["accepted"]
    asked.hear("run", id="waiting", suite="s")
    assert asked.answers(timed=True) == {}
    gate = Gate(TOPICS, "all")
    asked.state.save()
    gate.remember(asked.state.facts.commands, 0.0)
    asked.state.gate = gate
    asked.state.commands.clear()
    asked.hear("run", id="waiting", suite="s")
    asked.hear("list", id="done")
    assert {key: answer["accepted"] for key, answer in asked.answers().items()} == {"waiting": True, "done": False}


@pytest.mark.parametrize("client", ["me x", "\u00e4", "$SYS", "a//b", "a/b/c/d", ""])
def test_a_client_that_cannot_be_answered_is_refused_and_the_log_says_so(asked, capsys, client):
    asked.hear("run", client=client, suite="s")
    assert asked.answers() == {}
    assert not asked.agenda.runs
    log = capsys.readouterr().err
    assert log == "command refused: client: use letters, digits, '.', '-' and '_' in at most three levels\n"


def test_what_the_log_quotes_of_a_command_is_one_line(asked, capsys):
    asked.hear("run", **{"x\nbenchd: all is well\x1b[2J": 1})
    asked.answers()
    log = capsys.readouterr().err
    assert "unknown field" in log
    assert log.isprintable() or log[:-1].isprintable()
