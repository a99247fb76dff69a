"""TLS to a real mosquitto: an authority and a client certificate of one's own, and the reason where they do not fit."""

from dataclasses import replace

import pytest
from broker import HOST, free_port
from certificates import Authority, serving
from links import add, linked, progress
from waiting import wait_for

from benchd.daemon.delivery.broker import parse_url
from benchd.daemon.delivery.link import LinkState


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("tls") / "ours")


@pytest.fixture(scope="module")
def client_files(authority):
    return authority.issue("client")


@pytest.fixture(scope="module")
def stranger(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("tls") / "theirs")


def trusting(broker, authority, files):
    """Return how a device that trusts this authority connects."""
    certificate, key = map(str, files)
    url = f"mqtts://me:right@{HOST}:{broker.port}"
    return replace(
        parse_url(url), ca_file=str(authority.certificate), certificate_file=certificate, key_file=key, keep_alive_s=5
    )


@pytest.fixture
def broker(tmp_path, authority):
    with serving(tmp_path, authority, authority.issue("broker")) as broker:
        yield broker


def reason(to, folder):
    """Return why the link of a device with one result cannot connect; it goes on trying, and the result stays."""
    with linked(to, "d", folder) as (link, _):
        add(link, "d", "r1")
        wait_for(lambda: link.state.reason != LinkState().reason)
        assert (link.is_alive(), link.state.connected) == (True, False)
        assert progress(link) == (0, 0)
        return link.state.reason.replace(to.address, "BROKER")


def test_with_what_the_broker_asks_for_a_result_is_sent(broker, authority, client_files, tmp_path):
    with linked(trusting(broker, authority, client_files), "d", tmp_path) as (link, _):
        add(link, "d", "r1")
        wait_for(lambda: progress(link) == (1, 0))


def test_without_an_authority_of_its_own_a_device_trusts_those_of_the_system(
    broker, authority, client_files, tmp_path, monkeypatch
):
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.certificate))
    with linked(replace(trusting(broker, authority, client_files), ca_file=None), "d", tmp_path) as (link, _):
        add(link, "d", "r1")
        wait_for(lambda: progress(link) == (1, 0))


NOT_OURS = "this system does not trust the certificate of BROKER: "
ENDED = "BROKER ended TLS before it answered"
CHECK = "; check the certificate and key files"


def test_a_device_that_the_broker_does_not_let_in_says_why(broker, authority, client_files, stranger, tmp_path, capsys):
    fits = trusting(broker, authority, client_files)
    without = reason(replace(fits, certificate_file=None, key_file=None), tmp_path)
    assert without == f"{ENDED}{CHECK}"
    assert f"mqtt down: {without}" in capsys.readouterr().err.replace(fits.address, "BROKER")
    for files in (stranger.issue("client"), authority.issue("old", period="expired")):
        assert reason(trusting(broker, authority, files), tmp_path).startswith(ENDED)


def test_a_broker_of_another_address_gets_nothing(authority, client_files, tmp_path):
    with serving(tmp_path, authority, authority.issue("elsewhere", "127.0.0.2")) as broker:
        words = reason(trusting(broker, authority, client_files), tmp_path)
    assert words == f"{NOT_OURS}IP address mismatch, certificate is not valid for '{HOST}'."


def test_a_broker_of_another_authority_gets_nothing(broker, stranger, client_files, tmp_path):
    words = reason(trusting(broker, stranger, client_files), tmp_path)
    assert words == f"{NOT_OURS}self-signed certificate in certificate chain"


@pytest.mark.parametrize(
    ("named", "words"),
    [
        ({"ca_file": "absent.pem"}, "cannot be used: ca_file absent.pem: No such file or directory"),
        ({"key_file": "absent.key"}, "key_file absent.key: No such file or directory"),
        ({"ca_file": __file__}, f"cannot be used: ca_file {__file__}: no certificate or crl found"),
        ({"key_file": "STRANGER"}, "key values mismatch"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(authority, client_files, stranger, tmp_path, named, words):
    given = {name: str(stranger.issue("other")[1]) if path == "STRANGER" else path for name, path in named.items()}
    url = f"mqtts://{HOST}:{free_port()}"
    files = {"certificate_file": str(client_files[0]), "key_file": str(client_files[1])}
    to = replace(parse_url(url), ca_file=str(authority.certificate), **files)
    assert words in reason(replace(to, **given), tmp_path)
