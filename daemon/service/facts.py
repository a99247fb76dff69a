"""`state.json`: the facts that the service must know after a restart, replaced as a whole.

Records in the log after `applied_seq` are processed at the next start.
"""

from contextlib import suppress
from pathlib import Path

import msgspec
from msgspec import Struct

from benchd.daemon.delivery.messages import DeployedFolder, Judgement
from benchd.daemon.journal import explaining
from benchd.daemon.machine import folders
from benchd.daemon.records import Case
from benchd.daemon.service.schedule import Schedule

STATE = "state.json"


class Standing(Struct, frozen=True, kw_only=True):
    """The state of a case: its last SLOWER runs, each a day after the previous one, and the time of the last.

    `slower` is a regression, `stale` a fingerprint that none of the pinned runs has.
    """

    doubted: list[str] = []
    doubted_wall: str | None = None
    doubted_boot: str | None = None
    doubted_mono_ns: int | None = None
    slower: Judgement | None = None
    stale: str | None = None


class Running(Struct, frozen=True):
    """The running case, so that the next service can report that its predecessor died during it."""

    suite_id: str
    case: Case
    preset: str
    boot_id: str
    t_wall: str
    t_mono_ns: int


class Verification(Struct, frozen=True):
    """The state of a shipped folder: when it was verified, with which `fingerprint`, and what was published.

    A broken promise stays `is_broken` until a verdict says that it is kept again, or the folder changes.
    """

    verified_s: float
    fingerprint: str
    published: DeployedFolder
    is_broken: bool


class Facts(Struct):
    """The facts; `standings` omits cases in the default state.

    `retained` lists the topics retained on the broker, and `commands` the ids of accepted commands.
    """

    schedule: Schedule = Schedule()
    standings: dict[str, Standing] = {}
    running: Running | None = None
    shipped: dict[str, Verification] = {}
    commands: list[str] = []
    retained: list[str] = []
    log: str = ""
    applied_seq: int = 0


class FactsFile:
    """The file; `now` is the content to save, and `lost` says why earlier content could not be used."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._saved, self.now, self.lost = b"", Facts(), ""
        with explaining(path), suppress(FileNotFoundError):
            self._saved = path.read_bytes()
            try:
                self.now = msgspec.json.decode(self._saved, type=Facts)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                path.replace(aside := path.with_name(f"{path.name}.damaged"))
                self.lost = (
                    f"{path} cannot be read ({error}) and is now {aside.name}; the service starts without its history"
                )

    def save(self) -> None:
        """Write the facts if they have changed; raise UsageError, or Full, if that fails."""
        now = msgspec.json.encode(self.now)
        if now != self._saved:
            with explaining(self._path):
                folders.write_through(self._path, now)
            self._saved = now
