"""The real `bench-once`: its records, every way a case ends, a real broker, a real Ctrl-C."""

import json
import os
import re
import signal
from contextlib import ExitStack, closing
from datetime import datetime, timezone
from pathlib import Path

import jsonschema
import msgspec
import pytest
import torch
from broker import running_broker
from gaps import without_energy, without_gaps
from links import Watcher
from msgspec import UNSET
from PIL import Image
from records_made import written
from simulations import slow
from stub_interpreter import interpreter
from worker_jobs import user_module

from benchd.daemon import journal, records
from benchd.daemon.machine.lock import MachineLock
from benchd.models import catalog, data

ROOT = Path(__file__).parents[2]
ONE_STEP = ("--option", "time_steps=1", "--option", "threshold=0.1")  # of an SNN that fires though it is random


def test_energy_comes_with_scope_error_bar_and_idle(once, tmp_path):
    watts = [5.01, 15.02, 7.03, 6.04, 9.05, 12.06, 5.57]
    metric = {"metric": "power_w", "scope": "module input VDD_IN", "values": watts, "period_s": 0.05}
    (tmp_path / "script.json").write_text(json.dumps({"metrics": [metric]}))
    limits = (tmp_path / "tiny.toml").read_text().replace("measure_cap_s = 0.1", "measure_cap_s = 1.0")
    sampling = limits + '[sampling]\nsources = ["fake=script.json"]\nperiod_s = 0.02\n'
    (tmp_path / "tiny.toml").write_text(sampling)

    def measured():
        done = once("--models", "square", "--option", "size=16", "--variants", "eager")
        assert done.returncode == 0, done.stderr
        assert "module input VDD_IN, by fake" in done.stdout or not written(tmp_path)[-1].energy
        return written(tmp_path)[-1:]

    (record,) = without_gaps(measured, without_energy)
    (process,) = record.processes
    before, after = process.idle
    assert before.end_ns <= process.window.start_ns < process.window.end_ns <= after.start_ns
    assert process.interference.as_experienced.blocks == process.blocks.count
    assert (record.energy.scope, record.energy.source) == ("module input VDD_IN", "fake")
    mean_w = record.energy.energy_j / process.window.seconds
    assert 5.0 < mean_w < 15.1
    # Energy per inference times inferences per second is the power.
    per_s = process.timing.runs * record.case.batch_size / process.window.seconds
    assert record.energy.gross_per_inference_j * per_s == pytest.approx(mean_w)
    assert "no_idle_baseline" in record.energy.flags or 5.0 < record.energy.idle_w < 15.1


def test_every_record_is_valid_and_arrives_over_a_real_broker(once, mosquitto, tmp_path):
    with closing(Watcher(mosquitto, "test-device")) as watcher:
        spiking = ("snn_onepass", *ONE_STEP, "--batch-sizes", "2", "--weights", "random")
        for case in (("square", "--option", "size=16"), spiking):
            done = once("--models", *case, "--variants", "eager,custom", "--mqtt", mosquitto.url)
            assert done.returncode == (7 if "square" in case else 0), done.stdout + done.stderr
        by_run = {record.run_id: record for record in written(tmp_path)}
        while len(watcher.results()) < len(by_run):
            watcher.until(lambda topic, _: "/result/" in topic)
    assert {*watcher.results()} == set(by_run)
    validator = jsonschema.Draft202012Validator(json.loads((ROOT / "docs" / "record.schema.json").read_text()))
    for message in (message for message in watcher.all if "/result/" in message.topic):
        validator.validate(json.loads(message.payload))
        record = records.decode(message.payload)
        assert message.topic == f"benchd/v1/test-device/result/{record.run_id}"
        assert record == by_run[record.run_id]
    eager, unsupported, *onepass = by_run.values()
    assert unsupported.status == "unsupported"
    for record in (eager, *onepass):
        assert_complete(record, tmp_path)
    # a short window may lie between two ticks
    sampled = {name for record in by_run.values() for name in record.telemetry}
    assert {"cpu_utilization_percent", "process_rss_bytes"} <= sampled
    assert any(process.sampler.failures == {} for record in by_run.values() for process in record.processes)
    assert [(record.kernels_ran or "").split(",")[0] for record in (eager, *onepass)] == ["", "", "c"]
    assert "│ custom (c" in done.stdout


def assert_complete(record, folder):
    """Hold a record of a case that was measured against what every one must have."""
    assert record.status == "ok"
    assert record.check.passed
    assert record.model.weights == "random, seed 0"
    assert record.check.note == "agreement on random weights, accuracy unknown"
    assert record.accuracy is None
    assert record.timing.min_ms <= record.timing.median_ms <= record.timing.max_ms
    assert record.missing["energy"] == "no_sensor"
    assert record.memory.worker_peak_bytes >= record.memory.rss_peak_bytes > 50 * 2**20
    assert record.environment.versions["torch"]
    assert record.environment.allocator["MALLOC_MMAP_MAX_"] == "0"
    (process,) = record.processes
    assert process.window.seconds > 0
    assert process.blocks.count >= 1
    for raw in process.raw.values():
        assert (folder / "out" / raw.path).stat().st_size == 8 * raw.count == 8 * record.timing.runs


def test_a_sweep_probes_first_and_last_and_prints_its_records_alone(once, tmp_path):
    sizes = ("--batch-sizes", "1,2,4", "--scenario", "offline")
    done = once("--models", "square", "--option", "size=16", "--variants", "eager", *sizes, "--threads", "1", "--json")
    assert done.returncode == 0, done.stderr
    results = [msgspec.structs.replace(record, log=UNSET, seq=UNSET) for record in written(tmp_path)]
    assert [records.decode(line.encode()) for line in done.stdout.splitlines()] == results
    case_ids = [f"square,eager,b{size},size=16,offline,threads=1" for size in (1, 2, 4)]
    assert [record.case_id for record in results] == case_ids
    assert [record.processes[0].probes is not None for record in results] == [True, False, True]
    assert all(record.environment.threads == 1 and record.floor and record.x_of_floor for record in results)
    assert all(record.probes == results[0].processes[0].probes for record in results)
    assert all(record.throughput_basis == "measured" for record in results)


def test_a_cold_start_does_not_count_the_making_of_files_and_its_energy_begins_with_its_spawn(once, tmp_path):
    counter = {"metric": "energy_counter_j", "scope": "package", "values": [*range(50_000)], "period_s": 0.02}
    (tmp_path / "script.json").write_text(json.dumps({"metrics": [counter]}))
    with (tmp_path / "tiny.toml").open("a") as limits:  # a fast machine starts in a quarter of a second
        limits.write('[sampling]\nsources = ["fake=script.json"]\nperiod_s = 0.02\n')
    what = ("--models", "square", "--option", "size=64", "--variants", "onnxruntime", "--batch-sizes", "1")

    def measured():
        done = once(*what, "--scenario", "cold_start", "--processes", "1")
        assert done.returncode == 0, done.stderr
        return written(tmp_path)[-1:]

    (record,) = without_gaps(measured, without_energy)
    assert len(record.processes) == 1
    assert [artifact.reused for artifact in record.artifacts] == [True]
    assert (tmp_path / "out" / "logs" / f"{record.run_id}.ready.log").exists()
    assert record.energy, record.missing["energy"]


def test_a_search_for_the_best_batch_size_ends_by_itself_and_is_replayed_to_a_broker_that_was_down(
    once, here, tmp_path
):
    """Twice the batch takes 250 times as long: a stop of seconds does not make the single image as slow."""
    slow = user_module(tmp_path, forward="time.sleep(0.0005 * 250 ** (len(images) - 1))")
    with running_broker(tmp_path) as broker:
        pass
    done = once("--module", slow, "--variants", "eager", "--scenario", "offline", "--mqtt", broker.url)
    assert done.returncode == 0, done.stderr
    assert "warning: not published: " in done.stderr
    results = written(tmp_path)
    assert [record.case.batch_size for record in results] == [1, 2]
    line = re.search(r"benchd (replay .*)", done.stderr)[1]
    with running_broker(tmp_path, port=broker.port) as broker, closing(Watcher(broker, "test-device")) as watcher:
        replayed = here("benchd", *line.split())
        assert replayed.returncode == 0, replayed.stderr
        arrived = [watcher.until(lambda topic, _: "/result/" in topic).payload for _ in results]
    assert arrived == list(journal.read(tmp_path / "out" / "records.jsonl"))


def test_a_worker_that_dies_costs_its_own_case_alone(once, tmp_path):
    dies = "if len(images) == 2: os.kill(os.getpid(), 9)"
    done = once("--module", user_module(tmp_path, forward=dies), "--batch-sizes", "2,3", "--variants", "eager")
    assert done.returncode == 1
    assert [record.status for record in written(tmp_path)] == ["failed", "ok"]
    assert "SIGKILL" in written(tmp_path)[0].reason


def test_real_images_and_weights_give_top_1(once, tmp_path):
    """Ten classes of a grey each, and weights whose logits know nothing: top-1 is counted right, and counted once."""
    for label in range(10):
        folder = tmp_path / "images" / f"class{label}"
        folder.mkdir(parents=True)
        for copy in range(3):
            Image.new("RGB", (40, 36), (25 * label, 80 * copy, 100)).save(folder / f"{copy}.png")
    torch.manual_seed(3)
    model = catalog.build("snn_onepass", time_steps=1, threshold=0.1)
    torch.save({"state_dict": {f"module.{k}": v for k, v in model.state_dict().items()}}, tmp_path / "weights.pth")
    arguments = ("--models", "snn_onepass", *ONE_STEP, "--batch-sizes", "30", "--variants", "eager")
    arguments += ("--weights", "weights.pth")
    done = once(*arguments, "--data", "imagefolder:images", "--processes", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    (record,) = written(tmp_path)
    images = data.open_set(f"imagefolder:{tmp_path}/images", (3, 32, 32), dataset="cifar10", inputs="unit").taken(256)
    with torch.no_grad():
        right = (model(images.images).argmax(1) == images.labels).double().mean()
    assert record.accuracy.value == pytest.approx(float(right))
    assert record.accuracy.images == 30
    assert [process.stages.accuracy_s is None for process in record.processes] == [False, True]
    assert (record.accuracy.gained, record.accuracy.lost) == (0, 0)
    assert record.model.weights == "weights.pth"
    assert "all 30 images of imagefolder:images" in record.model.data
    assert record.check.note == ""


def test_trained_weights_bring_their_options_to_every_model_of_the_plan(once, tmp_path):
    models = "vim_tiny,qann_resnet18"
    quickly = ("--variants", "eager", "--batch-sizes", "32", "--accuracy", "128")
    done = once("--models", models, "--weights", "demo", *quickly)
    assert done.returncode == 0, done.stdout + done.stderr
    vim, quantised = written(tmp_path)
    assert (vim.case.options["dim"], vim.model.input_shape) == (64, [3, 32, 32])
    assert quantised.case.options == {"width": 16}
    for record in (vim, quantised):
        assert (record.model.weights, record.model.data) == ("demo", "256 of the 359 images of demo")
        assert record.accuracy.value > 0.95
        assert record.check.note == ""
        assert record.floor is not None


def test_an_accuracy_that_was_asked_for_and_cannot_be_had_fails_the_run(once, tmp_path):
    """Three classes of images and five scores: the times stand."""
    for label in range(3):
        (tmp_path / "images" / str(label)).mkdir(parents=True)
        Image.new("RGB", (4, 4), (50 * label,) * 3).save(tmp_path / "images" / str(label) / "0.png")
    arguments = ("--module", user_module(tmp_path), "--variants", "eager", "--data", "imagefolder:images")
    done = once(*arguments, "--accuracy", "full")
    assert done.returncode == 6, done.stderr
    assert "error: the requested accuracy of own.net.build,eager,b1 was not measured: imagefolder:" in done.stderr
    assert "has 3 classes, but the model has 5" in done.stderr
    assert [record.status for record in written(tmp_path)] == ["ok"]


def test_a_variant_that_loses_accuracy_is_out_by_the_limit_and_says_why(here, once, tmp_path):
    """A module that answers wrongly in bf16 alone."""
    for label in range(5):
        (tmp_path / "images" / str(label)).mkdir(parents=True)
        for number in range(4):
            Image.new("RGB", (4, 4), (50 * label,) * 3).save(tmp_path / "images" / str(label) / f"{number}.png")
    levels = "levels = ((images[:, 0].mean((1, 2)).float() * 0.229 + 0.485) * 255 / 50)[:, None]"
    scores = "scores = -((levels - torch.arange(5.0)) ** 2).to(images.dtype)"
    wrong = f"{levels}; {scores}; return scores.roll(1, 1) if images.dtype == torch.bfloat16 else scores"
    module = user_module(tmp_path, forward=wrong)
    arguments = ["--module", module, "--variants", "eager,bf16", "--data", "imagefolder:images", "--accuracy", "full"]
    done = once(*arguments, "--max-drop", "20%", "--fail-on", "slower")
    assert done.returncode == 0, done.stderr
    eager, bf16 = written(tmp_path)
    assert (eager.accuracy.right, bf16.accuracy.lost) == (20, 20)
    assert "100.0 [83.9, 100.0]" in done.stdout
    assert "top-1: own.net.build,bf16,b1: drop against plain fp32 100.00" in done.stdout
    judged = here("benchd", "recommend", "out", "--max-drop", "10%")
    assert "ship: eager-bf16" not in judged.stdout
    assert "not eager-bf16: fails its numerical check" in judged.stdout
    written_page = here("benchd", "report", "out", "--format", "md,csv,html", "--output", "page")
    assert written_page.returncode == 0, written_page.stderr
    for name in ("report.md", "report.html"):
        assert "100.0 [83.9, 100.0]" in (tmp_path / "page" / name).read_text()
    assert "accuracy_drop_high" in (tmp_path / "page" / "report.csv").read_text()


def test_nothing_measured_exits_6(once, tmp_path):
    done = once("--module", user_module(tmp_path, build="raise RuntimeError('not today')"), "--variants", "eager")
    assert done.returncode == 6
    (record,) = written(tmp_path)
    log = f"logs/{record.run_id}.0.log"
    assert (
        record.reason == f"net.py:18: in build: raise RuntimeError('not today'): RuntimeError: not today (log: {log})"
    )
    assert "Traceback" in (tmp_path / "out" / log).read_text()
    assert "not today" in done.stdout


def test_what_only_the_worker_can_know_of_a_command_line_exits_2_too(once, tmp_path):
    user_module(tmp_path)
    done = once("--module", "net.py:torch", "--variants", "eager")
    assert done.returncode == 2
    assert "--module net.py:torch: this is module, not a function" in written(tmp_path)[0].reason
    assert "usage_error" in written(tmp_path)[0].flags


AUDIO = "lambda batch: batch['audio'].mean(1)"
TABLE = "lambda numbers, kinds: numbers.sum(1) + kinds.sum(1)"
OWN = """from torch import nn
class Net(nn.Module):
    def forward(self, *values, **named):
        return ({})(*values, **named)
"""


@pytest.mark.parametrize("variants", ["eager", slow("eager,compile,onnxruntime")])
def test_the_examples_of_the_page_on_own_models_run(once, tmp_path, variants):
    page = (ROOT / "docs" / "own-model.md").read_text()
    code, block, task, judged = re.findall(r"```(?:python|sh)\n(.*?)```", page, re.DOTALL)
    commands = [line.partition("#")[0].split()[1:] for line in block.splitlines()]
    (tmp_path / "net.py").write_text(code)
    (tmp_path / "task.py").write_text(task)
    done = once(*commands[0], "--variants", variants)
    assert done.returncode == 0, done.stdout + done.stderr
    measured = [(record.case.variant.name, record.status) for record in written(tmp_path)]
    assert measured == [(name, "ok") for name in variants.split(",")]
    assert all(record.check.passed for record in written(tmp_path))
    assert {str(spec) for record in written(tmp_path) for spec in record.model.inputs} == {
        "ids=int64:16:0-999",
        "mask=bool:16",
    }
    assert f"{len(measured)} case" in done.stderr
    done = once(*judged.split()[1:], "--variants", "eager", "--output", "judged")
    assert (done.returncode, "right: over 5 of the 5 items of task.py:items" in done.stdout) == (0, True)
    for name, forward in (("audio", AUDIO), ("table", TABLE)):
        (tmp_path / f"{name}.py").write_text(OWN.format(forward))
        (command,) = (words for words in commands if f"{name}.py:Net" in words)
        done = once(*command, "--variants", "eager")
        assert done.returncode == 0, done.stdout + done.stderr


def test_ctrl_c_aborts_the_running_case_and_keeps_what_was_measured(begun, tmp_path):
    module = user_module(tmp_path, forward="if len(images) == 2: time.sleep(1000)")
    what = ("--module", module, "--batch-sizes", "1,2,3", "--variants", "eager", "--preset", "quick", "--device", "cpu")
    with begun("bench-once", *what, "--config", "tiny.toml", "--output", "out", "--wait") as (process, stream):
        next(line for line in stream if "b2" in line and "load" in line)
        process.send_signal(signal.SIGINT)
        output = stream.read()
    assert process.returncode == 130
    assert [record.status for record in written(tmp_path)] == ["ok", "aborted"]
    assert "aborted" in output


def test_a_module_of_a_package_is_found_here_and_the_supervisor_stays_small_and_free_of_torch(once_apart, tmp_path):
    """The module under test looks at its parent: resident memory, and whether torch's libraries are mapped there."""
    look = (
        "p = f'/proc/{os.getppid()}'; kib = [l.split()[1] for l in open(p + '/status') if l.startswith('VmRSS')][0]; "
        f"open('{tmp_path}/seen', 'w').write(kib + ' ' + str('torch' in open(p + '/maps').read()))"
    )
    (tmp_path / "package").mkdir()
    user_module(tmp_path / "package", build=look)
    done = once_apart("--module", "package.net:build", "--variants", "eager")
    assert done.returncode == 0, done.stderr
    assert [record.case.model for record in written(tmp_path)] == ["own.net.build"]
    kib, torch_mapped = (tmp_path / "seen").read_text().split()
    assert torch_mapped == "False"
    assert int(kib) <= 60 * 1024


def test_two_at_a_time_is_refused_with_the_holder(command):
    with MachineLock():
        done = command("bench-once", "--models", "square", "--device", "cpu")
    assert done.returncode == 7
    assert str(os.getpid()) in done.stderr


@pytest.mark.parametrize(
    "line",
    [
        "bench-once --models square --option size=16 --config tiny.toml --preset quick --variants eager --output out",
        slow("benchd compare --live square,eager,b1,size=64 --python stub --python stub --pairs 2 --output out"),
        slow("benchd profile square --option size=16 --method memory --preset quick --steps 1 --output out"),
    ],
    ids=["once", "compare", "profile"],
)
def test_who_waits_gets_its_turn_when_the_holder_has_ended(line, begun, tmp_path):
    interpreter(tmp_path / "stub", "5")
    words = line.replace("stub", str(tmp_path / "stub")).split()
    with ExitStack() as stack:
        stack.enter_context(MachineLock())
        with begun(*words, "--wait", "--device", "cpu") as (process, stream):
            assert "waiting: this machine is already being measured by `" in stream.readline()
            held_until = datetime.now(timezone.utc)
            stack.close()
            stream.read()
    assert process.returncode in (0, 3, 4)  # or slower, or inconclusive
    assert {record.status for record in written(tmp_path)} == {"ok"}
    assert all(
        datetime.fromisoformat(record.t_wall.replace("Z", "+00:00")) >= held_until for record in written(tmp_path)
    )
