"""docs/asyncapi.yaml against the types and the topics of the code; tests/e2e/test_service.py adds real messages."""

import json

import jsonschema
import msgspec
import pytest
from asyncapi import DOCS, Document
from records_made import INFO, made

from benchd.daemon.delivery import messages
from benchd.daemon.delivery.commands import PARAMETERS, VERBS
from benchd.daemon.delivery.topics import Topics

KINDS = [messages.Status, messages.Info, messages.Health, messages.Telemetry, messages.Event, messages.Latest]
KINDS += [messages.DeployedFolder]
KINDS += [messages.Response, *PARAMETERS.values()]


@pytest.fixture(scope="module")
def document():
    return Document()


def test_the_schemas_are_those_of_the_types(document):
    _, wanted = msgspec.json.schema_components(KINDS, ref_template="#/components/schemas/{name}")
    record = json.loads((DOCS / "record.schema.json").read_text())
    for name in wanted.keys() - {kind.__name__ for kind in PARAMETERS.values()} - record["$defs"].keys() - {"Sample"}:
        left_out = ("log", "seq") if name == "Event" else ()  # what is sent has every other field
        wanted[name]["required"] = [field for field in wanted[name]["properties"] if field not in left_out]
    text = json.dumps({name: schema for name, schema in wanted.items() if name not in record["$defs"]})
    text = text.replace("#/components/schemas/Environment", "record.schema.json#/$defs/Environment")
    assert document.tree["components"]["schemas"] == json.loads(text)


def test_every_topic_of_the_code_is_a_channel_and_the_other_way_round(document):
    topics = Topics("d")
    known = [topics.of(kind) for kind in ("status", "info", "health", "telemetry", "event")]
    known += [
        topics.result("r"),
        topics.latest("m,eager,b1"),
        topics.shipped("net"),
        f"{topics.root}cmd/run",
        f"{topics.root}resp/me/1",
    ]
    assert {document.channel(topic) for topic in known} == set(document.tree["channels"])
    assert document.tree["channels"]["command"]["parameters"]["verb"]["enum"] == list(VERBS)


def test_every_channel_has_its_operation(document):
    used = {operation["channel"]["$ref"].rpartition("/")[2] for operation in document.tree["operations"].values()}
    assert used | {"response"} == set(document.tree["channels"])


def test_messages_fit_and_others_do_not(document):
    topics = Topics("d")
    record = made()
    document.validate(topics.result("r1"), msgspec.json.encode(record))
    document.validate(topics.latest(record.case_id), msgspec.json.encode(messages.latest(record)))
    document.validate(topics.of("info"), msgspec.json.encode(INFO))
    for given in ({}, {"suite": "s"}, {"models": ["square"], "preset": "quick"}, {"suite_id": "1"}, {"log": "l"}):
        document.validate(topics.command("run"), msgspec.json.encode({"id": "1", **given}))
    for topic in (topics.result("r1"), topics.of("info"), topics.of("status"), topics.command("run")):
        with pytest.raises(jsonschema.ValidationError):
            document.validate(topic, b'{"state": 1}')


@pytest.mark.parametrize(("key", "value"), [("id", "x" * 41), ("id", ".x"), ("client", "me x"), ("client", "a/b/c/d")])
def test_a_name_that_the_device_refuses_does_not_fit(document, key, value):
    given = {"id": "1", "client": "a/b/c"}
    document.validate(Topics("d").command("status"), msgspec.json.encode(given))
    with pytest.raises(jsonschema.ValidationError):
        document.validate(Topics("d").command("status"), msgspec.json.encode(given | {key: value}))
