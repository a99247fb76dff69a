"""Artifacts through real processes, a full disk, damage and pruning: whole and checked, or absent."""

import errno
import hashlib
import json
import os
import stat
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from waiting import WAIT_S

from benchd.exporters import artifacts
from benchd.exporters.artifacts import ArtifactError, ArtifactStore, key_of

FACTS = {"model": "vim_tiny", "precision": "fp16", "format": "onnx", "options": {"stride": 16}, "torch": "2.8.0"}
KEY = key_of(FACTS)
CONTENT = bytes(range(256)) * 40
GROUP = 65533
LOCKS = [0o660, 0o644, 0o600]

PRODUCE = """
import sys, time
from pathlib import Path
from benchd.exporters.artifacts import ArtifactStore, key_of
facts = {"model": "shared", "format": "onnx"}
def writer(path):
    path.write_bytes(b"first half, ")
    print("writing", flush=True)
    sys.stdin.readline()
    with path.open("ab") as file:
        file.write(b"second half")
with ArtifactStore(Path(sys.argv[1])) as store:
    made = store.produce(key_of(facts), facts, writer)
    print("reused" if made.reused else "made", made.path.read_bytes().decode(), flush=True)
    sys.stdin.readline()
"""
SHARED = key_of({"model": "shared", "format": "onnx"})


def write(path):
    path.write_bytes(CONTENT)


def facts_of(name):
    return {"model": name, "format": "onnx"}


def filled(folder, *names):
    """Put one artifact a name, in this order of use."""
    with ArtifactStore(folder) as store:
        for age, name in enumerate(reversed(names), start=1):
            artifact = store.put(key_of(facts_of(name)), facts_of(name), write)
            then = time.time_ns() - age * 10**9
            os.utime(artifact.path.with_name("metadata.json"), ns=(then, then))


def models(store):
    return {artifact.metadata.facts["model"] for artifact in store.list()}


def files(folder):
    """Return every file in the store but the locks."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and ".locks" not in path.parts)


def test_a_key_is_readable_and_depends_on_every_fact_but_not_on_their_order():
    assert KEY.startswith("vim_tiny-fp16-onnx-")
    assert key_of(dict(reversed(FACTS.items()))) == KEY
    assert len({KEY, *(key_of({**FACTS, name: "other"}) for name in FACTS), key_of({**FACTS, "new": 1})}) == 7
    assert key_of({"model": "../a b/c.onnx"}).startswith(".._a_b_c.onnx-")


def test_what_was_put_is_got_with_all_that_is_known_of_it(tmp_path):
    with ArtifactStore(tmp_path / "deep" / "store") as store:
        assert store.get(KEY) is None
        artifact = store.put(KEY, FACTS, write)
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

    with ArtifactStore(tmp_path) as store:
        produced = store.produce(KEY, FACTS, telling)
        assert (produced.reused, produced.metadata.measured) == (False, facts)
    with ArtifactStore(tmp_path) as store:
        again = store.produce(KEY, FACTS, lambda path: pytest.fail("made again"))
        assert (again.reused, again.metadata.measured) == (True, facts)
        assert [artifact.metadata.measured for artifact in store.list()] == [facts]
        store.put(KEY, FACTS, lambda path: path.write_bytes(b"new"))
        replaced = store.get(KEY)
        assert (replaced.path.read_bytes(), replaced.metadata.measured) == (b"new", {})


def test_a_store_that_is_only_to_be_read_stays_as_it_is(tmp_path):
    filled(tmp_path, "a", "b")
    cut("model.onnx", 5000)(tmp_path / key_of(facts_of("b")))
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    with ArtifactStore(tmp_path, read_only=True) as store:
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


def link(entry):
    (entry / "model.onnx").rename(entry.parent / "elsewhere")
    (entry / "model.onnx").symlink_to(entry.parent / "elsewhere")


DAMAGE = {
    "a flipped bit": (flip, "SHA-256"),
    "half the content": (cut("model.onnx", 5000), "has 5000 bytes, not 10240"),
    "no content": (lambda entry: (entry / "model.onnx").unlink(), "content cannot be opened"),
    "content elsewhere": (link, "content cannot be opened"),
    "half the metadata": (cut("metadata.json", 60), "metadata cannot be read"),
    "empty metadata": (cut("metadata.json", 0), "metadata cannot be read"),
    "no metadata": (lambda entry: (entry / "metadata.json").unlink(), "metadata cannot be read"),
    "another fact": (change_a_fact, "metadata cannot be read"),
}
LOST = ("no metadata", "no content", "content elsewhere")


def with_data(path):
    write(path)
    path.with_name(f"{path.name}{artifacts.DATA}").write_bytes(CONTENT[::-1])


def test_weights_in_a_second_file_are_part_of_an_artifact(tmp_path):
    with ArtifactStore(tmp_path) as store:
        artifact = store.put(KEY, FACTS, with_data)
    assert artifact.metadata.bytes == 2 * len(CONTENT)
    assert artifact.metadata.sha256 == hashlib.sha256(CONTENT + CONTENT[::-1]).hexdigest()
    _, data = artifacts.parts(artifact.path)
    with ArtifactStore(tmp_path) as store:
        assert store.get(KEY) is not None
    data.write_bytes(CONTENT)
    with ArtifactStore(tmp_path) as store:
        assert store.get(KEY) is None
        assert store.notes == [f"{KEY}: its bytes have changed since it was written (SHA-256); removed"]


@pytest.mark.parametrize(("damage", "reason"), DAMAGE.values(), ids=DAMAGE)
def test_what_is_damaged_is_absent_said_and_made_again(tmp_path, damage, reason):
    with ArtifactStore(tmp_path) as store:
        store.put(KEY, FACTS, write)
    damage(tmp_path / KEY)
    with ArtifactStore(tmp_path) as store:
        assert store.get(KEY) is None
        assert reason in store.notes[0]
        assert not (tmp_path / KEY).exists()
        store.put(KEY, FACTS, write)
    damage(tmp_path / KEY)
    with ArtifactStore(tmp_path) as store:
        artifact = store.produce(KEY, FACTS, write)
        assert (artifact.reused, artifact.path.read_bytes()) == (False, CONTENT)
        assert reason in artifact.note


def start(folder):
    command = [sys.executable, "-c", PRODUCE, str(folder)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)


def go_on(process):
    process.stdin.write("\n")
    process.stdin.flush()


def test_of_two_processes_one_makes_it_and_the_other_waits_for_it(tmp_path):
    with start(tmp_path) as first:
        assert first.stdout.readline() == "writing\n"
        with start(tmp_path) as second, ArtifactStore(tmp_path) as store:
            assert store.get(SHARED) is None  # half of it is written, and nobody sees it
            go_on(first)
            assert first.stdout.readline() == "made first half, second half\n"
            assert second.stdout.readline() == "reused first half, second half\n"
            go_on(first)
            go_on(second)


def test_a_killed_process_leaves_nothing_that_counts(tmp_path):
    with start(tmp_path) as first, ArtifactStore(tmp_path) as store:
        assert first.stdout.readline() == "writing\n"
        store.prune(0)
        assert len(files(tmp_path)) == 1, "a living process goes on with it"
        first.kill()
        first.wait()
        assert len(files(tmp_path)) == 1
        assert not store.produce(SHARED, facts_of("shared"), write).reused
        assert {path.parent.name for path in files(tmp_path)} == {SHARED}
    with start(tmp_path / "other") as second, ArtifactStore(tmp_path / "other") as store:
        assert second.stdout.readline() == "writing\n"
        second.kill()
        second.wait()
        store.prune(0)
        assert files(tmp_path / "other") == []


def test_the_least_recently_used_goes_first(tmp_path):
    filled(tmp_path, "a", "b", "c")
    with ArtifactStore(tmp_path) as store:
        store.get(key_of(facts_of("a")))
    with ArtifactStore(tmp_path) as store:
        assert store.prune(2 * len(CONTENT)) == (key_of(facts_of("b")),)
        assert models(store) == {"a", "c"}
        assert store.prune(2 * len(CONTENT)) == ()


def test_a_limit_never_takes_what_was_just_made_or_is_in_use(tmp_path):
    filled(tmp_path, "a", "b")
    with ArtifactStore(tmp_path, limit_bytes=1) as store, ArtifactStore(tmp_path) as user:
        user.get(key_of(facts_of("a")))
        artifact = store.produce(KEY, FACTS, write)
        assert artifact.path.read_bytes() == CONTENT
        assert models(store) == {"a", "vim_tiny"}
    with ArtifactStore(tmp_path) as store:
        store.prune(0)
        assert models(store) == set()


def test_what_was_made_for_one_run_goes_when_another_run_makes_something(tmp_path):
    def made(run):
        facts = facts_of("own") | {"suite_id": run}
        with ArtifactStore(tmp_path, limit_bytes=10**9) as store:
            return store.produce(key_of(facts), facts, write)

    filled(tmp_path, "a")
    assert [made("one").reused, made("one").reused] == [False, True]
    second = made("two")
    with ArtifactStore(tmp_path) as store:
        assert {artifact.key for artifact in store.list()} == {key_of(facts_of("a")), second.key}


def test_the_lock_of_what_was_removed_goes_too_and_the_key_can_be_made_again(tmp_path):
    with ArtifactStore(tmp_path) as store:
        store.put(KEY, FACTS, write)
    with ArtifactStore(tmp_path) as store:
        assert [path.name for path in (tmp_path / ".locks").iterdir()] == [KEY]
        assert store.prune(0) == (KEY,)
        assert list((tmp_path / ".locks").iterdir()) == []
        assert not store.produce(KEY, FACTS, write).reused


def test_who_waited_for_a_lock_that_was_removed_takes_the_next_one(tmp_path):
    path = tmp_path / "lock"
    first, _ = artifacts._lock(path, wait=True)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(artifacts._lock, path, wait=True)
        time.sleep(0.1)
        path.unlink()
        os.close(first)
        second, _ = waiting.result(timeout=WAIT_S)
    assert os.path.samestat(os.fstat(second), path.stat())
    third, free = artifacts._lock(path, wait=False)
    assert not free
    os.close(second)
    os.close(third)


def test_what_another_process_uses_stays_until_that_ends(tmp_path):
    with start(tmp_path) as user, ArtifactStore(tmp_path) as store:
        assert user.stdout.readline() == "writing\n"
        go_on(user)
        user.stdout.readline()
        assert store.prune(0) == ()
        user.kill()
        user.wait()
        assert store.prune(0) == (SHARED,)


def test_pruning_leaves_what_is_not_ours(tmp_path):
    filled(tmp_path, "a")
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "my-models").mkdir()
    with ArtifactStore(tmp_path) as store:
        store.prune(0)
        assert store.list() == ()
    assert (tmp_path / "notes.txt").exists()
    assert (tmp_path / "my-models").exists()


@pytest.mark.parametrize("damage", [cut("metadata.json", 10), *(DAMAGE[name][0] for name in LOST)], ids=["cut", *LOST])
def test_pruning_drops_what_lacks_metadata_or_content_and_the_rest_stays(tmp_path, damage):
    filled(tmp_path, "a", "b")
    damage(tmp_path / key_of(facts_of("a")))
    with ArtifactStore(tmp_path, limit_bytes=10**9) as store:
        produced = store.produce(KEY, FACTS, write)
        assert {artifact.key for artifact in store.list()} == {key_of(facts_of("b")), produced.key}
    assert not (tmp_path / key_of(facts_of("a"))).exists()


def test_an_entry_that_was_replaced_before_its_lock_was_free_stays(tmp_path, monkeypatch):
    filled(tmp_path, "a")
    metadata, lock = tmp_path / key_of(facts_of("a")) / "metadata.json", artifacts._lock
    replacement = metadata.read_bytes()

    def lock_after_another_process(path, *, wait):
        metadata.write_bytes(replacement)
        return lock(path, wait=wait)

    metadata.write_bytes(b"")
    monkeypatch.setattr(artifacts, "_lock", lock_after_another_process)
    with ArtifactStore(tmp_path) as store:
        store.prune(10**9)
    assert metadata.exists()


def test_a_full_disk_is_named_with_what_is_needed_and_leaves_nothing(small_disk):
    with ArtifactStore(small_disk) as store:
        store.put(KEY, FACTS, write)
        facts = facts_of("big")
        with pytest.raises(ArtifactError) as refused:
            store.produce(key_of(facts), facts, lambda path: path.write_bytes(bytes(9_000_000)))
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
    with ArtifactStore(tmp_path) as store:
        store.put(KEY, FACTS, write)
        with pytest.raises(error, match=message):
            store.put(KEY, FACTS, writer)
        assert store.get(KEY).path.read_bytes() == CONTENT
    assert len(files(tmp_path)) == 2


def test_a_wrong_key_or_folder_is_refused(tmp_path):
    with ArtifactStore(tmp_path) as store:
        for key in ("../../etc/passwd", "", "vim_tiny", "a/b-" + "0" * 32):
            with pytest.raises(ValueError, match="not a key"):
                store.get(key)
        with pytest.raises(ValueError, match="not the key of these facts"):
            store.put(KEY, {**FACTS, "torch": "2.9.0"}, write)
    (tmp_path / "file").touch()
    with ArtifactStore(tmp_path / "file") as store, pytest.raises(ArtifactError, match=r"file: .*; check that it"):
        store.produce(KEY, FACTS, write)


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
            "with ArtifactStore(Path(sys.argv[1])) as store:\n"
            "    found = [store.get(key) is not None for key in sys.argv[2:]]\n"
            "    print(json.dumps([found, store.notes]))\n"
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
        assert [stat.S_IMODE(path.stat().st_mode) for path in sorted((folder / ".locks").iterdir())] == LOCKS
        code = (
            "import os, sys\n"
            "from pathlib import Path\n"
            "from benchd.exporters.artifacts import ArtifactStore\n"
            "os.setgroups([]), os.setgid(int(sys.argv[2])), os.setuid(65534)\n"
            "with ArtifactStore(Path(sys.argv[1])) as store:\n"
            "    print(*store.prune(0))\n"
        )
        command = [sys.executable, "-c", code, str(folder), str(GROUP)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        assert done.stdout.split() == [key_of(facts_of("a"))]
