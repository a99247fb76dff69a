"""The board that most samplers of a Jetson are tested on."""

import pytest
from jetson_trees import ORIN_NANO, build


@pytest.fixture
def nano(tmp_path):
    return build(tmp_path, ORIN_NANO)
