"""What cannot be deployed as files is refused before it is measured."""

from pathlib import Path

import msgspec
import pytest
from worker_jobs import job, run_here, user_module


@pytest.mark.parametrize("name", ["my net", "json", "class", "torch"])
def test_a_module_that_load_could_not_import_by_its_name_is_refused(name, tmp_path):
    path = Path(user_module(tmp_path).rpartition(":")[0]).rename(tmp_path / f"{name}.py")
    outcome = run_here(msgspec.structs.replace(job(tmp_path, module=f"{path}:build"), ships=True))
    assert (outcome.process.status, outcome.process.timing) == ("unsupported", None)
    assert outcome.process.reason.startswith("LOAD.md imports its code, and ")
    assert outcome.process.reason.endswith(": rename the file")


def test_complex_answers_are_refused(tmp_path):
    module = user_module(tmp_path, forward="return torch.fft.fft(self.fc(images.flatten(1)))")
    outcome = run_here(msgspec.structs.replace(job(tmp_path, module=module), ships=True))
    assert (outcome.process.status, outcome.process.timing) == ("unsupported", None)
    assert outcome.process.reason == "its answer output is complex: return real tensors to ship it"
