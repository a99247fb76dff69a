"""Reads the configuration, in TOML, into a Config. A key that is unknown, mistyped or in the wrong unit is an error."""

import os
import re
import stat
import sys
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Struct

from benchd.daemon import trigger
from benchd.daemon.errors import UsageError, unknown
from benchd.daemon.records import HUB, SCENARIOS, Direction, Inputs, Option, OptionValue, Provider, Scenario, file_of
from benchd.daemon.trigger import Trigger

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Commands = Literal["off", "suites", "all"]
# poll() takes the sum of two of these, in ms, as a 32-bit int
Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=864_000.0)]
Count = Annotated[int, msgspec.Meta(ge=1, le=1_000_000_000)]
Core = Annotated[int, msgspec.Meta(ge=0)]
Load = Annotated[float, msgspec.Meta(ge=0.0, le=100_000.0)]
Processes = Annotated[int, msgspec.Meta(ge=1, le=1000)]
Queue = Annotated[int, msgspec.Meta(ge=1, le=100_000)]
BatchSize = Annotated[int, msgspec.Meta(ge=1, le=2**20)]
Threads = Annotated[int, msgspec.Meta(ge=1, le=1024)]
Streams = Annotated[int, msgspec.Meta(ge=1, le=64)]
RateHz = Annotated[float, msgspec.Meta(ge=0.0028, le=1e6)]  # ten requests an hour
# torch accepts 64 bits, and each image uses a different seed, counted from this one
Seed = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,39}"
_MODULE = rf"[^\W\d][\w.]*(?<!\.py):[^\W\d]\w*|{HUB}:.*"


class DeviceConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """`[device]`: the machine's id in records and topics; name, site and tags are for human readers."""

    id: str | None = None
    name: str = ""
    site: str = ""
    tags: list[str] = []


class MqttConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """`[mqtt]`: where results are published; without a `url`, they are not.

    With `telemetry` off, only health is published while a case runs. `commands` defines what MQTT commands may run:
    nothing, the configured suites, or also any lists of models, variants and so on.
    """

    url: str | None = None
    timeout_s: Seconds = 10.0
    ca_file: str | None = None
    certificate_file: str | None = None
    key_file: str | None = None
    keep_alive_s: Annotated[int, msgspec.Meta(ge=5, le=65535)] = 30  # MQTT encodes it in two bytes
    commands: Commands = "suites"
    telemetry: Literal["on", "off"] = "on"
    home_assistant: bool = False

    def __post_init__(self) -> None:
        files = {"ca_file": self.ca_file, "certificate_file": self.certificate_file, "key_file": self.key_file}
        given = next((name for name, path in files.items() if path), None)
        if given and self.url and not self.url.startswith("mqtts:"):
            raise UsageError(f"mqtt.{given}: needs TLS; use a URL that begins with mqtts://")


class ServiceConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """`[service]`: the file that `benchd run` writes for node_exporter."""

    prometheus_file: str | None = None


class BaselineConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """`[baseline]`: files or folders of records that the service compares its results with.

    If empty, the service uses the baseline stored in its state folder by `benchd baseline set`, if there is one.
    `false_alarms_per_month` is the accepted number of false regressions (code unchanged) across all cases in the plan.
    """

    runs: list[str] = []
    false_alarms_per_month: Annotated[float, msgspec.Meta(gt=0.0, le=100_000.0)] = 0.05


class SamplingConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """`[sampling]`: the sensors read while a case runs, and how often; an empty list means all available ones."""

    sources: list[str] = []
    period_s: Annotated[float, msgspec.Meta(ge=0.001, le=3600.0)] = 0.05


class LimitsConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """`[limits]`: overrides for the preset's caps and image count, and deadlines for the stages without a cap.

    `grace_s` is how long a worker may exceed a cap to finish the run in progress. Without `build_deadline_s`, a build
    may take 15 minutes, or an hour on a Jetson.
    """

    warm_up_cap_s: Seconds | None = None
    measure_cap_s: Seconds | None = None
    check_images: Count | None = None
    import_deadline_s: Seconds = 180.0
    build_deadline_s: Seconds | None = None
    check_deadline_s: Seconds = 600.0
    grace_s: Seconds = 120.0


class Conditions(Struct, frozen=True, forbid_unknown_fields=True):
    """`[suite.conditions]`: the conditions for starting a case of a scheduled run; null means no condition."""

    temperature_below_c: Annotated[float, msgspec.Meta(ge=-100.0, le=1000.0)] | None = None
    gpu_load_below_percent: Load | None = None
    system_load_below: Load | None = None
    power_mode: str | None = None
    on_mains: bool = False


class Suite(Inputs, Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[[suite]]`: lists whose combinations are cases. An empty list stands for the preset's choice.

    `every`, `at` or `cron` schedules it in the service, delayed by up to `random_delay_s` (constant per device); no
    further case begins once a run has measured for `time_limit_s`. `weights` is a checkpoint for a single model, `data`
    and `labels` specify images on this machine, `samples` and `metric` are --inputs and --metric, and `accuracy` is the
    number of images for top-1. A user's model replaces `models`: `onnx` or `nir` is its file, `module` the
    package.module:FUNCTION of an installed package, and `inputs` describes its undefined inputs, like `--input`. Only
    `read` accepts a user's model.

    Each of `rates_hz` is one case of the scenario `server`; `find_rate` is one at the highest rate that meets
    `deadline_ms`. With `device` "cuda", cases are never measured on the CPU: without a usable GPU, they are
    unsupported.
    """

    name: str = ""
    every: str | None = None
    at: str | None = None
    cron: str | None = None
    random_delay_s: Seconds = 0.0
    time_limit_s: Seconds | None = None
    conditions: Conditions = Conditions()
    device: Literal["cuda"] | None = None
    models: Annotated[
        list[str], Option("Models, separated by commas; also torchvision:NAME, timm:NAME and hf:ORG/NAME.", "A,B")
    ] = []
    variants: Annotated[list[str], Option("Variants, separated by commas.", "A,B")] = []
    batch_sizes: Annotated[list[BatchSize], Option("Batch sizes, separated by commas.", "1,4")] = []
    options: Annotated[
        dict[str, list[OptionValue]], Option("A model option with its values; may be repeated.", "NAME=A,B", "--option")
    ] = {}
    beside: Annotated[str | None, Option("Another case to run at this rate during the measurement.", "CASE:30Hz")] = (
        None
    )
    preset: Annotated[
        str, Option("How much to measure (default: from --config, else quick).", "quick|standard|thorough")
    ] = "standard"
    processes: Annotated[Processes | None, Option("Fresh processes per case.")] = None
    seed: Annotated[Seed, Option("Seed of random weights and inputs.")] = 0
    threads: Annotated[list[Threads], Option("CPU threads of the model (default: all).", "1,2")] = []
    directions: Annotated[list[Direction], Option("inference, training, or both.", "A,B", "--direction")] = []
    scenarios: Annotated[list[Scenario], Option(f"{', '.join(SCENARIOS)}.", "A,B", "--scenario")] = []
    streams: Annotated[list[Streams], Option("Streams that run one model at the same time.", "1,2,4")] = []
    rates_hz: Annotated[
        list[RateHz], Option("Requests per second to a server; each rate is a case.", "30Hz,60Hz", "--rate", unit="Hz")
    ] = []
    find_rate: Annotated[bool, Option("Find the highest server rate that meets --deadline.")] = False
    deadline_ms: Annotated[
        Annotated[float, msgspec.Meta(gt=0.0, le=1e9)] | None,
        Option("Latency limit of a request, from arrival to answer.", "33ms", "--deadline", unit="ms"),
    ] = None
    percentile: Annotated[
        Annotated[float, msgspec.Meta(ge=50.0, le=99.99)] | None,
        Option("Share of requests that must meet --deadline (default 99).", "99.9"),
    ] = None
    queue: Annotated[Queue | None, Option("Requests that may wait; others are dropped (default 32).")] = None
    provider: Annotated[Provider | None, Option("Provider of ONNX Runtime.", "cpu|cuda|tensorrt")] = None
    dla: Annotated[Core | None, Option("DLA core of a Jetson, for TensorRT variants.")] = None
    module: Annotated[str | None, Option("Your own module, by file or package.", "FILE.py:FUNCTION")] = None
    onnx: Annotated[str | None, Option("Your own ONNX file.", "FILE")] = None
    reference: Annotated[str | None, Option("The fp32 file that a quantised --onnx was made from.", "FILE")] = None
    nir: Annotated[str | None, Option("Your own spiking net in NIR format.", "FILE")] = None
    inputs: Annotated[
        list[str],
        Option(
            "One input of your own model without its batch axis, such as ids=int64:16:0-999 or x=@x.npy; repeatable.",
            "[NAME=][TYPE:]SIZES",
            "--input",
        ),
    ] = []

    def __post_init__(self) -> None:
        if self.trigger() and not self.name:
            raise UsageError("suite.name: a suite with every, at or cron needs a name")
        if self.name and not re.fullmatch(NAME, self.name):
            raise UsageError(f"suite.name {self.name!r}: use at most 40 letters, digits, '.', '-' and '_'")

        named = [name for name in ("onnx", "module", "nir") if getattr(self, name) is not None]
        if named and (self.models or len(named) > 1 or (self.options and not self.nir)):
            raise UsageError(f"suite.{self.own}: your own model replaces models and options; remove them")
        if self.nir is not None and not Path(self.nir).is_absolute():
            raise UsageError(f"suite.nir {self.nir!r}: give an absolute path, beginning with /")
        if self.module is not None and not re.fullmatch(_MODULE, self.module):
            raise UsageError(f"suite.module {self.module!r}: give package.module:FUNCTION of an installed package")
        if self.onnx is not None and not Path(self.onnx).is_absolute():
            raise UsageError(f"suite.onnx {self.onnx!r}: give an absolute path, beginning with /")
        if self.reference is not None and not (self.onnx and Path(self.reference).is_absolute()):
            raise UsageError(
                f"suite.reference {self.reference!r}: give the absolute path of the fp32 file of suite.onnx"
            )
        if self.inputs and not self.own:
            raise UsageError("suite.inputs: only for your own model; a model of the catalog defines its inputs")

    @property
    def own(self) -> str | None:
        """Return the key that specifies the user's own model, None if there is none."""
        return next((name for name in ("onnx", "module", "nir") if getattr(self, name) is not None), None)

    def code(self) -> list[tuple[str, Path]]:
        """Return the keys whose values are functions in Python files, each with its file."""
        named = {"samples": self.samples, "metric": self.metric, "calibration": self.calibration}
        return [(f"suite.{name}", Path(file_of(text))) for name, text in named.items() if text and ".py:" in text]

    def trigger(self) -> Trigger | None:
        """Return when the service starts the suite, None if only a command does."""
        return trigger.parse(self.every, self.at, self.cron)


class ShippedFolder(Struct, frozen=True, forbid_unknown_fields=True):
    """`[[shipped]]`: a folder from `benchd ship` that the service verifies, by absolute path; `name` is used in topics.

    It is verified on the schedule in `every`, `at` or `cron`, and whenever its files, the trust settings, the machine
    or the software have changed. A folder that runs code when loaded and was not shipped by the service's user needs
    `trust_code`; without `trust_plan`, a TensorRT plan made by a different user is rebuilt.
    """

    path: str
    name: str = ""
    every: str | None = None
    at: str | None = None
    cron: str | None = None
    trust_code: bool = False
    trust_plan: bool = False

    def __post_init__(self) -> None:
        self.trigger()
        if not Path(self.path).is_absolute():
            raise UsageError(f"shipped.path {self.path!r}: give an absolute path, beginning with /")
        if not re.fullmatch(NAME, self.called):
            raise UsageError(f"shipped.name {self.called!r}: use at most 40 letters, digits, '.', '-' and '_'")

    @property
    def called(self) -> str:
        """Return its name, which is the folder's by default."""
        return self.name or Path(self.path).name

    def trigger(self) -> Trigger | None:
        """Return when the service verifies it, None if only after a change."""
        return trigger.parse(self.every, self.at, self.cron)


class Config(Struct, frozen=True, forbid_unknown_fields=True):
    """The whole configuration file."""

    device: DeviceConfig = DeviceConfig()
    mqtt: MqttConfig = MqttConfig()
    service: ServiceConfig = ServiceConfig()
    baseline: BaselineConfig = BaselineConfig()
    sampling: SamplingConfig = SamplingConfig()
    limits: LimitsConfig = LimitsConfig()
    suite: list[Suite] = []
    shipped: list[ShippedFolder] = []

    def __post_init__(self) -> None:
        if twice := _twice(suite.name for suite in self.suite if suite.name):
            raise UsageError(f"suite.name {twice!r}: used twice; rename one")
        if twice := _twice(shipped_folder.called for shipped_folder in self.shipped):
            raise UsageError(f"shipped.name {twice!r}: used twice; rename one")
        files = {path: Path(path).stem for suite in self.suite if (path := suite.onnx or suite.nir)}
        modules = {suite.module: suite.module.rpartition(".")[2] for suite in self.suite if suite.module}
        for key, called_by in (("onnx: two files", files), ("module: two functions", modules)):
            if alike := _twice(called_by.values()):  # records and retained topics are identified by this name
                raise UsageError(f"suite.{key} are called {alike!r}; rename one")
        _refuse_two_readings(self.suite)


def _twice(names: Iterable[str]) -> str | None:
    return next((name for name, count in Counter(names).items() if count > 1), None)


def _refuse_two_readings(suites: list[Suite]) -> None:
    """Raise UsageError for a model with two different inputs or weights, whose results would have the same name."""
    given: dict[str | None, tuple[list[str], str | None]] = {}
    for suite in suites:
        this = suite.inputs, suite.weights
        own, link = suite.onnx or suite.module or suite.nir, "function" if suite.module else "link to it"
        if suite.own and given.setdefault(own, this) != this:
            raise UsageError(
                f"suite.{suite.own} {own!r}: two suites give it different inputs or weights, but their results would "
                f"share a name; use another {link} in one of them"
            )


def read(path: Path) -> Config:
    """Return the configuration in `path`; raise UsageError that quotes the key, the value or the line.

    It may refer to ONNX files, shipped folders and Python files only if just root and the current user can write the
    configuration and these Python files.
    """
    try:
        # otherwise opening a pipe would block
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise UsageError(f"configuration {path}: not a regular file")
            data = tomllib.load(file)
    except OSError as error:
        raise UsageError(f"configuration {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"configuration {path}: {error}") from error
    try:
        _refuse_nul(data, "")
        _refuse_unknown_keys(data, Config, "")
        config = msgspec.convert(data, Config)
        own = next((f"suite.{suite.own}" for suite in config.suite if suite.own), None)
        loaded = own or ("shipped" if config.shipped else None)
        run = [code for suite in config.suite for code in suite.code()]
        if loaded or run:
            _refuse_foreign(path, status, loaded or run[0][0])
        for key, code in run:
            _refuse_foreign(code, _status(code, key), key)
        return config
    except UsageError as error:
        raise UsageError(f"configuration {path}: {error}") from error
    except msgspec.ValidationError as error:
        raise UsageError(f"configuration {path}: {_with_value(str(error), data)}") from error


def _status(file: Path, key: str) -> os.stat_result:
    if not file.is_absolute():
        raise UsageError(f"{key} {str(file)!r}: give an absolute path, beginning with /")
    try:
        return file.stat()
    except OSError as error:
        raise UsageError(f"{key}: {file}: {error.strerror}") from error


def _with_value(message: str, data: Any) -> str:
    """Return msgspec's message about a key, with its value if that is a number; a string may contain a password."""
    stated, _, place = message.partition(" - at `$.")
    with suppress(LookupError):
        for key in re.findall(r"[^].[`]+", place):
            data = data[int(key) if isinstance(data, list) else key]
    value = f", not {data:g}" if isinstance(data, int | float) and not isinstance(data, bool) else ""
    return f"{stated}{value} - at `{place}" if place else message


def _refuse_nul(value: Any, key: str) -> None:
    """Raise UsageError for a string with a NUL, because opening such a path would not raise OSError."""
    if isinstance(value, str) and "\0" in value:
        raise UsageError(f"{key}: contains a NUL character")
    for name, inner in value.items() if isinstance(value, dict) else ():
        _refuse_nul(inner, f"{key}.{name}".removeprefix("."))
    for inner in value if isinstance(value, list) else ():
        _refuse_nul(inner, key)


def _refuse_foreign(path: Path, status: os.stat_result, key: str) -> None:
    """Raise UsageError for `key` if anyone other than root and the current user may write or replace the file."""
    for place, owned in [(path, status), *((folder, folder.stat()) for folder in path.resolve().parents)]:
        kind = "file" if place is path else "folder"
        # a sticky folder like /tmp, where users cannot replace each other's files
        is_kept = place is not path and owned.st_mode & stat.S_ISVTX
        if owned.st_uid not in (0, os.geteuid()):
            raise UsageError(f"{key}: refused because another user owns this {kind}: sudo chown root {place}")
        if owned.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not is_kept:
            raise UsageError(f"{key}: refused because other users can write to this {kind}: sudo chmod go-w {place}")


def _refuse_unknown_keys(data: dict[str, Any], kind: type[Struct], where: str) -> None:
    """Raise UsageError for the first unknown key, listing the known ones."""
    fields = {field.encode_name: field.type for field in msgspec.structs.fields(kind)}
    for key, value in data.items():
        if key not in fields:
            raise unknown("configuration key", f"{where}{key}", [f"{where}{name}" for name in fields])
        for table, inner in _tables(value, fields[key]):
            _refuse_unknown_keys(table, inner, f"{where}{key}.")


def _tables(value: Any, kind: Any) -> list[tuple[dict[str, Any], type[Struct]]]:
    """Return the tables inside a value together with the Struct that describes them."""
    inner = next((arg for arg in (kind, *get_args(kind)) if isinstance(arg, type) and issubclass(arg, Struct)), None)
    items = value if isinstance(value, list) else [value]
    return [(item, inner) for item in items if inner and isinstance(item, dict)]
