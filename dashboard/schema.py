"""The tables of a collector's database, the same in SQLite and PostgreSQL; each row has a unique key.

Pages rely on the indices here: tests/dashboard/test_indices.py checks their query plans.
"""

import secrets
from typing import Any, NamedTuple, get_args, get_type_hints

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
    Table,
    Text,
    insert,
    inspect,
    select,
)
from sqlalchemy.sql.type_api import TypeEngine

from benchd.daemon.errors import UsageError
from benchd.dashboard.messages import Result

VERSION = 6
"""The version of the tables, which changes with them; a database with a different version is rejected."""

METADATA = MetaData()
_KINDS = {str: Text, int: BigInteger, float: Double}
_LOCK = 0x62636864  # PostgreSQL's advisory lock for creating the tables
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
    """Return a number that increases in the order of insertion, and a key that is the same in duplicate deliveries."""
    serial = BigInteger().with_variant(Integer, "sqlite")
    return [
        Column("id", serial, Identity(always=True), primary_key=True),
        Column("key", Text, unique=True, nullable=False),
    ]


def _key_number(name: str, kind: type[TypeEngine[Any]] = BigInteger) -> Column[Any]:
    return Column(name, kind, primary_key=True, autoincrement=False)


def _of_fields(row: type[NamedTuple], but: str) -> list[Column[Any]]:
    """Return the columns for the fields of a row."""
    hints = {name: get_args(hint) or (hint,) for name, hint in get_type_hints(row).items() if name != but}
    return [Column(name, _KINDS[kinds[0]], nullable=type(None) in kinds) for name, kinds in hints.items()]


# `site` is a random name of the database
version = Table("version", METADATA, *_required("number", BigInteger), *_required("site"), *_optional("tidied_s"))

RESULT = Table(
    "result",
    METADATA,
    *_numbered(),
    *_of_fields(Result, but="key"),
    Index("result_case", "device_id", "case_id", "id"),
    # for the setups of each case of a board, and the newest runs in each setup
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

# separate from the results, because tables never read bodies
BODY = Table("body", METADATA, *_keys("key"), *_required("body", LargeBinary))

DEVICE = Table("device", METADATA, *_keys("device_id"), *_optional("seen_s"))

DOCUMENT = Table(
    "document",
    METADATA,
    *_keys("device_id kind"),
    *_required("body", LargeBinary),
    *_required("arrived_s", Double),
    *_optional("state", Text),
    *_required("session"),
)

# one row per message: its values by metric, as JSON
TELEMETRY = Table(
    "telemetry",
    METADATA,
    *_keys("device_id"),
    _key_number("t_s", Double),
    *_required("body", LargeBinary),
    Index("telemetry_time", "t_s"),
)

EVENT = Table(
    "event",
    METADATA,
    *_numbered(),
    *_required("device_id name"),
    *_required("arrived_s", Double),
    *_required("body", LargeBinary),
    Index("event_name", "name", "arrived_s"),
    Index("event_device", "device_id", "arrived_s", "id"),
    Index("event_time", "arrived_s"),
    sqlite_autoincrement=True,
)

# `reader` is the last version of benchd that could not read the message
QUARANTINE = Table(
    "quarantine",
    METADATA,
    *_numbered(),
    *_required("topic reason reader"),
    *_required("arrived_s", Double),
    *_required("body", LargeBinary),
    sqlite_autoincrement=True,
)

COLLECTOR = Table(
    "collector",
    METADATA,
    *_keys("name"),
    *_required("seen_s", Double),
    *_optional("problem", Text),
)

# numbers of the results and events that have arrived: single numbers, joined into ranges once a minute
SPAN = Table(
    "span",
    METADATA,
    *_keys("device_id log"),
    _key_number("first"),
    *_required("last", BigInteger),
    *_optional("joined_s"),
)

# the notices that each address of --notify has been sent
NOTICE = Table("notice", METADATA, *_keys("channel key"), *_required("told_s", Double))


def create(connection: Connection) -> str:
    """Create the tables in an empty database and return its site.

    Raises UsageError for a database with a different schema or from a different program.
    """
    if connection.dialect.name == "postgresql":
        connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_LOCK})")
    present = inspect(connection).get_table_names()
    if not present:
        METADATA.create_all(connection)
        connection.execute(insert(version).values(number=VERSION, site=secrets.token_hex(8)))
        present = ["version", "quarantine"]
    if "version" not in present or "quarantine" not in present:
        raise UsageError("contains another program's tables; give an empty database")
    number = connection.execute(select(version.c.number)).scalar_one()
    if number == VERSION:
        return str(connection.execute(select(version.c.site)).scalar_one())
    raise UsageError(
        f"contains the tables of a different version ({number}, not {VERSION}); give an empty database, and save "
        f"the records of this one with {_EXPORT[connection.dialect.name]}"
    )
