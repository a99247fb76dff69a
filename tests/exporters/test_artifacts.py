"""Artifacts through real processes, a full disk, damage and pruning: whole and checked, or absent."""

import errno
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from benchd.exporters import artifacts
from benchd.exporters.artifacts import ArtifactError, ArtifactStore, key_of

FACTS = {"model": "vim_tiny", "precision": "fp16", "format": "onnx", "options": {"stride": 16}, "torch": "2.8.0"}
KEY = key_of(FACTS)
CONTENT = bytes(range(256)) * 40
GROUP = 65533

PRODUCE = """
import sys
from pathlib import Path
from benchd.exporters.artifacts import ArtifactStore
def writer(path):
    path.write_bytes(b"first half, ")
    print("writing", flush=True)
    sys.stdin.readline()
    with path.open("ab") as file:
        file.write(b"second half")
made = ArtifactStore(Path(sys.argv[1])).produce({"model": "shared", "format": "onnx"}, writer)
print("reused" if made.reused else "made", made.path.read_bytes().decode(), flush=True)
"""
SHARED = key_of({"model": "shared", "format": "onnx"})


def write(path):
    path.write_bytes(CONTENT)


def facts_of(name):
    return {"model": name, "format": "onnx"}


def filled(folder, *names):
    """Put one artifact a name, in this order of use."""
    store = ArtifactStore(folder)
    for age, name in enumerate(reversed(names), start=1):
        artifact = store.put(facts_of(name), write)
        then = time.time_ns() - age * 10**9
        os.utime(artifact.path.with_name("metadata.json"), ns=(then, then))


def models(store):
    return {artifact.metadata.facts["model"] for artifact in store.list()}


def files(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_a_key_is_readable_and_depends_on_every_fact_but_not_on_their_order():
    assert KEY.startswith("vim_tiny-fp16-onnx-")
    assert key_of(dict(reversed(FACTS.items()))) == KEY
    assert len({KEY, *(key_of({**FACTS, name: "other"}) for name in FACTS), key_of({**FACTS, "new": 1})}) == 7
    assert key_of({"model": "../a b/c.onnx"}).startswith(".._a_b_c.onnx-")


def test_what_was_put_is_got_with_all_that_is_known_of_it(tmp_path):
    store = ArtifactStore(tmp_path / "deep" / "store")
    assert store.get(KEY) is None
    artifact = store.put(FACTS, write)
    stored = store.get(KEY)
    assert (artifact.reused, stored.reused) == (False, True)
    assert stored.path.read_bytes() == CONTENT
    assert stored.path.name == "model.onnx"
    assert stored.metadata.facts == FACTS
    assert stored.metadata.sha256 == hashlib.sha256(CONTENT).hexdigest()
    assert stored.metadata.bytes == len(CONTENT)
    assert stored.metadata.made_on
    assert stored.metadata.versions["python"] == ".".join(map(str, sys.version_info[:3]))
    assert store.notes == []
    listed = {path.relative_to(tmp_path).as_posix() for path in files(tmp_path)}
    assert listed == {f"deep/store/{KEY}/model.onnx", f"deep/store/{KEY}/metadata.json"}


def test_the_second_time_nothing_is_made_and_what_the_writer_told_is_kept(tmp_path):
    facts = {"nodes": 134, "parity": {"error_share": 2.7e-7}, "load_s": None, "input_shape": ["batch", 3, 32, 32]}

    def telling(path):
        write(path)
        return facts

    store = ArtifactStore(tmp_path)
    produced = store.produce(FACTS, telling)
    assert (produced.reused, produced.metadata.measured) == (False, facts)
    store = ArtifactStore(tmp_path)
    again = store.produce(FACTS, lambda path: pytest.fail("made again"))
    assert (again.reused, again.metadata.measured) == (True, facts)
    assert [artifact.metadata.measured for artifact in store.list()] == [facts]
    store.put(FACTS, lambda path: path.write_bytes(b"new"))
    replaced = store.get(KEY)
    assert (replaced.path.read_bytes(), replaced.metadata.measured) == (b"new", {})


def test_a_store_that_is_only_to_be_read_stays_as_it_is(tmp_path):
    filled(tmp_path, "a", "b")
    cut("model.onnx", 5000)(tmp_path / key_of(facts_of("b")))
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    store = ArtifactStore(tmp_path, read_only=True)
    assert store.get(key_of(facts_of("a"))).path.read_bytes() == CONTENT
    assert store.get(key_of(facts_of("b"))) is None
    assert "has 5000 bytes" in store.notes[0]
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def flip(entry):
    content = bytearray((entry / "model.onnx").read_bytes())
    content[777] ^= 1
    (entry / "model.onnx").write_bytes(content)


def change_a_fact(entry):
    path = entry / "metadata.json"
    path.write_text(path.read_text().replace("vim_tiny", "vim_huge"))


def cut(name, size):
    return lambda entry: os.truncate(entry / name, size)


DAMAGE = {
    "a flipped bit": (flip, "SHA-256"),
    "half the content": (cut("model.onnx", 5000), "has 5000 bytes, not 10240"),
    "no content": (lambda entry: (entry / "model.onnx").unlink(), "content cannot be read"),
    "half the metadata": (cut("metadata.json", 60), "metadata cannot be read"),
    "empty metadata": (cut("metadata.json", 0), "metadata cannot be read"),
    "no metadata": (lambda entry: (entry / "metadata.json").unlink(), "metadata cannot be read"),
    "another fact": (change_a_fact, "metadata cannot be read"),
}


def with_data(path):
    write(path)
    path.with_name(f"{path.name}{artifacts.DATA}").write_bytes(CONTENT[::-1])


def test_weights_in_a_second_file_are_part_of_an_artifact(tmp_path):
    store = ArtifactStore(tmp_path)
    artifact = store.put(FACTS, with_data)
    assert artifact.metadata.bytes == 2 * len(CONTENT)
    assert artifact.metadata.sha256 == hashlib.sha256(CONTENT + CONTENT[::-1]).hexdigest()
    _, data = artifacts.parts(artifact.path)
    store = ArtifactStore(tmp_path)
    assert store.get(KEY) is not None
    data.write_bytes(CONTENT)
    store = ArtifactStore(tmp_path)
    assert store.get(KEY) is None
    assert store.notes == [f"{KEY}: its bytes have changed since it was written (SHA-256); removed"]


@pytest.mark.parametrize(("damage", "reason"), DAMAGE.values(), ids=DAMAGE)
def test_what_is_damaged_is_absent_said_and_made_again(tmp_path, damage, reason):
    store = ArtifactStore(tmp_path)
    store.put(FACTS, write)
    damage(tmp_path / KEY)
    store = ArtifactStore(tmp_path)
    assert store.get(KEY) is None
    assert reason in store.notes[0]
    assert not (tmp_path / KEY).exists()
    store.put(FACTS, write)
    damage(tmp_path / KEY)
    store = ArtifactStore(tmp_path)
    artifact = store.produce(FACTS, write)
    assert (artifact.reused, artifact.path.read_bytes()) == (False, CONTENT)
    assert reason in artifact.note


def start(folder):
    command = [sys.executable, "-c", PRODUCE, str(folder)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)


def go_on(process):
    process.stdin.write("\n")
    process.stdin.flush()


def test_of_two_processes_that_make_the_same_the_later_one_stays(tmp_path):
    store = ArtifactStore(tmp_path)
    with start(tmp_path) as first, start(tmp_path) as second:
        for process in (first, second):
            assert process.stdout.readline() == "writing\n"
        assert store.get(SHARED) is None  # half of it is written, and nobody sees it
        for process in (first, second):
            go_on(process)
            assert process.stdout.readline() == "made first half, second half\n"
            made_at = store.get(SHARED).path.stat().st_ino
        assert store.produce(facts_of("shared"), write).path.stat().st_ino == made_at
    assert {path.parent.name for path in files(tmp_path)} == {SHARED}


def test_a_killed_process_leaves_nothing_that_counts(tmp_path):
    store = ArtifactStore(tmp_path)
    with start(tmp_path) as process:
        assert process.stdout.readline() == "writing\n"
        store.prune(0)
        assert len(files(tmp_path)) == 1, "a living process goes on with it"
        process.kill()
    assert not store.produce(facts_of("shared"), write).reused
    (left,) = (tmp_path / ".making").iterdir()
    os.utime(left, (1, 1))
    store.prune(10**9)
    assert {path.parent.name for path in files(tmp_path)} == {SHARED}


def test_the_least_recently_used_goes_first(tmp_path):
    filled(tmp_path, "a", "b", "c")
    store = ArtifactStore(tmp_path)
    store.get(key_of(facts_of("a")))
    store = ArtifactStore(tmp_path)
    assert store.prune(2 * len(CONTENT)) == (key_of(facts_of("b")),)
    assert models(store) == {"a", "c"}
    assert store.prune(2 * len(CONTENT)) == ()


def test_a_limit_never_takes_what_was_used_in_the_last_hour(tmp_path):
    filled(tmp_path, "a", "b")
    os.utime(tmp_path / key_of(facts_of("a")) / "metadata.json", (1, 1))
    store = ArtifactStore(tmp_path, limit_bytes=1)
    artifact = store.produce(FACTS, write)
    assert artifact.path.read_bytes() == CONTENT
    assert models(store) == {"b", "vim_tiny"}
    store.prune(0)
    assert models(store) == set()


def test_what_was_made_for_one_run_goes_when_another_run_makes_something(tmp_path):
    def made(run):
        facts = facts_of("own") | {"suite_id": run}
        store = ArtifactStore(tmp_path, limit_bytes=10**9)
        return store.produce(facts, write)

    filled(tmp_path, "a")
    assert [made("one").reused, made("one").reused] == [False, True]
    second = made("two")
    store = ArtifactStore(tmp_path)
    assert {artifact.key for artifact in store.list()} == {key_of(facts_of("a")), second.key}


def test_pruning_leaves_what_is_not_ours(tmp_path):
    filled(tmp_path, "a")
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "my-models").mkdir()
    store = ArtifactStore(tmp_path)
    store.prune(0)
    assert store.list() == ()
    assert (tmp_path / "notes.txt").exists()
    assert (tmp_path / "my-models").exists()


@pytest.mark.parametrize("damage", [name for name in DAMAGE if "metadata" in name])
def test_pruning_drops_what_lacks_metadata_and_the_rest_stays(tmp_path, damage):
    filled(tmp_path, "a", "b")
    DAMAGE[damage][0](tmp_path / key_of(facts_of("a")))
    store = ArtifactStore(tmp_path, limit_bytes=10**9)
    produced = store.produce(FACTS, write)
    assert {artifact.key for artifact in store.list()} == {key_of(facts_of("b")), produced.key}
    assert not (tmp_path / key_of(facts_of("a"))).exists()


def test_a_full_disk_is_named_with_what_is_needed_and_leaves_nothing(small_disk):
    store = ArtifactStore(small_disk)
    store.put(FACTS, write)
    facts = facts_of("big")
    with pytest.raises(ArtifactError) as refused:
        store.produce(facts, lambda path: path.write_bytes(bytes(9_000_000)))
    assert all(words in str(refused.value) for words in (str(small_disk), "needs more than 4.", "--prune"))
    assert {path.parent.name for path in files(small_disk)} == {KEY}
    assert store.get(KEY).path.read_bytes() == CONTENT


def full_behind_another_error(path):
    path.write_bytes(CONTENT)
    try:
        raise OSError(errno.ENOSPC, "No space left on device")
    except OSError as error:
        raise RuntimeError("the export failed") from error


def failing(path):
    path.write_bytes(b"half")
    raise LookupError("no such op")


def not_json(path):
    write(path)
    return {"module": object()}


def two_files(path):
    write(path)
    path.with_name("model.txt").write_bytes(b"more")


@pytest.mark.parametrize(
    ("writer", "error", "message"),
    [
        (lambda path: None, ArtifactError, "wrote nothing"),
        (lambda path: path.touch(), ArtifactError, "instead of one file"),
        (lambda path: path.mkdir(), ArtifactError, "instead of one file"),
        (two_files, ArtifactError, "wrote model.onnx, model.txt, instead of one file model.onnx"),
        (full_behind_another_error, ArtifactError, "disk full"),
        (failing, LookupError, "no such op"),
        (not_json, TypeError, "object"),
    ],
    ids=["nothing", "empty", "folder", "two", "full", "failing", "not JSON"],
)
def test_a_writer_that_fails_is_told_and_the_earlier_one_stays(tmp_path, writer, error, message):
    store = ArtifactStore(tmp_path)
    store.put(FACTS, write)
    with pytest.raises(error, match=message):
        store.put(FACTS, writer)
    assert store.get(KEY).path.read_bytes() == CONTENT
    assert len(files(tmp_path)) == 2


def test_a_wrong_key_or_folder_is_refused(tmp_path):
    store = ArtifactStore(tmp_path)
    for key in ("../../etc/passwd", "", "vim_tiny", "a/b-" + "0" * 32):
        with pytest.raises(ValueError, match="not a key"):
            store.get(key)
    (tmp_path / "file").touch()
    with pytest.raises(ArtifactError, match=r"file: .*; check that it"):
        ArtifactStore(tmp_path / "file").produce(FACTS, write)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_folder_that_can_only_be_read_gives_what_it_has():
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        filled(folder, "a", "b")
        flip(folder / key_of(facts_of("b")))
        code = (
            "import json, os, sys\n"
            "from pathlib import Path\n"
            "from benchd.exporters.artifacts import ArtifactStore\n"
            "os.setgroups([]), os.setgid(65534), os.setuid(65534)\n"
            "store = ArtifactStore(Path(sys.argv[1]))\n"
            "print(json.dumps([[store.get(key) is not None for key in sys.argv[2:]], store.notes]))\n"
        )
        keys = [key_of(facts_of(name)) for name in "ab"]
        command = [sys.executable, "-c", code, str(folder), *keys]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        presence, (note,) = json.loads(done.stdout)
        assert presence == [True, False]
        assert "SHA-256" in note


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_members_of_a_group_share_a_folder_and_keep_from_each_other_what_their_umask_says():
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "store")
        folder.mkdir()
        os.chown(folder, 0, GROUP)
        folder.chmod(0o2775)
        Path(name).chmod(0o755)
        for umask, label in ((0o007, "a"), (0o022, "b"), (0o077, "c")):
            before = os.umask(umask)
            filled(folder, label)
            os.umask(before)
        code = (
            "import os, sys\n"
            "from pathlib import Path\n"
            "from benchd.exporters.artifacts import ArtifactStore\n"
            "os.setgroups([]), os.setgid(int(sys.argv[2])), os.setuid(65534)\n"
            "print(*ArtifactStore(Path(sys.argv[1])).prune(0))\n"
        )
        command = [sys.executable, "-c", code, str(folder), str(GROUP)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        assert done.stdout.split() == [key_of(facts_of("a"))]
