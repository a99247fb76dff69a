"""The race of models: who runs is checked first, who cannot is named, and peers compute what our models compute."""

import json

import pytest
import torch
from typer.testing import CliRunner

from benchd.models import catalog
from benchmarks.models import app
from benchmarks.peer_models import (
    SpikingJellyOnePass,
    SteppedOnePass,
    mambapy_vim,
    official_vim,
    spikingjelly_stbif_net,
)
from benchmarks.peers import Missing


def test_variants_and_another_model_take_turns_and_who_cannot_is_named(tmp_path):
    output = tmp_path / "rows.jsonl"
    arguments = ["--model", "square", "--device", "cpu", "--seconds", "0.05", "--threads", "1", "--option", "size=16"]
    for name in ("amp", "custom", "square/bf16"):
        arguments += ["--variant", name]
    done = CliRunner().invoke(app, [*arguments, "--output", str(output)])
    assert done.exit_code == 0, done.output
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    rows = {row["contender"]: row for row in lines}
    assert rows["eager"]["ratio"] == 1.0
    assert lines[0]["verdict"] == f"{rows['eager']['verdict']}, not raced", "written before the others are loaded"
    for name in ("eager", "amp", "square/bf16"):
        assert rows[name]["right"], rows[name]
        assert rows[name]["ratio_low"] <= rows[name]["ratio"] <= rows[name]["ratio_high"]
    assert "no custom kernels" in rows["custom"]["verdict"]
    assert rows["custom"]["median_ms"] is None
    assert "square batch 1 inference" in done.stdout


@pytest.mark.parametrize("batch", [1, 3])
def test_onepass_step_by_step_is_our_onepass(batch):
    torch.manual_seed(0)
    ours = catalog.build("snn_onepass").double()
    images = torch.rand(batch, 3, 32, 32, dtype=torch.float64)
    with torch.inference_mode():
        torch.testing.assert_close(SteppedOnePass(ours)(images), ours(images), rtol=1e-9, atol=1e-9)


def test_onepass_of_spikingjelly_is_our_onepass():
    pytest.importorskip("spikingjelly", reason="spikingjelly is a peer and no dependency")
    torch.manual_seed(0)
    ours = catalog.build("snn_onepass")
    images = torch.rand(2, 3, 32, 32)
    with torch.inference_mode():
        torch.testing.assert_close(SpikingJellyOnePass(ours)(images), ours(images), rtol=1e-3, atol=1e-3)


def test_the_converted_net_of_spikingjelly_is_our_converted_net():
    pytest.importorskip("spikingjelly", reason="spikingjelly is a peer and no dependency")
    torch.manual_seed(0)
    ours = catalog.build("snn_stbif_resnet18", width=16)
    images = torch.rand(2, 3, 32, 32)
    with torch.inference_mode():
        wanted = ours(images)
        torch.testing.assert_close(spikingjelly_stbif_net(ours)(images), wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("scan", ["selective_scan", "selective_scan_seq"])
def test_vim_of_mambapy_is_our_vim(scan):
    pytest.importorskip("mambapy", reason="mambapy is a peer and no dependency")
    torch.manual_seed(0)
    ours = catalog.build("vim_tiny")
    images = torch.rand(1, 3, 224, 224)
    with torch.inference_mode():
        torch.testing.assert_close(mambapy_vim(scan, ours)(images), ours(images), rtol=1e-3, atol=1e-3)


def test_a_peer_that_computes_something_else_is_refused():
    with pytest.raises(Missing, match="encoding repeat"):
        SteppedOnePass(catalog.build("snn_onepass", encoding="rate"))


def test_the_official_path_of_vim_needs_a_gpu():
    with pytest.raises(Missing, match="CUDA only"):
        official_vim(catalog.build("vim_tiny"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--model", "vim_tini"), "vim_tini"),
        (("--model", "square", "--variant", "custm"), "custm"),
        (("--model", "square", "--variant", "cube/eager"), "cube"),
        (("--model", "square", "--option", "size=many"), "size"),
        (("--model", "square", "--direction", "sideways"), "sideways"),
    ],
)
def test_what_does_not_fit_is_refused(arguments, said):
    done = CliRunner().invoke(app, [*arguments, "--device", "cpu"])
    assert done.exit_code == 2
    assert said in done.output
