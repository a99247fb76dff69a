"""The inputs of a user's own model as the command line and a module's `inputs` write them."""

import re
from collections.abc import Sequence

from benchd.daemon.errors import UsageError, unknown
from benchd.daemon.records import DTYPES, InputSpec


def parse(texts: Sequence[str]) -> list[InputSpec]:
    """Return the inputs of `3x224x224`, `ids=int64:16` and `scale=float32:`, each without its batch.

    Those without a name lead, as in a call. Raises UsageError for what is none of these, and for two of one name.
    """
    specs = [_input(text) for text in texts]
    names = [spec.name for spec in specs if spec.name]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise UsageError(f"--input {twice}: given twice")
    return sorted(specs, key=lambda spec: bool(spec.name))


def _input(text: str) -> InputSpec:
    name, equals, rest = text.rpartition("=")
    dtype, colon, sizes = rest.rpartition(":")
    if (equals and not name) or not (colon or sizes) or not re.fullmatch(r"([0-9]+(x[0-9]+)*)?", sizes):
        raise UsageError(f"--input {text}: expected [NAME=][TYPE:]SIZExSIZE..., as in 3x224x224 or ids=int64:16")
    shape = [int(size) for size in sizes.split("x")] if sizes else []
    if shape and min(shape) < 1:
        raise UsageError(f"--input {text}: every size is at least 1")
    known = {str(one): one for one in DTYPES}
    if colon and dtype not in known:
        raise unknown("type of an input", dtype, known)
    return InputSpec(name.strip(), known[dtype] if colon else None, shape)
