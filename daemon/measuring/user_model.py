"""Reads a user's model from the command line: a module or an ONNX file, and its inputs."""

import keyword
import sys
from collections.abc import Sequence
from functools import lru_cache
from importlib.machinery import PathFinder
from pathlib import Path

import msgspec

from benchd.daemon.errors import UsageError
from benchd.daemon.measuring import hub, user_python
from benchd.daemon.measuring.user_inputs import inputs_of, of_module
from benchd.daemon.records import InputSpec, UserFile, UserModel, UserModule, UserNir
from benchd.models.catalog import LIBRARIES


def of_sides(
    modules: Sequence[str] | None,
    files: Sequence[Path] | None,
    nets: Sequence[str] | None,
    given: Sequence[str],
) -> list[UserModel]:
    """Return the models of --module, --onnx or --nir, one for both sides or one per side; `given` is that of --input.

    Raises UsageError if more than one of these options is given, and for --input without any.
    """
    options = {"--module": modules, "--onnx": files, "--nir": nets}
    chosen = [option for option, values in options.items() if values]
    if len(chosen) > 1:
        raise UsageError(f"{' and '.join(chosen)}: give only one of them")
    if given and not chosen:
        raise UsageError(f"--input is for {', '.join(options)}: the catalog's models define their inputs")
    return [
        *(module(text, given) for text in modules or []),
        *(onnx_file(path.resolve(), given) for path in files or []),
        *(nir_file(Path(path), given) for path in nets or []),
    ]


def usual_variant(models: Sequence[UserModel]) -> str:
    """Return the variant that stands for these models where none is named."""
    return "onnxruntime" if any(isinstance(model, UserFile) for model in models) else "eager"


def module(text: str, given: Sequence[str]) -> UserModule:
    """Return the module that `--module` and `--input` describe; raise UsageError if it is invalid."""
    file, colon, function = text.rpartition(":")
    inputs = _arguments(given)
    if hub.is_named(text):
        return UserModule(text, inputs, str(hub.folder(text)))
    if not colon or not function.isidentifier():
        raise UsageError(f"--module {text}: expected FILE.py:FUNCTION or package.module:FUNCTION")
    if file in LIBRARIES:
        raise UsageError(f"--module {text}: a library's model is given by name: bench-once --models {text}")
    if not file.endswith(".py") and all(map(str.isidentifier, file.split("."))) and not Path(file).is_file():
        package = file.partition(".")[0]
        if _place_of(package, [str(Path.cwd()), *sys.path]) is None:
            raise UsageError(f"--module {text}: no module {package!r} in this folder or environment")
        return UserModule(text, inputs, str(Path.cwd()))
    if not Path(file).is_file():
        raise UsageError(f"--module {text}: {file}: no such file")
    if not file.endswith(".py"):
        raise UsageError(f"--module {text}: {file} is not a .py file")
    user_python.refuse(Path(file), function)
    return UserModule(f"{Path(file).resolve()}:{function}", inputs)


def installed(text: str, given: Sequence[str]) -> UserModule:
    """Return package.module:FUNCTION from this environment, not from the current folder, or a net from the Hub.

    Raises UsageError if it is absent.
    """
    if hub.is_named(text):
        return module(text, given)
    package = text.partition(":")[0].partition(".")[0]
    place = _place_of(package, [entry for entry in sys.path if Path(entry).is_absolute()])
    if place is None:
        raise UsageError(f"{text}: no package {package!r} in this environment; pip install it")
    return UserModule(text, _arguments(given), place)


def nir_file(path: Path, given: Sequence[str]) -> UserNir:
    """Return the file with the inputs given by `--input`; raise UsageError if it does not exist."""
    if not path.is_file():
        raise UsageError(f"{path}: no such file")
    return UserNir(str(path.resolve()), _arguments(given))


def onnx_file(path: Path, given: Sequence[str], reference: Path | None = None) -> UserFile:
    """Return the file with its inputs; `given` has the syntax of `--input`, `reference` is its fp32 original.

    Raises UsageError for a file that cannot be measured.
    """
    try:
        file = _file(path, path.stat().st_mtime_ns, tuple(given))
        return _referred(file, reference) if reference else file
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error


@lru_cache(maxsize=8)  # cached, because the service plans again before each case
def _file(path: Path, changed_ns: int, given: Sequence[str]) -> UserFile:
    inputs = inputs_of(given)
    try:
        from benchd.daemon.measuring import user_onnx  # noqa: PLC0415 - everything else works without onnx
    except ImportError:
        return UserFile(str(path), inputs)  # the worker will report what to install
    return UserFile(str(path), *user_onnx.reads(path, inputs), user_onnx.precision(path))


def _referred(quantised: UserFile, reference: Path) -> UserFile:
    """Return the quantised file with its reference; raise UsageError unless it is a float file with the same inputs."""
    try:
        other = onnx_file(reference, [str(spec) for spec in quantised.inputs])
    except UsageError as error:
        raise UsageError(f"--reference {reference}: its inputs are not those of {quantised.path} ({error})") from error
    if quantised.precision != "int8" or other.precision == "int8":
        raise UsageError(f"--reference {reference}: give the fp32 file that a quantised --onnx file was made from")
    return msgspec.structs.replace(quantised, reference=str(reference))


def _arguments(given: Sequence[str]) -> list[InputSpec]:
    """Return the inputs of a module given by `--input`; raise UsageError for a name that cannot be an argument."""
    inputs = of_module(inputs_of(given))
    names = [spec.name for spec in inputs if spec.name]
    for name in names:
        if not all(part.isidentifier() and not keyword.iskeyword(part) for part in name.split(".")):
            raise UsageError(
                f"--input {name}: not a valid argument name; give the name of one of forward's arguments, or "
                "ARGUMENT.KEY if that is a dict"
            )
        if inner := next((other for other in names if other.startswith(f"{name}.")), None):
            raise UsageError(f"--input {name}: either a tensor or a dict with {inner}, not both")
    return inputs


def _place_of(package: str, places: Sequence[str]) -> str | None:
    """Return the first of these folders that contains the package, None if none does."""
    return next((place for place in places if PathFinder.find_spec(package, [place])), None)
