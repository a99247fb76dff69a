"""Notices to a real HTTP server and a real mail server: what is told, how often, and what if nobody listens."""

import json
import math
import threading
import time
from contextlib import closing, contextmanager
from email import message_from_bytes
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
from aiosmtpd import controller as smtp
from broker import HOST, free_port, running_broker
from messages_made import add, message
from records_made import WRONG, made
from waiting import wait_for

from benchd.daemon.delivery.broker import parse_url
from benchd.daemon.errors import UsageError
from benchd.dashboard import collector, notices
from benchd.dashboard.collector import Collector
from benchd.dashboard.limits import READ
from benchd.dashboard.queries import collectors
from benchd.dashboard.store import Store

NOW_S = 1_800_000_000.0


@contextmanager
def webhook(code=200, port=0):
    """Yield the address of a server that answers with `code`, and the messages that it got."""
    got = []

    class Answer(BaseHTTPRequestHandler):
        def do_POST(self):
            got.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(code)
            self.end_headers()

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer((HOST, port), Answer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"json://{HOST}:{server.server_port}/hook", got
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def mail_server():
    """Yield the address of a mail server, and the mails that it got."""
    got = []

    class Take:
        async def handle_DATA(self, server, session, envelope):  # noqa: N802 - the library's name
            got.append((envelope.rcpt_tos, message_from_bytes(envelope.content)))
            return "250 OK"

    controller = smtp.Controller(Take(), hostname=HOST, port=free_port())
    controller.start()
    try:
        yield f"mailto://{HOST}:{controller.port}?from=benchd@example.org&to=lab@example.org", got
    finally:
        controller.stop()


@contextmanager
def running(kept):
    stop = threading.Event()
    thread = threading.Thread(target=kept.run, args=(stop,))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


class Clock:
    """The clocks of a collector and of the one who tells: still, but for `seconds` or `set_s` that last a few looks."""

    def __init__(self, monkeypatch):
        started_s, steady, news = time.time(), time.monotonic(), notices.news
        self._passed_s, self._set_s, self._looks = 0.0, 0.0, 0
        monkeypatch.setattr(time, "time", lambda: started_s + self._passed_s + self._set_s)
        both = SimpleNamespace(time=time.time, monotonic=lambda: steady + self._passed_s)
        for module in (notices, collector):
            monkeypatch.setattr(module, "time", both)
        monkeypatch.setattr(notices, "LOOK_S", 0.01)
        monkeypatch.setattr(notices, "news", lambda *given: self._look(news, given))

    def _look(self, news, given):
        yield from news(*given)
        self._looks += 1

    def move(self, seconds=0.0, set_s=0.0):
        self._set_s += set_s
        self._passed_s += seconds
        looks = self._looks
        wait_for(lambda: self._looks > looks + 2)


def arrive(store, device_id, leaf, body, at_s=NOW_S):
    add(store, message(device_id, leaf, body, at_s))


def regression(store, device_id, detail, at_s=NOW_S):
    arrive(store, device_id, "event", {"event": "regression", "detail": detail}, at_s)


def failed(store, device_id, run_id, at_s=NOW_S):
    arrive(store, device_id, f"result/{run_id}", made(device_id=device_id, run_id=run_id, check=WRONG), at_s)


def online(store, device_id, at_s):
    arrive(store, device_id, "status", {"state": "online", "session": "s1"}, at_s)


def teller(store, *urls, said=None, since_s=0.0, **settings):
    said = [] if said is None else said
    return notices.Teller(store, notices.Settings(urls=list(urls), **settings), said.append, lambda: since_s)


def test_each_subject_is_told_once_whichever_collector_looks(store):
    arrive(store, "orin-2", "info", b'{"name": "Orin 2"}', NOW_S - 3600)
    online(store, "orin-2", NOW_S - 3600)
    online(store, "orin-1", NOW_S - 3600)
    regression(store, "orin-1", "vim_tiny,eager,b1: 5 ms against 4 ms")
    regression(store, "old", "of last week", NOW_S - 7 * 86400)
    failed(store, "orin-1", "r1")
    failed(store, "orin-1", "r2")
    with webhook() as (url, got):
        first, second = (teller(store, url, every_s=0) for _ in range(2))
        first.tell(NOW_S)
        second.tell(NOW_S + 1)
        (message,) = got
        assert message["title"] == "benchd: regression on orin-1 and 2 more"
        assert message["message"].splitlines() == [
            "regression: orin-1: vim_tiny,eager,b1: 5 ms against 4 ms",
            "silent: Orin 2 (orin-2): nothing heard for 60 minutes",
            "failed check: orin-1: vim_tiny,eager,b1: its answers differ from float64's",
        ]
        arrive(store, "orin-2", "health", b"{}", NOW_S + 10)
        second.tell(NOW_S + 20)
        first.tell(NOW_S + 700)
        assert got[1]["title"] == "benchd: silent on orin-1 and 1 more"
        assert len(got) == 2


def test_a_check_that_fails_for_long_is_told_once(store):
    with webhook() as (url, got):
        for day in (0, 91, 182):
            now_s = NOW_S + day * 86400
            store.tidy(now_s)
            failed(store, "orin-1", f"r{day}", now_s)
            teller(store, url, subjects=("failed check",)).tell(now_s)
    assert len(got) == 1


def test_silent_is_a_device_with_a_service_that_a_collector_could_have_heard(store):
    failed(store, "laptop", "r1", NOW_S - 3600)  # bench-once --mqtt
    online(store, "orin-1", NOW_S - 3600)
    with webhook() as (url, got):
        telling = teller(store, url, subjects=("silent",), since_s=NOW_S)
        for later_s in (15, 590, 610):
            telling.tell(NOW_S + later_s)
    assert [message["message"] for message in got] == ["silent: orin-1: nothing heard for 70 minutes"]


def test_a_silence_is_told_once_although_the_broker_says_offline_during_it(store):
    """As late as the keep-alive of the device's connection lets it."""
    online(store, "orin-1", NOW_S)
    with webhook() as (url, got):
        telling = teller(store, url, subjects=("silent",), since_s=NOW_S)
        telling.tell(NOW_S + 610)
        arrive(store, "orin-1", "status", b'{"state":"offline"}', NOW_S + 900)
        telling.tell(NOW_S + 1800)
    assert [message["message"] for message in got] == ["silent: orin-1: nothing heard for 10 minutes"]


def test_while_the_broker_is_away_no_device_is_silent(tmp_path, monkeypatch):
    """Its clock goes on: all devices fall silent at once, for a collector that cannot hear any."""
    port, clock = free_port(), Clock(monkeypatch)
    with webhook() as (url, got), closing(Store(f"sqlite:///{tmp_path}/dashboard.db")) as store:
        settings = notices.Settings(urls=[url], subjects=("silent",), every_s=0)
        online(store, "orin-1", time.time())
        own_collector = Collector(store, parse_url(f"mqtt://{HOST}:{port}"), "one")
        with running(own_collector), notices.telling(store, settings, "one", own_collector.listens_since_s):
            clock.move(700)
            with running_broker(tmp_path, port=port):
                wait_for(lambda: own_collector.listens_since_s() < math.inf)
                clock.move(500)
                assert got == []
                clock.move(200)
                wait_for(lambda: got)
            wait_for(lambda: collectors(store, time.time())[0].problem)
            online(store, "orin-2", time.time())
            clock.move(700)
    assert [message["message"] for message in got] == ["silent: orin-1: nothing heard for 23 minutes"]


def test_a_clock_that_is_set_and_a_machine_that_slept_make_no_device_silent(tmp_path, monkeypatch):
    clock = Clock(monkeypatch)
    with webhook() as (url, got), closing(Store(f"sqlite:///{tmp_path}/dashboard.db")) as store:
        settings = notices.Settings(urls=[url], subjects=("silent",), every_s=0)
        with running_broker(tmp_path) as broker:
            own_collector = Collector(store, parse_url(broker.url), "one")
            with running(own_collector), notices.telling(store, settings, "one", own_collector.listens_since_s):
                wait_for(lambda: own_collector.listens_since_s() < math.inf)
                clock.move(3600)
                online(store, "orin-1", time.time())
                clock.move(set_s=3 * 3600)
                clock.move(500)
                assert got == []
                clock.move(200)
                wait_for(lambda: got)
                clock.move(set_s=-5 * 3600)
                online(store, "orin-2", time.time())
                clock.move(500)
                assert len(got) == 1
                clock.move(200)
                wait_for(lambda: len(got) == 2)
    expected = ["silent: orin-1: nothing heard for 192 minutes", "silent: orin-2: nothing heard for 12 minutes"]
    assert [message["message"] for message in got] == expected


def test_what_is_new_meanwhile_waits_for_the_next_message(store):
    with webhook() as (url, got):
        telling = teller(store, url, subjects=("regression",), every_s=600)
        for second in range(0, 1300, 100):
            regression(store, "orin-1", f"case {second}", NOW_S + second)
            telling.tell(NOW_S + second)
    assert [len(message["message"].splitlines()) for message in got] == [1, 6, 6]


def test_a_silence_that_ends_meanwhile_is_told_too(store):
    online(store, "orin-1", NOW_S)
    regression(store, "orin-2", "slower")
    with webhook() as (url, got):
        telling = teller(store, url, every_s=3600)
        telling.tell(NOW_S + 1)
        telling.tell(NOW_S + 700)
        arrive(store, "orin-1", "health", b"{}", NOW_S + 3590)
        telling.tell(NOW_S + 3700)
    assert [message["message"] for message in got] == [
        "regression: orin-2: slower",
        "silent: orin-1: nothing heard for 12 minutes",
    ]


def test_other_events_hide_no_regression(store):
    regression(store, "orin-1", "slower")
    noise = [message("noisy", "event", {"event": "throttled", "detail": str(n)}, NOW_S + 1) for n in range(READ + 1)]
    add(store, *noise)
    regression(store, "orin-2", "slower")
    with webhook() as (url, got):
        telling = teller(store, url, subjects=("regression",))
        telling.tell(NOW_S + 2)
        add(store, *(event._replace(body=event.body + b" ") for event in noise))
        regression(store, "orin-3", "slower", NOW_S + 3)
        telling.tell(NOW_S + 1000)
    assert [message["title"] for message in got] == [
        "benchd: regression on orin-1 and 1 more",
        "benchd: regression on orin-3",
    ]


def test_a_mail_is_sent_beside_a_webhook_that_fails_and_is_tried_again(store):
    regression(store, "orin-1", "slower")
    warnings = []
    with mail_server() as (mail, mails), webhook(500) as (url, refused):
        telling = teller(store, url, mail, said=warnings, subjects=("regression",))
        telling.tell(NOW_S)
        assert (len(refused), len(mails)) == (1, 1)
        assert warnings == ["notices: urls, entry 1 did not accept 1; trying again"]
        (to, content) = mails[0]
        assert (to, content["subject"]) == (["lab@example.org"], "benchd: regression on orin-1")
        assert "regression: orin-1: slower" in content.as_string()
        port = int(url.split(":")[2].partition("/")[0])
    with webhook(port=port) as (url, got):
        telling.tell(NOW_S + 5)
        telling.tell(NOW_S + 2000)
    assert (len(got), len(mails)) == (1, 1)


def test_what_a_device_says_is_no_html_in_a_mail_and_stays_in_lines(store):
    link = '<a href="http://elsewhere.example/">sign in</a> & win'
    regression(store, "orin-1", link)
    regression(store, "orin-2", "slower")
    with mail_server() as (mail, mails):
        teller(store, mail, subjects=("regression",)).tell(NOW_S)
    ((_, content),) = mails
    leaves = [part for part in content.walk() if not part.is_multipart()]
    parts = {part.get_content_type(): part.get_payload(decode=True).decode() for part in leaves}
    assert "<a " not in parts.get("text/html", "")
    lines = parts["text/plain"].splitlines()
    assert {f"regression: orin-1: {link}", "regression: orin-2: slower"} <= set(lines)


def test_a_template_that_fails_loses_no_notice_for_any_address(store, tmp_path):
    regression(store, "orin-1", "slower")
    warnings, template = [], tmp_path / "site.txt"
    with webhook() as (url, got), webhook() as (other, others):
        telling = teller(store, url, other, said=warnings, template=str(template))
        telling.tell(NOW_S)
        template.write_text("{{ notices|length }}")
        telling.tell(NOW_S + 1)
    assert [message["title"] for message in got + others] == ["1", "1"]
    assert warnings == [
        f"notices: urls, entry {number} failed with FileNotFoundError; trying again" for number in (1, 2)
    ]


def test_a_collector_looks_by_itself_and_with_the_site_s_template(store, tmp_path, monkeypatch):
    monkeypatch.setattr(notices, "LOOK_S", 0.01)
    regression(store, "quiet", "slower")
    (tmp_path / "site.txt").write_text(
        "{{ notices|length }} from the lab\n\n{{ notices[0].device }} is {{ notices[0].subject }}"
    )
    with webhook() as (url, got):
        path = tmp_path / "notify.toml"
        path.write_text(f'urls = ["{url}"]\ntemplate = "{tmp_path}/site.txt"\n')
        monkeypatch.setattr(notices.time, "time", lambda: NOW_S + 700)
        with notices.telling(store, notices.read(path), "one", lambda: NOW_S):
            wait_for(lambda: got)
    assert (got[0]["title"], got[0]["message"]) == ("1 from the lab", "quiet is regression")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("urls = []", "Expected `array` of length >= 1 - at `urls`"),
        ('urls = ["nowhere://secret@x"]', "urls, entry 1: apprise does not support nowhere:..."),
        ('urls = ["json://x"]\nevery = 3', "unknown field `every`"),
        ('urls = ["json://x"]\nevery_s = 604800', "Expected `float` <= 43200.0 - at `every_s`"),
        ('urls = ["json://x"]\nsilent_s = 86400', "Expected `float` <= 43200.0 - at `silent_s`"),
        ('urls = ["json://x"]\nsubjects = ["weather"]', "Invalid enum value 'weather'"),
        ('urls = ["json://x"]\ntemplate = "none.txt"', "No such file"),
        ("urls = [", "--notify "),
    ],
)
def test_a_wrong_file_is_refused_with_what_is_wrong(tmp_path, text, words):
    path = tmp_path / "notify.toml"
    path.write_text(text)
    with pytest.raises(UsageError) as refused:
        notices.read(path)
    assert words in str(refused.value)
    assert "secret" not in str(refused.value)
