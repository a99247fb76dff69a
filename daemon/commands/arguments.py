"""Options shared by several commands, and parsers that turn command line text into typed values.

Each error quotes the invalid text and says what was expected.
"""

import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TextIO, TypeVar

import typer

from benchd.daemon.config import MqttConfig
from benchd.daemon.delivery.broker import Broker, configured
from benchd.daemon.errors import UsageError, unknown
from benchd.daemon.machine.quiet import Start
from benchd.daemon.measuring import hub, user_inputs, user_model
from benchd.daemon.measuring.protocol import encoded
from benchd.daemon.records import ImageCount, UserModel
from benchd.models import data_named, demo

T = TypeVar("T")

Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:N, GPU-UUID or auto.", metavar="DEVICE")]
Artifacts = Annotated[
    Path | None, typer.Option(help="Folder to search for exported files before exporting any.", metavar="DIR")
]
Workspace = Annotated[str | None, typer.Option(help="Memory limit of a TensorRT build.", metavar="1GiB")]
Publish = Annotated[
    str | None, typer.Option("--mqtt", help="Also publish to this broker.", metavar="mqtt://HOST[:PORT]")
]
FailOn = Annotated[
    str, typer.Option(help="Results that cause a nonzero exit code: slower, check, inconclusive.", metavar="A,B")
]
ConfigFile = Annotated[Path | None, typer.Option(help="A TOML file with the device's id, limits and sensors.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Files = Annotated[list[Path], typer.Argument(help="Result files or folders.")]
Wait = Annotated[
    bool | None,
    typer.Option(
        "--wait/--no-wait",
        help="Wait until no other benchd is measuring, and ask no questions (default on a terminal: wait, but ask).",
    ),
]
QuietFor = Annotated[
    str | None, typer.Option(help="Begin once other processes have left the CPUs alone for this long.", metavar="30s")
]
MaxLatency = Annotated[
    str | None, typer.Option(help="Maximum p99, or upper bound of the median if p99 is missing.", metavar="33ms")
]
MaxPower = Annotated[str | None, typer.Option(help="Maximum mean input power.", metavar="10W")]
MaxMemory = Annotated[str | None, typer.Option(help="Maximum peak memory.", metavar="2GiB")]
MinAgreement = Annotated[
    float | None,
    typer.Option(
        help="Minimum share of images, except ties, that get float64's class (default 0.98).", metavar="0.995"
    ),
]
MaxAccuracyDrop = Annotated[
    str | None,
    typer.Option(
        "--max-drop",
        "--max-accuracy-drop",
        help="Maximum loss of top-1 or of --metric against plain fp32 on the same items.",
        metavar="1%",
    ),
]
CaFile = Annotated[
    str | None, typer.Option(help="CA certificate of the broker (default: the system's).", metavar="FILE")
]
CertificateFile = Annotated[
    str | None, typer.Option(help="Client certificate, if the broker asks for one.", metavar="FILE")
]
KeyFile = Annotated[str | None, typer.Option(help="Private key, if not in the certificate's file.", metavar="FILE")]


def broker(url: str, ca_file: str | None, certificate_file: str | None, key_file: str | None) -> Broker:
    """Return the broker at a URL with these TLS files; raise UsageError for files with a URL without TLS."""
    return configured(url, mqtt_config(url, ca_file, certificate_file, key_file))


def mqtt_config(url: str | None, ca_file: str | None, certificate_file: str | None, key_file: str | None) -> MqttConfig:
    """Return the settings of an optional broker; raise UsageError for TLS files without a broker."""
    given = {"--ca-file": ca_file, "--certificate-file": certificate_file, "--key-file": key_file}
    if not url and (option := next((option for option, path in given.items() if path), None)):
        raise UsageError(f"{option} only applies to a broker; add --mqtt mqtts://HOST")
    return MqttConfig(url=url, ca_file=ca_file, certificate_file=certificate_file, key_file=key_file)


def start(wait: bool | None, quiet_for: str | None = None) -> Start:
    """Return what a session waits for, reporting on stderr; by default it waits and asks only on a terminal.

    It does not ask if `wait` is given.
    """
    waiting = sys.stderr if wait or (wait is None and sys.stderr.isatty()) else None
    quiet_s = quantity("--quiet-for", quiet_for, {"s": 1, "min": 60}) if quiet_for else 0.0
    asks = wait is None and sys.stderr.isatty() and _answers(sys.stdin)
    return Start(waiting, quiet_s, sys.stderr, sys.stdin if asks else None)


def _answers(stdin: TextIO | None) -> bool:
    """Return whether a person can answer; a background job would be stopped if it read from its terminal."""
    if stdin is None or not stdin.isatty():
        return False
    try:
        return os.tcgetpgrp(stdin.fileno()) == os.getpgrp()
    except OSError:  # not this process's controlling terminal, so reading from it is safe
        return True


def names(option: str, text: str | None) -> list[str]:
    """Return the distinct parts between the commas; raise UsageError with the option's name if there are none."""
    parts = [name.strip() for name in text.split(",")] if text is not None else []
    names = list(dict.fromkeys(name for name in parts if name))
    if text is not None and not names:
        raise UsageError(f"{option} is empty: give values separated by commas, or omit it")
    return names


def whole_numbers(option: str, text: str | None) -> list[int]:
    """Return the whole numbers between the commas; raise UsageError with the option's name."""
    texts = names(option, text)
    try:
        return [int(part) for part in texts]
    except ValueError:
        raise UsageError(f"{option} {','.join(texts)}: expected whole numbers separated by commas") from None


def options(texts: Sequence[str]) -> dict[str, list[str]]:
    """Return the values of each `name=value[,value...]`; the values of a repeated name are joined."""
    options: dict[str, list[str]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        if not equals or not name or not values:
            raise UsageError(f"--option {text}: expected NAME=VALUE[,VALUE...]")
        options.setdefault(name.strip(), []).extend(value.strip() for value in values.split(","))
    return options


_UNITS = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def byte_count(option: str, text: str) -> int:
    """Return the number of bytes for `512MiB` or `2GiB`."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([KMG]iB)?", text)
    if match is None:
        raise UsageError(f"{option} {text}: expected a size such as 512MiB or 2GiB")
    return int(float(match[1]) * _UNITS[match[2] or ""])


def batches(option: str, texts: Sequence[str]) -> list[int | None]:
    """Return the batch sizes, with None for `dynamic`."""
    sizes = [None if text == "dynamic" else whole_numbers(option, text)[0] for text in texts]
    if any(size is not None and size < 1 for size in sizes):
        raise UsageError(f"{option} {','.join(texts)}: must be at least 1")
    return sizes


def choices(kind: str, texts: Sequence[str], known: Sequence[T]) -> list[T]:
    """Return the known value of each text; raise UsageError, with the closest match, for an unknown one."""
    by_text = {str(value): value for value in known}
    for text in texts:
        if text not in by_text:
            raise unknown(kind, text, by_text)
    return [by_text[text] for text in texts]


def quantity(option: str, text: str, units: Mapping[str, float]) -> float:
    """Return a quantity such as `33ms` according to `units`; raise UsageError with the option and its units."""
    match = re.fullmatch(r"(\d+|\d*\.\d+) *([A-Za-z%]*)", text)
    if not match or match[2] not in units:
        raise UsageError(f"{option} {text}: expected a number with its unit, one of {', '.join(filter(None, units))}")
    return float(match[1]) * units[match[2]]


LATENCY_UNITS = {"ms": 1, "s": 1e3, "us": 1e-3}
POWER_UNITS = {"W": 1, "mW": 1e-3}
RATE_UNITS = {"Hz": 1, "fps": 1, "": 1}
MEMORY_UNITS = {"GiB": 2**30, "MiB": 2**20, "GB": 1e9, "MB": 1e6}


def limit(option: str, text: str | None, units: Mapping[str, float]) -> float | None:
    """Return the positive quantity of a limit, or None if it was not given."""
    number = quantity(option, text, units) if text is not None else None
    if number == 0.0:
        raise UsageError(f"{option} {text}: must be more than 0")
    return number


def agreement(share: float | None) -> float | None:
    """Return the share of --min-agreement; raise UsageError unless it is above 0 and at most 1."""
    if share is not None and not 0.0 < share <= 1.0:
        raise UsageError(f"--min-agreement {share:.15g}: expected a share above 0 and at most 1, such as 0.995")
    return share


def image_count(text: str) -> ImageCount:
    """Return `full` or the number of images; raise UsageError for anything else."""
    if text == "full":
        return "full"
    if not re.fullmatch(r"[1-9][0-9]{0,8}", text):
        raise UsageError(f"--accuracy {text}: expected full or a number of images, such as 1000")
    return int(text)


def calibrated_with(text: str) -> str:
    """Return the value of `--calibration` with a full path; raise UsageError if it does not specify images."""
    if text == demo.RANDOM:
        return text
    if user_inputs.are_samples(text):
        return user_inputs.of_samples("--calibration", text)
    try:
        scheme, folder = data_named.parse(text)
    except data_named.DataError as error:
        raise UsageError(f"--calibration: {error}, or {demo.RANDOM}") from error
    return f"{scheme}:{Path(folder).resolve()}" if folder else scheme


def accuracy_drop(text: str) -> float:
    """Return `1%` as a share; raise UsageError unless it is above 0 % and at most 100 %."""
    share = -1.0 if text.startswith("-") else quantity("--max-drop", text, {"%": 0.01})
    if not 0.0 < share <= 1.0:
        raise UsageError(f"--max-drop {text}: expected more than 0 % and at most 100 %, such as 1%")
    return share


def folder_of_files(artifacts: Path | None) -> Path | None:
    """Return the folder for --artifacts; raise UsageError if it is missing or its path cannot be passed to a worker."""
    if artifacts is None:
        return None
    if not artifacts.is_dir():
        made_by = f"`benchd export MODEL --output {artifacts}`"
        raise UsageError(f"--artifacts {artifacts}: no such folder; create it with {made_by}")
    encoded(str(artifacts.resolve()))
    return artifacts.resolve()


def own_model(given: dict[str, Any], beside: Mapping[str, object]) -> UserModel | None:
    """Remove the options of a user's model from `given`; return the model, or None if there is none.

    Raises UsageError if it is invalid or conflicts with the options `beside`, which may select a Hub net.
    """
    named = hub.only(beside.values())
    if named and not any(map(given.get, ("module", "onnx", "nir"))):
        return user_model.module(named, given.pop("inputs", []))
    return _of_options(given, beside)


def _of_options(given: dict[str, Any], beside: Mapping[str, object]) -> UserModel | None:
    module, onnx, nir, reference = (given.pop(name, None) for name in ("module", "onnx", "nir", "reference"))
    inputs: list[str] = given.pop("inputs", [])
    flags = [flag for flag, value in {"--module": module, "--onnx": onnx, "--nir": nir}.items() if value]
    if len(flags) > 1:
        raise UsageError(f"{' and '.join(flags)}: give only one of them")
    if flags and beside.get("--artifacts"):
        raise UsageError("--artifacts is for files of the catalog's models; measure your own file with --onnx")
    if named := next((name for name, value in beside.items() if value and flags), None):
        raise UsageError(f"{named} with {flags[0]}: your own model runs alone; omit one of them")
    if onnx and not Path(onnx).is_file():
        raise UsageError(f"--onnx {onnx}: no such file")
    if inputs and not flags:
        raise UsageError("--input is for --module, --onnx and --nir: the catalog's models define their inputs")
    if reference and not (onnx and Path(reference).is_file()):
        raise UsageError(f"--reference {reference}: give the existing fp32 file of a quantised --onnx file")
    if onnx:
        return user_model.onnx_file(Path(onnx).resolve(), inputs, Path(reference).resolve() if reference else None)
    if nir:
        return user_model.nir_file(Path(nir), inputs)
    return user_model.module(module, inputs) if module else None
