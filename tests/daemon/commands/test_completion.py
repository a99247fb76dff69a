"""What the shell completes, asked as bash asks."""

import os
import subprocess
import sys

import pytest
from records_made import made
from waiting import WAIT_S

from benchd.daemon.records import Case, Variant, encode

RUN = "import sys; from benchd.daemon import cli; sys.argv = [{0!r}]; cli.{1}()"


def offered(folder, line):
    """Return what bash is offered for the last word of this line."""
    words = line.split(" ")
    name = words[0].replace("-", "_")
    asked = {"COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1), f"_{name.upper()}_COMPLETE": "complete_bash"}
    command = [sys.executable, "-c", RUN.format(words[0], name)]
    done = subprocess.run(
        command, cwd=folder, env=os.environ | asked, timeout=WAIT_S, capture_output=True, text=True, check=False
    )
    return done.stdout.split()


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
def test_bash_completes(line, words, tmp_path):
    (tmp_path / "bench-out").mkdir()
    record = made(case=Case(model="square", variant=Variant(precision="amp")))
    (tmp_path / "bench-out" / "records.jsonl").write_bytes(encode(record) + b"\n")
    assert offered(tmp_path, line) == words
