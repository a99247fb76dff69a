import json

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from messages_made import message
from records_made import ENERGY, WRONG, made

from benchd.daemon.delivery.connection import IncomingMessage
from benchd.daemon.records import Case, encode
from benchd.dashboard.limits import BYTES, OTHER_BYTES, VALUES
from benchd.dashboard.messages import INTEGER_LIMIT, rows

DEVICE = "bench-abc123"
RESULT = f"benchd/v1/{DEVICE}/result/r1"


def taken(kind, body, **fields):
    return rows(message(DEVICE, kind, body, 100.0, **fields))


def only(kind, body):
    """Return the table and the values of a message that makes one row beside its device's."""
    (table, values), device = taken(kind, body)
    assert device == ("device", {"device_id": DEVICE, "seen_s": 100.0})
    return table, values


def reason(topic, body):
    ((table, values),) = rows(IncomingMessage(topic, body, 100.0))
    assert (table, values["topic"], values["body"]) == ("quarantine", topic, body)
    return values["reason"]


def test_a_result_is_a_row_and_its_original_bytes():
    body = encode(made(energy=ENERGY, check=WRONG, flags=["mqtt", "service"], x_of_floor=3.0)) + b" "
    result, original, _ = taken("result/r1", body)
    assert original == ("body", {"key": f"{DEVICE}:r1", "body": body})
    expected = {
        "median_ms": 5.0,
        "energy_mj": 500.0,
        "energy_err_mj": 25.0,
        "checked": "failed",
        "flags": "mqtt, service",
    }
    expected |= {"x_of_floor": 3.0, "model": "vim_tiny", "variant": "eager", "hardware": "cpu", "arrived_s": 100.0}
    assert {name: result.values[name] for name in expected} == expected


def test_a_record_that_was_not_measured_has_no_figures():
    result, *_ = taken("result/r1", encode(made(status="failed", reason="x" * 5000, timing=None)))
    assert (result.values["median_ms"], result.values["energy_mj"], result.values["checked"]) == (None, None, None)
    assert len(result.values["reason"]) == 512
    result, *_ = taken("result/r1", encode(made(status="failed", reason="x" + "é" * 5000, timing=None)))
    assert result.values["reason"] == "x" + "é" * 255


def test_a_figure_that_a_record_s_numbers_do_not_allow_is_refused():
    energy = msgspec.structs.replace(ENERGY, energy_j=1e-300, energy_err_j=1e300)
    assert "energy_err_mj is not a finite number" in reason(RESULT, encode(made(energy=energy)))


def test_an_event_with_its_judgement_is_kept_as_it_came():
    judgement = {"case_id": "c", "verdict": "slower", "median_ms": 3.0, "baseline_ms": 1.0, "new": 1}
    table, values = only("event", {"event": "regression", "judgement": judgement})
    assert (table, json.loads(values["body"])["judgement"]) == ("event", judgement)


def test_offline_is_stored_and_is_no_sign_of_life():
    status, device = taken("status", {"state": "offline", "session": "s7"})
    assert (status.values["state"], status.values["session"], device.values["seen_s"]) == ("offline", "s7", None)


def test_telemetry_is_the_last_value_of_each_metric_at_its_arrival():
    samples = [[5, "power_w", 7.0, "ina3221", "VDD_IN"], [6, "power_w", 8.0, "ina3221", "VDD_IN"], [6, "m", 1.0, "x"]]
    row, _ = taken("telemetry", {"samples": samples})
    assert row.values == {"device_id": DEVICE, "t_s": 100.0, "body": b'{"power_w@VDD_IN":8.0,"m":1.0}'}


@pytest.mark.parametrize(
    ("topic", "body", "why"),
    [
        ("other/topic", b"{}", "not a benchd topic"),
        (f"benchd/v1/{DEVICE}/cmd/run", b"{}", "not a benchd topic"),
        (f"{RESULT}/more", b"{}", "not a benchd topic"),
        (RESULT, b"", "not a benchd record"),
        (RESULT, b'{"schema":"benchd.record/2"}', "this version reads"),
        (RESULT, b'{"schema":"benchd.record/1","median":NaN}', "not a benchd record"),
        (RESULT, encode(made()).replace(b'"scenario":"', b'"scenario":"later-'), "Invalid enum value"),
        (RESULT, b"[" * 32, "not a benchd record"),
        (RESULT, b"\xff\xfe", "not a benchd record"),
        (RESULT, encode(made(run_id="other")), f"the record says it is {DEVICE}:other"),
        (RESULT, encode(made(case=Case(model="m" * 513))), "longer than 512 bytes"),
        (RESULT, encode(made(case=Case(model="é" * 257))), "longer than 512 bytes"),
        (RESULT, encode(made(case=Case(model="m", batch_size=2**63))), "does not fit in 64 bits"),
        (f"benchd/v1/{DEVICE}/status", b'{"state":"asleep"}', "Invalid enum value 'asleep'"),
        (f"benchd/v1/{DEVICE}/latest/c", b'{"verdict":"fixed inset-0"}', "Invalid enum value"),  # it becomes a class
        (f"benchd/v1/{DEVICE}/telemetry", b'{"samples":[[1,"power_w",1e999,"x"]]}', "out of range"),
        (f"benchd/v1/{DEVICE}/status", b'{"state":"online","session":"%s"}' % (b"s" * 600), "longer than 512 bytes"),
        (f"benchd/v1/{DEVICE}/health", b"[]", "Expected `object`"),
        (f"benchd/v1/{DEVICE}/event", b'{"event":"e","judgement":{}}', "`case_id`"),
        (f"benchd/v1/{DEVICE}/health", b'{"disk_free_bytes":1%s}' % (b"0" * 400), "disk_free_bytes"),
    ],
)
def test_what_cannot_be_read_is_kept_apart_with_the_reason(topic, body, why):
    assert why in reason(topic, body)


@given(st.sampled_from(["result/r1", "status", "info", "health", "telemetry", "event"]), st.binary())
def test_no_body_raises(kind, body):
    assert taken(kind, body)


@settings(max_examples=40)  # of five fields each
@given(
    st.recursive(
        st.none() | st.integers() | st.floats() | st.text(), lambda e: st.lists(e) | st.dictionaries(st.text(), e)
    )
)
def test_no_change_of_a_record_raises_or_makes_a_value_that_no_database_takes(value):
    record = msgspec.to_builtins(made())
    for name in ("case", "timing", "status", "suite_id", "environment"):
        for row in taken("result/r1", json.dumps(record | {name: value}).encode()):
            whole = [number for number in row.values.values() if isinstance(number, int)]
            assert all(abs(number) < INTEGER_LIMIT for number in whole)


@pytest.mark.parametrize("kind", [*BYTES, "cmd"])
def test_what_is_beyond_a_limit_of_its_kind_is_kept_apart_without_its_body(kind):
    most, topic = BYTES.get(kind, OTHER_BYTES), f"benchd/v1/{DEVICE}/{kind}"
    for over, why in ((b"x" * (most + 1), f"{most} bytes"), (b"[" + b"0," * VALUES + b"0]", f"{VALUES} values")):
        if len(over) <= most or why.endswith("bytes"):
            ((table, values),) = rows(IncomingMessage(topic, over, 100.0))
            assert (table, values["body"], values["reason"]) == ("quarantine", b"", f"more than {why}")


def test_a_body_that_is_nested_without_end_is_kept_apart():
    assert "recursion" in reason(RESULT, b'{"a":' * 2_000 + b"1" + b"}" * 2_000)


@pytest.mark.parametrize(("kind", "is_numbered"), [("result/r1", True), ("event", True), ("health", False)])
def test_a_result_and_an_event_say_their_numbers_also_where_they_cannot_be_read(kind, is_numbered):
    body = b'{"log":"0123456789abcdef","seq":7,"event":1}'
    spans = [
        row.values for row in rows(IncomingMessage(f"benchd/v1/{DEVICE}/{kind}", body, 1.0)) if row.table == "span"
    ]
    assert spans == [{"device_id": DEVICE, "log": "0123456789abcdef", "first": 7, "last": 7}] * is_numbered
