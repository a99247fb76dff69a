"""The command line of `benchd why`: what it refuses before anything is measured."""

import pytest

CASE = "square,eager,b1,size=16"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((), "name the case, as in vim_tiny,eager"),
        ((CASE,), "both sides have the same packages, variables and threads: there is nothing to search"),
        ((CASE, *["--threads", "1"] * 3), "--threads: at most once per side"),
        ((CASE, "--python", "absent"), "--python absent: No such file or directory; give the interpreter of"),
        ((CASE, "--lock", "absent.txt"), "absent.txt: "),
        ((CASE, "--lock", "lock.txt", "--wheels", "."), "no-such-package==1.0 cannot be installed: "),
        (("nothing,eager,b1", "--threads", "1"), "unknown model 'nothing'"),
    ],
)
def test_a_command_line_that_cannot_be_answered_is_refused(arguments, told, here, tmp_path):
    (tmp_path / "lock.txt").write_text("no-such-package==1.0\n")
    done = here("benchd", "why", *arguments, "--device", "cpu")
    assert done.returncode == 2
    assert told in done.stderr
