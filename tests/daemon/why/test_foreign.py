"""Results of other tools, in the words that they print: read right, or refused with a message."""

import json
import os
import re
from contextlib import suppress

import pytest

from benchd.daemon.errors import UsageError
from benchd.daemon.why import foreign

TRTEXEC = """&&&& RUNNING TensorRT.trtexec [TensorRT v100300] # trtexec --onnx=net.onnx
[I] Precision: FP32+FP16
[I] Inference Streams: 1
[I] Duration: 3s (+ 200ms warm up)
[I] Throughput: 400.5 qps
[I] Latency: min = 2.1 ms, max = 4.4 ms, mean = 2.6 ms, median = 2.5 ms, percentile(90%) = 2.9 ms
&&&& PASSED TensorRT.trtexec [TensorRT v100300]
"""
BENCHMARK_APP = """[Step 1/11] Parsing and validating input arguments
[ INFO ]   NUM_STREAMS: 2
[ INFO ]   INFERENCE_NUM_THREADS: 2
[ INFO ]   INFERENCE_PRECISION_HINT: <Type: 'bfloat16'>
[Step 10/11] Measuring performance (Start inference asynchronously, 4 inference requests, limits: 4000 ms duration)
[ INFO ] Latency:
[ INFO ]    Median:        24.17 ms
[ INFO ]    Average:       24.69 ms
[ INFO ]    Min:           14.74 ms
[ INFO ]    Max:           39.34 ms
[ INFO ] Throughput:   80.44 FPS
"""
PERF_ANALYZER = (
    "Concurrency,Inferences/Second,Client Send,Network+Server Send/Recv,Server Queue,Server Compute Input,"
    "Server Compute Infer,Server Compute Output,Client Recv,p50 latency,p90 latency,p95 latency,p99 latency\n"
    "1,340.5,10,400,50,20,2400,15,5,2890,3000,3100,3500\n"
)
ONNXRUNTIME = """Setting intra_op_num_threads to 2
Disabling intra-op thread spinning between runs
Session creation time cost: 0.05 s
First inference time cost: 9 ms
Total inference time cost: 5.12 s
Total inference requests: 1000
Average inference time cost total: 5.12 ms
Total inference run time: 5.13 s
Number of inferences per second: 195.3
Min Latency: 0.0041 s
Max Latency: 0.0092 s
P50 Latency: 0.0050 s
P99 Latency: 0.0071 s
"""
LITERT = """INFO: STARTING!
INFO: Num threads: [4]
INFO: count=10 first=9000 curr=8100 min=8000 max=9000 avg=8200 std=200
INFO: count=120 first=8200 curr=8100 min=7900 max=9100 avg=8150.5 std=90
INFO: Inference timings in us: Init: 21000, First inference: 9000, Warmup (avg): 8200, Inference (avg): 8.1505e+03
"""
ULTRALYTICS = """Benchmarks complete for yolo11n.pt on coco8.yaml at imgsz=640 (12.3s)
                   Format Status❔  Size (MB)  metrics/mAP50-95(B)  Inference time (ms/im)    FPS
0                    ONNX       ✅       10.2               0.6086                   31.25   32.0
9     TensorFlow Edge TPU       ❌        0.0                  NaN                     NaN    NaN
"""
ULTRALYTICS_TABLES = {
    "without FPS": """                   Format Status❔  Size (MB)  metrics/mAP50-95(B)  Inference time (ms/im)
6   TensorFlow SavedModel       ✅       10.2               0.6086                   31.25
""",
    "Markdown": """| Format | Status | Size (MB) | metrics/mAP50-95(B) | Inference time (ms/im) | FPS |
| --- | --- | --- | --- | --- | --- |
| ONNX | ✅ | 10.2 | 0.6086 | 31.25 | 32.0 |
| TensorRT | ❌ | - | - | - | - |
""",
    "polars": """┌─────┬────────┬─────────┬───────────┬─────────────────────┬────────────────────────┬──────┐
│     ┆ Format ┆ Status❔ ┆ Size (MB) ┆ metrics/mAP50-95(B) ┆ Inference time (ms/im) ┆ FPS  │
│ 2   ┆ ONNX   ┆ ✅      ┆ 10.2      ┆ 0.6086              ┆ 31.25                  ┆ 32.0 │
└─────┴────────┴─────────┴───────────┴─────────────────────┴────────────────────────┴──────┘
""",
}
OPTIMUM = json.dumps(
    {
        "forward": {
            "latency": {"unit": "s", "values": [0.010, 0.012, 0.011]},
            "throughput": {"unit": "samples/s", "value": 90.9},
        }
    }
)
REPORT = json.dumps(
    {
        "cmd_options": {"-m": "net.onnx", "-shape": "[2,32,56,56]", "-infer_precision": "bf16", "-nthreads": "2"},
        "configuration_setup": {
            "inference_only": True,
            "batch size": "1",
            "number of parallel infer requests": "4",
            "number of CPU streams": "2",
        },
        "execution_results": {
            "latency (ms)": "24.17",
            "avg latency": "24.69",
            "min latency": "14.74",
            "max latency": "39.34",
            "throughput": "80.44",
        },
    }
)
REPORT_CSV = """Command line parameters
-m;net.onnx
-shape;[2,32,56,56]
-infer_precision;bf16
-nthreads;2

Configuration setup
inference_only;True
batch size;1
number of parallel infer requests;4
number of CPU streams;2

Execution results
latency (ms);24.17
avg latency;24.69
min latency;14.74
max latency;39.34
throughput;80.44
"""
TIMES = json.dumps(
    [{"startComputeMs": 10.0 * n, "computeMs": 2.0, "latencyMs": 9.0 if n < 20 else 2.5} for n in range(60)]
)
NEW_TIMES = json.dumps(
    [{"startComputeMs": 200.0 + n, "computeMs": 2.0, "latencyMs": 9.0 if n < 80 else 2.5} for n in range(100)]
)
FILES = {
    "trtexec": (TRTEXEC, "median", 2.5, "fp16", 1),
    "trtexec --exportTimes": (TIMES, "median", 2.5, None, 1),
    "benchmark_app": (BENCHMARK_APP, "median", 24.17, "bf16", 4),
    "benchmark_app report": (REPORT, "median", 24.17, "bf16", 4),
    "perf_analyzer": (PERF_ANALYZER, "mean", 2.9, None, 1),
    "onnxruntime_perf_test": (ONNXRUNTIME, "mean", 5.12, None, 1),
    "LiteRT benchmark_model": (LITERT, "mean", 8.1505, None, 1),
    "optimum-benchmark": (OPTIMUM, "mean", 11.0, None, 1),
    "ultralytics": (ULTRALYTICS, "mean", 31.25, None, 1),
}


@pytest.fixture
def read(tmp_path):
    def of(text):
        path = tmp_path / "theirs"
        path.write_text(text, encoding="utf-8")
        return foreign.read(path)

    return of


@pytest.mark.parametrize("tool", FILES)
def test_the_number_that_is_quoted_is_read_in_ms_with_its_protocol(tool, read):
    text, quoted, ms, precision, in_flight = FILES[tool]
    result = read(text)
    assert (result.tool, result.quoted, result.precision, result.in_flight) == (tool, quoted, precision, in_flight)
    assert result.quoted_ms == pytest.approx(ms)
    assert result.means


def test_an_export_of_a_trtexec_that_leaves_out_the_warm_up_is_whole(read):
    result = read(NEW_TIMES)
    assert (result.quoted_ms, result.notes) == (9.0, [])


@pytest.mark.parametrize("tool", FILES)
def test_a_file_that_is_cut_off_is_refused_or_has_no_other_number(tool, read):
    text, _, ms, *_ = FILES[tool]
    for part in range(1, 20):
        with suppress(UsageError):
            assert read(text[: len(text) * part // 20]).quoted_ms == pytest.approx(ms)


@pytest.mark.parametrize("tool", [tool for tool, (text, *_) in FILES.items() if not text.startswith(("{", "["))])
def test_the_same_result_twice_is_one_and_two_results_are_refused(tool, read):
    text, _, ms, *_ = FILES[tool]
    if tool != "perf_analyzer":
        assert read(text + text).quoted_ms == pytest.approx(ms)
    faster = (
        text.replace("2.5 ms", "1.5 ms").replace("24.17", "14.17").replace("5.12", "4.12").replace("31.25", "21.25")
    )
    faster = faster.replace("8.1505e+03", "7.1505e+03").replace(",2400,", ",1400,")
    with pytest.raises(UsageError, match=r"2 different results|2 load levels|differ in length"):
        read(text + faster)


def test_decimal_commas_of_a_locale_are_read_where_they_are_unambiguous(read):
    text = BENCHMARK_APP
    for number in ("24.17", "24.69", "14.74", "39.34", "80.44"):
        text = text.replace(number, number.replace(".", ","))
    assert read(text).quoted_ms == pytest.approx(24.17)
    with pytest.raises(UsageError, match="differ in length"):
        read(PERF_ANALYZER.replace("340.5", "340,5"))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (REPORT_CSV.partition("throughput")[0], "the line throughput is missing"),
        (PERF_ANALYZER.partition("\n")[0] + "\n", "a header without results"),
        ("hello\n", "not recognised; benchd reads trtexec"),
        (TRTEXEC.replace("&&&& PASSED", "&&&& FAILED"), "did not end with PASSED"),
        ('{"cmd_options": {}, "execution_results": {"error": "no device"}}', "benchmark_app failed"),
        ('{"cmd_options": {}, "execution_results": {"niter": "1"}}', "benchmark_app from 2023 wrote its options there"),
        (REPORT.replace("latency (ms)", "latency (95 percentile) (ms)"), "a percentile instead of the median"),
        (OPTIMUM.replace('"s"', '"ms"'), "a latency in 'ms', not in s"),
        ('{"a":' * 100_000, "the JSON is truncated or damaged"),
        (REPORT.replace('"4"', '"0"'), "a batch, threads, streams or requests below 1"),
        (TRTEXEC + BENCHMARK_APP, "2 different results"),
        (
            ULTRALYTICS + "1  OpenVINO  ✅      10.2       0.6086               11.25                   88.0\n",
            "2 formats",
        ),
        (TRTEXEC.replace("median = 2.5", "median = ?"), "the line Latency is missing"),
        (TRTEXEC.replace("] Latency: min", "] H2D Latency: min"), "the line Latency is missing"),
        (BENCHMARK_APP.replace("Median", "95 percentile"), "a percentile instead of the median"),
        (LITERT[: LITERT.rindex("1505e")], "latencies that cannot all be right"),
        ('{"forward": {"latency": "x"}}', "truncated or edited file"),
    ],
)
def test_what_is_no_whole_result_is_refused_with_the_reason(text, told, read):
    with pytest.raises(UsageError) as refused:
        read(text)
    assert told in str(refused.value)


def test_what_is_no_readable_file_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "large").open("wb") as large:
        large.truncate(2 * 2**30)
    told = {"absent": "No such file", "pipe": "not a regular file", ".": "not a regular file", "large": "larger than"}
    for name, reason in told.items():
        with pytest.raises(UsageError, match=reason):
            foreign.read(tmp_path / name)


def test_a_table_whose_last_line_does_not_end_is_not_read_again_from_each_of_its_characters(read):
    with pytest.raises(UsageError, match="0 formats"):
        read(ULTRALYTICS.splitlines()[0] + "\nInference time" + "x" * 2**20)


@pytest.mark.parametrize("join", ["", "\ufeff", "\r\n"])
@pytest.mark.parametrize("tool", ["trtexec", "benchmark_app", "perf_analyzer", "onnxruntime_perf_test"])
def test_a_second_result_is_found_wherever_it_begins(join, tool, read):
    text = FILES[tool][0]
    other = text.replace("2.5 ms", "2.7 ms").replace("24.17", "25.17").replace("5.12", "5.22").replace(",2400", ",2500")
    with pytest.raises(UsageError, match=r"2 different results|differ in length"):
        read(text.rstrip() + join + other)


@pytest.mark.parametrize("table", ULTRALYTICS_TABLES)
def test_every_form_of_the_table_of_ultralytics_is_read(table, read):
    title = ULTRALYTICS.splitlines()[0]
    text = f"{title}\n{ULTRALYTICS_TABLES[table]}"
    assert read(text).quoted_ms == pytest.approx(31.25)
    for end in range(len(text)):
        with suppress(UsageError):
            assert read(text[:end]).quoted_ms == pytest.approx(31.25)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_a_console_of_windows_and_colours_change_nothing(encoding, tmp_path):
    path = tmp_path / "theirs"
    coloured = "".join(f"\x1b[32m{line}\x1b[0m\r\n" for line in TRTEXEC.splitlines())
    path.write_bytes(coloured.encode(encoding))
    assert foreign.read(path).quoted_ms == pytest.approx(2.5)


def test_latencies_of_benchmark_app_may_be_in_microseconds(read):
    below_ms = re.sub(r"(\d+)\.(\d\d) ms$", r"\1\2.00 us", BENCHMARK_APP, flags=re.MULTILINE)
    latency_ms = {name: pytest.approx(value / 10) for name, value in read(BENCHMARK_APP).latency_ms.items()}
    assert read(below_ms).latency_ms == latency_ms


def test_a_report_of_benchmark_app_has_the_protocol_in_its_options_and_is_the_same_in_csv(read):
    result = read(REPORT)
    assert (result.batch, result.streams, result.in_flight, result.threads) == (2, 2, 4, 1)
    assert result.span == (0, 255)
    assert read(REPORT_CSV) == result


def test_a_stream_without_a_request_does_not_run(read):
    alone = read(BENCHMARK_APP.replace("4 inference requests", "1 inference requests"))
    assert (alone.streams, alone.in_flight, alone.threads) == (1, 1, 1)


def test_the_batch_of_trtexec_is_its_first_dimension(read):
    bound = "[I] Created input binding for x with dimensions 8x3x32x32\n[I] Throughput"
    assert read(TRTEXEC.replace("[I] Throughput", bound)).batch == 8


def test_what_a_request_of_perf_analyzer_contains_is_read_or_told(read):
    header, row = PERF_ANALYZER.splitlines()
    with_mean = read(f"{header},Avg latency,request/response\n{row},2950,3\n")
    assert (with_mean.quoted, with_mean.quoted_ms) == ("mean", pytest.approx(2.95))
    cached = read(f"{header.replace('Client Recv', 'Server Cache Hit,Client Recv')}\n{row.replace(',5,', ',100,5,')}\n")
    assert cached.quoted_ms == pytest.approx(3.0)
    # without the server's times, those of the client do not add up to a request
    client = read("Concurrency,Inferences/Second,Client Send,Client Recv,p50 latency\n2,2710,10,5,5900\n")
    assert (client.quoted, client.quoted_ms, client.in_flight) == ("median", pytest.approx(5.9), 2)
    assert client.notes == ["7.99 inputs per request: give our case their batch, such as b8"]
    rate = read("Request Rate,Inferences/Second,Client Send,Client Recv,p50 latency\n2710,2710,10,5,5900\n")
    assert rate.notes == []


def test_the_batch_of_optimum_benchmark_is_its_throughput_times_its_latency(read):
    backend = {"name": "pytorch", "intra_op_num_threads": 3, "torch_dtype": "bfloat16"}
    whole = {"config": {"backend": backend}, "report": json.loads(OPTIMUM.replace("90.9", "727.3"))}
    result = read(json.dumps(whole))
    assert (result.batch, result.threads, result.precision) == (8, 3, "bf16")
    assert read(OPTIMUM).batch == 1
    assert read(OPTIMUM.replace("samples/s", "tokens/s")).batch is None


def test_threads_and_calls_at_once_of_onnxruntime_perf_test(read):
    result = read(ONNXRUNTIME)
    assert (result.threads, result.streams) == (2, 1)
    four = read(ONNXRUNTIME.replace("run time: 5.13", "run time: 1.3"))
    assert (four.threads, four.streams, four.in_flight) == (2, 4, 4)


def test_inputs_and_copies_are_read_as_far_as_they_are_told(read):
    random = BENCHMARK_APP + "[ INFO ] Fill input 'x' with random values \n"
    assert (read(BENCHMARK_APP).span, read(random).span) == (None, (0, 255))
    told = "[I] Data transfers: Disabled\n[I] Inputs:\n[I] x<-x.bin\n[I] Compute Clock Rate: 1.3 GHz\n[I] Throughput"
    whole, alone = read(TRTEXEC), read(TRTEXEC.replace("[I] Throughput", told))
    assert (whole.span, alone.span) == ((-1, 1), None)
    assert "input copy" in whole.means
    assert "without the copies" in alone.means
    assert "their GPU's clock: at most 1.3 GHz" in alone.notes


def test_the_statistics_of_one_call_are_not_those_of_the_warm_up(read):
    text = LITERT.replace("count=120 first=8200 curr=8100 min=7900 max=9100 avg=8150.5 std=90", "count=1 curr=8150.5")
    warm_up = "INFO: count=3 first=9000 curr=8100 min=8000 max=9000 avg=8200 std=9 median=8100\nINFO: count=1"
    assert read(text.replace("INFO: count=1", warm_up)).latency_ms == {"mean": pytest.approx(8.1505)}
