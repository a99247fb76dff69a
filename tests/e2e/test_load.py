"""Requests at a rate on one stream and on two, from the command line to the recommendation and the reports."""

import json

from records_made import written

SERVER = ("--models", "square", "--option", "size=16", "--variants", "eager", "--threads", "1", "--scenario", "server")
GOAL = ("--deadline", "2s", "--percentile", "90")


def test_a_server_is_measured_reported_and_recommended(here, once, tmp_path):
    tiny = tmp_path / "tiny.toml"
    tiny.write_text(tiny.read_text().replace("measure_cap_s = 0.1", "measure_cap_s = 0.3"))
    done = once(*SERVER, "--rate", "300Hz", "--streams", "1,2", *GOAL)
    assert done.returncode == 0, done.stderr
    assert "90 asked = " in done.stdout
    results = written(tmp_path)
    assert [record.case.streams for record in results] == [1, 2]
    for record in results:
        requests = record.requests
        assert requests.asked == 90 == requests.answered + requests.late + requests.dropped
        assert requests.arrivals_p > 0.01
        assert record.missing["throughput_per_s"] == "server runs are not back to back"
    recommended = here("benchd", "recommend", "out", "--rate", "200", "--streams", "2", *GOAL)
    assert "threads=1 for 200 requests per second on 2 streams within 2000 ms at p90: " in recommended.stdout
    assert "only up to" not in recommended.stdout  # whether it ships depends on the machine
    reported = here("benchd", "report", "out", "--format", "md,csv,json,html", "--output", "page")
    assert reported.returncode == 0, reported.stderr
    page = tmp_path / "page"
    assert all("server streams=2 rate=300" in (page / f"report.{name}").read_text() for name in ("md", "html"))
    rows = json.loads((page / "report.json").read_text())["records"]
    assert [row["requests"] for row in rows] == [90, 90]
    assert "deadline_met" in (page / "report.csv").read_text().splitlines()[0]


def test_a_demand_without_records_says_what_to_measure(here, results):
    done = here("benchd", "recommend", results("a.jsonl"), "--rate", "30", "--streams", "4", "--deadline", "33ms")
    assert done.returncode == 2
    assert "bench-once --scenario server --streams 4 --rate 30 --deadline 33ms" in done.stderr
    half = here("benchd", "recommend", results("a.jsonl"), "--rate", "30")
    assert half.returncode == 2
    assert "give both --rate and --deadline" in half.stderr
