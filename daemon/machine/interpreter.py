"""Command lines for fresh Python processes whose path does not include the current folder, which anyone may own."""

import sys

# same as -P in Python 3.11 and newer; runs before any import that a file in the current folder could replace
_SAFE_PATH = "import sys; sys.path[0] or sys.path.pop(0)"
# 1 is PR_SET_PDEATHSIG, and 9 is SIGKILL
_MODULE = "import ctypes, runpy; ctypes.CDLL(None).prctl(1, 9); sys.argv.pop(0)"
_MODULE += '; runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)'


def of_code(code: str, *arguments: str, python: str = "") -> list[str]:
    """Return the command line that runs this code like `python -c`, with this interpreter by default."""
    return [python or sys.executable, "-c", f"{_SAFE_PATH}; {code.lstrip()}", *arguments]


def of_module(module: str, *arguments: str, python: str = "") -> list[str]:
    """Return the command line that runs a module like `python -m`; the kernel kills it when its parent ends."""
    return of_code(_MODULE, module, *arguments, python=python)
