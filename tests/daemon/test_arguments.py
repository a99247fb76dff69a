"""What a command line asks of a variant."""

import pytest

from benchd.daemon.arguments import requirements
from benchd.daemon.errors import UsageError


@pytest.mark.parametrize("share", [0.0, 99.5])
def test_an_agreement_is_a_share(share):
    with pytest.raises(UsageError, match=f"--min-agreement {share:g}: expected a share above 0 and at most 1"):
        requirements(None, None, None, share, "latency")
