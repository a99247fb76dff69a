"""The manifest: its published schema, and what one that was made to fit may not say."""

import json
from pathlib import Path

import msgspec
import pytest
from manifests_made import manifest as made
from manifests_made import record_of, seal, write_golden, write_whole
from records_made import ENVIRONMENT, timing

from benchd.daemon import records
from benchd.daemon.errors import UsageError
from benchd.daemon.measuring.protocol import Golden, Tensor
from benchd.daemon.records import Case
from benchd.daemon.shipping import manifest

DOCS = Path(__file__).parents[3] / "docs"


def test_the_published_schema_is_the_one_of_the_types():
    published = json.loads((DOCS / "manifest.schema.json").read_text())
    assert published == msgspec.to_builtins(records.json_schema(manifest.Manifest))


def written(folder, **said):
    manifest.write(folder, made(**said))
    return folder


def test_what_ship_writes_is_read(tmp_path):
    write_whole(tmp_path, made(asked=msgspec.structs.asdict(manifest.Asked(max_latency_ms=30.0))))
    assert manifest.read(tmp_path).name == "net"


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"latency_ms": 10.005}, r"latency_ms 10\.005, and its records\.jsonl 10\.0"),
        ({"processes_ms": [10.0] * 4 + [10.1]}, "processes_ms "),
        ({"low_ms": 9.99}, "low_ms "),
        ({"high_ms": None}, "high_ms None"),
        ({"p99_ms": 12.0}, "p99_ms "),
        ({"energy_per_inference_j": 0.1}, "energy_per_inference_j "),
        ({"memory_bytes": 2**20}, "memory_bytes "),
        ({"accuracy": 0.9}, "accuracy "),
    ],
)
def test_a_promise_that_is_not_that_of_its_record_is_damage_and_told(said, words, tmp_path):
    write_whole(tmp_path, made(promised=msgspec.structs.replace(made().promised, **said)))
    with pytest.raises(UsageError, match=rf"its manifest\.json says {words}.*; ship it again"):
        manifest.read(tmp_path)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"case": Case(model="net", batch_size=4)}, "case another one"),
        ({"weights_sha256": "other"}, "weights_sha256 other"),
        ({"device_id": "other"}, "device_id other"),
        ({"environment": msgspec.structs.replace(ENVIRONMENT, power_mode="15W")}, "environment another one"),
    ],
)
def test_a_manifest_of_another_case_or_machine_than_its_record_is_damage(said, words, tmp_path):
    golden = {"golden": Golden(1, 4, {"y": 1e-5})} if "case" in said else {}
    write_whole(tmp_path, made(**said, **golden), record_of(made()))
    with pytest.raises(UsageError, match=rf"says {words}, and its records\.jsonl"):
        manifest.read(tmp_path)


def test_the_last_record_makes_the_promise(tmp_path):
    """The ones before it are those of the race."""
    raced = msgspec.structs.replace(record_of(made()), run_id="raced", timing=timing(10.4), processes=[])
    write_whole(tmp_path, made(), raced, record_of(made()))
    assert manifest.read(tmp_path).promised.latency_ms == 10.0
    write_whole(tmp_path, made(), record_of(made()), raced)
    with pytest.raises(UsageError, match="says processes_ms"):
        manifest.read(tmp_path)


def test_a_folder_without_records_promises_nothing(tmp_path):
    write_golden(tmp_path, "input0:x", "exact0:y")
    with pytest.raises(UsageError, match=r"what it promises, and there is no records\.jsonl"):
        manifest.read(written(tmp_path))


@pytest.mark.parametrize(("names", "lacking"), [((), "input0:x"), (("input0:x", "answer0:y"), "exact0:y")])
def test_a_golden_file_without_an_array_is_damage(names, lacking, tmp_path):
    write_golden(tmp_path, *names)
    with pytest.raises(UsageError, match=rf"golden\.npz is damaged \(no {lacking}\); ship it again"):
        manifest.read(written(tmp_path))


@pytest.mark.parametrize("content", [b"", b"PK no archive"])
def test_a_golden_file_that_is_no_archive_is_damage(content, tmp_path):
    (tmp_path / manifest.GOLDEN).write_bytes(content)
    with pytest.raises(UsageError, match=r"golden\.npz is damaged \(.+\); ship it again"):
        manifest.read(written(tmp_path))


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"golden": Golden(0, 0, {"y": 1e-5})}, "not whole batches"),
        ({"golden": Golden(1, 8, {"y": 1e-5})}, "not whole batches"),
        ({"golden": Golden(1, 1, {"y": 1e-5}, rows_off=1)}, "may be off"),
        ({"golden": Golden(8, 8, {"y": 1e-5}, rows_off=3)}, "may be off"),
        ({"golden": Golden(1, 1, {"y": 1e-5}, rows_off=-1)}, "may be off"),
        ({"golden": Golden(1, 1, {})}, "not those of its outputs"),
        ({"golden": Golden(1, 1, {"y": 1e-5, "z": 1e-5})}, "not those of its outputs"),
        ({"outputs": [Tensor("y", "float32", [1, 2]), Tensor("z", "float32", [1, 2])]}, "not those of its outputs"),
        ({"outputs": [], "golden": Golden(1, 1, {})}, "not those of its outputs"),
    ],
)
def test_golden_answers_that_would_accept_any_are_damage(said, reason, tmp_path):
    with pytest.raises(UsageError, match=rf"manifest\.json is damaged \(.*{reason}.*\); ship it again"):
        manifest.read(written(tmp_path, **said))


@pytest.mark.parametrize("odd", [b'"n\xff\xfe"', b'{"a":' * 50_000 + b"1" + b"}" * 50_000])
def test_bytes_that_no_json_has_are_damage(odd, tmp_path):
    path = written(tmp_path) / manifest.MANIFEST
    path.write_bytes(path.read_bytes().replace(b'"net"', odd, 1))
    seal(tmp_path)
    with pytest.raises(UsageError, match=r"manifest\.json is damaged"):
        manifest.read(tmp_path)
