"""Which index a Jetson's packages come from."""

import pytest
from machines import orin_nano, write

from benchd.exporters import tegra

JP6 = "https://pypi.jetson-ai-lab.io/jp6/cu126"


@pytest.mark.parametrize(
    ("release", "index"),
    [
        ("# R36 (release), REVISION: 3.0, GCID: 36923193, BOARD: generic", "URL"),
        ("# R36 (release), REVISION: 4.0, GCID: 37537400, BOARD: generic", JP6),
        ("# R36 (release), REVISION: 4.7, GCID: 42132812, BOARD: generic", JP6),
        ("# R36 (release), REVISION: 5.0, GCID: 43688277, BOARD: generic", JP6),
        ("# R38 (release), REVISION: 4.0, GCID: 43443517, BOARD: generic", "URL"),
        ("", "URL"),
    ],
    ids=["JetPack 6.0", "6.1", "6.2.1", "6.2.2", "7", "unknown"],
)
def test_an_index_is_named_only_for_the_jetpacks_that_its_builds_run_on(tmp_path, release, index):
    write(orin_nano(tmp_path), {"etc/nv_tegra_release": f"{release}\n"})
    assert tegra.index(tmp_path) == index
