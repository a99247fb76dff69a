"""What a kept reference is made of: nothing that changes the answer may be missing from its key."""

import os

import msgspec
import numpy as np
import pytest
import torch
from worker_jobs import changed, job, user_module

from benchd.daemon.worker import workload
from benchd.daemon.worker.check import references
from benchd.exporters import code

CPU = torch.device("cpu")


def key(a_job, images=None, *, name="float64", batch_size=8, device=CPU):
    built = workload.build(a_job)
    images = built.images[:4] if images is None else images
    return msgspec.json.encode(references.facts(name, built, a_job, images, batch_size, device))


def test_everything_that_changes_the_answer_is_in_the_key(tmp_path, monkeypatch):
    a_job = job(tmp_path, module=user_module(tmp_path))
    images = torch.zeros(4, 3, 4, 4)
    keys = [
        key(a_job, images),
        key(a_job, images, name="fp16"),
        key(a_job, images, batch_size=4),
        key(a_job, images, device=torch.device("cuda")),
        key(a_job, images + 1),
        key(a_job, images.double()),
        key(a_job, images.reshape(4, 3, 2, 8)),
        key(msgspec.structs.replace(a_job, suite_id="another run"), images),
        key(changed(a_job, seed=1), images),
    ]
    user_module(tmp_path, forward="images = images + 1")
    keys.append(key(a_job, images))
    monkeypatch.setattr(code, "versions", lambda *_: {"torch": "2.8.0"})
    keys.append(key(a_job, images))
    assert len(set(keys)) == len(keys)


def test_a_run_keeps_its_reference(tmp_path):
    a_job = job(tmp_path, module=user_module(tmp_path))
    assert key(a_job) == key(a_job)


def test_a_shipped_model_is_known_by_the_code_of_benchd_and_by_no_run(tmp_path, monkeypatch):
    a_job = job(tmp_path)
    first = key(a_job)
    assert key(msgspec.structs.replace(a_job, suite_id="another run")) == first
    monkeypatch.setattr(code, "sha256", lambda *_: "another version's")
    assert key(a_job) != first


@pytest.mark.parametrize("limit_bytes", [1, 10**9])
def test_the_oldest_make_room(tmp_path, monkeypatch, limit_bytes):
    monkeypatch.setattr(references, "LIMIT_BYTES", limit_bytes)
    for number in range(3):
        for used in tmp_path.glob("*/metadata.json"):
            os.utime(used, (1, 1))  # what was used in the last hour is kept
        facts = {"number": number, "format": "npz"}
        reference = references.kept(tmp_path, facts, lambda number=number: {"outputs": np.array([number])})
        assert reference["outputs"] == number
    assert len(list(tmp_path.glob("*/model.*"))) == (1 if limit_bytes == 1 else 3)
