"""The configuration that `benchd run --check`, a start and a reload refuse alike."""

import pytest

from benchd.daemon.commands import run
from benchd.daemon.errors import BenchdError

TWO_READINGS = '[[suite]]\nname = "a"\nmodels = ["square"]\n[[suite]]\nname = "b"\nmodels = ["square"]\ndata = "demo"\n'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[device]\nid = "Lab 1"', "device id 'Lab 1'"),
        ('[mqtt]\nurl = "http://h"', "MQTT URL: expected"),
        ('[mqtt]\nurl = "mqtts://h"\nca_file = "/a\\u0000b"', r"mqtt\.ca_file: contains a NUL"),
        ('[sampling]\nsources = ["nope"]', r"sampling\.sources: unknown sampler 'nope'"),
        ('[sampling]\nsources = ["rapl", "rapl"]', r"sampling\.sources: sampler 'rapl' is listed twice"),
        ('[baseline]\nruns = ["/gone/records.jsonl"]', r"baseline\.runs: /gone/records\.jsonl: no such file or folder"),
        (TWO_READINGS, "the suites a and b measure square,eager,b1"),
        ("[devise]", "unknown configuration key"),
    ],
)
def test_the_check_refuses_what_the_service_refuses(tmp_path, text, words):
    """The installer asks it: what it lets pass must not end the service at its start."""
    (path := tmp_path / "benchd.toml").write_text(text)
    with pytest.raises(BenchdError, match=words):
        run.run(path, check=True)
