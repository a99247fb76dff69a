"""`benchd recommend` from files to lines and an exit code."""

import pytest
import typer
from records_made import PASSED, made

from benchd.daemon.commands import recommend
from benchd.daemon.errors import UsageError
from benchd.daemon.records import Case, encode


def test_training_beside_inference_is_named_as_left_out(tmp_path, capsys):
    trained = made(run_id="r2", case=Case(model="vim_tiny", direction="training"))
    lines = [encode(record) + b"\n" for record in (made(check=PASSED), trained)]
    (tmp_path / "records.jsonl").write_bytes(b"".join(lines))
    with pytest.raises(typer.Exit) as end:
        recommend.recommend(files=[tmp_path])
    assert end.value.exit_code == 4  # one process confirms nothing
    assert capsys.readouterr().err == "ignoring vim_tiny,eager,b1,training: training cannot be shipped\n"


@pytest.mark.parametrize("streams", [0, -3])
def test_no_streams_are_refused(streams):
    with pytest.raises(UsageError, match=rf"--streams \[{streams}\]: Expected `int` >= 1"):
        recommend.recommend(files=[], rates_hz="30Hz", deadline_ms="33ms", streams=streams)


@pytest.mark.parametrize("share", [0.0, 99.5, 1.0000001])
def test_an_agreement_is_a_share(share):
    with pytest.raises(UsageError, match=f"--min-agreement {share:.15g}: expected a share above 0 and at most 1"):
        recommend.recommend(files=[], min_agreement=share)
