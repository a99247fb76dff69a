"""The tables of a collector's database, the same in SQLite and PostgreSQL; each row has a key of its own.

Pages find what they show by the indices here: tests/dashboard/test_indices.py holds their plans.
"""

from typing import Any

from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    Double,
    Identity,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    Table,
    Text,
    insert,
    inspect,
    select,
)
from sqlalchemy.sql.type_api import TypeEngine

from benchd.daemon.errors import UsageError

VERSION = 1
"""Changes with the tables; a database of another one is refused."""

METADATA = MetaData()
_LOCK = 0x62636864  # PostgreSQL's advisory lock of whoever creates the tables
_EXPORT = {
    "sqlite": 'sqlite3 FILE "SELECT CAST(body AS TEXT) FROM body" > records.jsonl',
    "postgresql": "psql URL -Atc \"SELECT convert_from(body, 'UTF8') FROM body\" > records.jsonl",
}


def _required(names: str, kind: type[TypeEngine[Any]] = Text) -> list[Column[Any]]:
    return [Column(name, kind, nullable=False) for name in names.split()]


def _optional(names: str, kind: type[TypeEngine[Any]] = Double) -> list[Column[Any]]:
    return [Column(name, kind) for name in names.split()]


def _keys(names: str) -> list[Column[Any]]:
    return [Column(name, Text, primary_key=True) for name in names.split()]


def _numbered() -> list[Column[Any]]:
    """Return a number that counts up in the order of insertion, and a key that a second delivery repeats."""
    serial = BigInteger().with_variant(Integer, "sqlite")
    return [
        Column("id", serial, Identity(always=True), primary_key=True),
        Column("key", Text, unique=True, nullable=False),
    ]


def _key_number(name: str, kind: type[TypeEngine[Any]] = BigInteger) -> Column[Any]:
    return Column(name, kind, primary_key=True, autoincrement=False)


version = Table("version", METADATA, *_required("number", BigInteger), *_optional("tidied_s"))

result = Table(
    "result",
    METADATA,
    *_numbered(),
    *_required("device_id run_id suite_id case_id model variant"),
    *_required("batch_size", BigInteger),
    *_required("status t_wall flags hardware fingerprint tool_version"),
    *_required("arrived_s measured_s", Double),
    *_optional("median_ms low_ms high_ms p99_ms throughput_per_s energy_mj energy_err_mj x_of_floor"),
    *_optional("accuracy_top1 accuracy_low accuracy_high accuracy_drop"),
    *_optional("reason energy_scope checked", Text),
    Index("result_case", "device_id", "case_id", "id"),
    # the setups of each case of a board, and the newest runs in each
    Index("result_setup", "device_id", "case_id", "tool_version", "fingerprint", "measured_s", "arrived_s"),
    Index("result_measured", "device_id", "case_id", "measured_s", "arrived_s", "id"),
    Index("result_time", "measured_s", "arrived_s", "id"),
    *(
        Index(f"result_{name}_time", column, "measured_s", "arrived_s", "id")
        for name, column in {
            "device": "device_id",
            "model": "model",
            "variant": "variant",
            "status": "status",
            "checked": "checked",
        }.items()
    ),
    sqlite_autoincrement=True,
)

# apart from the results, because tables never read it
body = Table("body", METADATA, *_keys("key"), *_required("body", LargeBinary))

device = Table("device", METADATA, *_keys("device_id"), *_optional("seen_s"))

document = Table(
    "document",
    METADATA,
    *_keys("device_id kind"),
    *_required("body", LargeBinary),
    *_required("arrived_s", Double),
    *_optional("state", Text),
    *_required("session", BigInteger),
)

# pages ask for a device, then a time
telemetry = Table(
    "telemetry",
    METADATA,
    *_keys("device_id metric"),
    _key_number("t_s", Double),
    PrimaryKeyConstraint("device_id", "t_s", "metric"),
    *_required("value", Double),
    Index("telemetry_time", "t_s"),
    postgresql_partition_by="RANGE (t_s)",
)

telemetry_minute = Table(
    "telemetry_minute",
    METADATA,
    *_keys("device_id metric"),
    _key_number("t_s"),
    PrimaryKeyConstraint("device_id", "t_s", "metric"),
    *_required("samples", BigInteger),
    *_required("total minimum maximum", Double),
    Index("telemetry_minute_time", "t_s"),
    postgresql_partition_by="RANGE (t_s)",
)

event = Table(
    "event",
    METADATA,
    *_numbered(),
    *_required("device_id"),
    *_required("arrived_s", Double),
    *_required("body", LargeBinary),
    Index("event_device", "device_id", "arrived_s", "id"),
    Index("event_time", "arrived_s"),
    sqlite_autoincrement=True,
)

# `reader` is the last version of benchd that could not read it
quarantine = Table(
    "quarantine",
    METADATA,
    *_numbered(),
    *_required("topic reason reader"),
    *_required("arrived_s", Double),
    *_required("body", LargeBinary),
    sqlite_autoincrement=True,
)

# `message_s` is when its last message arrived
collector = Table(
    "collector",
    METADATA,
    *_keys("name"),
    *_required("seen_s", Double),
    *_optional("problem", Text),
    *_optional("message_s"),
    *_required("starts", BigInteger),
)

# the numbers of the results that have arrived, and the ranges that they are joined to once a minute
arrived = Table("arrived", METADATA, *_keys("device_id stream"), _key_number("seq"))

span = Table(
    "span",
    METADATA,
    *_keys("device_id stream"),
    _key_number("first"),
    *_required("last", BigInteger),
    *_required("joined_s", Double),
)

# what each address of --notify has been told
notice = Table("notice", METADATA, *_keys("channel key"), *_required("told_s", Double))


def create(connection: Connection) -> None:
    """Create the tables in an empty database; raise UsageError for one of another schema or another program."""
    if connection.dialect.name == "postgresql":
        connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_LOCK})")
    present = inspect(connection).get_table_names()
    if not present:
        METADATA.create_all(connection)
        connection.execute(insert(version).values(number=VERSION))
        return
    if "version" not in present or "quarantine" not in present:
        raise UsageError("contains tables of another program; give an empty database")
    number = connection.execute(select(version.c.number)).scalar_one()
    if number != VERSION:
        raise UsageError(
            f"has the tables of another benchd (version {number}, not {VERSION}); give an empty database, and save the "
            f"records of this one with {_EXPORT[connection.dialect.name]}"
        )
