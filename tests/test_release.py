"""What a release says of itself; `make release` builds one and proves its files."""

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CHANGELOG = "# Changelog\n\n## [Unreleased]\n\n- soon\n\n## [0.1.0] - 2026-01-01\n\n- first\n"


@pytest.mark.parametrize(("version", "said"), [("0.1.0", "- first"), ("0.2.0", "- soon")])
def test_the_notes_are_those_of_the_version_or_else_of_what_is_unreleased(version, said):
    notes = runpy.run_path(str(ROOT / ".ci/release.py"))["notes"]
    assert notes(CHANGELOG, version) == f"# benchd {version}\n\n{said}\n"
