"""An interpreter that answers in place of a worker, with times that are known, and is Python in all else."""

import sys
from pathlib import Path

STUB = """#!{python} -IS
import os, sys
if "benchd.daemon.worker" not in sys.argv:
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
job = sys.stdin.readline()
with open({log!r}, "a+") as log:
    log.write({name!r} + "\\n")
    log.seek(0)
    turn = log.read().split().count({name!r}) - 1
message = {message}
os.write(int(sys.argv[-1]), (message + "\\n").encode())
"""
OUTCOME = (
    '{"type": "outcome", "process": {"status": "%s", "reason": "says the stub", "throughput_per_s": 9, '
    '"timing": {"median_ms": %s, "mean_ms": 9, "min_ms": 0, "max_ms": 99, "runs": 9}}%s}'
)
PASSED = (
    ', "check": {"passed": true, "rule": "outputs", "images": 1, "max_abs_error": 0, "error_share": 0, '
    '"tolerance": 1, "argmax_disagreements": 0}'
)


def interpreter(path: Path, ms: str, *, status: str = "ok", more: str = PASSED, dies: bool = False) -> str:
    """Write the interpreter and return its path; `ms` is a median in which `turn` counts its workers from 0,
    and `job` is the text of its job.

    `more` is further JSON of the outcome, a check that passed unless given. Each turn leaves the file's name as a line
    in `log` beside it.
    """
    message = "''" if dies else f"{OUTCOME!r} % ({status!r}, {ms}, {more!r})"
    log = str(path.with_name("log"))
    path.write_text(STUB.format(python=sys.executable, log=log, name=path.name, message=message))
    path.chmod(0o755)
    return str(path)
