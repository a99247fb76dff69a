"""The configuration: TOML to a frozen Config. Every key is known, typed and in the unit of its name, or an error."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import msgspec
from msgspec import Struct

from benchd.daemon.errors import UsageError, unknown
from benchd.daemon.records import Direction, OptionValue, Provider, Scenario

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


class DeviceConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """`[device]`: how this machine is called in records and topics."""

    id: str | None = None


class MqttConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """`[mqtt]`: where results go; null publishes nothing."""

    url: str | None = None
    timeout_s: float = 10.0


class SamplingConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """`[sampling]`: which sensors are read while a case runs, and how often; none named stands for all there are."""

    sources: list[str] = []
    period_s: float = 0.05


class LimitsConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """`[limits]`: caps and image count in place of the preset's, and the deadlines of stages that have no cap.

    `grace_s` is how far a worker may run over a cap, because a run that has begun is finished.
    """

    warm_up_cap_s: float | None = None
    measure_cap_s: float | None = None
    check_images: int | None = None
    import_deadline_s: float = 180.0
    build_deadline_s: float = 900.0
    check_deadline_s: float = 600.0
    grace_s: float = 120.0


class Suite(Struct, frozen=True, forbid_unknown_fields=True):
    """`[[suite]]`: lists that multiply into cases. An empty list stands for the preset's own choice."""

    models: list[str] = []
    variants: list[str] = []
    batch_sizes: list[int] = []
    options: dict[str, list[OptionValue]] = {}
    directions: list[Direction] = []
    scenarios: list[Scenario] = []
    preset: str = "standard"
    processes: int | None = None
    seed: int = 0
    provider: Provider | None = None


class Config(Struct, frozen=True, forbid_unknown_fields=True):
    """All of the configuration file."""

    device: DeviceConfig = DeviceConfig()
    mqtt: MqttConfig = MqttConfig()
    sampling: SamplingConfig = SamplingConfig()
    limits: LimitsConfig = LimitsConfig()
    suite: list[Suite] = []


def read(path: Path) -> Config:
    """Return the configuration in `path`; raise UsageError that names the key, the value or the line."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"configuration {path}: {error}") from error
    try:
        _refuse_unknown_keys(data, Config, "")
        return msgspec.convert(data, Config)
    except UsageError as error:
        raise UsageError(f"configuration {path}: {error}") from error
    except msgspec.ValidationError as error:
        raise UsageError(f"configuration {path}: {str(error).replace('`$.', '`')}") from error


def _refuse_unknown_keys(data: Mapping[str, Any], kind: type[Struct], where: str) -> None:
    fields = {field.encode_name: field.type for field in msgspec.structs.fields(kind)}
    for key, value in data.items():
        if key not in fields:
            raise unknown("configuration key", f"{where}{key}", [f"{where}{name}" for name in fields])
        for table, inner in _tables(value, fields[key]):
            _refuse_unknown_keys(table, inner, f"{where}{key}.")


def _tables(value: Any, kind: Any) -> list[tuple[Mapping[str, Any], type[Struct]]]:
    """Return the tables inside a value together with the Struct that describes them."""
    inner = next((arg for arg in (kind, *get_args(kind)) if isinstance(arg, type) and issubclass(arg, Struct)), None)
    items = value if isinstance(value, list) else [value]
    return [(item, inner) for item in items if inner and isinstance(item, Mapping)]
