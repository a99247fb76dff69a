"""The campaign: stages leave their files, a part that fails costs its own rows, and the page tells what they hold."""

import itertools
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from records_made import made
from typer.testing import CliRunner

from benchd.daemon import cli
from benchd.daemon.measuring import process
from benchd.daemon.records import Case, all_variants, encode
from benchd.daemon.verdicts import results
from benchmarks import campaign, kernels, models, performance
from benchmarks.commands import command

ROOT = Path(__file__).parents[2]
PAGE, PICTURE = ROOT / "docs/performance.md", ROOT / "docs/pictures/performance.svg"


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


@pytest.mark.slow
def test_stages_leave_their_files_the_page_tells_them_and_a_part_that_fails_is_named_alone(run):
    ops = ("--op", "nonsense", "--op", "add_rms_norm")
    done, folder = run("--stage", "probes", "--stage", "kernels", *ops, "--batch-size", "1")
    assert done.returncode == 1, done.stdout + done.stderr
    raced = [
        msgspec.json.decode(line, type=kernels.Row) for line in (folder / "kernels.jsonl").read_bytes().splitlines()
    ]
    row = next(each for each in reversed(raced) if each.contender == "benchd")
    assert row.shape == [197, 192]
    assert "(add_rms_norm, fp32)" in done.stdout
    machine = json.loads((folder / "machine.json").read_text())
    assert f"{machine['launch_us']:.1f} us" in done.stdout
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
    assert [record.run_id for record in results.read(chosen.folder / "records.jsonl")] == ["r0", "r1"]


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


def test_an_unknown_stage_is_refused():
    done = CliRunner().invoke(campaign.app, ["--device", "cpu", "--stage", "probing"])
    assert done.exit_code == 2
    assert "probing" in done.output


def race(contender, ratio, **facts):
    facts = {"model": "vim_tiny", "batch_size": 4, "right": True, "is_peer": False, "median_ms": ratio} | facts
    return models.Row(
        device="NVIDIA H200",
        contender=contender,
        verdict="",
        ratio=ratio,
        versions={},
        options={},
        direction="inference",
        **facts,
    )


def kernel(contender, shape, ratio, **facts):
    facts = {"op": "lif", "dtype": "fp32", "right": True, "captured": False} | facts
    return kernels.Row(
        device="NVIDIA H200",
        contender=contender,
        shape=shape,
        ratio=ratio,
        median_ms=ratio,
        bound_by="bytes",
        verdict="",
        versions={},
        **facts,
    )


def page(folder, *rows):
    for name, kind in (("models.jsonl", models.Row), ("kernels.jsonl", kernels.Row)):
        lines = (msgspec.json.encode(row) + b"\n" for row in rows if isinstance(row, kind))
        (folder / name).write_bytes(b"".join(lines))
    return performance.page(folder)


def test_the_best_and_the_other_build_are_the_fastest_whose_answers_are_right(tmp_path):
    peer, amp, fp16 = "mamba-ssm", "mamba-ssm, amp", "mamba-ssm, fp16"
    rows = [race("eager", 1.0), race("custom-fp16", 0.1, right=False), race("custom", 0.25)]
    rows += [race("qann_resnet18/eager", 0.2), race(peer, 1.5, is_peer=True), race(amp, 1.0, is_peer=True)]
    shown = page(tmp_path, *rows, race(fp16, 0.1, is_peer=True, right=False))
    assert "| vim_tiny | 4 | custom | 0.25 | 4 | mamba-ssm, amp | 4 |" in shown


def test_without_eager_a_race_has_a_time_and_no_ratio(tmp_path):
    assert "| custom | 0.2 | - | - | - |" in page(tmp_path, race("custom", None, median_ms=0.2))


def test_a_race_that_nobody_of_ours_finished_rightly_is_left_out(tmp_path):
    assert "vim_tiny" not in page(tmp_path, race("custom", 0.2, right=False), race("mamba-ssm", 1.0, is_peer=True))


def test_of_repeated_races_the_last_one_stands(tmp_path):
    assert "| custom | 0.4 | 2.5 |" in page(
        tmp_path, race("eager", 1.0), race("custom", 0.5), race("eager", 1.0), race("custom", 0.4)
    )


def test_kernels_are_compared_at_their_largest_shape_with_the_fastest_other_that_is_right(tmp_path):
    shown = page(
        tmp_path,
        kernel("benchd", [8, 1], 1.0),
        kernel("torch", [8, 1], 9.0),
        kernel("benchd", [8, 64], 1.0),
        kernel("spikingjelly", [8, 64], 1.5),
        kernel("torch", [8, 64], 1.2),
        kernel("wrong", [8, 64], 0.1, right=False),
        kernel("benchd", [8, 64], 0.2, captured=True),
        kernel("torch", [8, 64], 0.9, captured=True),
    )
    assert "median 1.2, from 1.2 (lif, fp32) to 1.2 (lif, fp32)." in shown


def test_the_page_and_its_picture_are_made_of_the_records():
    assert PAGE.read_text() == performance.whole(ROOT / "results")
    assert PICTURE.read_text() == performance.picture(ROOT / "results")
