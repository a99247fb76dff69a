"""What the child of `benchd export` hands back."""

import os

from benchd.daemon.worker import exporting
from benchd.exporters.artifacts import Store, key_of


def test_the_engine_is_handed_back_whichever_file_the_clock_says_was_used_last(tmp_path):
    with Store(tmp_path) as store:
        facts = [{"format": "onnx", "model": "a"}, {"format": "plan", "model": "a"}, {"format": "plan", "model": "b"}]
        made = [store.put(key_of(each), each, lambda path: path.write_bytes(b"content")) for each in facts]
        for artifact, used_ns in zip(made, (2, 2, 1), strict=True):
            os.utime(artifact.path.with_name("metadata.json"), ns=(used_ns, used_ns))
        assert exporting._engine(store).metadata.facts == {"format": "plan", "model": "a"}
