"""What the shell completes, asked as bash asks."""

import sys

import pytest
from records_made import made

from benchd.daemon import cli
from benchd.daemon.records import Case, Variant, encode


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("benchd verif", ["verify"]),
        ("benchd ship --onn", ["--onnx"]),
        ("benchd ship vim_t", ["vim_tiny"]),
        ("bench-once --models square,snn_o", ["square,snn_onepass"]),
        ("bench-once --variants eager,openvino-b", ["eager,openvino-bf16"]),
        ("bench-once --case squ", ["square,amp,b1"]),
        ("bench-once --case vim", []),
    ],
)
def test_bash_completes(line, words, tmp_path, monkeypatch, capsys):
    program = line.partition(" ")[0]
    name = program.replace("-", "_")
    (tmp_path / "bench-out").mkdir()
    record = made(case=Case(model="square", variant=Variant(precision="amp")))
    (tmp_path / "bench-out" / "records.jsonl").write_bytes(encode(record) + b"\n")
    variables = {"COMP_WORDS": line, "COMP_CWORD": str(line.count(" ")), f"_{name.upper()}_COMPLETE": "complete_bash"}
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr(sys, "argv", [program])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        getattr(cli, name)()
    assert capsys.readouterr().out.split() == words
