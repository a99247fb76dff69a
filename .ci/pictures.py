"""Creates the pictures of README.md and docs: python .ci/pictures.py RECORDS FOLDER.

The table and the report show the newest record of some cases. The dashboard's pictures show `benchd demo`, which
measures this machine together with seven simulated boards. Every phrase that a caption quotes must appear in its
picture.
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

from playwright.sync_api import Browser, sync_playwright
from rich.console import Console

from benchd.daemon.records import Record, encode
from benchd.daemon.reporting import report
from benchd.daemon.reporting.console import print_decisions, print_table
from benchd.daemon.verdicts import results
from benchd.daemon.verdicts.recommend import Requirements, decide

COLUMNS = 150
VARIANTS = {
    "vim_tiny": ("eager", "amp", "onnxruntime", "custom"),
    "snn_onepass": ("eager", "compile", "onnxruntime", "custom"),
}
WEB_FONT = re.compile(r"@font-face \{.*?\}", re.DOTALL)
HOST = "127.0.0.1"
STORY_MS = 120_000  # everything that a caption quotes must be visible by then
PAGES = {
    "dashboard": "/",
    "fleet": "/fleet",
    "device": "/device/simulated-desktop-gpu-2",
    "history": "/history/simulated-orin-agx-2/vim_tiny,tensorrt-fp16,b1",
}
VIEWPORT = {"width": 1280, "height": 800}


def chosen(path: Path, batch_size: int) -> list[Record]:
    """Return the newest record of each of our cases with this batch size."""
    newest = {record.case_id: record for record in results.read(path)}
    names = [f"{model},{variant},b{batch_size}" for model, variants in VARIANTS.items() for variant in variants]
    return [newest[name] for name in names]


def table(found: list[Record], picture: Path) -> None:
    """Draw what `bench-once` prints at the end."""
    console = Console(file=StringIO(), record=True, width=COLUMNS, highlight=False)
    print_table(console, found)
    text = StringIO()
    print_decisions(text, decide(found, Requirements()), as_json=False)
    console.print(text.getvalue().rstrip(), markup=False)
    shown = console.export_text(clear=False)
    require({words: words in shown for words in quoted(picture)}, picture)
    # a picture must not load anything from other hosts
    drawn = WEB_FONT.sub("", console.export_svg(title="bench-once"))
    picture.write_text(drawn, encoding="utf-8")


@contextmanager
def demo(port: int) -> Iterator[None]:
    """Run `benchd demo` with its own machine lock and folders."""
    with TemporaryDirectory() as folder:
        own = dict.fromkeys(("BENCHD_LOCK_DIR", "XDG_CACHE_HOME", "XDG_STATE_HOME"), folder)
        command = [sys.executable, "-m", "benchd.daemon.cli", "demo", "--port", str(port)]
        with subprocess.Popen(command, env=os.environ | own) as process:
            try:
                while not answers(port):
                    time.sleep(1.0)
                yield
            finally:
                process.send_signal(signal.SIGINT)


def answers(port: int) -> bool:
    """Return whether something listens on a port."""
    with socket.socket() as probe:
        return probe.connect_ex((HOST, port)) == 0


def quoted(picture: Path) -> set[str]:
    """Return the phrases that a picture's captions quote."""
    files = subprocess.run(["git", "ls-files", "*.md"], check=True, capture_output=True, text=True).stdout.split()
    captions = re.findall(
        rf"!\[([^]]*)\]\([^)]*{re.escape(picture.name)}\)", "".join(Path(one).read_text() for one in files)
    )
    return {words for caption in captions for words in re.findall('"(.*?)"', " ".join(caption.split()))}


def require(is_seen: dict[str, bool], picture: Path) -> None:
    """Exit with an error if a caption quotes something that its picture does not show."""
    if lacking := [words for words, seen in is_seen.items() if not seen]:
        sys.exit(f"{picture.name} does not show what its caption quotes: {', '.join(lacking)}")


def screenshot(browser: Browser, address: str, picture: Path) -> None:
    """Draw the upper part of a page once it shows what its captions quote."""
    page = browser.new_page(viewport=VIEWPORT)
    page.goto(address)
    page.get_by_role("heading", level=1).wait_for()
    places = {words: page.get_by_text(words).locator("visible=true").first for words in quoted(picture)}
    for place in places.values():
        place.wait_for(timeout=STORY_MS)
    page.wait_for_timeout(3000)  # the charts are drawn by then
    boxes = {words: place.bounding_box() for words, place in places.items()}
    require({words: bool(box and box["y"] < VIEWPORT["height"]) for words, box in boxes.items()}, picture)
    page.screenshot(path=picture)
    page.close()


def free_port() -> int:
    """Return a free port."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def main(records: Path, folder: Path) -> None:
    """Write all pictures into `folder`."""
    folder.mkdir(exist_ok=True)
    table(chosen(records, 1), folder / "table.svg")
    options = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as started, TemporaryDirectory() as out:
        browser = started.chromium.launch(executable_path=shutil.which("chromium"), args=options)
        shown = Path(out) / "records.jsonl"
        shown.write_bytes(b"".join(encode(one) + b"\n" for one in (*chosen(records, 1), *chosen(records, 4))))
        report.report([shown], ["html"], Path(out), StringIO())
        screenshot(browser, (Path(out) / "report.html").as_uri(), folder / "report.png")
        port = free_port()
        with demo(port):
            for name, path in PAGES.items():
                screenshot(browser, f"http://{HOST}:{port}{path}", folder / f"{name}.png")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:3]))
