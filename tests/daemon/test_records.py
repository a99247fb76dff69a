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
from records_made import made, timing

from benchd.daemon import records
from benchd.daemon.errors import SchemaError, UsageError
from benchd.daemon.records import Case, Variant

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


finite = st.floats(min_value=0.0, allow_nan=False, allow_infinity=False)


@given(median=finite, flags=st.lists(st.sampled_from(sorted(records.FLAGS))), reason=st.none() | st.text())
def test_a_record_survives_the_round_trip(median, flags, reason):
    whole = timing(median, mean_ms=median, min_ms=median, max_ms=median, low_ms=None, high_ms=None)
    record = made(timing=whole, flags=flags, reason=reason)
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


MEASURED = [line for path in sorted(ROOT.glob("results/*/records.jsonl")) for line in path.read_bytes().splitlines()]


def test_no_measured_record_contradicts_itself():
    """Among them is one whose median, the mean of its blocks, lies above its p90 because a few blocks were slow."""
    timings = [timing for line in MEASURED if (timing := records.decode(line).timing)]
    assert len(timings) > 100
    assert any(timing.p90_ms and timing.p90_ms < timing.median_ms for timing in timings)


@pytest.mark.parametrize(
    ("path", "damage", "words"),
    [
        ("timing.low_ms", lambda timing: 1.01 * timing["median_ms"], r"timing\.median_ms .* is below low_ms"),
        ("timing.high_ms", lambda timing: 0.99 * timing["low_ms"], r"timing\.high_ms .* is below median_ms"),
        ("timing.max_ms", lambda timing: 0.5 * timing["min_ms"], r"timing\.max_ms"),
        ("parts.compute.mean_ms", lambda timing: 2 * timing["max_ms"], r"parts\.compute\.max_ms"),
        ("processes.0.timing.median_ms", lambda timing: 2 * timing["max_ms"], r"processes\.0\.timing\.max_ms"),
        ("processes.0.window.end_ns", lambda window: window["start_ns"] - 10**9, r"processes\.0\.window\.end_ns"),
        ("processes.0.status", lambda _: "failed", "status is ok, but a process is not"),
        ("check.void", lambda _: True, "check.passed and check.void are both true"),
        ("check.ties", lambda check: check["images"] + 1, r"check\.images"),
        ("energy.energy_err_j", lambda _: -1.0, "energy_err_j -1 is below 0"),
        ("check.mean_error_share", lambda check: 1.0, r"check\.error_share .* is below mean_error_share 1"),
        ("check.audited", lambda _: -1, "audited -1 is below 0"),
        ("timing.runs", lambda _: 0, "runs 0 is below 1"),
        ("timing.confidence", lambda _: 7.0, "1 is below confidence 7"),
        ("case_id", lambda _: "other", "case_id other does not match its case, vim_tiny"),
        ("case.seed", lambda case: case["seed"] + 1, "case_id .* does not match its case"),
        ("t_wall", lambda _: "yesterday", "t_wall 'yesterday' is not an RFC 3339 time"),
        ("flags", lambda _: ["nonsense"], "'nonsense' is not a known flag"),
    ],
)
def test_a_record_whose_parts_contradict_each_other_is_refused_in_one_sentence(path, damage, words):
    """Each is a copy of a measured record with one value that its other values exclude."""
    measured = json.loads(next(line for line in MEASURED if b'"p99_ms":0.' in line and b'"rule":"outputs"' in line))
    records.decode(json.dumps(measured).encode())
    *places, field = path.split(".")
    part = measured
    for place in places:
        part = part[int(place) if place.isdigit() else place]
    part[field] = damage(part)
    with pytest.raises(SchemaError, match=words) as refused:
        records.decode(json.dumps(measured).encode())
    assert "\n" not in str(refused.value)


def test_every_flag_is_documented():
    documented = (ROOT / "docs" / "records.md").read_text()
    assert {flag for flag in records.FLAGS if f"`{flag}`" not in documented} == set()


def test_a_later_minor_version_is_read():
    data = json.loads(records.encode(made())) | {"schema": "benchd.record/1.4", "flags": ["of_a_later_version"]}
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
