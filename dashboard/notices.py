"""Notifies people of regressions, silent devices and failed checks by webhook, mail or anything else apprise supports.

Each configured address is a channel: it gets every notice once, whichever collector sends it, and messages no more
often than configured. New notices in between wait for the channel's next message.
"""

import hashlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple, get_args

import jinja2
import msgspec
from msgspec import Struct
from sqlalchemy import exists, select

from benchd.daemon.delivery.messages import Event
from benchd.daemon.errors import UsageError, needing
from benchd.dashboard import queries
from benchd.dashboard.limits import READ
from benchd.dashboard.messages import TEXT_LIMIT
from benchd.dashboard.schema import DEVICE, DOCUMENT, EVENT, RESULT
from benchd.dashboard.store import Store

if TYPE_CHECKING:
    from apprise import Apprise

Subject = Literal["regression", "silent", "failed check"]
LOOK_S = 15.0
CLOCK_STEP_S = 10.0  # a larger jump since the last look means that the clock was set or the machine slept
NEWS_S = 86400.0  # older events are not news, for example when notices are enabled for the first time
KEPT = 10 * READ  # maximum number of notices found within NEWS_S
TEMPLATE = Path(__file__).with_name("templates") / "notice.txt"


class Settings(Struct, frozen=True, forbid_unknown_fields=True):
    """The file for `--notify`. `urls` are apprise's; `silent_s` is how long a device may be silent without notice.

    `every_s` is the minimum time between two messages to a channel. `template` is a Jinja file whose first line is the
    title; it gets `notices`, each with `subject`, `device` and `detail`.
    """

    urls: Annotated[list[str], msgspec.Meta(min_length=1)]
    subjects: tuple[Subject, ...] = get_args(Subject)
    every_s: Annotated[float, msgspec.Meta(ge=0, le=NEWS_S / 2)] = 600.0
    silent_s: Annotated[float, msgspec.Meta(ge=queries.STALE_S, le=NEWS_S / 2)] = 600.0
    template: str = str(TEMPLATE)


class Notice(NamedTuple):
    """A single notice; the `key` identifies the occurrence, and is the same in all collectors."""

    key: str
    subject: Subject
    device: str
    detail: str


def read(path: Path) -> Settings:
    """Return the settings in a TOML file.

    Raises UsageError for an invalid file, address or template, NotAvailable without apprise.
    """
    try:
        settings = msgspec.toml.decode(path.read_bytes(), type=Settings)
        _message(settings, [Notice("", "silent", "a device", "a detail")])
    except (OSError, ValueError, jinja2.TemplateError) as error:
        raise UsageError(f"--notify {path}: {str(error).replace('`$.', '`')}") from error
    for number, url in enumerate(settings.urls, 1):
        if not _sender(url):
            scheme = url.partition(":")[0]
            raise UsageError(f"--notify {path}: urls, entry {number}: apprise does not support {scheme}:...")
    return settings


@contextmanager
def telling(store: Store, settings: Settings | None, collector: str, since_s: Callable[[], float]) -> Iterator[None]:
    """If there are settings, look for news in a separate thread while the block runs."""
    if settings is None:
        yield
        return
    stop = threading.Event()
    teller = Teller(store, settings, lambda text: sys.stderr.write(f"collector {collector}: {text}\n"), since_s)
    thread = threading.Thread(target=teller.run, args=[stop], name="benchd.notices", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


class Teller:
    """Sends news from `store` to every channel; failures are reported to `say` and retried.

    `since_s` returns the time since which the collector has been listening, or infinity while it cannot hear any
    device.
    """

    def __init__(
        self, store: Store, settings: Settings, say: Callable[[str], object], since_s: Callable[[], float]
    ) -> None:
        self._store, self._settings, self._say, self._since_s = store, settings, say, since_s
        self._clock_s, self._set_s = time.time() - time.monotonic(), 0.0
        # with the time, because a channel may be notified half a day later
        self._found: dict[str, tuple[float, Notice]] = {}

    def run(self, stop: threading.Event) -> None:
        """Send notices until `stop`; an unreachable database is reported by the collector."""
        while not stop.wait(LOOK_S):
            self._look()

    def _look(self) -> None:
        now_s = time.time()
        was_s, self._clock_s = self._clock_s, now_s - time.monotonic()
        if abs(self._clock_s - was_s) > CLOCK_STEP_S:
            self._set_s = now_s  # earlier messages are dated by a clock with a different setting
        try:
            self.tell(now_s)
        except Exception as error:  # whatever failed, the next look may succeed
            self._say(f"notices: {type(error).__name__}; trying again")

    def tell(self, now_s: float) -> None:
        """Send the news, in one message per channel."""
        self._keep_news(now_s)
        if not self._found:
            return
        for number, url in enumerate(self._settings.urls, 1):
            channel = hashlib.sha256(url.encode()).hexdigest()[:16]  # not the address, which may contain a password
            keys = self._store.claim(channel, list(self._found), now_s, self._settings.every_s)
            if keys and (failure := self._failure(url, [self._found[key][1] for key in keys])):
                self._store.unclaim(channel, keys)
                self._say(f"notices: urls, entry {number} {failure}; trying again")

    def _keep_news(self, now_s: float) -> None:
        since_s = max(self._since_s(), self._set_s)
        for notice in news(self._store, self._settings, now_s, since_s):
            self._found[notice.key] = now_s, notice
        recent = [(key, entry) for key, entry in self._found.items() if entry[0] > now_s - NEWS_S]
        self._found = dict(recent[-KEPT:])

    def _failure(self, url: str, notices: Sequence[Notice]) -> str:
        """Send the notices and return why that failed, or an empty string."""
        try:
            title, body = _message(self._settings, notices)
            # otherwise mail would contain HTML from devices
            accepted = _sender(url).notify(body, title, body_format="text")
        except Exception as error:  # for example caused by an edited template: the claim must be released
            return f"failed with {type(error).__name__}"
        return "" if accepted else f"did not accept {len(notices)}"


def news(store: Store, settings: Settings, now_s: float, since_s: float) -> Iterator[Notice]:
    """Yield the news of the last day, if still true; the collector has been listening since `since_s`."""
    names = queries.names(store)
    by_subject: dict[Subject, Callable[[], Iterator[tuple[str, str, str]]]] = {
        "regression": lambda: _regressions(store, now_s - NEWS_S),
        "silent": lambda: _silent(store, now_s, since_s, settings.silent_s),
        "failed check": lambda: _failed(store, now_s - NEWS_S),
    }
    for subject in settings.subjects:
        for device_id, occurrence, detail in by_subject[subject]():
            yield Notice(f"{subject}:{device_id}:{occurrence}", subject, names.get(device_id, device_id), detail)


def _regressions(store: Store, since_s: float) -> Iterator[tuple[str, str, str]]:
    """Yield each regression since `since_s`."""
    wanted = select(EVENT.c.device_id, EVENT.c.key, EVENT.c.body)
    wanted = wanted.where(EVENT.c.name == "regression", EVENT.c.arrived_s > since_s)
    for device_id, key, body in reversed(store.read(wanted.order_by(EVENT.c.id.desc()).limit(KEPT))):
        yield device_id, key, msgspec.json.decode(body, type=Event).detail[:TEXT_LIMIT]


def _silent(store: Store, now_s: float, since_s: float, silent_s: float) -> Iterator[tuple[str, str, str]]:
    """Yield each device with a service that has been silent for `silent_s` although a collector was listening."""
    if since_s > now_s - silent_s:
        return
    has_service = exists().where(
        DOCUMENT.c.device_id == DEVICE.c.device_id, DOCUMENT.c.kind == "status", DOCUMENT.c.state.is_not(None)
    )
    wanted = select(DEVICE.c.device_id, DEVICE.c.seen_s).where(has_service)
    wanted = wanted.where(DEVICE.c.seen_s < now_s - silent_s, DEVICE.c.seen_s > now_s - NEWS_S)
    for device_id, seen_s in store.read(wanted.order_by(DEVICE.c.device_id).limit(READ)):
        yield device_id, repr(seen_s), f"nothing heard for {(now_s - seen_s) / 60:.0f} minutes"


def _failed(store: Store, since_s: float) -> Iterator[tuple[str, str, str]]:
    """Yield each case that failed its check, once per setup of its device."""
    columns = [RESULT.c[name] for name in ("device_id", "case_id", "tool_version", "fingerprint")]
    wanted = select(*columns).distinct().where(RESULT.c.checked == "failed", RESULT.c.arrived_s > since_s)
    for device_id, case_id, tool_version, fingerprint in store.read(wanted.order_by(*columns).limit(READ)):
        yield device_id, f"{case_id}:{tool_version}:{fingerprint}", f"{case_id}: its answers differ from float64's"


def _message(settings: Settings, notices: Sequence[Notice]) -> tuple[str, str]:
    plain = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True)  # noqa: S701 - not HTML
    template = plain.from_string(Path(settings.template).read_text(encoding="utf-8"))
    title, _, body = template.render(notices=notices).strip().partition("\n")
    return title, body.strip() or title


def _sender(url: str) -> "Apprise":
    """Return the sender for this address, which is empty, and therefore false, if apprise does not support it."""
    with needing("notify"):
        from apprise import Apprise  # noqa: PLC0415 - most collectors tell nobody
    sender = Apprise()
    sender.add(url)
    return sender
