"""The configuration file: what is read, and how each mistake is named."""

import os

import pytest

from benchd.daemon import config
from benchd.daemon.errors import UsageError

FULL = """
[device]
id = "orin-lab-1"

[mqtt]
url = "mqtt://broker.local"
timeout_s = 5.0

[sampling]
sources = ["procfs"]
period_s = 0.2

[limits]
measure_cap_s = 10.0

[[suite]]
models = ["vim_tiny"]
variants = ["eager", "amp"]
batch_sizes = [1, 4]
options = { scan = ["serial"] }
directions = ["inference"]
preset = "quick"

[[suite]]
models = ["square"]
"""

ONNX = """
[[suite]]
onnx = "/etc/benchd/net.onnx"
inputs = ["3x224x224"]
"""


def read(tmp_path, text):
    path = tmp_path / "benchd.toml"
    path.write_text(text)
    return config.read(path)


def test_a_full_file_is_read(tmp_path):
    full = read(tmp_path, FULL)
    assert full.device.id == "orin-lab-1"
    assert [suite.models for suite in full.suite] == [["vim_tiny"], ["square"]]
    assert full.limits.measure_cap_s == 10.0
    assert full.limits.warm_up_cap_s is None


def test_an_onnx_file_is_taken_from_a_configuration_that_nobody_else_can_write(tmp_path):
    (suite,) = read(tmp_path, ONNX).suite
    assert (suite.onnx, suite.inputs) == ("/etc/benchd/net.onnx", ["3x224x224"])
    for mode in (0o620, 0o602):
        (tmp_path / "benchd.toml").chmod(mode)
        with pytest.raises(
            UsageError, match=r"suite.onnx: refused because other users can write to this file: sudo chmod go-w"
        ):
            config.read(tmp_path / "benchd.toml")


@pytest.mark.parametrize("key", ["metric", "samples", "calibration"])
def test_a_python_file_of_a_configuration_must_be_one_that_nobody_else_can_write(tmp_path, key):
    code = tmp_path / "task.py"
    suite = f'[[suite]]\nmodels = ["square"]\n{key} = "{{}}:items"'
    with pytest.raises(UsageError, match=f"suite.{key}: .*task.py: No such file"):
        read(tmp_path, suite.format(code))
    code.touch()
    assert read(tmp_path, suite.format(code)).suite
    code.chmod(0o666)
    with pytest.raises(UsageError, match=f"suite.{key}: refused because other users can write to this file: sudo"):
        read(tmp_path, suite.format(code))
    with pytest.raises(UsageError, match=f"suite.{key} 'task.py': give an absolute path"):
        read(tmp_path, suite.format("task.py"))


@pytest.mark.parametrize("shared", ["", "etc"])
def test_a_folder_in_which_others_may_replace_the_configuration_is_as_open_as_the_file(tmp_path, shared):
    (tmp_path / "root" / "etc").mkdir(parents=True)
    (tmp_path / "root" / shared).chmod(0o777)
    with pytest.raises(
        UsageError, match=rf"refused because other users can write to this folder: .* {tmp_path}/root/?{shared}$"
    ):
        read(tmp_path / "root" / "etc", ONNX)
    (tmp_path / "root" / shared).chmod(0o1777)
    assert read(tmp_path / "root" / "etc", ONNX).suite[0].onnx


def test_an_onnx_file_is_not_taken_from_another_user_s_configuration(tmp_path, monkeypatch):
    (tmp_path / "benchd.toml").write_text(ONNX)
    if os.geteuid() == 0:
        os.chown(tmp_path / "benchd.toml", 4242, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 4242)
    with pytest.raises(UsageError, match=r"suite.onnx: refused because another user owns this file: sudo chown root"):
        config.read(tmp_path / "benchd.toml")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[devise]\nid = 'x'", r"unknown configuration key 'devise'; did you mean 'device'\? Valid: device, mqtt"),
        ("[mqtt]\nurI = 'x'", r"unknown configuration key 'mqtt.urI'; did you mean 'mqtt.url'\?"),
        ("[[suite]]\nmodel = ['x']", r"unknown configuration key 'suite.model'; did you mean 'suite.models'\?"),
        ("[[suite]]\nonnx = 'net.onnx'", r"suite.onnx 'net.onnx': give an absolute path, beginning with /"),
        ("[[suite]]\nonnx = '/net.onnx'\nmodels = ['square']", r"suite.onnx: your own model replaces models"),
        ("[[suite]]\ninputs = ['3x4x4']", r"suite.inputs: only for your own model"),
        ("[[suite]]\nonnx = '/a/net.onnx'\n[[suite]]\nonnx = '/b/net.onnx'", r"suite.onnx: two files are called 'net'"),
        ("[[suite]]\nmodule = 'net.py:build'", r"suite.module 'net.py:build': give package.module:FUNCTION"),
        ("[[suite]]\nnir = 'net.nir'", r"suite.nir 'net.nir': give an absolute path, beginning with /"),
        ("[[suite]]\nonnx = '/a/net.onnx'\n[[suite]]\nnir = '/b/net.nir'", r"suite.onnx: two files are called 'net'"),
        ("[[suite]]\nmodule = 'a.net:f'\nonnx = '/net.onnx'", r"suite.onnx: your own model replaces models"),
        (
            "[[suite]]\nmodule = 'a.net:f'\n[[suite]]\nmodule = 'b.net:f'",
            r"suite.module: two functions are called 'net:f'",
        ),
        (
            "[[suite]]\nonnx = '/net.onnx'\n[[suite]]\nonnx = '/net.onnx'\ninputs = ['3x8x8']",
            r"suite.onnx '/net.onnx': .* different inputs or weights, .*; use another link to it in one",
        ),
        (
            "[[suite]]\nmodule = 'a:f'\nweights = '/1'\n[[suite]]\nmodule = 'a:f'\nweights = '/2'",
            r"suite.module 'a:f': .* different inputs or weights, .*; use another function in one of them",
        ),
        ("[sampling]\nperiod_s = '1s'", r"Expected `float`, got `str` - at `sampling.period_s`"),
        ("[[suite]]\nbatch_sizes = ['1']", r"Expected `int`, got `str` - at `suite\[0\].batch_sizes\[0\]`"),
        ("[[suite]]\ndirections = ['up']", r"Invalid enum value 'up' - at `suite"),
        ("[mqtt]\nkeep_alive_s = -1", r"Expected `int` >= 5, not -1 - at `mqtt.keep_alive_s`"),
        ("[mqtt]\nkeep_alive_s = 120000", r"Expected `int` <= 65535, not 120000 - at `mqtt.keep_alive_s`"),
        ("suite = [", r"benchd.toml: "),
        ('[[suite]]\nonnx = "/a\\u0000b"', r"benchd.toml: suite.onnx: contains a NUL character"),
        ('[[suite]]\noptions = { size = [16, "\\u0000"] }', r"suite.options.size: contains a NUL character"),
        (
            "[mqtt]\nurl = 'mqtt://h'\nca_file = 'x'",
            r"mqtt.ca_file: needs TLS; use a URL that begins with mqtts://",
        ),
    ],
)
def test_a_mistake_is_named(tmp_path, text, words):
    with pytest.raises(UsageError, match=words):
        read(tmp_path, text)


@pytest.mark.parametrize(
    ("section", "key", "value", "words"),
    [
        ("limits", "measure_cap_s", "inf", "<= 864000.0, not inf"),
        ("limits", "measure_cap_s", "nan", ">= 0.0, not nan"),
        ("limits", "measure_cap_s", "-1", ">= 0.0, not -1"),
        ("limits", "warm_up_cap_s", "inf", "<= 864000.0, not inf"),
        ("limits", "import_deadline_s", "nan", ">= 0.0, not nan"),
        ("limits", "build_deadline_s", "1e300", "<= 864000.0, not 1e.300"),
        ("limits", "check_deadline_s", "-inf", ">= 0.0, not -inf"),
        ("limits", "grace_s", "inf", "<= 864000.0, not inf"),
        ("limits", "check_images", "-1", ">= 1, not -1"),
        ("sampling", "period_s", "nan", ">= 0.001, not nan"),
        ("sampling", "period_s", "1e-300", ">= 0.001, not 1e-300"),
        ("sampling", "period_s", "inf", "<= 3600.0, not inf"),
        ("mqtt", "timeout_s", "inf", "<= 864000.0, not inf"),
        ("baseline", "false_alarms_per_month", "inf", "<= 100000.0, not inf"),
        ("[suite]", "random_delay_s", "nan", ">= 0.0, not nan"),
        ("[suite]", "random_delay_s", "1e308", "<= 864000.0, not 1e.308"),
        ("[suite]", "random_delay_s", "-5", ">= 0.0, not -5"),
        ("[suite]", "time_limit_s", "nan", ">= 0.0, not nan"),
        ("[suite]", "conditions", "{ temperature_below_c = nan }", ">= -100.0, not nan"),
        ("[suite]", "processes", "0", ">= 1, not 0"),
        ("[suite]", "batch_sizes", "[1, 0]", ">= 1, not 0"),
        ("[suite]", "streams", "[65]", "<= 64, not 65"),
        ("[suite]", "rates_hz", "[nan]", ">= 0.0028, not nan"),
        ("[suite]", "deadline_ms", "0", "> 0.0, not 0"),
        ("[suite]", "percentile", "99.999", "<= 99.99, not 99.999"),
    ],
)
def test_a_number_that_nothing_can_be_measured_with_is_refused_with_its_key_and_range(
    tmp_path, section, key, value, words
):
    with pytest.raises(UsageError, match=rf"Expected `(int|float)` {words} - at `[a-z]+(\[0\])?\.{key}"):
        read(tmp_path, f"[{section}]\n{key} = {value}")


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero")])
def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path, make):
    make(tmp_path / "benchd.toml")
    with pytest.raises(UsageError, match=r"benchd\.toml: (not a regular file|Is a directory)"):
        config.read(tmp_path / "benchd.toml")


@pytest.mark.parametrize(("text", "accuracy"), [("'full'", "full"), ("1000", 1000)])
def test_a_suite_says_over_how_many_images_accuracy_is_measured(tmp_path, text, accuracy):
    (suite,) = read(tmp_path, f"[[suite]]\naccuracy = {text}\ndata = 'imagefolder:/srv/images'").suite
    assert (suite.accuracy, suite.data) == (accuracy, "imagefolder:/srv/images")
