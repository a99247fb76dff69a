"""The manifest's published schema."""

import json
from pathlib import Path

import msgspec

from benchd.daemon.verdicts import manifest

DOCS = Path(__file__).parents[3] / "docs"


def test_the_published_schema_is_the_one_of_the_types():
    published = json.loads((DOCS / "manifest.schema.json").read_text())
    assert published == msgspec.to_builtins(manifest.json_schema())
