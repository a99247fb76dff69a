"""The messages of docs/asyncapi.yaml as a validator: which channel a topic is, and whether a payload fits it."""

import json
import re
from pathlib import Path

import jsonschema
import pytest
from referencing import Registry, Resource

DOCS = Path(__file__).parents[2] / "docs"


class Document:
    """The AsyncAPI document; needs PyYAML."""

    def __init__(self):
        yaml = pytest.importorskip("yaml", reason="docs/asyncapi.yaml is read with PyYAML")
        self.tree = yaml.safe_load((DOCS / "asyncapi.yaml").read_text())
        record = json.loads((DOCS / "record.schema.json").read_text())
        resources = [("asyncapi", self.tree), ("record.schema.json", record)]
        self._registry = Registry().with_resources(
            (name, Resource.from_contents({"$schema": "https://json-schema.org/draft/2020-12/schema", **content}))
            for name, content in resources
        )

    def channel(self, topic):
        """Return the name of the channel that this topic belongs to, None for one that is not described."""
        for name, channel in self.tree["channels"].items():
            if re.fullmatch(re.sub(r"\{\w+\}", "[^/]+", channel["address"]), topic):
                return name
        return None

    def validate(self, topic, payload):
        """Hold a message against its channel; raise ValidationError where it does not fit."""
        name = self.channel(topic)
        assert name, f"{topic} is not described"
        if name == "latest" and not payload:
            return name
        (message,) = self.tree["channels"][name]["messages"]
        schema = {"$ref": f"asyncapi#/components/messages/{message}/payload"}
        jsonschema.Draft202012Validator(schema, registry=self._registry).validate(json.loads(payload))
        return name
