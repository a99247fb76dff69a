"""Home Assistant's MQTT discovery: one retained message that describes the device and its entities.

Source: the device discovery payload of Home Assistant's MQTT integration (`dev`, `o`, `cmps`).
"""

from collections.abc import Sequence

import msgspec

from benchd.daemon.delivery.messages import Info
from benchd.daemon.delivery.topics import Topics

_OF_HEALTH = {
    "activity": {"name": "Activity"},
    "case_id": {"name": "Running case"},
    "cases_left": {"name": "Cases left"},
    "next_suite": {"name": "Next suite"},
    "pending": {"name": "Results waiting"},
    "refused": {"name": "Results refused"},
    "disk_free_bytes": {"name": "Free space", "unit_of_measurement": "B", "device_class": "data_size"},
    "uptime_s": {"name": "Uptime", "unit_of_measurement": "s", "device_class": "duration"},
}
"""The name and the unit of the sensor for each field of the health message."""


def topic(device_id: str) -> str:
    """Return the topic on which Home Assistant looks for the device."""
    return f"homeassistant/device/benchd-{device_id}/config"


def discovery(topics: Topics, info: Info, shipped: Sequence[str] = ()) -> bytes:
    """Return the message, with a sensor for each `shipped` folder; an empty message instead removes the device."""
    health = topics.of("health")
    entities = {field: _entity(health, f"value_json.{field}") | named for field, named in _OF_HEALTH.items()}
    for name in shipped:
        topic_of = topics.shipped(name)
        of_folder = {"name": f"Shipped {name}", "json_attributes_topic": topic_of}
        entities[f"shipped_{name}"] = _entity(topic_of, "value_json.verdict") | of_folder
    is_wrong = {"p": "binary_sensor", "name": "Problem", "device_class": "problem"}
    entities["problem"] = _entity(health, "'ON' if value_json.problem else 'OFF'") | is_wrong
    message = {
        "dev": {
            "ids": [f"benchd_{topics.device_id}"],
            "name": info.name or topics.device_id,
            "mdl": info.environment and (info.environment.board or info.environment.cpu_model),
            "sw": info.tool_version,
        },
        "o": {"name": "benchd", "sw": info.tool_version},
        "avty": [{"topic": topics.of("status"), "value_template": "{{ value_json.state }}"}],
        "cmps": {key: {"unique_id": f"benchd_{topics.device_id}_{key}"} | entity for key, entity in entities.items()},
    }
    return msgspec.json.encode(message)


def _entity(topic: str, value: str) -> dict[str, str]:
    return {"p": "sensor", "state_topic": topic, "value_template": f"{{{{ {value} }}}}"}
