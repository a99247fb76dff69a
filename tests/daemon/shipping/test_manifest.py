"""The manifest: its published schema, and what one that was made to fit must not say."""

import json
from pathlib import Path

import msgspec
import pytest
from manifests_made import manifest as made
from manifests_made import seal

from benchd.daemon import records
from benchd.daemon.errors import UsageError
from benchd.daemon.shipping import manifest

DOCS = Path(__file__).parents[3] / "docs"


def test_the_published_schema_is_the_one_of_the_types():
    published = json.loads((DOCS / "manifest.schema.json").read_text())
    assert published == msgspec.to_builtins(records.json_schema(manifest.Manifest))


def written(folder, **said):
    manifest.write(folder, made(**said))
    return folder


@pytest.mark.parametrize("odd", [b'"n\xff\xfe"', b'{"a":' * 50_000 + b"1" + b"}" * 50_000])
def test_bytes_that_no_json_has_are_damage(odd, tmp_path):
    path = written(tmp_path) / manifest.MANIFEST
    path.write_bytes(path.read_bytes().replace(b'"net"', odd, 1))
    seal(tmp_path)
    with pytest.raises(UsageError, match=r"manifest\.json is damaged"):
        manifest.read(tmp_path)
