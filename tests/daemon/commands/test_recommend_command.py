"""`benchd recommend` from files to lines and an exit code."""

import io

from records_made import PASSED, made

from benchd.daemon.commands.compare import recommend
from benchd.daemon.records import Case, encode
from benchd.daemon.verdicts.recommend import Requirements


def test_training_beside_inference_is_named_as_left_out(tmp_path, capsys):
    trained = made(run_id="r2", case=Case(model="vim_tiny", direction="training"))
    lines = [encode(record) + b"\n" for record in (made(check=PASSED), trained)]
    (tmp_path / "records.jsonl").write_bytes(b"".join(lines))
    assert recommend([tmp_path], Requirements(), io.StringIO(), as_json=False) == 0
    assert capsys.readouterr().err == "not vim_tiny,eager,b1,training: training is not shipped\n"
