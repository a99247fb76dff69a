"""The service's folders: when they are verified, what is said of them, and which variant is ahead."""

import os
import shutil
import tempfile
from pathlib import Path

import msgspec
import pytest
from manifests_made import manifest
from records_made import ENERGY, ENVIRONMENT, INFO, PASSED, made, timing
from services import state_in

from benchd.daemon import config
from benchd.daemon.config import ShippedFolder
from benchd.daemon.delivery.messages import DeployedFolder
from benchd.daemon.delivery.topics import Topics
from benchd.daemon.errors import UsageError
from benchd.daemon.records import Case, ModelFacts, ProcessResult, Variant, encode
from benchd.daemon.service import deployed, homeassistant
from benchd.daemon.service.facts import STATE, FactsFile, Verification
from benchd.daemon.shipping import manifest as manifests
from benchd.daemon.verdicts.results import JOURNAL

DAY = 86400.0
FOLDER = ShippedFolder(path="/srv/net")
MODEL = ModelFacts(options={}, input_shape=[3], parameters=1, weights="w", weights_sha256="same", data="random")


def said(verdict="kept", **fields):
    return DeployedFolder(name="net", case_id="c", verdict=verdict, since="then", t_wall="then", **fields)


def record(variant, median_ms, weights="same", joules=0.5, power_mode=None, **case):
    times = [timing(median_ms * (1.0 + step / 1000)) for step in (0, 1, 2)]
    energy = msgspec.structs.replace(ENERGY, gross_per_inference_j=joules)
    return made(
        run_id=variant,
        case=Case(model="vim_tiny", variant=Variant.parse(variant), **case),
        timing=times[1],
        energy=energy,
        environment=msgspec.structs.replace(ENVIRONMENT, power_mode=power_mode),
        check=PASSED,
        model=msgspec.structs.replace(MODEL, weights_sha256=weights),
        processes=[ProcessResult(status="ok", timing=process_timing, energy=energy) for process_timing in times],
    )


def shipped(variant="eager", **asked):
    return manifest(
        name="vim_tiny",
        case=Case(model="vim_tiny", variant=Variant.parse(variant)),
        weights_sha256="same",
        asked={"max_latency_ms": None, "max_energy_j": 0.6, "min_effect": 0.01, "rate_hz": None} | asked,
    )


@pytest.fixture
def state(tmp_path):
    """A service of one folder, without a broker."""
    with state_in(tmp_path, config.Config(shipped=[FOLDER])) as state:
        yield state


def events(state):
    return [msgspec.json.decode(entry.body)["event"] for entry in state.events.entries()]


def test_a_folder_is_due_at_first_at_its_time_and_after_a_change():
    folder, before = ShippedFolder(path="/srv/net", every="1d"), Verification(1000.0, "as it is", said(), False)
    assert deployed.is_due(folder, None, 1000.0, "as it is")
    assert not deployed.is_due(folder, before, 1000.0 + DAY / 2, "as it is")
    assert deployed.is_due(folder, before, 1000.0 + DAY, "as it is")
    assert deployed.is_due(folder, before, 1001.0, "changed")
    assert not deployed.is_due(ShippedFolder(path="/srv/net"), before, 1000.0 + 90 * DAY, "as it is")
    assert deployed.is_due(folder, Verification(1000.0 + 30 * DAY, "as it is", said(), False), 1000.0, "as it is")


def test_a_folder_whose_file_the_service_may_read_by_now_is_due():
    with tempfile.TemporaryDirectory() as place:  # another user cannot enter pytest's own folders
        Path(place).chmod(0o755)
        for name in (manifests.MANIFEST, "model.onnx"):
            Path(place, name).write_text("{}")
            Path(place, name).chmod(0o600)

        def fingerprint():
            return deployed.fingerprint_of(ShippedFolder(path=place), "machine")

        user = os.getuid()
        os.setreuid(user or 65534, -1)  # root may read every file
        try:
            before = fingerprint()
            Path(place, "model.onnx").chmod(0o644 if user == 0 else 0)
            assert fingerprint() != before
        finally:
            os.setreuid(user, -1)


def test_a_folder_that_cannot_be_read_breaks_its_promise_and_its_place_is_not_told():
    folder = ShippedFolder(path="/srv/secret/net")
    document = deployed.document(folder, None, "/srv/secret/net: model.onnx is missing", None, "")
    assert (document.verdict, document.is_broken, document.reason) == ("broken", True, "net: model.onnx is missing")


def test_the_time_since_when_a_verdict_stands_is_kept():
    folder, before = ShippedFolder(path="/srv/net"), Verification(0.0, "", said("broken"), False)
    assert deployed.document(folder, None, "still", before, "").since == "then"
    assert deployed.document(folder, None, "still", Verification(0.0, "", said("kept"), False), "").since != "then"


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        ("kept slower inconclusive slower another_machine broken kept", ["promise_broken", "promise_kept"]),
        ("inconclusive another_machine kept", []),
        ("failed inconclusive faster inconclusive", ["promise_broken", "promise_kept"]),
    ],
)
def test_a_broken_promise_is_kept_again_only_by_a_verdict_that_says_so(state, tmp_path, verdicts, expected):
    for verdict in verdicts.split():
        deployed.publish(state, FOLDER, said(verdict), "as it is")
        state.facts.shipped = FactsFile(tmp_path / STATE).now.shipped
    assert events(state) == expected


def test_a_folder_that_was_mended_or_replaced_breaks_a_promise_of_its_own(state):
    for verdict, of in (("broken", "old"), ("another_machine", "trusted"), ("slower", "trusted"), ("kept", "trusted")):
        deployed.publish(state, FOLDER, said(verdict), of)
    assert events(state) == ["promise_broken", "promise_broken", "promise_kept"]


@pytest.mark.parametrize(
    ("records", "ahead"),
    [
        ([record("eager", 10.0), record("onnxruntime", 7.0)], "onnxruntime, 1.43x"),
        ([record("eager", 10.0), record("onnxruntime", 9.999)], ""),
        ([record("eager", 7.0), record("onnxruntime", 10.0)], ""),
        ([record("eager", 10.0), record("onnxruntime", 7.0, weights="other")], ""),
        ([record("eager", 10.0), record("onnxruntime", 7.0, joules=0.59)], ""),
        ([record(name, time_ms, threads=1) for name, time_ms in (("eager", 10.0), ("onnxruntime", 7.0))], None),
        ([record(name, time_ms, power_mode="15W") for name, time_ms in (("eager", 10.0), ("onnxruntime", 7.0))], None),
        ([record("onnxruntime", 7.0)], None),
        ([], None),
    ],
)
def test_a_variant_that_the_plan_shows_ahead_is_named_with_its_interval(records, ahead):
    lead = deployed.better(shipped(), records)
    assert lead == ahead or (ahead and lead.startswith(ahead))


def test_a_variant_ahead_is_told_once_whatever_becomes_of_the_journal(state, tmp_path, monkeypatch):
    """It is put away, has only some cases yet, is moved elsewhere, or holds the figures of another night."""

    def verify(*given, **named):
        raise UsageError("not measured here")

    monkeypatch.setattr(deployed.manifest, "read", lambda folder, beat: shipped())
    monkeypatch.setattr(deployed.verifying, "verify", verify)

    def better(*records):
        for each in records:
            state.records.append(encode(each))
        deployed.verify(state, FOLDER)
        return state.facts.shipped[FOLDER.called].published.better

    lead = better(record("eager", 10.0), record("onnxruntime", 7.0))
    assert lead.startswith("onnxruntime, 1.43x")
    state.records.rotate(1)
    assert better() == lead
    assert better(record("eager", 10.0)) == lead
    (tmp_path / JOURNAL).rename(tmp_path / "rotated")
    shutil.rmtree(tmp_path / "runs")
    assert better() == lead
    assert better(record("eager", 10.0), record("onnxruntime", 6.0)).startswith("onnxruntime, 1.67x")
    assert events(state).count("shipped_behind") == 1


def test_a_lead_in_joules_is_named_in_joules():
    lead = deployed.better(
        shipped(objective="energy"), [record("eager", 10.0, joules=0.4), record("onnxruntime", 9.0, joules=0.2)]
    )
    assert lead.startswith("onnxruntime, 2x [1.8")


def test_each_folder_has_a_sensor():
    sensor = msgspec.json.decode(homeassistant.discovery(Topics("d"), INFO, ["net"]))["cmps"]["shipped_net"]
    assert sensor["state_topic"] == "benchd/v1/d/shipped/net"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ('path = "net"', "absolute path"),
        ('path = "/srv/a net"', "shipped.name 'a net'"),
        ('path = "/srv/net"\nevery = "1d"\nat = "03:00"', "give only one"),
        ('path = "/srv/net"\n[[shipped]]\npath = "/mnt/net"', "used twice"),
    ],
)
def test_a_folder_that_cannot_be_meant_is_refused(tmp_path, given, words):
    (tmp_path / "benchd.toml").write_text(f"[[shipped]]\n{given}\n")
    with pytest.raises(UsageError, match=words):
        config.read(tmp_path / "benchd.toml")


def test_a_configuration_that_others_may_write_names_no_folder(tmp_path):
    path = tmp_path / "benchd.toml"
    path.write_text('[[shipped]]\npath = "/srv/net"\n')
    path.chmod(0o666)
    with pytest.raises(UsageError, match="shipped: refused"):
        config.read(path)
