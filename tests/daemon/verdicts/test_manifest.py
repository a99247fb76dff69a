"""The manifest: its published schema, and what a hostile one may not say."""

import json
from pathlib import Path

import msgspec
import pytest
from manifests_made import manifest as made

from benchd.daemon.errors import UsageError
from benchd.daemon.records import Case, InputSpec, Load
from benchd.daemon.verdicts import manifest
from benchd.daemon.verdicts.manifest import Golden, Tensor

DOCS = Path(__file__).parents[3] / "docs"


def test_the_published_schema_is_the_one_of_the_types():
    published = json.loads((DOCS / "manifest.schema.json").read_text())
    assert published == msgspec.to_builtins(manifest.json_schema())


@pytest.mark.parametrize(
    "said",
    [
        {"case": Case(model="net", streams=10**6)},
        {"case": Case(model="net", scenario="server", load=Load(rate_hz=1.0))},
        {"case": Case(model="net", scenario="sustained")},
        {"case": Case(model="net", direction="training")},
        {"case": Case(model="net", batch_size=0)},
        {"case": Case(model="net", batch_size=10**30)},
        {"case": Case(model="net", threads=-1)},
        {"case": Case(model="net", threads=10**9)},
        {"case": Case(model="net", seed=-1)},
        {"golden": Golden(0, 0, {})},
        {"golden": Golden(1, 8, {})},
        {"golden": Golden(1, 1, {}, rows_off=1)},
        {"read": [InputSpec(shape=[-256])]},
        {"inputs": [Tensor("x", "float32", [-1, 256])]},
    ],
)
def test_what_ship_never_writes_is_damage(said, tmp_path):
    (tmp_path / manifest.MANIFEST).write_bytes(manifest.encode(made(**said)))
    with pytest.raises(UsageError, match=r"manifest\.json is damaged \(.*\); ship it again"):
        manifest.read(tmp_path)
