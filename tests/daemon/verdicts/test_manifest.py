"""The manifest: its published schema, and what a hostile one may not say."""

import json
from pathlib import Path

import msgspec
import pytest
from manifests_made import manifest as made
from manifests_made import write_golden

from benchd.daemon import records
from benchd.daemon.errors import UsageError
from benchd.daemon.records import Case, InputSpec, Load
from benchd.daemon.verdicts import manifest
from benchd.daemon.verdicts.manifest import Golden, Promised, Tensor

DOCS = Path(__file__).parents[3] / "docs"


def test_the_published_schema_is_the_one_of_the_types():
    published = json.loads((DOCS / "manifest.schema.json").read_text())
    assert published == msgspec.to_builtins(records.json_schema(manifest.Manifest))


def written(folder, **said):
    (folder / manifest.MANIFEST).write_bytes(manifest.encode(made(**said)))
    return folder


def test_what_ship_writes_is_read(tmp_path):
    asked = msgspec.structs.asdict(manifest.Asked(max_latency_ms=30.0))
    write_golden(tmp_path, "input0:x", "exact0:y")
    assert manifest.read(written(tmp_path, asked=asked, resources=manifest.resources(tmp_path))).name == "net"


@pytest.mark.parametrize(("names", "lacking"), [((), "input0:x"), (("input0:x", "answer0:y"), "exact0:y")])
def test_a_golden_file_without_an_array_is_damage(names, lacking, tmp_path):
    write_golden(tmp_path, *names)
    with pytest.raises(UsageError, match=rf"golden\.npz is damaged \(no {lacking}\); ship it again"):
        manifest.read(written(tmp_path, resources=manifest.resources(tmp_path)))


@pytest.mark.parametrize("content", [b"", b"PK no archive"])
def test_a_golden_file_that_is_no_archive_is_damage(content, tmp_path):
    (tmp_path / manifest.GOLDEN).write_bytes(content)
    with pytest.raises(UsageError, match=r"golden\.npz is damaged \(.+\); ship it again"):
        manifest.read(written(tmp_path, resources=manifest.resources(tmp_path)))


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"case": Case(model="net", streams=10**6)}, "one stream"),
        ({"case": Case(model="net", scenario="server", load=Load(rate_hz=1.0))}, "one stream"),
        ({"case": Case(model="net", scenario="sustained")}, "one stream"),
        ({"case": Case(model="net", direction="training")}, "one stream"),
        ({"case": Case(model="net", batch_size=0)}, "batch_size"),
        ({"case": Case(model="net", batch_size=10**30)}, "batch_size"),
        ({"case": Case(model="net", threads=-1)}, "threads"),
        ({"case": Case(model="net", threads=0)}, "threads"),
        ({"case": Case(model="net", threads=10**9)}, "threads"),
        ({"case": Case(model="net", seed=-1)}, "seed"),
        ({"name": "x" * 2000}, "name has no end"),
        ({"asked": {"max_latency_ms": 30.0, "demand": 30.0}}, "no limit of benchd ship"),
        ({"inputs": []}, "no inputs"),
        ({"golden": Golden(0, 0, {"y": 1e-5})}, "no batches"),
        ({"golden": Golden(1, 8, {"y": 1e-5})}, "no batches"),
        ({"golden": Golden(1, 1, {"y": 1e-5}, rows_off=1)}, "may be off"),
        ({"golden": Golden(8, 8, {"y": 1e-5}, rows_off=3)}, "may be off"),
        ({"golden": Golden(1, 1, {"y": 1e-5}, rows_off=-1)}, "may be off"),
        ({"golden": Golden(1, 1, {})}, "not those of its outputs"),
        ({"golden": Golden(1, 1, {"y": 1e-5, "z": 1e-5})}, "not those of its outputs"),
        ({"outputs": [Tensor("y", "float32", [1, 2]), Tensor("z", "float32", [1, 2])]}, "not those of its outputs"),
        ({"golden": Golden(1, 1, {"y": 1e300})}, "not a share"),
        ({"promised": Promised(processes_ms=[0.0] * 3, latency_ms=0.0, low_ms=None, high_ms=None)}, "that it promises"),
        ({"promised": Promised(processes_ms=[1e308] * 5, latency_ms=9, low_ms=None, high_ms=None)}, "that it promises"),
        ({"read": [InputSpec(shape=[-256])]}, "negative"),
        ({"inputs": [Tensor("x", "float32", [-1, 256])]}, "negative"),
    ],
)
def test_what_ship_never_writes_is_damage(said, reason, tmp_path):
    with pytest.raises(UsageError, match=rf"manifest\.json is damaged \(.*{reason}.*\); ship it again"):
        manifest.read(written(tmp_path, **said))


@pytest.mark.parametrize("odd", [b'"n\xff\xfe"', b'{"a":' * 50_000 + b"1" + b"}" * 50_000])
def test_bytes_that_no_json_has_are_damage(odd, tmp_path):
    path = written(tmp_path) / manifest.MANIFEST
    path.write_bytes(path.read_bytes().replace(b'"net"', odd, 1))
    with pytest.raises(UsageError, match=r"manifest\.json is damaged"):
        manifest.read(tmp_path)
