"""`benchd export` up to its child: what is refused before anything is done, the table and the JSON."""

import io
import os
import re

import msgspec
import pytest

from benchd.daemon.commands import export
from benchd.daemon.errors import UsageError
from benchd.daemon.measuring.protocol import ExportRequest
from benchd.daemon.records import Inputs
from benchd.exporters import code, files
from benchd.exporters.artifacts import Artifact, ArtifactStore

REQUEST = ExportRequest(
    models=["snn_onepass"],
    to="onnx",
    precisions=["fp32"],
    batches=[1],
    form=None,
    options={},
    inputs=Inputs(),
    seed=0,
    out=None,
    workspace_bytes=None,
)
MEASURED = {
    "nodes": 134,
    "export_s": 3.14159,
    "load_s": 0.077,
    "parity": {"error_share": 2.7e-7},
}
MADE_BY = (code.sha256()[:8], code.versions("torch")["torch"])


@pytest.fixture(autouse=True)
def state(tmp_path, monkeypatch):
    """The state folder of this machine is the test's own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("STATE_DIRECTORY", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "benchd" / "artifacts"


def filled(folder, model="vim_tiny", measured=MEASURED, size=1_234_567):
    """Put a file into the store; return it as made now."""
    facts = files.onnx_facts(model, {}, "0" * 64, "fp16", None, "scan" if model == "vim_tiny" else None)

    def write(path):
        path.write_bytes(bytes(size))
        return measured

    store = ArtifactStore(folder)
    return store.put(facts, write)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"models": []}, "name a model, as in `benchd export vim_tiny`"),
        ({"models": ["vim_tni"]}, "unknown model 'vim_tni'; did you mean 'vim_tiny'?"),
        ({"options": {"time_stps": ["2"]}}, "unknown option of snn_onepass 'time_stps'; did you mean 'time_steps'?"),
        ({"models": ["snn_onepass", "vim_tiny"], "options": {"time_steps": ["2"]}}, "unknown option of vim_tiny"),
        (
            {"inputs": Inputs(weights="nowhere.pth")},
            "--weights nowhere.pth: expected demo, or an existing file for one model",
        ),
        ({"inputs": Inputs(weights=__file__), "models": ["vim_tiny", "vim_small"]}, "an existing file for one model"),
        ({"out": "net.onnx", "batches": [1, None]}, "--output net.onnx: engines, or several files"),
        ({"out": "net.onnx", "precisions": ["fp32", "fp16"]}, "--output net.onnx: engines, or several files"),
        ({"out": "net.onnx", "options": {"time_steps": ["2", "4"]}}, "--output net.onnx: engines, or several files"),
        ({"out": "net.onnx", "to": "tensorrt"}, "--output net.onnx: engines, or several files"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_done(fields, reason, state):
    out = io.StringIO()
    with pytest.raises(UsageError, match=re.escape(reason)):
        export.run(msgspec.structs.replace(REQUEST, **fields), out, as_json=False)
    assert out.getvalue() == ""
    assert not state.exists()


def shown(artifacts, as_json=False):
    out = io.StringIO()
    export.show(artifacts, out, as_json)
    return out.getvalue()


def lines(table):
    """Return the lines of a table that have cells."""
    return [line for line in table.splitlines() if re.match("[┃│]", line)]


def test_the_table_has_a_row_a_file(state):
    fresh = filled(state)
    reused = filled(state, "snn_onepass", measured={})
    table = shown([fresh, msgspec.structs.replace(reused, reused=True)])
    heading, first, second = ([cell.strip() for cell in re.split("[┃│]", line)[1:-1]] for line in lines(table))
    assert heading[:4] == ["model", "precision", "batch", "scan"]
    cells = ["vim_tiny", "fp16", "dynamic", "scan", "134", "1.2", "2.7e-07", "0.08", "3.14"]
    assert first == [*cells, *MADE_BY, "made", fresh.key]
    cells = ["snn_onepass", "fp16", "dynamic", "-", "-", "1.2", "-", "-", "-"]
    assert second == [*cells, *MADE_BY, "kept", reused.key]


def test_a_quantised_file_says_what_stays_in_float(state):
    quantised = {"layers": ["conv1"], "left_fp32": {"conv0": "first layer", "a": "last layer"}}
    table = shown([filled(state), filled(state, "snn_onepass", measured={"quantised": quantised})])
    assert "1 of 3 products; fp32: first layer, last layer" in " ".join(table.split())


def test_the_json_holds_all_that_is_known(state):
    artifact = filled(state)
    (read,) = msgspec.json.decode(
        shown([artifact], as_json=True), type=list[Artifact], dec_hook=lambda kind, text: kind(text)
    )
    assert read == artifact
    assert read.metadata.measured == MEASURED
    assert shown([], as_json=True) == "[]\n"


def test_the_store_is_listed_with_what_it_takes(state):
    out = io.StringIO()
    export.list_store(out, as_json=False)
    assert out.getvalue() == f"0 files, 0.0 MB in {state}\n"
    filled(state)
    filled(state, "snn_onepass")
    out = io.StringIO()
    export.list_store(out, as_json=False)
    *table, total = out.getvalue().splitlines()
    assert len(lines("\n".join(table))) == 3
    assert total == f"2 files, 2.5 MB in {state}"
    out = io.StringIO()
    export.list_store(out, as_json=True)
    assert len(msgspec.json.decode(out.getvalue())) == 2


def test_the_store_is_pruned_to_a_size_and_says_what_went(state):
    old, new = filled(state), filled(state, "snn_onepass")
    os.utime(old.path.with_name("metadata.json"), ns=(1, 1))
    out = io.StringIO()
    export.prune_store(2_000_000, out)
    export.prune_store(2_000_000, out)
    assert out.getvalue() == f"removed {old.key}\nnothing to remove\n"
    assert not old.path.exists()
    assert new.path.exists()
