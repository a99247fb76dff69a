"""Where a broker is: every form of its URL, and no password in sight."""

import pytest

from benchd.daemon.config import MqttConfig
from benchd.daemon.delivery.broker import FORM, Broker, configured, parse_url
from benchd.daemon.errors import UsageError


@pytest.mark.parametrize(
    ("url", "broker"),
    [
        ("mqtt://host", Broker("host", 1883)),
        ("mqtts://Host.example/", Broker("host.example", 8883, tls=True)),
        ("mqtt://10.0.0.1:99", Broker("10.0.0.1", 99)),
        ("mqtt://[::1]", Broker("::1", 1883)),
        ("mqtts://me:a%2Fb%40@[fe80::1%25eth0]:1", Broker("fe80::1%eth0", 1, True, "me", "a/b@")),
        ("mqtt://me@bücher.example", Broker("xn--bcher-kva.example", 1883, user="me")),
        ("mqtt://m%C3%A9:@h", Broker("h", 1883, False, "mé", "")),
    ],
)
def test_urls(url, broker, monkeypatch):
    monkeypatch.delenv("BENCHD_MQTT_PASSWORD", raising=False)
    assert parse_url(url) == broker


def test_the_password_comes_from_the_environment_and_is_never_shown(monkeypatch):
    monkeypatch.setenv("BENCHD_MQTT_PASSWORD", "secret")
    urls = ("mqtt://me@h", "mqtt://me:other@h", "mqtt://h")
    assert [parse_url(url).password for url in urls] == ["secret", "other", None]
    broker = parse_url("mqtts://m%40e@[::1]:7")
    assert "secret" not in f"{broker} {broker!r} {broker.url} {broker.address}"
    assert broker.url == "mqtts://m%40e@[::1]:7"
    assert parse_url(broker.url) == broker


@pytest.mark.parametrize(
    "url",
    [
        *("", "host", "host:1883", "me:secret@host", "http://host", "mqtt://", "mqtt://:1883", "mqtt://me@"),
        *("mqtt://a b", "mqtt://a..b", "mqtt://[::1", "mqtt://[host]", "mqtt://h:0", "mqtt://h:65536", "mqtt://h:http"),
        *("mqtt://::1", "mqtt://:secret@h", "mqtt://me:se/cret@h", "mqtt://me:se#cret@h"),
        *("mqtt://h/topic", "mqtt://h?tls=1", "mqtt://h#x"),
    ],
)
def test_a_bad_url_is_told_the_form_and_no_secret(url):
    with pytest.raises(UsageError) as error:
        parse_url(url)
    assert str(error.value) == FORM


@pytest.mark.parametrize("keep_alive_s", [5, 30])
def test_a_dead_link_shows_after_one_and_a_half_keep_alives_though_the_broker_looks_every_5_s(keep_alive_s):
    told_s = configured("mqtt://h", MqttConfig(keep_alive_s=keep_alive_s)).keep_alive_s
    assert 0 < 1.5 * told_s + 5 <= 1.5 * keep_alive_s + 1
