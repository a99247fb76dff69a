"""A user's model as given on the command line: a module or an ONNX file, and its inputs."""

import keyword
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib.machinery import PathFinder
from pathlib import Path

from benchd.daemon.errors import UsageError
from benchd.daemon.measuring import user_python
from benchd.daemon.measuring.user_inputs import inputs_of, of_module
from benchd.daemon.records import InputSpec, Precision


@dataclass(frozen=True)
class UserModule:
    """A user's `FILE.py:function`, or `package.module:function` in `folder`; its inputs if it does not define them."""

    path: str
    inputs: list[InputSpec] = field(default_factory=list)
    folder: str = ""

    @classmethod
    def at(cls, module: str, given: Sequence[str]) -> "UserModule":
        """Return the module that `--module` and `--input` describe; raise UsageError if it is invalid."""
        file, colon, function = module.rpartition(":")
        inputs = _arguments(given)
        if not colon or not function.isidentifier():
            raise UsageError(f"--module {module}: expected FILE.py:FUNCTION or package.module:FUNCTION")
        if not file.endswith(".py") and all(map(str.isidentifier, file.split("."))) and not Path(file).is_file():
            package = file.partition(".")[0]
            if _place_of(package, [str(Path.cwd()), *sys.path]) is None:
                raise UsageError(f"--module {module}: no module {package!r} in this folder or environment")
            return cls(module, inputs, str(Path.cwd()))
        if not Path(file).is_file():
            raise UsageError(f"--module {module}: {file}: no such file")
        if not file.endswith(".py"):
            raise UsageError(f"--module {module}: {file} is not a .py file")
        user_python.refuse(Path(file), function)
        return cls(f"{Path(file).resolve()}:{function}", inputs)

    @classmethod
    def installed(cls, module: str, given: Sequence[str]) -> "UserModule":
        """Return package.module:FUNCTION of this environment, not of the current folder; raise UsageError if absent."""
        package = module.partition(":")[0].partition(".")[0]
        place = _place_of(package, [entry for entry in sys.path if Path(entry).is_absolute()])
        if place is None:
            raise UsageError(f"{module}: no package {package!r} in this environment; pip install it")
        return cls(module, _arguments(given), place)

    @property
    def model(self) -> str:
        """Return the model name in its records."""
        file, _, function = self.path.rpartition(":")
        name = file.rpartition(".")[2] if self.folder else Path(file).stem
        return f"own.{name}.{function}"


@dataclass(frozen=True)
class UserFile:
    """A user's ONNX file and its inputs; `batch_size` is its fixed batch size, None if it accepts any.

    `precision` is what it computes in, and `reference` is the fp32 file that a quantised one was made from.
    """

    path: str
    inputs: list[InputSpec]
    batch_size: int | None = None
    precision: Precision = "fp32"
    reference: str | None = None

    @classmethod
    def at(cls, path: Path, given: Sequence[str], reference: Path | None = None) -> "UserFile":
        """Return the file with its inputs; `given` has the syntax of `--input`, `reference` is its fp32 original.

        Raises UsageError for a file that cannot be measured.
        """
        try:
            found = _file(path, path.stat().st_mtime_ns, tuple(given))
            return _referred(found, reference) if reference else found
        except OSError as error:
            raise UsageError(f"{path}: {error.strerror}") from error

    @property
    def model(self) -> str:
        """Return the model name in its records."""
        return f"own.{Path(self.path).stem}"


@lru_cache(maxsize=8)  # the service plans again before each case
def _file(path: Path, changed_ns: int, given: Sequence[str]) -> UserFile:
    inputs = inputs_of(given)
    try:
        from benchd.daemon.measuring import user_onnx  # noqa: PLC0415 - everything else works without onnx
    except ImportError:
        return UserFile(str(path), inputs)  # the worker reports what to install
    return UserFile(str(path), *user_onnx.reads(path, inputs), user_onnx.precision(path))


def _referred(found: UserFile, reference: Path) -> UserFile:
    """Return the quantised file with its reference; raise UsageError unless it is a float file of the same inputs."""
    other = UserFile.at(reference, [str(spec) for spec in found.inputs])
    if found.precision != "int8" or other.precision == "int8":
        raise UsageError(f"--reference {reference}: give the fp32 file that a quantised --onnx file was made from")
    return replace(found, reference=str(reference))


UserModel = UserModule | UserFile


def _arguments(given: Sequence[str]) -> list[InputSpec]:
    """Return the inputs of a module as `--input` gives them; raise UsageError for a name that is no argument's."""
    inputs = of_module(inputs_of(given))
    for name in (spec.name for spec in inputs if spec.name):
        if not name.isidentifier() or keyword.iskeyword(name):
            raise UsageError(f"--input {name}: not a valid argument name; give the name of one of forward's arguments")
    return inputs


def _place_of(package: str, places: Sequence[str]) -> str | None:
    """Return the first of these folders that has the package, None if none has."""
    return next((place for place in places if PathFinder.find_spec(package, [place])), None)
