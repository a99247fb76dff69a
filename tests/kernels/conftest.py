"""The ops of these tests have their equations as one implementation more, "reference"."""

import importlib

import pytest


@pytest.fixture(scope="session", autouse=True)
def _references() -> None:
    importlib.import_module("references")  # not before: how Triton runs is settled once pytest is configured
