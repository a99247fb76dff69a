"""Stores of both kinds, empty for each test, and a browser."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest
from browsing import running_browser
from postgres import running_postgres

from benchd.dashboard import runs
from benchd.dashboard.store import Store

# whose subject is what a database answers; the others ask a database of one kind, and of both in `make test-slow`
OF_BOTH = ("test_store", "test_queries", "test_answers", "test_gaps", "test_indices")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "[postgresql" in item.nodeid and item.path.parent == Path(__file__).parent and item.path.stem not in OF_BOTH:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """One Chromium for a file of tests: while it runs no other event loop can."""
    with running_browser() as chromium:
        yield chromium


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """The URL of a PostgreSQL server for the whole run; its databases are the tests' to make."""
    with running_postgres() as server:
        yield server.url


@pytest.fixture
def empty_postgres(postgres: str) -> str:
    """The URL of a database without any table."""
    with psycopg.connect(postgres, autocommit=True) as connection:
        connection.execute("DROP SCHEMA public CASCADE")
        connection.execute("CREATE SCHEMA public")
    return postgres


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty database of each kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/dashboard.db"
    database_url: str = request.getfixturevalue("empty_postgres")
    return database_url


@pytest.fixture
def store(url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """An empty store of each kind; one update reads all its boards, however slow the machine is."""
    monkeypatch.setattr(runs, "BUDGET_S", 3600.0)
    with closing(Store(url)) as database:
        yield database
