"""A report of any number of records: what memory holds of them, and that few of them decide as all do."""

import os
import tempfile
import tracemalloc
from io import StringIO
from pathlib import Path

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from records_made import ENERGY, ENVIRONMENT, PASSED, QANN, made, timing
from simulations import counts

from benchd.daemon.errors import UsageError
from benchd.daemon.records import Case, ProcessResult, Variant, encode
from benchd.daemon.reporting import report
from benchd.daemon.reporting.spool import spooled
from benchd.daemon.verdicts import results
from benchd.daemon.verdicts.recommend import Requirements, decide, newest
from benchd.daemon.verdicts.spiking import comparisons

SPIKING = msgspec.structs.replace(QANN, options=QANN.options | {"time_steps": 8})
OTHER = msgspec.structs.replace(QANN, weights_sha256="b")
NETS = {"snn_stbif_resnet18": [SPIKING, None], "qann_resnet18": [QANN, OTHER]}


def line(number):
    """Return one of the records of two variants, three processes each."""
    processes = [ProcessResult(status="ok", timing=timing(5.0 + share)) for share in (0.0, 0.01, 0.02)]
    return encode(
        made(
            run_id=f"run-{number:012d}",
            suite_id=f"suite-{number:012d}",
            case=Case(model="vim_tiny", variant=Variant.parse(("eager", "custom")[number % 2])),
            t_wall=f"2026-01-01T00:00:00.{number:06d}Z",
            t_mono_ns=10**12 + number,
            timing=timing(5.0 + number % 7 / 1000),
            processes=processes,
            energy=ENERGY,
            check=PASSED,
        )
    )


def peak_bytes(count, form, folder):
    path = folder / f"{count}.jsonl"
    path.write_bytes(b"".join(line(number) + b"\n" for number in range(count)))
    tracemalloc.start()
    try:
        report.report([path], [form], folder / "out", StringIO())
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("form", "count", "most_bytes"), [("csv", 300, 800), ("html", 600, 1300)])
def test_memory_holds_little_of_one_more_record_of_a_known_case(form, count, most_bytes, tmp_path):
    if form == "html":  # whose text and charts have every record
        pytest.importorskip("jinja2", reason="the extra `report` is not installed")
    peak_bytes(50, form, tmp_path)  # what is imported and cached once
    fewer, more = (peak_bytes(each, form, tmp_path) for each in (count, 2 * count))
    assert (more - fewer) / count < most_bytes


@st.composite
def measured(draw):
    """Return records of two nets in random orders of time, boots, devices, weights, kinds and outcomes."""
    found = []
    for number in range(draw(st.integers(1, 40))):
        model = draw(st.sampled_from(sorted(NETS)))
        direction = draw(st.sampled_from(["inference", "inference", "inference", "training"]))
        variant = draw(st.sampled_from(["eager", "onnxruntime"])) if direction == "inference" else "eager"
        median_ms = draw(st.sampled_from([0.0, 4.0, 5.0, 6.0]))
        found.append(
            made(
                run_id=f"{number}",
                suite_id=draw(st.sampled_from("st")),
                device_id=draw(st.sampled_from("de")),
                boot_id=draw(st.sampled_from("abc")),
                t_wall=f"2026-01-01T00:00:{draw(st.integers(0, 20)):02d}.000Z",
                t_mono_ns=draw(st.integers(0, 20)),
                case=Case(model=model, variant=Variant.parse(variant), direction=direction),
                model=draw(st.sampled_from(NETS[model])),
                environment=msgspec.structs.replace(ENVIRONMENT, power_mode=draw(st.sampled_from([None, "15W"]))),
                status=draw(st.sampled_from(["ok", "ok", "ok", "failed"])),
                timing=timing(median_ms),
                processes=[ProcessResult(status="ok", timing=timing(median_ms + part)) for part in (0, 0.01, 0.02)],
                check=PASSED,
            )
        )
    return found


def at(second, boot_id, batch_size):
    case = Case(model="vim_tiny", batch_size=batch_size)
    return made(run_id=boot_id + str(second), boot_id=boot_id, t_wall=f"2026-01-01T00:00:{second:02d}.000Z", case=case)


@counts(50, 100)
def test_the_decisive_records_decide_as_all_do(count):
    given_any = settings(max_examples=count)(given(measured())(assert_the_decisive_decide))
    # only its boot needs the fourth
    example([at(0, "a", 1), at(1, "b", 2), at(10, "c", 4), at(20, "b", 1), at(30, "d", 1)])(given_any)()


def assert_the_decisive_decide(found):
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / results.JOURNAL).write_bytes(b"".join(encode(one) + b"\n" for one in found))
        with spooled([Path(name)], Path(name)) as spool:
            few = spool.decisive
    found.sort(key=lambda record: record.t_wall)
    assert decide(few, Requirements()) == decide(found, Requirements())
    assert comparisons(few) == comparisons(found)
    shown = [[one for one in each if one.status == "ok" and one.timing.median_ms > 0] for each in (few, found)]
    assert newest(shown[0]) == newest(shown[1])


def test_a_pipe_is_read_once(tmp_path):
    reading, writing = os.pipe()
    os.write(writing, line(1) + b"\n" + line(2) + b"\n")
    os.close(writing)
    report.report([Path(f"/dev/fd/{reading}")], ["csv"], tmp_path, StringIO())
    os.close(reading)
    assert len((tmp_path / "report.csv").read_text().splitlines()) == 3


def test_an_error_leaves_no_folder(tmp_path):
    with pytest.raises(UsageError, match="no such file"):
        report.report([tmp_path / "absent"], ["csv"], tmp_path / "some" / "out", StringIO())
    assert list(tmp_path.iterdir()) == []
