"""What cannot be deployed as files is refused before it is measured."""

from pathlib import Path

import msgspec
import pytest
from worker_jobs import job, run_here, user_module

from benchd.daemon.errors import Unsupported
from benchd.daemon.worker import packing


def refused(folder, module):
    """Return why this module is not shipped; it was not measured."""
    outcome = run_here(msgspec.structs.replace(job(folder, module=module), ships=True))
    assert (outcome.process.status, outcome.process.timing) == ("unsupported", None)
    return outcome.process.reason


def test_a_file_that_load_could_not_import_is_refused(tmp_path):
    path = Path(user_module(tmp_path).rpartition(":")[0]).rename(tmp_path / "my net.py")
    reason = refused(tmp_path, f"{path}:build")
    assert reason == "LOAD.md imports its code, and 'my net' cannot be a module's name: rename the file"


@pytest.mark.parametrize("name", ["json", "torch", "numpy.net"])
def test_so_is_one_that_would_be_another_module(name):  # no such file: the next tests' processes might import it
    with pytest.raises(Unsupported, match=r"is also a package that it needs: rename the file$"):
        packing._refuse_name(name)


def test_names_that_python_imports_are_taken():
    packing._refuse_name("net")
    packing._refuse_name("models.zoo.net2")
    with pytest.raises(Unsupported, match=r"'models\.class' cannot be"):
        packing._refuse_name("models.class")


def test_complex_answers_are_refused(tmp_path):
    module = user_module(tmp_path, forward="return torch.fft.fft(self.fc(images.flatten(1)))")
    assert refused(tmp_path, module) == "its answer output is complex: return real tensors to ship it"
