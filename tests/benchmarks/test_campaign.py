"""The campaign: stages leave their files, a part that fails costs its own rows, and the page tells what they hold."""

import itertools
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import profiles_made
import pytest
from records_made import ENERGY, made
from typer.testing import CliRunner

from benchd.daemon import cli
from benchd.daemon.measuring import process
from benchd.daemon.records import Case, CrossCheck, ProcessResult, all_variants, encode
from benchd.kernels.shipped import Compiled
from benchmarks import campaign, kernels, models, performance
from benchmarks.commands import command
from tests.soak import soak, soak_aa

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/performance.md"


@pytest.fixture
def run(tmp_path, child_environment):
    def start(*arguments):
        line = [sys.executable, "-m", "benchmarks.campaign", "--device", "cpu", "--seconds", "0.02"]
        line += ["--output", str(tmp_path / "results"), "--no-compile", *arguments]
        # with a worker's settings, without which each race would begin by starting itself again
        settings = process.settings("cpu", str(Path(child_environment["XDG_CACHE_HOME"]) / "benchd"))
        paths = {"PYTHONPATH": f"{child_environment.get('PYTHONPATH', '')}:{ROOT}"}
        environment = child_environment | paths | settings
        done = subprocess.run(line, check=False, cwd=tmp_path, env=environment, capture_output=True, text=True)
        (folder,) = (tmp_path / "results").iterdir()
        return done, folder

    return start


def test_stages_leave_their_files_the_page_tells_them_and_a_part_that_fails_is_named_alone(run):
    ops = ("--op", "nonsense", "--op", "add_rms_norm")
    done, folder = run("--stage", "probes", "--stage", "kernels", *ops, "--batch-size", "1")
    assert done.returncode == 1, done.stdout + done.stderr
    (row,) = [each for each in performance.read(folder).kernels if each.contender == "benchd"]
    assert row.shape == [197, 192]
    assert f"| {row.median_ms:.4g} |" in done.stdout
    machine = json.loads((folder / "machine.json").read_text())
    assert f"{machine['launch_us']:.2f} us" in done.stdout
    parts = [json.loads(line) for line in (folder / "campaign.jsonl").read_text().splitlines()]
    assert [(part["part"], part["status"]) for part in parts] == [
        ("machine", "ok"),
        ("nonsense fp32 batch 1", "failed"),
        ("add_rms_norm fp32 batch 1", "ok"),
    ]
    assert "nonsense" in parts[1]["said"]
    assert "failed: kernels nonsense" in done.stdout


def test_each_chosen_variant_has_a_record_in_its_directions():
    chosen = settings("cpu", models=["snn_onepass"], batch_sizes=[1], variants=["custom"])
    asked = [dict(itertools.pairwise(part.command)) for part in campaign.STAGES["records"](chosen)]
    assert [(one["--variants"], one["--direction"]) for one in asked] == [
        ("eager,custom", "inference"),
        ("eager", "training"),
    ]


def test_the_commands_of_records_are_ones_of_bench_once_and_what_they_write_is_gathered_once(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    for name in ("STATE", "CACHE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name.lower()))
    chosen = settings("cpu", models=["square"], batch_sizes=[1], variants=["eager"], folder=tmp_path / "results")
    chosen.folder.mkdir()
    planned = []
    for number, part in enumerate(campaign.STAGES["records"](chosen)):
        arguments = part.command[part.command.index("-c") + 2 :]
        assert part.command == command("bench-once", *arguments)
        monkeypatch.setattr(sys, "argv", ["bench-once", *arguments, "--dry-run"])
        with pytest.raises(SystemExit) as end:
            cli.bench_once()
        assert not end.value.code, capsys.readouterr()
        planned += re.findall(r"square,[\w,]+", capsys.readouterr().out)
        output = Path(dict(itertools.pairwise(arguments))["--output"])
        output.mkdir(parents=True)
        (output / "records.jsonl").write_bytes(
            encode(made(run_id=f"r{number}", case=Case(model="square", seed=number))) + b"\n"
        )
        for _ in range(2):
            campaign.keep(chosen.scratch, chosen.folder)
    assert planned == ["square,eager,b1", "square,eager,b1,training"]
    assert [record.run_id for record in performance.read(chosen.folder).records] == ["r0", "r1"]


def test_a_part_that_does_not_end_is_ended_and_the_next_finds_no_time():
    sleep = campaign.Part("sleep", [sys.executable, "-c", "import time; time.sleep(60)"], "sleep")
    end = time.monotonic() + 0.3
    assert campaign.finished("kernels", sleep, end).status == "timeout"
    assert campaign.finished("kernels", sleep, end).status == "no time left"


def test_what_is_kept_names_no_path_of_this_machine(tmp_path):
    line = f"{sys.executable} -m benchd < {Path.cwd()}/bench-out/nsys.job.json"
    for name, text in (("records-square/records.jsonl", line), ("square-eager/profile.json", line)):
        path = tmp_path / "scratch" / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
    campaign.keep(tmp_path / "scratch", tmp_path)
    for name in ("records.jsonl", "profiles/square-eager.json"):
        assert (tmp_path / name).read_text() == "python -m benchd < bench-out/nsys.job.json"


def settings(device, **fields):
    what = {"models": ["snn_stbif_resnet18"], "batch_sizes": [4, 256], "kernel_batch_sizes": [1], "ops": []}
    what["variants"] = []
    how = {"folder": Path("results"), "scratch": Path("out"), "seconds": 1.0, "peers": True, "compiled": True}
    return campaign.Settings(device=device, **{**what, **how, **fields})


def raced(part):
    return [value for name, value in itertools.pairwise(part.command) if name == "--variant"]


def test_on_a_gpu_a_race_has_the_variants_worth_it():
    small, large, training = campaign.STAGES["models"](settings("cuda"))
    assert raced(small) == [*campaign.RACED, "qann_resnet18/eager"]
    fits = [name for name in raced(small) if name != "cudagraph-fp16"]
    assert raced(large) == fits, "its memory would be the others'"
    assert raced(training) == ["eager", "custom", "qann_resnet18/eager"]
    asked = [raced(part) for part in campaign.STAGES["models"](settings("cuda", variants=["cudagraph"]))]
    assert asked == [["cudagraph"]] * 3
    assert [raced(part) for part in campaign.STAGES["models"](settings("cpu"))] == [[]] * 3
    assert set(campaign.RACED) <= {variant.name for variant in all_variants()}


def test_on_a_gpu_the_engines_of_a_race_are_built_before_it():
    small, large = campaign.STAGES["engines"](settings("cuda"))
    asked = "export snn_stbif_resnet18 --to tensorrt --precision fp16 --batch-sizes 4 --weights random"
    assert small.shown == f"benchd {asked}"
    assert "256" in large.command
    both = settings("cuda", variants=["tensorrt", "tensorrt-fp16"], batch_sizes=[1])
    assert ["fp16,fp32" in part.command for part in campaign.STAGES["engines"](both)] == [True]
    for none in (settings("cuda", variants=["eager"]), settings("cpu")):
        assert list(campaign.STAGES["engines"](none)) == []
    assert list(campaign.STAGES).index("engines") < list(campaign.STAGES).index("models")


def test_on_a_gpu_each_op_is_raced_in_graphs_too():
    asked = {device: campaign.STAGES["kernels"](settings(device, ops=["lif"])) for device in ("cuda", "cpu")}
    graphs = {device: {part.name: "--graph" in part.command for part in parts} for device, parts in asked.items()}
    fp32, fp16 = "lif fp32 batch 1", "lif fp16 batch 1"
    assert graphs["cuda"] == {fp32: False, f"{fp32} in graphs": True, fp16: False, f"{fp16} in graphs": True}
    assert graphs["cpu"] == {fp32: False}


def test_on_a_gpu_the_kernels_are_tested_by_several_processes():
    kernels, gpu = campaign.STAGES["correctness"](settings("cuda"))
    assert "--numprocesses" in kernels.command
    assert "--numprocesses" not in gpu.command


def test_an_unknown_stage_is_refused():
    done = CliRunner().invoke(campaign.app, ["--device", "cpu", "--stage", "probing"])
    assert done.exit_code == 2
    assert "probing" in done.output


OFFICIAL = "vim_tiny batch {}, our best without a CUDA graph against mamba-ssm"


def race(contender, ratio, **facts):
    facts = {"model": "vim_tiny", "batch_size": 4, "right": True, "is_peer": False} | facts
    return models.Row(
        device="NVIDIA H200",
        contender=contender,
        verdict="",
        ratio=ratio,
        median_ms=ratio,
        versions={},
        options={},
        direction="inference",
        **facts,
    )


def test_a_target_is_read_off_the_race_and_what_was_not_raced_is_said(tmp_path):
    folder = tmp_path / "nvidia-h200"
    folder.mkdir()
    official = race("mamba-ssm + causal-conv1d", 1.5, is_peer=True)
    captured = [race("custom-cudagraph-fp16", 0.1), race("tensorrt-fp16", 0.1)]
    rows = [race("eager", 1.0), race("custom-fp16", 0.1, right=False), race("custom", 0.25), official, *captured]
    (folder / "models.jsonl").write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    page = performance.page(folder)
    best = f"| {OFFICIAL.format(4)} | at least 5 x | 6 x | met |"
    assert best in page, "a wrong answer is no best, and peers are not captured"
    assert f"| {OFFICIAL.format(64)} | at least 3 x | not measured | - |" in page


def test_a_peer_is_held_at_its_best_precision(tmp_path):
    folder = tmp_path / "nvidia-h200"
    folder.mkdir()
    name = "mamba-ssm + causal-conv1d"
    rows = [race("eager", 1.0), race("custom-fp16", 0.25), race(name, 1.5, is_peer=True)]
    rows += [race(f"{name}, amp", 1.0, is_peer=True), race(f"{name}, fp16", 0.1, is_peer=True, right=False)]
    (folder / "models.jsonl").write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    page = performance.page(folder)
    assert f"| {OFFICIAL.format(4)} | at least 5 x | 4 x | MISSED |" in page


def test_without_eager_a_race_has_times_and_no_ratios(tmp_path):
    folder = tmp_path / "nvidia-h200"
    folder.mkdir()
    row = msgspec.structs.replace(race("custom-cudagraph-fp16", None, batch_size=1), median_ms=0.2)
    (folder / "models.jsonl").write_bytes(msgspec.json.encode(row))
    page = performance.page(folder)
    assert "| custom-cudagraph-fp16 | 0.2 | - |  |" in page
    assert "| vim_tiny custom-cudagraph-fp16 batch 1 | at most 0.25 ms | 0.2 ms | met |" in page
    assert f"| {OFFICIAL.format(4)} | at least 5 x | not measured | - |" in page


def kernel(op, contender, shape, **facts):
    facts = {
        "right": True,
        "bound_by": "bytes",
        "verdict": "",
        "versions": {},
        "dtype": "fp32",
        "median_ms": 1.0,
    } | facts
    return kernels.Row(device="NVIDIA H200", op=op, contender=contender, shape=shape, **facts)


def test_kernels_are_held_against_the_best_peer_and_against_the_floor_at_the_largest_shape(tmp_path):
    folder = tmp_path / "nvidia-h200"
    folder.mkdir()
    rows = [
        kernel("lif", "benchd", [8, 1], ratio=1.0, x_of_floor=9.0),
        kernel("lif", "benchd", [8, 64], ratio=1.0, x_of_floor=1.25),
        kernel("lif", "benchd", [8, 64], ratio=1.0, x_of_floor=1.1, dtype="fp16"),
        kernel("lif", "spikingjelly LIF triton", [8, 64], ratio=1.5),
        kernel("lif", "spikingjelly LIF cupy", [8, 64], ratio=1.2),
        kernel("lif", "spikingjelly LIF torch", [8, 64], ratio=0.1, right=False),
    ]
    (folder / "kernels.jsonl").write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    page = performance.page(folder)
    assert "| lif and stbif against spikingjelly's best | at least 1.3 x | 1.2 x | MISSED |" in page
    assert "| share of the floor, the worst kernel at its largest shape | at least 50 % | 80 % | met |" in page


def test_captured_races_have_a_table_of_their_own_and_do_not_meet_a_target(tmp_path):
    folder = tmp_path / "nvidia-h200"
    folder.mkdir()
    peer = "spikingjelly LIF"
    rows = [
        kernel("lif", "benchd", [8, 64], ratio=1.0, x_of_floor=4.0),
        kernel("lif", peer, [8, 64], ratio=1.5),
        kernel("lif", "benchd", [8, 64], ratio=1.0, x_of_floor=1.25, median_ms=0.2, captured=True),
        kernel("lif", peer, [8, 64], ratio=1.1, median_ms=0.22, captured=True),
    ]
    kept = folder / "kernels.jsonl"
    kept.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    page = performance.page(folder)
    host, gpu = page.split("### In CUDA graphs")
    assert "| lif | 8,64 | fp32 | 1 | 4 | bytes |  | 1.5 |" in host
    assert "| lif | 8,64 | fp32 | 0.2 | 1.25 | bytes |  | 1.1 |" in gpu
    assert "| lif and stbif against spikingjelly's best | at least 1.3 x | 1.5 x | met |" in gpu
    assert "at its largest shape | at least 50 % | 25 % | MISSED |" in gpu
    kept.write_bytes(b"".join(kept.read_bytes().replace(b',"captured":false', b"").splitlines(keepends=True)[:2]))
    assert "In CUDA graphs" not in performance.page(folder), "rows of before captures"


def test_the_scatter_of_energies_and_their_cross_check_are_read_off_the_records(tmp_path):
    folder = tmp_path / "nvidia-h200"
    folder.mkdir()
    checked = CrossCheck(energy_j=22.0, energy_err_j=1.0, source="nvml", metric="power_w")
    energies = [msgspec.structs.replace(ENERGY, gross_per_inference_j=joules) for joules in (0.5, 0.5, 0.5, 0.5, 0.6)]
    processes = [ProcessResult(status="ok", energy=energy) for energy in energies]
    record = made(energy=msgspec.structs.replace(ENERGY, cross_check=checked), processes=processes)
    (folder / "records.jsonl").write_bytes(encode(record) + b"\n")
    page = performance.page(folder)
    assert "| energy an inference, coefficient of variation | at most 3 % | 8.6 % | MISSED |" in page
    assert "| energy by the counter against the integral of the power | at most 5 % | 10 % | MISSED |" in page


def test_static_occupancy_is_held_against_the_trace(tmp_path):
    folder = tmp_path / "nvidia-h200"
    (folder / "profiles").mkdir(parents=True)
    compiled = [Compiled("lif", "lif fp32", name, 87, 4, 32, 0, 512, 1.0, ()) for name in ("_lif", "_scan")]
    (folder / "occupancy.json").write_bytes(msgspec.json.encode({"triton": "3", "kernels": compiled}))
    takes = [("_lif", 32), ("_scan", 40), ("gemm", 99)]
    ran = [profiles_made.kernel(name, 0.1, registers=registers, shared_bytes=512) for name, registers in takes]
    (folder / "profiles" / "vim.json").write_bytes(msgspec.json.encode(profiles_made.on_gpu(kernels=ran)))
    page = performance.page(folder)
    assert "| _lif | 32, 512 | 32, 512 | agree |" in page
    assert "| _scan | 40, 512 | 32, 512 | DIFFER |" in page
    assert "those compiled ahead | at least 100 % | 50 % | MISSED |" in page


def test_the_page_tells_what_the_soaks_found(tmp_path):
    folder = tmp_path / "cpu"
    folder.mkdir()
    lines = [{"case": "square", "beside_load": beside, "answer": "same", "effect": 0.0} for beside in (False, True)]
    (folder / soak_aa.FILE).write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    figures = [soak.at_most("lost", 1, 0), soak.Figure("kills", 1000)]
    (folder / soak.FILE).write_text(json.dumps({"kills": [figure._asdict() for figure in figures]}))
    page = performance.page(folder)
    assert "| square | beside another load | 1 | 0 | 95.0% | 1 | 0 |" in page
    assert "| lost | 1 | at most 0 | MISSED |" in page
    assert "| kills | 1,000 |  |  |" in page


def test_of_repeated_races_the_last_one_stands(tmp_path):
    folder = tmp_path / "cpu"
    folder.mkdir()
    rows = [race("eager", 1.0), race("custom", 0.5), race("eager", 1.0), race("custom", 0.4)]
    (folder / "models.jsonl").write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    assert [row.ratio for row in performance.read(folder).models] == [1.0, 0.4]


@pytest.mark.skipif(not (ROOT / "results").is_dir(), reason="no campaign is kept yet")
def test_the_page_is_made_of_the_records():
    assert PAGE.read_text() == performance.whole(ROOT / "results")
