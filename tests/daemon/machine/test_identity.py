import re
import shutil

import pytest
from machines import desktop, orin_nano, write

from benchd.daemon.errors import NotAvailable, UsageError
from benchd.daemon.machine.identity import boot_id, device_id, is_placeholder


@pytest.mark.parametrize("configured", ["", "a/b", "a+", "#", "with blank", "-a", "A", "a.b", "ä", "a\n"])
def test_an_id_that_is_no_topic_level_is_refused(configured, tmp_path):
    with pytest.raises(UsageError, match="device id"):
        device_id(configured, root=tmp_path)


def test_boards_flashed_from_one_image_differ(tmp_path):
    first = device_id(None, orin_nano(tmp_path / "a", serial="1421223012345"))
    second = device_id(None, orin_nano(tmp_path / "b", serial="1421223012346"))
    assert first != second
    assert re.fullmatch(r"orin-[0-9a-f]{6}", first)
    assert re.fullmatch(r"orin-[0-9a-f]{6}", second)


def test_desktops_cloned_from_one_disk_differ_by_their_network_card(tmp_path):
    first = device_id(None, desktop(tmp_path / "a"))
    second = device_id(None, desktop(tmp_path / "b", mac="3c:ec:ef:12:34:57"))
    assert first.startswith("lab-pc-")
    assert first != second


def test_what_only_root_may_read_does_not_count_because_users_must_agree(tmp_path):
    root = desktop(tmp_path)
    before = device_id(None, root)
    uuid = root / "sys/class/dmi/id/product_uuid"
    uuid.write_text("4c4c4544-0042-3510-8054-b9c04f4e3532\n")
    uuid.chmod(0o400)
    assert device_id(None, root) == before
    uuid.chmod(0o444)
    assert device_id(None, root) != before


def test_machine_id_is_the_last_resort_and_then_the_host_name(tmp_path):
    root = desktop(tmp_path)
    shutil.rmtree(root / "sys")
    by_machine_id = device_id(None, root)
    write(root, {"etc/machine-id": "00000000000000000000000000000001\n"})
    assert device_id(None, root) != by_machine_id
    write(root, {"etc/machine-id": "uninitialized\n"})
    assert re.fullmatch(r"lab-pc-[0-9a-f]{6}", device_id(None, root))


@pytest.mark.parametrize(
    "value",
    ["Default string", "To be filled by O.E.M.", "0", "000-000", "FFFFFFFF-FFFF", "00:00:00:00:00:00", " ", "N/A"],
)
def test_placeholders(value):
    assert is_placeholder(value)


def test_boot_id(tmp_path):
    assert boot_id(orin_nano(tmp_path)) == "c81f324a-8cee-44ef-9e73-7927e7fee33c"
    with pytest.raises(NotAvailable, match="boot_id"):
        boot_id(tmp_path / "nothing")
