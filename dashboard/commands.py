"""Asks a device to run one of its own suites: names it has published, and nothing else."""

import time
import uuid

import msgspec
from msgspec import Struct
from paho.mqtt.client import Client, ConnectFlags, MQTTMessage
from paho.mqtt.enums import CallbackAPIVersion, MQTTErrorCode, MQTTProtocolVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode

from benchd.daemon.delivery.mqtt import KEEP_ALIVE_S, Broker, Ended, explain, secure
from benchd.daemon.delivery.topics import Topics

ANSWER_S = 10.0
EXPIRY_S = 60


class Answer(Struct, frozen=True):
    """What the device says; `reason` where it does not do it."""

    accepted: bool
    reason: str | None = None


def run_suite(broker: Broker, device_id: str, suite: str, timeout_s: float = ANSWER_S) -> Answer:
    """Ask for one suite and return the device's answer; without one, an answer that says so."""
    command_id = uuid.uuid4().hex
    client = Client(CallbackAPIVersion.VERSION2, f"benchd-page-{command_id}", protocol=MQTTProtocolVersion.MQTTv5)
    client.username_pw_set(broker.user, broker.password)
    topics, answers = Topics(device_id), list[Answer]()
    answer_to = topics.response(f"page/{command_id}")

    def ask(
        _client: Client, userdata: None, packet_id: int, reasons: list[ReasonCode], properties: Properties | None
    ) -> None:
        body = msgspec.json.encode({"id": command_id, "suite": suite, "sent_s": time.time()})
        client.publish(topics.command("run"), body, qos=1, properties=_asking(answer_to))

    def connected(
        _client: Client, userdata: None, flags: ConnectFlags, reason: ReasonCode, properties: Properties | None
    ) -> None:
        if reason.is_failure:
            answers.append(Answer(accepted=False, reason=f"{broker.address} refused the connection: {reason}"))
        else:
            client.subscribe(answer_to, qos=1)

    def take(_client: Client, userdata: None, message: MQTTMessage) -> None:
        answers.append(_answer(bytes(message.payload)))

    client.on_connect, client.on_subscribe, client.on_message = connected, ask, take
    try:
        secure(client, broker)
        client.connect(broker.host, broker.port, KEEP_ALIVE_S)
        deadline = time.monotonic() + timeout_s
        while not answers and time.monotonic() < deadline and client.loop(0.1) == MQTTErrorCode.MQTT_ERR_SUCCESS:
            pass
        client.disconnect()
    except (OSError, Ended) as error:
        reason = explain(broker.address, error) if isinstance(error, OSError) else str(error)
        return Answer(accepted=False, reason=reason)
    return answers[0] if answers else Answer(accepted=False, reason=f"no answer within {timeout_s:g} s")


def _asking(answer_to: str) -> Properties:
    properties = Properties(PacketTypes.PUBLISH)  # type: ignore[no-untyped-call]
    properties.ResponseTopic = answer_to
    properties.MessageExpiryInterval = EXPIRY_S
    return properties


def _answer(body: bytes) -> Answer:
    try:
        return msgspec.json.decode(body, type=Answer)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Answer(accepted=False, reason="an answer that cannot be read")
