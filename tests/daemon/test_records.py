"""The wire format: names of variants and cases, round trips, and what is refused."""

import itertools
import json
import math
from pathlib import Path

import jsonschema
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from records_made import made

from benchd.daemon import records
from benchd.daemon.errors import SchemaError, UsageError
from benchd.daemon.records import Case, Record, Variant

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("variant", "name"),
    [
        (Variant(), "eager"),
        (Variant(precision="fp16"), "fp16"),
        (Variant("compile", "amp"), "compile-amp"),
        (Variant(kernels="custom"), "custom"),
        (Variant("cudagraph", "fp16", "custom"), "custom-cudagraph-fp16"),
        (Variant("onnxruntime"), "onnxruntime"),
        (Variant("tensorrt", "fp16"), "tensorrt-fp16"),
    ],
)
def test_a_variant_is_named_by_what_is_not_default(variant, name):
    assert variant.name == name
    assert Variant.parse(name) == variant


def test_every_variant_parses_from_its_name_and_its_label():
    variants = list(records.all_variants())
    assert len({variant.name for variant in variants}) == len(variants)
    for variant in variants:
        assert Variant.parse(variant.name) == Variant.parse(variant.label) == variant
    assert Variant(precision="fp16").label == "eager-fp16"


@pytest.mark.parametrize(("name", "words"), [("custom-tensorrt", "standard ops"), ("onnxruntime-amp", "use fp16")])
def test_a_combination_that_makes_no_sense_says_why(name, words):
    with pytest.raises(UsageError, match=words):
        Variant.parse(name)


def test_an_unknown_variant_names_the_closest():
    with pytest.raises(UsageError, match=r"'compil'; did you mean 'compile'\? Valid: eager, "):
        Variant.parse("compil")


case_fields = {
    "model": st.sampled_from(["vim_tiny", "snn_onepass", "own.net.build"]),
    "variant": st.sampled_from(list(records.all_variants())),
    "batch_size": st.integers(1, 512),
    "options": st.dictionaries(st.sampled_from(["time_steps", "scan"]), st.integers(1, 64) | st.text(max_size=5)),
    "direction": st.sampled_from(records.DIRECTIONS),
    "scenario": st.sampled_from(records.SCENARIOS),
    "seed": st.integers(0, 9),
}


@given(st.builds(Case, **case_fields))
def test_a_case_id_is_safe_in_a_path_and_in_a_topic(case):
    assert not set(case.case_id) & set("/+#\\ \0\n")
    assert msgspec.json.decode(msgspec.json.encode(case), type=Case).case_id == case.case_id


def test_what_differs_differs_in_the_case_id():
    values = [(v, b, d, s) for v, b, d, s in itertools.product([0, 1], repeat=4)]
    ids = {
        Case(
            model="vim_tiny",
            variant=[Variant(), Variant(precision="amp")][v],
            batch_size=b + 1,
            direction=records.DIRECTIONS[d],
            seed=s,
        ).case_id
        for v, b, d, s in values
    }
    assert len(ids) == len(values)


finite = st.floats(allow_nan=False, allow_infinity=False)


@given(median=finite, flags=st.lists(st.text()), reason=st.none() | st.text())
def test_a_record_survives_the_round_trip(median, flags, reason):
    timing = msgspec.structs.replace(made().timing, median_ms=median)
    record = made(timing=timing, flags=flags, reason=reason)
    assert records.decode(records.encode(record)) == record


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_refused_with_its_path(value):
    timing = msgspec.structs.replace(made().timing, p99_ms=value)
    with pytest.raises(ValueError, match=r"record\.timing\.p99_ms"):
        records.encode(made(timing=timing))


def test_a_reader_ignores_what_it_does_not_know_and_fills_in_what_is_not_there():
    data = json.loads(records.encode(made()))
    data["of_a_later_version"] = {"x": 1}
    del data["flags"]
    assert records.decode(json.dumps(data).encode()) == made()


@pytest.mark.parametrize("schema", ["benchd.record/2", "other/1", ""])
def test_another_schema_is_named(schema):
    data = json.loads(records.encode(made())) | {"schema": schema}
    with pytest.raises(SchemaError, match="this version reads"):
        records.decode(json.dumps(data).encode())


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff\xfe", b'{"schema": "benchd.record/1"}', b"[" * 10**5])
def test_what_is_no_record_is_refused(data):
    with pytest.raises(SchemaError):
        records.decode(data)


def test_a_record_of_a_variant_that_cannot_be_is_refused():
    data = json.loads(records.encode(made()))
    data["case"]["variant"] = {"backend": "tensorrt", "kernels": "custom"}
    with pytest.raises(SchemaError, match="standard ops only"):
        records.decode(json.dumps(data).encode())


def test_a_later_minor_version_is_read():
    data = json.loads(records.encode(made())) | {"schema": "benchd.record/1.4"}
    assert records.decode(json.dumps(data).encode()).key == made().key


def test_the_published_schema_is_the_one_of_the_types():
    published = json.loads((ROOT / "docs" / "record.schema.json").read_text())
    assert published == msgspec.to_builtins(records.json_schema())


def test_a_record_is_valid_by_the_published_schema_and_a_broken_one_is_not():
    validator = jsonschema.Draft202012Validator(records.json_schema())
    data = json.loads(records.encode(made()))
    validator.validate(data)
    data["status"] = "splendid"
    assert not validator.is_valid(data)


def test_the_key_is_device_and_run():
    assert made().key == "bench-abc123:r1"
    assert isinstance(made(), Record)
