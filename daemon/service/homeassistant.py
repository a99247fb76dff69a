"""Home Assistant's MQTT discovery: one retained message that describes the device and its entities.

Source: the device discovery payload of Home Assistant's MQTT integration (`dev`, `o`, `cmps`).
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from benchd.daemon.delivery.messages import Info
from benchd.daemon.delivery.topics import Topics

# name, path in health, unit, device class
_SENSORS = (
    ("Activity", "activity", None, None),
    ("Running case", "case_id", None, None),
    ("Cases left", "cases_left", None, None),
    ("Next suite", "next_suite", None, None),
    ("Results waiting", "outbox_pending", None, None),
    ("Results refused", "outbox_refused", None, None),
    ("Free space", "disk_free_bytes", "B", "data_size"),
    ("Uptime", "uptime_s", "s", "duration"),
)


def topic(device_id: str) -> str:
    """Return the topic on which Home Assistant looks for the device."""
    return f"homeassistant/device/benchd-{device_id}/config"


def discovery(topics: Topics, info: Info, shipped: Sequence[str] = ()) -> bytes:
    """Return the message, with a sensor for each `shipped` folder; an empty one in its place removes the device."""
    components = {path: _sensor(topics, name, path, unit, kind) for name, path, unit, kind in _SENSORS}
    components |= {f"shipped_{name}": _shipped(topics, name) for name in shipped}
    components["problem"] = {
        "p": "binary_sensor",
        "name": "Problem",
        "unique_id": f"benchd_{topics.device_id}_problem",
        "device_class": "problem",
        "state_topic": topics.of("health"),
        "value_template": "{{ 'ON' if value_json.problem else 'OFF' }}",
    }
    message = {
        "dev": {
            "ids": [f"benchd_{topics.device_id}"],
            "name": info.name or topics.device_id,
            "mdl": info.environment.board or info.environment.cpu_model,
            "sw": info.tool_version,
        },
        "o": {"name": "benchd", "sw": info.tool_version},
        "avty": [{"topic": topics.of("status"), "value_template": "{{ value_json.state }}"}],
        "cmps": components,
    }
    return msgspec.json.encode(message)


def _shipped(topics: Topics, name: str) -> dict[str, Any]:
    return {
        "p": "sensor",
        "name": f"Shipped {name}",
        "unique_id": f"benchd_{topics.device_id}_shipped_{name}",
        "state_topic": topics.shipped(name),
        "value_template": "{{ value_json.verdict }}",
        "json_attributes_topic": topics.shipped(name),
    }


def _sensor(topics: Topics, name: str, path: str, unit: str | None, kind: str | None) -> dict[str, Any]:
    sensor = {
        "p": "sensor",
        "name": name,
        "unique_id": f"benchd_{topics.device_id}_{path}",
        "state_topic": topics.of("health"),
        "value_template": f"{{{{ value_json.{path} }}}}",
        "unit_of_measurement": unit,
        "device_class": kind,
    }
    return {key: value for key, value in sensor.items() if value is not None}
