"""Reads other tools' results, with the meaning of each number; sources: the tools' own printing code.

A file is recognised by its content. Truncated or failed output, and files with two different results, are rejected with
a reason, because benchd would otherwise explain a wrong number.
"""

import codecs
import csv
import io
import math
import re
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise, takewhile
from pathlib import Path
from statistics import fmean, median
from typing import Any, Literal

import msgspec
from msgspec import Struct

from benchd.daemon.errors import UsageError
from benchd.daemon.runtimes import Precision

Statistic = Literal["mean", "median"]
MOST_BYTES = 64 * 2**20


class Foreign(Struct, frozen=True, kw_only=True):
    """Another tool's result, in ms per call: `latency_ms` by statistic, and the statistic that is usually quoted.

    `in_flight` requests share `streams` streams: excess requests wait, which counts as latency. `same_input` is set if
    every call reads the same values, and `span` to the ends between which the tool draws floats. Values that are
    missing from the file are the tool's default, or None. `means` says what the number stands for, and `notes` what it
    excludes.
    """

    tool: str
    quoted: Statistic
    latency_ms: dict[str, float]
    means: str
    model: str = ""
    throughput_per_s: float | None = None
    batch: int | None = None
    streams: int = 1
    in_flight: int = 1
    threads: int | None = None
    precision: Precision | None = None
    same_input: bool = True
    span: tuple[float, float] | None = None
    warm_up: str = ""
    notes: list[str] = []

    @property
    def quoted_ms(self) -> float:
        """The quoted statistic, which is the number to explain."""
        return self.latency_ms[self.quoted]


def read(path: Path) -> Foreign:
    """Return the result in a file; raise UsageError for an unknown tool, truncated or failed output, or two results."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # reading a pipe would wait for a writer
            raise UsageError(f"{path}: not a regular file; save the tool's output in one")
        if status.st_size > MOST_BYTES:
            raise UsageError(f"{path}: larger than 64 MiB, so not a result; give the tool's final output")
        text = _decoded(path.read_bytes())
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    try:
        results = _json_results(text) if re.match(r"\s*(\{|\[\s*\{)", text) else _text_results(text)
    except _UnreadableFile as error:
        raise UsageError(f"{path}: {error}") from error
    except (AttributeError, KeyError, ValueError, TypeError, IndexError, StopIteration) as error:
        raise UsageError(f"{path}: a field is missing or not a number ({error}): truncated or edited file") from error
    if not results:
        raise UsageError(
            f"{path}: not recognised; benchd reads trtexec (log, --exportTimes), benchmark_app (console, report), "
            "perf_analyzer (-f), onnxruntime_perf_test, LiteRT benchmark_model, optimum-benchmark and ultralytics"
        )
    result, *others = results
    if any(each != result for each in others):
        raise UsageError(f"{path}: contains {len(results)} different results; give a file with a single result")
    ms = result.latency_ms
    low, high = ms.get("min", 0.0), ms.get("max", math.inf)
    if not all(0.99 * low <= each <= 1.01 * high and 0.0 < each < math.inf for each in ms.values()):  # rounded
        raise UsageError(f"{path}: latencies that cannot all be right ({ms}, in ms): truncated or edited file")
    counts = (result.batch, result.threads, result.streams, result.in_flight)
    if any(count is not None and count < 1 for count in counts):
        raise UsageError(f"{path}: a batch, threads, streams or requests below 1: truncated or edited file")
    return result


def _decoded(content: bytes) -> str:
    """Return the text without colours and byte order marks; Windows consoles write the latter, and UTF-16."""
    encoding = "utf-16" if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "utf-8"
    return re.sub(r"\ufeff|\x1b\[[\d;]*m", "", content.decode(encoding, errors="replace")).replace("\r\n", "\n")


class _UnreadableFile(Exception):
    """The reason why a recognised file cannot be used."""


def _json_results(text: str) -> list[Foreign]:
    try:
        content = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise _UnreadableFile(f"the JSON is truncated or damaged ({error})") from error
    if isinstance(content, list):
        return [_export_times(content)] if content and "computeMs" in content[0] else []
    if "execution_results" in content or "configuration_setup" in content:
        return [_benchmark_report(content)]
    if "forward" in content or "report" in content:
        return [_optimum(content.get("report", content), content.get("config") or {})]
    return []


def _text_results(text: str) -> list[Foreign]:
    return [reader(part) for marker, reader in _TEXTS.items() for part in _parts(text, marker)]


def _parts(text: str, marker: str) -> list[str]:
    """Split the text at the start of each of the tool's runs; return none if there is no run."""
    begins = [match.start() for match in re.finditer(marker, text, re.MULTILINE)]
    return [text[begin:end] for begin, end in pairwise([*begins, len(text)])]


def _numbers(text: str, pattern: str) -> list[float]:
    """Return the numbers in the first match; commas are decimal separators if no number in the line has a point."""
    match = re.search(pattern, text)
    if match is None:
        return []
    commas = "," in "".join(match.groups()) and "." not in "".join(match.groups())
    return [float(group.replace(",", ".") if commas else group) for group in match.groups()]


def _required(text: str, pattern: str, name: str) -> list[float]:
    numbers = _numbers(text, pattern)
    if not numbers:
        raise _UnreadableFile(f"{name} is missing: the output is truncated, the run failed, or the version is unknown")
    return numbers


def _whole(text: str, pattern: str) -> int | None:
    match = re.search(pattern, text)
    return int(match[1]) if match else None


_PRECISIONS: dict[str, Precision] = {
    **dict.fromkeys(("float32", "f32", "FP32"), "fp32"),
    **dict.fromkeys(("float16", "f16", "FP16", "FP32+FP16"), "fp16"),
    **dict.fromkeys(("bfloat16", "bf16", "BF16"), "bf16"),
    "INT8": "int8",
}
_N = r"([\d.,]+(?:[eE][+-]?\d+)?)"


_QUERY = "a query's input copy, computation and output copy, excluding the wait for the query queued before it"


def _trtexec(text: str) -> Foreign:
    if "&&&& PASSED" not in text:
        raise _UnreadableFile("trtexec did not end with PASSED: the log is truncated, or the run failed")
    low, high, mean, middle = _required(
        text, rf"(?<!\w )Latency: min = {_N} ms, max = {_N} ms, mean = {_N} ms, median = {_N} ms", "the line Latency"
    )
    queries = _required(text, rf"Throughput: {_N} qps", "the line Throughput")[0]
    precision = re.search(r"Precision: (\S+)", text)
    streams = _whole(text, r"Inference Streams: (\d+)") or 1
    copies = "Data transfers: Disabled" not in text
    clock = _found(text, r"Compute Clock Rate: (.+)")
    return Foreign(
        tool="trtexec",
        quoted="median",
        latency_ms={"min": low, "max": high, "mean": mean, "median": middle},
        throughput_per_s=queries,
        means=_QUERY if copies else "a query's computation, without the copies that ours includes",
        batch=_whole(text, r"Created input binding for \S+ with dimensions (\d+)"),
        streams=streams,
        in_flight=streams,
        precision=_PRECISIONS.get(precision[1]) if precision else None,
        span=None if "<-" in text else (-1.0, 1.0),  # with --loadInputs
        warm_up=_found(text, r"Duration: [\d.]+s \(\+ ([\d.]+ms) warm up\)"),
        notes=["TF32 unless --noTF32", *([f"their GPU's clock: at most {clock}"] if clock else [])],
    )


def _found(text: str, pattern: str) -> str:
    match = re.search(pattern, text)
    return match[1] if match else ""


def _export_times(rows: Sequence[Mapping[str, Any]]) -> Foreign:
    """Read the output of `trtexec --exportTimes`, which in older versions includes the warm-up of 200 ms.

    Its clock starts with the warm-up, whether that is included or not.
    """
    measured = [row for row in rows if float(row["startComputeMs"]) >= 200.0] or rows
    return Foreign(
        tool="trtexec --exportTimes",
        quoted="median",
        latency_ms=_statistics(float(row["latencyMs"]) for row in measured),
        means=_QUERY,
        warm_up="200 ms",
        notes=[f"{len(measured)} of {len(rows)} queries; the others are the warm-up's"] * (measured != rows),
    )


def _statistics(times_ms: Iterable[float]) -> dict[str, float]:
    times = sorted(times_ms)
    return {"min": times[0], "median": median(times), "mean": fmean(times), "max": times[-1]}


_BENCHMARK_MEANS = "one of the requests in flight together, from start to answer"
_PERCENTILE = "a percentile instead of the median: run benchmark_app without -latency_percentile"


def _of_each(threads: int | None, streams: int) -> int | None:
    """Return the threads of each stream of benchmark_app, which share its threads."""
    return max(1, threads // max(1, streams)) if threads else None


def _benchmark_app(text: str) -> Foreign:
    if re.search(r"\d percentile:", text):
        raise _UnreadableFile(_PERCENTILE)
    latency_ms = {}
    for ours, name in {"median": "Median", "mean": "Average", "min": "Min", "max": "Max"}.items():
        us = _numbers(text, rf"{name}:\s+{_N} us")  # below 1 ms, since 2026
        latency_ms[ours] = us[0] / 1e3 if us else _required(text, rf"{name}:\s+{_N} ms", f"the line {name}")[0]
    threads, streams = _whole(text, r"INFERENCE_NUM_THREADS: (\d+)"), _whole(text, r"NUM_STREAMS: (\d+)") or 1
    requests = _whole(text, r"Start inference asynchronously, (\d+)") or 1
    return Foreign(
        tool="benchmark_app",
        quoted="median",
        latency_ms=latency_ms,
        throughput_per_s=_required(text, rf"Throughput:\s+{_N} FPS", "the line Throughput")[0],
        means=_BENCHMARK_MEANS,
        batch=_whole(text.partition("[Step 6/11]")[2], r"Model inputs:\n.* / \[(\d+),"),
        streams=min(streams, requests),
        in_flight=requests,
        threads=_of_each(threads, streams),
        precision=_PRECISIONS.get(_found(text, r"INFERENCE_PRECISION_HINT: <Type: '(\w+)'>")),
        span=(0.0, 255.0) if "with random values" in text else None,
        warm_up="one request",
    )


def _benchmark_report(content: Mapping[str, Any]) -> Foreign:
    results, setup = content.get("execution_results", {}), content.get("configuration_setup", {})
    options = {name.lstrip("-"): str(value) for name, value in content.get("cmd_options", {}).items()}
    if "error" in content or "error" in results:
        raise _UnreadableFile("benchmark_app failed")
    if "throughput" not in results:
        raise _UnreadableFile("execution_results contains no results: benchmark_app from 2023 wrote its options there")
    middle = next((value for name, value in results.items() if re.fullmatch(r"latency( \(ms\))?", name)), None)
    if middle is None:
        raise _UnreadableFile(_PERCENTILE)
    requests = int(setup.get("number of parallel infer requests", 1))
    running = _whole(" ".join(f"{name} {value}" for name, value in setup.items()), r"number of \w+ streams (\d+)")
    streams = requests if running is None else running
    threads = _whole(options.get("nthreads", options.get("number_threads", "")), r"(\d+)")
    shape = options.get("shape", f"[{options.get('b', options.get('batch_size', ''))}")
    return Foreign(
        tool="benchmark_app report",
        quoted="median",
        latency_ms={
            "median": float(middle),
            "mean": float(results["avg latency"]),
            "min": float(results["min latency"]),
            "max": float(results["max latency"]),
        },
        throughput_per_s=float(results["throughput"]),
        means=_BENCHMARK_MEANS,
        batch=_whole(shape, r"\[(\d+)"),  # not "batch size", which is 1 for an input of unknown layout
        streams=min(streams, requests),
        in_flight=requests,
        threads=_of_each(threads, streams),
        precision=_PRECISIONS.get(options.get("infer_precision", "").rpartition(":")[2]),
        span=None if {"i", "paths_to_input"} & {*options} else (0.0, 255.0),
        warm_up="one request",
    )


def _benchmark_csv(text: str) -> Foreign:
    """Read the report without -json_stats, which has the same fields as lines of `name;value`."""
    fields = dict(line.split(";", 1) for line in text.splitlines() if ";" in line)
    if "throughput" not in fields:
        raise _UnreadableFile("the line throughput is missing: the report is truncated, or the run failed")
    return _benchmark_report(dict.fromkeys(("cmd_options", "configuration_setup", "execution_results"), fields))


_PARTS = ("Client Send", "Network+Server Send/Recv", "Server ", "Client Recv")


def _perf_analyzer(text: str) -> Foreign:
    header, *rows = [row for row in csv.reader(io.StringIO(text)) if row]
    if any(len(row) != len(header) for row in rows):
        raise _UnreadableFile("a row and the header differ in length: the file has decimal commas, or is truncated")
    if not rows:
        raise _UnreadableFile("a header without results: the file is truncated, or the run failed")
    if len(rows) != 1:
        raise _UnreadableFile(
            f"{len(rows)} load levels; give a file with one, for example from --concurrency-range 1:1"
        )
    row = dict(zip(header, rows[0], strict=True))
    latency_ms = {
        {"p50": "median", "Avg": "mean"}.get(name, name): float(us) / 1e3
        for name, us in ((name.removesuffix(" latency"), us) for name, us in row.items() if name.endswith(" latency"))
    }
    compute = row.get("Server Compute Infer")
    if compute and "mean" not in latency_ms:  # its parts; without the server's, the wait for the answer is missing
        latency_ms["mean"] = sum(float(us) for name, us in row.items() if name.startswith(_PARTS)) / 1e3
    in_flight, per_s = int(row.get("Concurrency", 1)), float(row["Inferences/Second"])
    quoted: Statistic = "mean" if "mean" in latency_ms else "median"
    inputs = per_s * latency_ms[quoted] / 1e3 / max(1, in_flight) if "Concurrency" in row else 1.0  # Little's law
    return Foreign(
        tool="perf_analyzer",
        quoted=quoted,
        latency_ms=latency_ms,
        throughput_per_s=per_s,
        means="a request as the client sees it, including the server's network, queue and copies",
        in_flight=in_flight,
        notes=[
            *([f"compute alone: {float(compute) / 1e3:.4g} ms"] if compute else []),
            *([f"{inputs:.3g} inputs per request: give our case their batch, such as b8"] if inputs > 1.5 else []),
        ],
    )


def _onnxruntime(text: str) -> Foreign:
    mean = _required(text, rf"Average inference time cost(?: total)?: ?{_N} ms", "Average inference time cost")[0]
    seconds = {
        ours: value * 1e3
        for ours, name in {"min": "Min", "median": "P50", "p90": "P90", "p99": "P99", "max": "Max"}.items()
        for value in _numbers(text, rf"{name} Latency: {_N} s")
    }
    # how many calls ran at once: the time of all calls divided by that of the run
    times = [_numbers(text, rf"Total inference {what}: ?{_N} s") for what in ("time cost", "run time")]
    at_once = max(1, round(times[0][0] / times[1][0])) if all(times) else 1
    return Foreign(
        tool="onnxruntime_perf_test",
        quoted="mean",
        latency_ms={"mean": mean, **seconds},
        throughput_per_s=next(iter(_numbers(text, rf"Number of inferences per second: {_N}")), None),
        means="the mean of consecutive calls",
        streams=at_once,
        in_flight=at_once,
        threads=_whole(text, r"Setting intra_op_num_threads to (\d+)"),
        warm_up="one run",
        notes=["with -I but without -S, its inputs are zeros, or uninitialised memory in older versions"],
    )


def _litert(text: str) -> Foreign:
    times = _required(text, rf"Inference \(avg\): {_N}", "the line Inference timings")
    last = "".join(re.findall(r"count=.*", text)[-1:])  # the line before is the warm-up's
    others = {name: float(us) / 1e3 for name, us in re.findall(rf"(min|max|median)={_N}", last)}
    return Foreign(
        tool="LiteRT benchmark_model",
        quoted="mean",
        latency_ms={"mean": times[0] / 1e3, **others},
        means="the mean of consecutive calls",
        threads=_whole(text, r"Num threads: \[(\d+)\]") or None,
        span=(-0.5, 0.5),
        warm_up="0.5 s",
    )


def _optimum(content: Mapping[str, Any], config: Mapping[str, Any]) -> Foreign:
    target = next(name for name in ("forward", "prefill", "call") if name in content)
    latency = content[target]["latency"]
    if latency.get("unit") != "s":
        raise _UnreadableFile(f"a latency in {latency.get('unit')!r}, not in s")
    times = _statistics(float(value) * 1e3 for value in latency["values"])
    throughput, backend = content[target].get("throughput") or {}, config.get("backend", {})
    per_s = float(throughput["value"]) if throughput else None
    is_samples = throughput.get("unit") == "samples/s"  # its throughput is the batch divided by the mean latency
    return Foreign(
        tool="optimum-benchmark",
        quoted="mean",
        latency_ms=times,
        throughput_per_s=per_s,
        means=f"the mean of {target} over all processes",
        batch=round(per_s * times["mean"] / 1e3) if per_s and is_samples else None,
        threads=backend.get("intra_op_num_threads"),
        precision=_PRECISIONS.get(backend.get("torch_dtype")),
        notes=[] if target == "forward" else [f"only {target}"],
    )


def _ultralytics(text: str) -> Foreign:
    header = next(line for line in text.splitlines() if "Inference time" in line)
    width = 4 if "FPS" in header else 3  # numbers of a row: size, metric, time and FPS
    numbers = []
    for line in text.split("\n")[:-1]:  # a line without its end may be truncated
        cells = re.split(r"[\s│┆|]+", line.strip(" │┆|"))
        values = [*takewhile(re.compile(r"\d+(\.\d+)?").fullmatch, cells[::-1])][::-1]
        if len(values) == width:
            numbers.append((float(values[2]), " ".join(cell for cell in cells[:-width] if cell[0].isalpha())))
    if len(numbers) != 1:
        formats = ", ".join(name for _, name in numbers)
        raise _UnreadableFile(f"a table of {len(numbers)} formats ({formats}); keep only the row of yours")
    size = _whole(text, r"imgsz=(\d+)")
    return Foreign(
        tool="ultralytics",
        quoted="mean",
        latency_ms={"mean": numbers[0][0]},
        means="the mean of the forward pass alone over the validation images, one by one",
        model=_found(text, r"Benchmarks complete for (\S+)"),
        batch=1,
        same_input=False,
        notes=[f"imgsz {size}"] if size else [],
    )


_TEXTS: dict[str, Callable[[str], Foreign]] = {
    r"&&&& RUNNING TensorRT\.trtexec": _trtexec,
    r"\[Step 1/11\]": _benchmark_app,
    r"Command line parameters$": _benchmark_csv,
    r"(Concurrency|Request Rate),Inferences/Second": _perf_analyzer,
    r"(Setting intra_op_num_threads to \d+\n(.+\n){0,9}?)?Session creation time cost:": _onnxruntime,
    r"STARTING!$": _litert,
    r"Benchmarks complete for ": _ultralytics,
}
