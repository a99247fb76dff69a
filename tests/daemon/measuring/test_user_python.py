"""What a user's Python file says of itself before anything runs it."""

import pytest

from benchd.daemon.errors import UsageError
from benchd.daemon.measuring import user_python


def written(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    "text",
    [
        "def build(): pass",
        "class build: pass",
        "build = lambda: None",
        "build: object = None",
        "import other as build",
        "from other import build",
        "from other import *",
        "if True:\n    def build(): pass",
        "for build in (print,): pass",
        "globals()['bui' + 'ld'] = print",
        "def __getattr__(name): return print",
        "try:\n    from .net import build\nexcept ImportError:\n    from net import build",
    ],
)
def test_what_may_define_the_function_is_let_pass(text, tmp_path):
    user_python.refuse(written(tmp_path / "net.py", text), "build")


def test_a_function_that_is_not_there_is_refused_unrun(tmp_path):
    path = written(tmp_path / "net.py", "raise SystemExit\ndef build(): pass")
    with pytest.raises(UsageError, match=r"net\.py:bild: net\.py has no 'bild'$"):
        user_python.refuse(path, "bild")
