"""How often `benchd why` is right on this machine: regressions between wheels, and results of benchmark_app.

Each regression is a net of 20 nodes or so with one operator that became slower between two published wheels of ONNX
Runtime, in environments that differ in eight other packages. Each result of benchmark_app is of a protocol that differs
from ours in a known way. `make soak-why` takes three minutes a case, installs the wheels once, and resumes where it was
stopped.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import onnx
import typer
from onnx import TensorProto, helper, numpy_helper

from tests.soak.soak_aa import keep, read

FILE = "soak_why.jsonl"
BENCHD = Path(sys.executable).with_name("benchd")
OTHERS = (
    "attrs==25.3.0",
    "filelock==3.18.0",
    "fsspec==2025.3.0",
    "idna==3.10",
    "mdurl==0.1.1",
    "mpmath==1.2.1",
    "networkx==3.4.2",
    "pygments==2.18.0",
)
FLOAT, DOUBLE, INT64 = TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.INT64
# the versions before and after, the operator, its type, attributes, and whether its inputs are of one sign
CASES: dict[str, tuple[str, str, str, int, dict[str, Any], bool]] = {
    "LRN": ("1.20.1", "1.21.0", "LRN", FLOAT, {"size": 5}, True),
    "Selu": ("1.20.1", "1.21.0", "Selu", FLOAT, {}, True),
    "Elu": ("1.20.1", "1.21.0", "Elu", FLOAT, {}, True),
    "Sigmoid of float64": ("1.20.1", "1.21.0", "Sigmoid", DOUBLE, {}, True),
    "ReduceMean of int64": ("1.20.1", "1.21.0", "ReduceMean", INT64, {"axes": [1], "keepdims": 1}, True),
    "ReduceSumSquare of int64": ("1.21.0", "1.31.1", "ReduceSumSquare", INT64, {"axes": [2, 3], "keepdims": 1}, True),
    "MatMul of int64": ("1.20.1", "1.21.0", "MatMul", INT64, {}, True),
    "LeakyRelu, backwards": ("1.21.0", "1.20.1", "LeakyRelu", FLOAT, {}, False),
    "Tanh of float64, backwards": ("1.21.0", "1.20.1", "Tanh", DOUBLE, {}, False),
    "ReduceL1, backwards": ("1.21.0", "1.20.1", "ReduceL1", FLOAT, {"axes": [1], "keepdims": 1}, False),
    "Elu of both signs, backwards": ("1.21.0", "1.20.1", "Elu", FLOAT, {}, False),
}
ALWAYS = ("one input, which stays in the caches", "inputs drawn from 0 to 255")
ONE_THREAD = ["-nstreams", "1", "-nireq", "1", "-nthreads", "1"]
# our case, the options of benchmark_app, and what differs
PROTOCOLS: dict[str, tuple[str, list[str], list[str]]] = {
    "one thread": ("openvino,b2,threads=2", ONE_THREAD, ["1 thread, not 2"]),
    "two threads": ("openvino,b2,threads=1", ["-nstreams", "1", "-nireq", "1"], ["2 threads, not 1"]),
    "a batch of 8": ("openvino,b2,threads=1", [*ONE_THREAD, "-shape", "[8,32,56,56]"], ["batch 8, not 2"]),
    "bf16": ("openvino,b2,threads=1", [*ONE_THREAD, "-infer_precision", "bf16"], ["bf16, not fp32"]),
    "a queue": (
        "openvino,b2,threads=1",
        ["-nstreams", "1", "-nireq", "4", "-nthreads", "1"],
        ["4 requests in flight, 1 of them running"],
    ),
    "two streams": (
        "openvino,b2,threads=2",
        ["-nstreams", "2", "-nireq", "2"],
        ["1 thread, not 2", "2 streams, not 1"],
    ),
    "a queue before one thread": (
        "openvino,b2,threads=2",
        ["-nstreams", "1", "-nireq", "3", "-nthreads", "1"],
        ["1 thread, not 2", "3 requests in flight, 1 of them running"],
    ),
    "a batch of 8 in bf16": (
        "openvino,b2,threads=1",
        [*ONE_THREAD, "-shape", "[8,32,56,56]", "-infer_precision", "bf16"],
        ["bf16, not fp32", "batch 8, not 2"],
    ),
    "nothing": ("openvino,b2,threads=1", ONE_THREAD, []),
}
SHAPE = (2, 32, 56, 56)

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command(epilog="Example: make soak-why ARGS='--only LRN'")
def main(
    output: Annotated[Path, typer.Option(help=f"Folder of {FILE}.")] = Path("bench-out/soak-why"),
    only: Annotated[str, typer.Option(help="Cases whose name contains this.")] = "",
) -> None:
    """Ask `benchd why` for each case and print whether it was right."""
    output.mkdir(parents=True, exist_ok=True)
    done = {line["case"] for line in read(output / FILE)}
    for name in (each for each in (*CASES, *PROTOCOLS) if only in each and each not in done):
        line = {"case": name, **(asked(name, output) if name in CASES else bridged(name, output))}
        typer.echo(json.dumps(line))
        keep(output / FILE, line)
    lines = read(output / FILE)
    for text in (*summary([line for line in lines if line["case"] in CASES]), *of_protocols(lines)):
        typer.echo(text)


def asked(name: str, output: Path) -> dict[str, Any]:
    """Return what `benchd why` answers for a case."""
    before, after, *_ = CASES[name]
    folder = output / name.replace(" ", "_").replace(",", "")
    folder.mkdir(exist_ok=True)
    onnx.save(net(name), folder / "net.onnx")
    (folder / "old.txt").write_text("\n".join([f"onnxruntime=={before}", *OTHERS]))
    (folder / "new.txt").write_text(f"onnxruntime=={after}\n")
    began = time.monotonic()
    command = [str(BENCHD), "why", "onnxruntime,threads=1", "--onnx", "net.onnx"]
    done = subprocess.run(
        [*command, "--lock", "old.txt", "--lock", "new.txt", "--json", "--wait"],
        cwd=folder,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    answer = json.loads(done.stdout) if done.returncode in {0, 4} else {}
    layers = (answer.get("layers") or {}).get("changes", [])
    return {
        "effect": answer.get("verdict", {}).get("effect"),
        "layer": layers[0]["name"] if layers else None,
        "packages": [cause["differences"] for cause in answer.get("causes", [])],
        "minutes": (time.monotonic() - began) / 60,
    }


def bridged(name: str, output: Path) -> dict[str, Any]:
    """Return what `benchd why --theirs` answers for a result of benchmark_app."""
    case, options, expected = PROTOCOLS[name]
    folder = output / name.replace(" ", "_")
    folder.mkdir(exist_ok=True)
    onnx.save(net("LeakyRelu, backwards", batch="n"), folder / "net.onnx")
    whole = ["-shape", f"[{','.join(map(str, SHAPE))}]", "-infer_precision", "f32", "-hint", "none", "-t", "10"]
    command = [str(BENCHD.with_name("benchmark_app")), "-m", "net.onnx", "-d", "CPU", *whole, *options]
    theirs = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, check=True).stdout
    (folder / "theirs.log").write_text(theirs)
    command = [str(BENCHD), "why", case, "--onnx", "net.onnx", "--input", "x=32x56x56"]
    done = subprocess.run(
        [*command, "--theirs", "theirs.log", "--json", "--wait"],
        cwd=folder,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    answer = json.loads(done.stdout) if done.returncode == 0 else {}
    gap_ms = answer["theirs"]["latency_ms"]["median"] - answer["ours_ms"] if answer else None
    return {
        "ours_ms": answer.get("ours_ms"),
        "gap_ms": gap_ms,
        "switches": [switch["name"] for switch in answer.get("switches", [])],
        "expected": expected,
        "unexplained_ms": answer.get("unexplained_ms"),
    }


def of_protocols(lines: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a line for each result of benchmark_app, and how many were right."""
    protocols = [line for line in lines if line["case"] in PROTOCOLS]
    for line in protocols:
        yield (
            f"{line['case']:<30} ours {line['ours_ms']:.3g} ms, gap {line['gap_ms']:+.3g} ms, unexplained "
            f"{line['unexplained_ms']:+.3g} ms: {'; '.join(line['switches']) or 'nothing'}"
        )
    named = sum(set(line["switches"]) == {*line["expected"], *ALWAYS} for line in protocols)
    planted = [line for line in protocols if line["expected"]]
    explained = sum(abs(line["unexplained_ms"]) <= 0.1 * abs(line["gap_ms"]) for line in planted)
    yield f"what differs named: {named} of {len(protocols)}; 90 % of the gap explained: {explained} of {len(planted)}"


def net(name: str, batch: int | str = SHAPE[0]) -> onnx.ModelProto:
    """Return the net of a case: eight convolutions with their activations, and the operator between two casts."""
    *_, operator, kind, attributes, is_positive = CASES[name]
    draw, nodes, weights, value = np.random.default_rng(0), [], [], "x"
    channels = SHAPE[1]
    for number in range(8):
        weight = draw.standard_normal((channels, channels, 1, 1)) / np.sqrt(channels)
        weights.append(numpy_helper.from_array(weight.astype(np.float32), f"w{number}"))
        nodes.append(helper.make_node("Conv", [value, f"w{number}"], [f"c{number}"], name=f"conv{number}"))
        activation = "Sigmoid" if is_positive and number == 3 else "Relu" if number != 3 else "Identity"
        nodes.append(helper.make_node(activation, [f"c{number}"], [f"r{number}"], name=f"act{number}"))
        value = f"r{number}"
        if number == 3:
            nodes += [helper.make_node("Cast", [value], ["before"], name="before", to=kind)] if kind != FLOAT else []
            given = ["before" if kind != FLOAT else value]
            if operator == "MatMul":
                weights.append(numpy_helper.from_array(draw.integers(0, 9, (SHAPE[3], SHAPE[3])), "square"))
                given.append("square")
            nodes.append(helper.make_node(operator, given, ["made"], name="guilty", **attributes))
            nodes += [helper.make_node("Cast", ["made"], ["after"], name="after", to=FLOAT)] if kind != FLOAT else []
            nodes.append(
                helper.make_node("Add", [value, "after" if kind != FLOAT else "made"], ["added"], name="added")
            )
            value = "added"
    ends = [helper.make_tensor_value_info(end, FLOAT, (batch, *SHAPE[1:])) for end in ("x", value)]
    graph = helper.make_graph(nodes, "net", ends[:1], ends[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)


def summary(lines: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a line a case, and how many were right."""
    for line in lines:
        effect = f"{100 * line['effect']:+.0f} %" if line["effect"] is not None else "-"
        packages = "; ".join(" + ".join(each) for each in line["packages"]) or "none"
        yield f"{line['case']:<30} {effect:>7}  layer {line['layer'] or 'none'}  {packages}  {line['minutes']:.1f} min"
    layers = sum(line["layer"] == "guilty" for line in lines)
    named = sum(
        len(line["packages"]) == 1 and [each.split()[0] for each in line["packages"][0]] == ["onnxruntime"]
        for line in lines
    )
    minutes = median(line["minutes"] for line in lines) if lines else 0.0
    count = len(lines)
    yield f"the layer first: {layers} of {count}; the package named: {named} of {count}; median {minutes:.1f} min"


if __name__ == "__main__":
    app()
