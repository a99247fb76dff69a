"""Every view in a real Chromium, served by the real command from a real store behind a real mosquitto."""

import json
import os
import re
import time
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from urllib.parse import quote

import msgspec
import psycopg
import pytest
from broker import HOST, free_port, running_broker
from browsing import BOXES, EVERY_LOOK, LOOKS, faults, get, opened
from forked import BENCHD, PAGES, Program
from links import Watcher
from messages_made import add, message
from records_made import ENERGY, ENVIRONMENT, PASSED, accuracy, made, timing
from simulations import slow
from waiting import WAIT_S, wait_for

from benchd.daemon.records import Case, ProcessResult, Variant, encode
from benchd.dashboard.app import TOKEN_VARIABLE
from benchd.dashboard.queries import STALE_S
from benchd.dashboard.store import Store

PAST, SECONDS, VIEWER_BYTES_PER_S = 240, 3, 5 * 1024
HOSTILE = "<script>document.title='owned'</script><img src=x onerror=document.title='owned'>"
CUSTOM = "vim_tiny,custom,b1"
SINCE = r"since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d \S+, \d+ (s|min|h|days) ago"
SLOWER = r"▲ \+10\.[01] % \[[0-9.]+, [0-9.]+\] slower"
TOP1 = "95.0 [88.8, 97.8] %, 1.00 below fp32"
VIEWS = (  # each with a word of what only it says
    ("/", "eager"),
    ("/fleet", "gone-1"),
    ("/device/orin-1", "nightly"),
    ("/device/hostile", HOSTILE),
    ("/changes", "not side by side, so it need not be the cause"),
    ("/changes?q=agx-1", "side by side"),
    ("/results", "1-25 of "),
    ("/result/orin-1:r59", "raw record"),
    ("/compare?a=orin-1:r0&b=orin-1:r30", "SLOWER"),
    ("/history/orin-1/vim_tiny,custom-fp16,b1", re.compile(r"\+1[45]\.[0-9]+ % +from .* ms to .* ms")),
    ("/shipped", "vim"),
    ("/trade-off?model=vim_tiny", "Not beaten on both axes: eager b1: "),
)


def record(device, number, variant="eager", **fields):
    median_ms = fields.pop("median_ms", 10.0 + number)
    energy = msgspec.structs.replace(ENERGY, energy_err_j=0.4, gross_per_inference_j=median_ms / 100)
    given = {"case": Case(model="vim_tiny", variant=Variant.parse(variant)), "energy": energy, "check": PASSED}
    medians_ms = [median_ms * (1 + share) for share in (-0.002, -0.001, 0.0, 0.001, 0.002)]
    given |= {"timing": timing(median_ms), "x_of_floor": 2.25, "throughput_per_s": 1000 / median_ms}
    given["accuracy"] = accuracy(right=95, lost=1)
    given |= {"processes": [ProcessResult(status="ok", timing=timing(value)) for value in medians_ms]}
    return made(run_id=f"r{number}", device_id=device, **given | fields)


def stored(now_s):
    """Yield what a small fleet has said: one device alive, one silent, one off, one hostile."""
    suites = [{"name": "nightly", "when": "daily", "cases": ["a", "b"]}]
    ages_s = {"orin-1": 1, "quiet-1": 100, "gone-1": 30_000}
    for device, age_s in ages_s.items():
        yield message(device, "info", {"name": device, "site": "lab", "suites": suites}, now_s - age_s)
        yield message(device, "health", {"activity": "idle", "pending": 3}, now_s - age_s)
        yield message(device, "status", {"state": "offline" if device == "gone-1" else "online"}, now_s - age_s)
    for number in range(60):
        variant = ("eager", "custom", "custom-fp16")[number % 3]
        shifted_ms = (60.0 if number < 30 else 69.0) * (1 + 0.001 * ((59 - number) // 3 % 2))
        changed = {"median_ms": shifted_ms} if variant == "custom-fp16" else {}
        body = record("orin-1", number, variant, **changed)
        yield message("orin-1", f"result/r{number}", body, now_s - 6000 + 100 * number)
    for number in range(6):
        setup = msgspec.structs.replace(ENVIRONMENT, fingerprint=f"e{number // 3}", l4t=f"36.4.{number // 3}")
        changed = {"environment": setup, "case": Case(model="square"), "suite_id": f"s{number}"}
        changed |= {"t_wall": "1970-01-01T00:00:00Z", "median_ms": (5.0, 5.5)[number // 3] + number / 1000}
        body = record("agx-1", number, **changed)
        yield message("agx-1", f"result/r{number}", body, now_s - 900 + 100 * number)
    failed = {"status": "failed", "reason": "CUDA error: out of memory", "timing": None, "processes": []}
    yield message("agx-1", "result/r9", record("agx-1", 9, case=Case(model="snn_onepass"), **failed), now_s - 300)
    yield message("orin-1", "event", {"event": "regression", "detail": CUSTOM}, now_s - 30)
    slower = {"case_id": CUSTOM, "verdict": "slower", "median_ms": 68.0, "baseline_ms": 11.0}
    shares = {"value": 0.95, "low": 0.888, "high": 0.978, "drop": 0.01}
    slower |= {"accuracy_metric": "top-1"} | {f"accuracy_{name}": share for name, share in shares.items()}
    yield message("orin-1", f"latest/{CUSTOM}", slower, now_s - 30)
    deployed = {"name": "vim", "case_id": "vim_tiny,eager,b1", "verdict": "slower", "since": "2026-01-01T00:00:00Z"}
    deployed |= {"promised_ms": 50.0, "now_ms": 68.0, "change": 0.36, "change_low": 0.34, "change_high": 0.38}
    yield message("orin-1", "shipped/vim", deployed | {"better": "custom, 1.3x [1.2, 1.4]"}, now_s - 30)
    for second in range(60):
        samples = [
            [0, "power_w", 6.0 + second % 5, "ina3221", "VDD_IN"],
            [0, "gpu_clock_hz", 1e9, "devfreq"],
            [0, "soc_temp_c", 50.0, "thermal", "tj"],
            [0, "gpu_throttle_reasons", 4.0 if 20 < second < 40 else 1.0, "nvml"],
        ]
        yield message("orin-1", "telemetry", {"samples": samples}, now_s - 60 + second)
    huge = record("hostile", 1, case=Case(model=HOSTILE, batch_size=2**60), timing=timing(1e300))
    yield message("hostile", "result/r1", huge, now_s)
    yield message("hostile", "info", {"name": HOSTILE + "x" * 1_000_000, "environment": {HOSTILE: HOSTILE}}, now_s)
    yield message("hostile", "health", {"activity": HOSTILE, "problem": HOSTILE}, now_s)
    yield message("hostile", "event", {"event": HOSTILE, "detail": "x" * 1_000_000}, now_s)


@contextmanager
def serving(mqtt, database, *options, stderr=None, **environment):
    """Yield the port of the running command, and its process, which may write its errors to the file `stderr`."""
    port = free_port()
    arguments = ["benchd", "dashboard", "--mqtt", mqtt, "--database", database, "--port", str(port), *options]
    child = os.environ | environment
    child.pop("PYTEST_CURRENT_TEST", None)  # NiceGUI would take itself for a test's own server
    with (
        stderr.open("w") if stderr else nullcontext() as log,
        Program(BENCHD, arguments, Path.cwd(), child, log.fileno() if log else 2, PAGES) as process,
    ):
        try:
            wait_for(lambda: _answers(port), process)
            yield port, process
        finally:
            process.terminate()
            assert process.wait(WAIT_S) is not None


def _answers(port):
    try:
        return get(port, "/record/none")[0] > 0
    except OSError:
        return False


@pytest.fixture(scope="module")
def mosquitto(tmp_path_factory):
    """A broker of these pages' own: they show every board that another test has left on the shared one."""
    with running_broker(tmp_path_factory.mktemp("mosquitto")) as broker:
        yield broker


@pytest.fixture(scope="module")
def site_database(tmp_path_factory):
    return f"sqlite:///{tmp_path_factory.mktemp('site')}/dashboard.db"


@pytest.fixture(scope="module")
def store_of_site(site_database):
    with closing(Store(site_database)) as store:
        add(store, *stored(time.time()))
        yield store


@pytest.fixture(scope="module")
def site(mosquitto, site_database, store_of_site):
    """The port of a dashboard that shows the small fleet."""
    with serving(mosquitto.url, site_database) as (port, _):
        yield port


@pytest.mark.parametrize("judged", [1, slow(len(EVERY_LOOK))], ids=["some looks", "every look"])
def test_every_view_is_accessible_and_no_text_is_cut_or_on_another(site, browser, judged):
    """Each view by axe at one look or at every one."""
    looks = LOOKS if judged == 1 else EVERY_LOOK
    with opened(browser, site) as page:
        for number, (path, words) in enumerate(VIEWS):
            page.goto(f"http://{HOST}:{site}{path}", wait_until="networkidle")
            page.get_by_text(words).first.wait_for()
            first = number % len(looks)
            assert not faults(page, looks[first:] + looks[:first], judged), path


def test_a_box_that_is_cut_off_wider_than_the_page_or_on_another_is_found(browser):
    page = browser.new_page()
    cut, wide, under = ("overflow: hidden; width: 2em", "width: 2000px", "position: absolute; top: 300px")
    styles = {"cut": cut, "wide": wide, "over": under, "under": under, "well": "width: 9em; overflow: auto"}
    page.set_content(
        "".join(f"<p style='{style}; white-space: nowrap'>{name} text</p>" for name, style in styles.items())
    )
    problems = page.evaluate(BOXES)
    page.close()
    assert [problem.partition(" px")[0] for problem in problems] == [
        "the page is 2008",
        '"cut text" is cut off',
        '"over text" is on "under text"',
    ]


def test_home_names_what_ships_and_who_needs_help_and_filters_by_the_url(site, browser):
    with opened(browser, site) as page:
        row = page.get_by_role("row").filter(has_text="67.00 ± 0.67 ms")
        row.wait_for()
        assert "eager" in row.inner_text()
        assert "670 ± 13 mJ, top-1 95.0 %" in row.inner_text()
        page.get_by_role("link", name=re.compile("[0-9] silent")).click()
        page.wait_for_url("**/?state=silent")
        page.get_by_role("link", name=re.compile("[0-9] silent")).and_(page.locator("[aria-current]")).wait_for()
        assert page.get_by_role("link", name="orin-1").count() == 0
        page.get_by_role("link", name="quiet-1").click()
        page.get_by_role("heading", level=1, name="quiet-1").wait_for()


def test_home_leads_to_a_change_whose_cause_is_not_separable_and_to_the_layers_that_a_verification_named(
    site, store_of_site, browser
):
    broken = {"name": "net", "case_id": "square,eager,b1", "verdict": "slower", "reason": "12 of 14 %: conv2"}
    add(store_of_site, message("agx-1", "shipped/net", broken, time.time()))
    with opened(browser, site) as page:
        page.get_by_text(re.compile(r"1 of 1 case slower, 10\.[01] % since l4t 36\.4\.0 → 36\.4\.1")).wait_for()
        page.get_by_text(re.compile(rf"^{SINCE}$")).first.wait_for()
        page.get_by_role("link", name=re.compile(SLOWER)).click()
        page.wait_for_url("**/changes?q=agx-1+square%2Ceager%2Cb1")
        page.get_by_role("heading").get_by_text(re.compile(r"▲ 1 of 1 case slower, 10\.[01] %")).wait_for()
        row = page.get_by_role("row").filter(has_text="square,eager,b1")
        row.get_by_text(re.compile(SLOWER)).wait_for()
        row.get_by_role("link", name="shipped folder: 12 of 14 %: conv2").wait_for()
        row.get_by_role("link", name="side by side").click()
        page.get_by_text(re.compile(r"SLOWER: time of B relative to A \+10\.")).wait_for()
        page.get_by_text("l4t 36.4.0 → 36.4.1: measured before and after, not side by side").wait_for()
        page.get_by_text("to find the cause: undo l4t 36.4.0 → 36.4.1, run bench-once --case ").wait_for()
        page.goto(f"http://{HOST}:{site}/changes?since=setup")
        page.get_by_text(re.compile(rf"^{SINCE}$")).first.wait_for()
        page.goto(f"http://{HOST}:{site}/changes")
        search = page.get_by_label("board, case or what changed")
        search.fill("36.4.2")
        search.press("Enter")
        page.get_by_text("No change matches").wait_for()
        page.wait_for_url("**/changes?since=setup&q=36.4.2")
        page.goto(f"http://{HOST}:{site}/changes?since=driver")
        page.get_by_text("Nothing has changed").wait_for()


def test_a_fleet_shows_who_is_there_and_since_when(site, browser, store_of_site):
    add(store_of_site, message("orin-1", "status", {"state": "online"}, time.time()))
    with opened(browser, site, "/fleet") as page:
        cards = {name: page.get_by_role("link", name=name) for name in ("orin-1", "quiet-1", "gone-1")}
        for name, state in (("orin-1", "online"), ("quiet-1", "silent"), ("gone-1", "silent")):
            assert state in cards[name].inner_text()
        assert "backlog 3 results" in cards["orin-1"].inner_text()
        assert "8 h ago" in cards["gone-1"].inner_text()


def test_a_fleet_shows_trouble_first_and_finds_a_device_by_name_site_or_state(site, browser):
    with opened(browser, site, "/fleet") as page:
        cards = page.locator("a.entry")
        cards.filter(has_text="orin-1").wait_for()
        texts = cards.all_inner_texts()
        assert texts.index(next(t for t in texts if "slower" in t)) < texts.index(
            next(t for t in texts if "silent" in t)
        )
        page.get_by_role("searchbox", name="board or case").fill("quiet")
        page.keyboard.press("Enter")
        page.wait_for_url("**/fleet?q=quiet")
        cards.filter(has_text="quiet-1").wait_for()
        assert cards.count() == 1
        page.goto(f"http://{HOST}:{site}/fleet?q=LAB&state=slower")
        cards.filter(has_text="orin-1").wait_for()
        assert cards.count() == 1
        page.get_by_role("searchbox", name="board or case").fill("onepass")
        page.keyboard.press("Enter")
        page.wait_for_url("**/results?text=onepass")
        page.get_by_text("1-1 of 1").wait_for()


def test_a_keyboard_s_first_stop_skips_the_links_and_the_current_page_is_marked(site, browser):
    with opened(browser, site, "/fleet") as page:
        page.keyboard.press("Tab")
        page.locator(":focus", has_text="Skip to the content").press("Enter")
        assert page.evaluate("document.activeElement.querySelector('h1').textContent.trim()") == "Fleet"
        assert page.get_by_label("pages").locator("[aria-current=page]").all_inner_texts() == ["Fleet"]


def test_values_on_the_page_are_the_record_s(site, browser):
    with opened(browser, site, "/results?device=orin-1") as page:
        row = page.get_by_role("row").filter(has_text="vim_tiny").first
        row.wait_for()
        text = row.inner_text()
        # r59: 69 ms with 1 % either way, 0.69 J an inference with 2 %
        for value in ("custom-fp16", "69.00 ± 0.69 ms", "690 ± 14 mJ", "passed", "2.250 x", "14.49 /s", TOP1):
            assert value in text
        row.get_by_role("link", name="record of").click()
        for value in ("69.00 ± 0.69 ms (95 %, within process)", "8 of 8", "690 ± 14 mJ", "1: ok; 68.86 ± 0.69 ms"):
            page.get_by_text(value).first.wait_for()
        page.get_by_text("bench-once --case vim_tiny,custom-fp16,b1").wait_for()
        page.get_by_text("+0545, benchd").wait_for()  # the time of the browser
        href = page.get_by_role("link", name="raw record").get_attribute("href")
    assert json.loads(get(site, href)[2])["timing"]["median_ms"] == 69.0


def test_results_are_filtered_by_their_url_which_follows_the_page_and_so_does_the_csv(site, browser):
    with opened(browser, site, "/results?device=agx-1&status=failed") as page:
        page.get_by_text("✕ failed: CUDA error: out of memory").wait_for()
        page.get_by_text("1-1 of 1").wait_for()
        page.goto(f"http://{HOST}:{site}/results?device=orin-1&check=passed&sort=median_ms&up=1&page=2")
        page.get_by_text("26-50 of 60").wait_for()
        page.get_by_role("button", name="Previous page").click()
        page.get_by_role("cell", name="10.00 ± 0.10 ms").wait_for()
        page.get_by_label("search, then Enter").fill("custom-fp16")
        page.get_by_label("search, then Enter").press("Enter")
        page.wait_for_url("**/results?device=orin-1&check=passed&text=custom-fp16&sort=median_ms&up=1")
        page.get_by_text("1-20 of 20").wait_for()
        csv = page.get_by_role("link", name="Download as CSV").get_attribute("href")
    _, headers, body = get(site, csv)
    assert (headers["content-type"], len(body.decode().splitlines())) == ("text/csv; charset=utf-8", 21)
    assert len(get(site, "/results.csv?device=agx-1&check=failed")[2].decode().splitlines()) == 1


def test_two_results_are_compared_by_the_rule_for_files(site, browser):
    verdicts = {
        ("orin-1:r0", "orin-1:r30"): "SLOWER: time of B relative to A +300.00 % [+266",
        ("orin-1:r30", "orin-1:r0"): "FASTER: time of B relative to A -75.00 % [-77.",
        ("orin-1:r0", "orin-1:r1"): "INCONCLUSIVE: two cases; on one device benchd compare --live vim_tiny,eager,b1",
        ("orin-1:r0", "none"): "Choose two results",
    }
    with opened(browser, site) as page:
        for (a, b), verdict in verdicts.items():
            page.goto(f"http://{HOST}:{site}/compare?a={a}&b={b}")
            page.get_by_text(verdict).wait_for()
            if b != "none":
                page.get_by_text("Environment: the same").wait_for()


def test_what_became_slower_is_said_with_its_baseline(site, browser):
    with opened(browser, site, "/device/orin-1") as page:
        page.get_by_text("▲ slower: ").wait_for()
        page.get_by_role("link", name="which, and why").wait_for()
        page.get_by_text("regression").wait_for()
        page.get_by_role("link", name=f"{CUSTOM}: top-1 {TOP1}").wait_for()
        page.get_by_role("link", name=f"slower: {CUSTOM}, 68 ms against 11 ms").click()
        page.get_by_role("heading", level=1, name=CUSTOM).wait_for()


def test_an_open_page_follows_what_is_published(site, browser, mosquitto):
    with opened(browser, site, "/results?device=newcomer") as page, closing(Watcher(mosquitto, "newcomer")) as device:
        page.get_by_text("No results match").wait_for()
        for number in (1, 2):
            device.say(f"benchd/v1/newcomer/result/r{number}", encode(record("newcomer", number)))
            page.get_by_text(f"1-{number} of {number}").wait_for()
        assert page.get_by_role("cell", name="newcomer", exact=True).count() == 2


def test_the_page_asks_a_device_to_run_a_suite_and_shows_its_answer_as_text(site, browser, mosquitto):
    with opened(browser, site, "/device/orin-1") as page, closing(Watcher(mosquitto, "orin-1")) as device:
        device.say("benchd/v1/orin-1/health", '{"activity":"idle","pending":3}')  # it is there
        button = page.get_by_role("button", name="Run nightly")
        button.dblclick()
        command = json.loads(device.until(lambda topic, _: topic.endswith("/cmd/run")).payload)
        answer = json.dumps({"accepted": False, "reason": HOSTILE})
        device.say("benchd/v1/orin-1/resp/{client}/{id}".format(**command), answer)
        page.get_by_text(f"refused: {HOSTILE}").wait_for()
        assert button.is_enabled()
        assert command["suite"] == "nightly"
        device.say("benchd/v1/orin-1/resp/test/last", b"{}")
        device.until(lambda topic, _: topic.endswith("/last"))
        assert sum(message.topic.endswith("/cmd/run") for message in device.all) == 1


@pytest.mark.parametrize(("path", "name"), [("/fleet?q=warm-1", "warm-1"), ("/device/warm-2", "warm-2")])
def test_an_open_page_is_sent_only_what_is_new(site, browser, mosquitto, store_of_site, path, name):
    heard, metrics = [], ("power_w", "gpu_clock_hz", "gpu_temp_c", "process_rss_bytes", "gpu_utilization_percent")
    bodies = [
        {"samples": [[0, metric, 40.0 + second, "fake"] for metric in metrics]} for second in range(PAST + SECONDS)
    ]
    add(
        store_of_site,
        *(message(name, "telemetry", body, time.time() - PAST + n) for n, body in enumerate(bodies[:PAST])),
    )
    with opened(browser, site, path, heard=heard) as page, closing(Watcher(mosquitto, name)) as device:
        page.locator(".figure", has_text=f"{39 + PAST} °C").wait_for()  # all that is known was sent
        heard.clear()
        for body in bodies[PAST:]:
            device.say(f"benchd/v1/{name}/telemetry", json.dumps(body))
            page.wait_for_timeout(1000)
        page.locator(".figure", has_text=f"{39 + PAST + SECONDS} °C").wait_for()
    assert 0 < sum(heard) < SECONDS * VIEWER_BYTES_PER_S


def test_a_device_that_says_nothing_turns_silent(site, browser, store_of_site):
    add(store_of_site, message("fading", "status", {"state": "online"}, time.time() - STALE_S + 1.0))
    with opened(browser, site, "/fleet") as page:
        page.get_by_role("link", name="fading").get_by_text("silent: last data").wait_for()


def test_a_page_without_a_record_has_the_frame_and_says_what_to_do(site, browser):
    assert get(site, "/nowhere")[0] == 404
    with opened(browser, site, "/result/none") as page:
        page.get_by_text("This record is unknown here").wait_for()
        page.get_by_role("link", name="Trade-off").wait_for()


def test_a_page_comes_before_its_data_and_says_its_age_while_the_server_is_away_then_is_dimmed(
    mosquitto, browser, empty_postgres, tmp_path
):
    storage = {"NICEGUI_STORAGE_PATH": str(tmp_path)}
    page = browser.new_page()
    page.set_default_timeout(WAIT_S * 1000)
    with serving(mosquitto.url, empty_postgres, "--only", "pages", **storage) as (port, process):
        with psycopg.connect(empty_postgres) as other:
            other.execute("LOCK TABLE result IN ACCESS EXCLUSIVE MODE")
            page.goto(f"http://{HOST}:{port}/results")
            page.get_by_role("heading", level=1, name="Results").wait_for()
            page.get_by_text("The database has not answered for 5 s").wait_for()
        page.get_by_text("No results match").wait_for()
        page.clock.install()
        page.reload()
        page.get_by_text("No results match").wait_for()
        process.kill()
        page.wait_for_function("!window.socket.connected")
        page.clock.fast_forward(10_000)
        page.get_by_text(re.compile("The server is not responding: the data shown is 1[0-9] s old")).wait_for()
        assert not page.locator("body.away").count()
        page.clock.fast_forward(50_000)
        page.locator("body.away").wait_for()
    page.close()


def test_a_keyboard_sorts_and_chooses_results(site, browser):
    with opened(browser, site, "/results?device=orin-1") as page:
        page.get_by_role("row").nth(3).wait_for()
        heading = page.get_by_role("columnheader", name="Median")
        heading.focus()
        page.keyboard.press("Enter")
        page.get_by_role("cell", name="10.00 ± 0.10 ms").wait_for()
        assert heading.get_attribute("aria-sort") == "ascending"
        for number in (0, 3):
            box = page.get_by_role("checkbox", name=f"select orin-1:r{number}", exact=True)
            box.press("Space")
            box.and_(page.locator("[aria-checked=true]:focus")).wait_for()  # the server has heard, the focus stays
        button = page.get_by_role("button", name="Compare two")
        button.click(trial=True)  # waits until it is enabled
        button.press("Enter")
        page.get_by_text("SLOWER").wait_for()


def test_another_name_and_another_site_are_refused(site):
    assert get(site, "/", Host="evil.example")[0] == 403
    assert get(site, "/", Origin="http://evil.example")[0] == 403
    assert get(site, "/", Host=f"localhost:{site}")[0] == 200
    for malformed in ({"Host": "[::1"}, {"Host": "localhost:x"}, {"Origin": "http://["}):
        assert get(site, "/", **malformed)[0] == 403


def test_beyond_loopback_a_token_is_asked_for(mosquitto, tmp_path):
    database, secret = f"sqlite:///{tmp_path}/d.db", {TOKEN_VARIABLE: " s3 c;r=\u20act\n"}
    token = quote(secret[TOKEN_VARIABLE])
    with serving(mosquitto.url, database, "--host", "0.0.0.0", "--only", "pages", **secret) as (port, _):  # noqa: S104
        assert get(port, "/")[0] == 401
        assert get(port, "/?token=wrong")[0] == 401
        status, headers, _ = get(port, f"/?token={token}")
        assert (status, headers["location"]) == (303, "/")
        for path, there in (
            (f"//evil.example/?token={token}", "/evil.example/"),
            (f"/%2f%5cevil.example?token={token}", "/%5Cevil.example"),
            (f"/a%0d%0ab?token={token}", "/a%0D%0Ab"),
            (f"/results?device=a&token={token}&model=b%26c", "/results?device=a&model=b%26c"),
        ):
            assert get(port, path)[1]["location"] == there
        cookie = headers["set-cookie"].partition(";")[0]
        assert get(port, "/", Cookie=cookie)[0] == 200
        bearer = f"Bearer {secret[TOKEN_VARIABLE].strip()}".encode().decode("latin-1")
        assert get(port, "/", Authorization=bearer)[0] == 200
