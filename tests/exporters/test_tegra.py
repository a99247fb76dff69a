"""Which release of JetPack a board runs, and which index and versions its packages come from."""

import subprocess
import sys
from pathlib import Path

import jetson_trees
import pytest
from machines import desktop, orin_nano, write

from benchd.exporters import tegra

JP6, SBSA = "https://pypi.jetson-ai-lab.io/jp6/cu126", "https://pypi.jetson-ai-lab.io/sbsa/cu130"
ROOT = Path(__file__).parents[2]


def board(root, release, system="Ubuntu 22.04.5 LTS"):
    files = {"etc/os-release": f'PRETTY_NAME="{system}"\n'}
    if release:
        major, _, revision = release.partition(".")
        files["etc/nv_tegra_release"] = f"# R{major} (release), REVISION: {revision}, GCID: 42132812, BOARD: generic\n"
    (orin_nano(root) / "etc/nv_tegra_release").unlink(missing_ok=True)
    write(root, files)
    return root


@pytest.mark.parametrize(
    ("release", "jetpack", "index", "is_known"),
    [
        ("36.4.0", "6.1 to 6.2.1", JP6, True),
        ("36.4.7", "6.1 to 6.2.1", JP6, True),
        ("36.5.0", "6.2.2", JP6, True),
        ("38.2.0", "7.0 to 7.1", SBSA, True),
        ("39.2.0", "7.2", SBSA, True),
        ("36.9.0", "6.2.2", JP6, False),
        ("41.0.0", "7.2", SBSA, False),
    ],
)
def test_a_board_has_the_index_of_its_release_or_of_the_last_known_before(tmp_path, release, jetpack, index, is_known):
    known, exactly = tegra.release(board(tmp_path, release))
    assert (known.jetpack, known.index, exactly) == (jetpack, index, is_known)


@pytest.mark.parametrize(
    ("system", "jetpack", "index"),
    [
        ("Ubuntu 22.04.5 LTS", "6.2.2", JP6),
        ("Ubuntu 24.04.3 LTS", "7.2", SBSA),
        ("Debian GNU/Linux 12 (bookworm)", "7.2", SBSA),
    ],
)
def test_a_container_on_a_board_has_the_newest_release_of_its_ubuntu(tmp_path, system, jetpack, index):
    known, exactly = tegra.release(board(tmp_path, "", system))
    assert tegra.is_tegra(tmp_path)
    assert (known.index, exactly) == (index, False)
    assert tegra.described(tmp_path).startswith(f"{jetpack}, assumed: its L4T version is unknown")


def test_a_container_that_hides_the_device_tree_is_known_by_its_kernel(tmp_path):
    (board(tmp_path / "board", "") / "proc/device-tree/compatible").unlink()
    assert tegra.is_tegra(tmp_path / "board")
    assert not tegra.is_tegra(desktop(tmp_path / "desktop"))


@pytest.mark.parametrize(
    ("damaged", "jetpack"),
    [
        ("etc/nv_tegra_release", "6.2.2, assumed"),
        ("etc/os-release", "6.1 to 6.2.1"),
        ("proc/device-tree/compatible", "6.1 to 6.2.1"),
    ],
)
def test_a_damaged_file_is_one_that_says_nothing(tmp_path, damaged, jetpack):
    (board(tmp_path, "36.4.3") / damaged).write_bytes(b"# R36\xff\0")
    assert tegra.is_tegra(tmp_path)
    assert tegra.described(tmp_path).startswith(jetpack)


def test_a_release_file_that_docker_made_a_folder_is_one_that_says_nothing(tmp_path):
    (board(tmp_path, "") / "etc/nv_tegra_release").mkdir()
    assert tegra.described(tmp_path).startswith("6.2.2, assumed")


def test_a_release_without_numbers_is_unknown(tmp_path):
    (board(tmp_path, "") / "etc/nv_tegra_release").write_text("# R36 (release), REVISION: ., GCID: 1\n")
    assert tegra.l4t(tmp_path) == ""


def test_a_container_on_a_jetpack_that_is_too_old_is_known_by_its_kernel(tmp_path):
    (board(tmp_path, "") / "proc/sys/kernel/osrelease").write_text("5.10.120-tegra\n")
    with pytest.raises(
        tegra.TooOld, match=r"JetPack 5 or older \(Linux 5.10.120-tegra\), and benchd needs JetPack 6.1"
    ):
        tegra.release(tmp_path)


@pytest.mark.parametrize(("release", "why"), [("36.3.0", "JetPack 6.0 "), ("35.4.1", "JetPack 5 or older ")])
def test_a_jetpack_that_is_too_old_is_told_what_to_do(tmp_path, release, why):
    with pytest.raises(tegra.TooOld, match=f"{why}.*needs JetPack 6.1 or newer: (upgrade|flash)"):
        tegra.release(board(tmp_path, release))
    assert "JetPack 6.1 or newer" in tegra.install("torch", tmp_path)


def test_torch_that_needs_libraries_beside_it_is_set_up_by_make(tmp_path):
    root = board(tmp_path, "39.2.0")
    assert tegra.install("torch torchvision", root) == (
        f"`make once` in a checkout, which links torch of {SBSA} with nvpl-blas, nvpl-lapack, nvidia-cudss-cu13"
    )
    assert tegra.install("triton", root).startswith(f"pip install --no-deps --index-url {SBSA} triton")
    assert "ubuntu2404/sbsa" in tegra.library("ImportError: libcudss.so.0: cannot open shared object file", root)
    assert tegra.library("ImportError: libother.so.0: cannot open shared object file", root) is None


def printed(*arguments):
    command = [sys.executable, str(ROOT / "exporters/tegra.py"), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def test_scripts_read_the_same_table(tmp_path):
    root = jetson_trees.build(tmp_path / "new", jetson_trees.ORIN_NANO_7)
    assert printed("constraints", root) == (0, "constraints-jetson72.txt\n")
    assert printed("beside", root) == (0, "nvpl-blas nvpl-lapack nvidia-cudss-cu13\n")
    assert printed("release", root) == (0, "JetPack 7.2\n")
    assert printed("bundle", root) == (0, "make bundle TARGET=jetpack72\n")
    code, output = printed("index", jetson_trees.build(tmp_path / "old", jetson_trees.AGX_ORIN))
    assert (code, output.startswith("benchd: this board runs JetPack 5 or older")) == (1, True)


def test_each_release_has_its_constraints():
    assert all((ROOT / known.constraints).is_file() for known in tegra.RELEASES)
