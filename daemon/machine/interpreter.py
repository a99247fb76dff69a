"""Command lines of fresh Python processes: the current folder, which may be anybody's, is not on their path."""

import sys

# what -P does from Python 3.11 on; before anything is imported that a file in that folder could replace
_SAFE_PATH = "import sys; sys.path[0] or sys.path.pop(0)"
# 1 is PR_SET_PDEATHSIG, and 9 is SIGKILL
_MODULE = "import ctypes, runpy; ctypes.CDLL(None).prctl(1, 9); sys.argv.pop(0)"
_MODULE += '; runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)'


def of_code(code: str, *arguments: str, python: str = "") -> list[str]:
    """Return the command line that runs this code as `python -c` does, under this interpreter by default."""
    return [python or sys.executable, "-c", f"{_SAFE_PATH}; {code.lstrip()}", *arguments]


def of_module(module: str, *arguments: str, python: str = "") -> list[str]:
    """Return the command line that runs a module as `python -m` does; the kernel kills it when its parent ends."""
    return of_code(_MODULE, module, *arguments, python=python)
