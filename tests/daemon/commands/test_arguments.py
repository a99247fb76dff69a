"""Options that several commands share."""

import sys

import pytest

from benchd.daemon import cli


@pytest.mark.parametrize(
    "line", [("dashboard", "--only", "neither"), ("watch", "--seconds", "0"), ("replay", ".")], ids=lambda line: line[0]
)
@pytest.mark.parametrize("name", ["ca_file", "certificate_file", "key_file"])
def test_a_file_for_tls_is_refused_with_a_url_without_it(line, name, monkeypatch, capsys):
    option = f"--{name.replace('_', '-')}"
    monkeypatch.setattr(sys, "argv", ["benchd", *line, "--mqtt", "mqtt://127.0.0.1:1", option, "x.pem"])
    with pytest.raises(SystemExit) as end:
        cli.benchd()
    assert end.value.code == 2
    assert f"mqtt.{name}: needs TLS; use a URL that begins with mqtts://" in capsys.readouterr().err


@pytest.mark.parametrize("line", [("watch", "--seconds", "0"), ("profile", "square")], ids=lambda line: line[0])
@pytest.mark.parametrize("option", ["--ca-file", "--certificate-file", "--key-file"])
def test_a_file_for_tls_is_refused_without_a_broker(line, option, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["benchd", *line, option, "x.pem"])
    with pytest.raises(SystemExit) as end:
        cli.benchd()
    assert end.value.code == 2
    assert f"{option} only applies to a broker; add --mqtt mqtts://HOST" in capsys.readouterr().err
