"""AOTInductor packages read without torch: what one may hold, and each part that would run code beside its library."""

import json
import zipfile

import pytest

from benchd.daemon.errors import UsageError
from benchd.exporters import aoti

MADE = aoti.Made(torch="2.9.0", cpu="a CPU", gpu="", threads=2, outputs=["scores", "boxes[0]"])
INNER = "data/aotinductor/model"
RIGHT = {
    "model/archive_format": b"pt2",
    "model/archive_version": b"0",
    "model/byteorder": b"little",
    "model/.data/serialization_id": b"1",
    f"model/{INNER}/abc.wrapper.so": b"\x7fELF",
    f"model/{INNER}/abc.wrapper.json": b"{}",
    f"model/{INNER}/abc.wrapper_metadata.json": json.dumps(aoti.metadata(MADE) | {"AOTI_DEVICE_KEY": "cpu"}).encode(),
}


@pytest.fixture
def package(tmp_path):
    """A function that writes a package with these parts more, or without those that are None."""

    def written(**changed):
        path = tmp_path / "model.pt2"
        with zipfile.ZipFile(path, "w") as file:
            for name, content in (RIGHT | changed).items():
                if content is not None:
                    file.writestr(name, content)
        return path

    return written


def test_a_package_says_what_it_was_compiled_for(package):
    assert aoti.read(package()) == MADE


@pytest.mark.parametrize(
    "name",
    [
        "model/models/model.json",
        "model/data/weights/weight_0",
        "model/data/constants/opaque_0",
        "model/data/sample_inputs/model.pt",
        f"model/{INNER}/abc.wrapper.cpp",
        f"model/{INNER}/../../evil.so",
        "../model.so",
        f"/{INNER}/abc.so",
        "model/data/aotinductor/other/abc.so",
        f"model/{INNER}/deeper/abc.so",
        "setup.py",
    ],
)
def test_a_package_with_any_other_part_is_refused_by_name(package, name):
    with pytest.raises(UsageError, match=r"model\.pt2 is not an AOTInductor package written by benchd: it has '"):
        aoti.read(package(**{name: b"anything"}))


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({f"model/{INNER}/abc.wrapper.so": None}, "exactly one library"),
        ({f"model/{INNER}/second.so": b""}, "exactly one library"),
        ({f"model/{INNER}/abc.wrapper_metadata.json": None}, "ValueError"),
        ({f"model/{INNER}/abc.wrapper_metadata.json": b"{}"}, "KeyError"),
        ({f"model/{INNER}/abc.wrapper_metadata.json": b'{"benchd": "{}"}'}, "missing required field"),
        ({f"model/{INNER}/abc.wrapper_metadata.json": b"[" * 10**5}, "RecursionError"),
    ],
)
def test_a_package_that_does_not_say_what_it_is_is_refused(package, changed, why):
    with pytest.raises(UsageError, match=why):
        aoti.read(package(**changed))


def test_a_file_that_is_no_zip_is_refused(tmp_path):
    (tmp_path / "model.pt2").write_bytes(b"PK\x03\x04 half of it")
    with pytest.raises(UsageError, match="BadZipFile"):
        aoti.read(tmp_path / "model.pt2")


def test_sources_which_name_folders_of_the_machine_are_not_kept(package):
    source = f"model/{INNER}/abc.wrapper.cpp"
    path = package(**{source: b"// g++ -I/some/folder", "model/data/weights/w": b"1"})
    aoti.keep_library(path)
    assert aoti.read(path) == MADE
    with zipfile.ZipFile(path) as file:
        assert set(file.namelist()) == {*RIGHT, source}
        assert file.read(source) == b""  # torch before 2.10 looks for the metadata by its name


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({}, ""),
        ({"torch": "2.9.1"}, "torch 2.9.0, not 2.9.1"),
        ({"threads": 4, "gpu": "NVIDIA H200"}, "gpu none, not NVIDIA H200; threads 2, not 4"),
        ({"cpu": "another"}, "different CPU or instruction set"),
        ({"outputs": []}, ""),
    ],
)
def test_what_differs_is_told(changed, told):
    assert MADE.differs(aoti.Made(**({"torch": "2.9.0", "cpu": "a CPU", "gpu": "", "threads": 2} | changed))) == told
