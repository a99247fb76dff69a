"""Compares two environments, and mixes them: a mixture is a virtual environment of links to installed packages.

Each file of a chosen package, as listed in its RECORD, is linked to the installed one. A mixture therefore needs
neither an index nor an installer, takes about a second to create, and leaves both environments untouched.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from graphlib import TopologicalSorter
from pathlib import Path, PurePosixPath

import msgspec
from msgspec import Struct
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from benchd.daemon.errors import UsageError
from benchd.daemon.journal import explaining
from benchd.daemon.machine import environment, interpreter
from benchd.daemon.machine.installed import has_pip
from benchd.daemon.measuring import plan
from benchd.daemon.verdicts import results

ABSENT = "absent"
LISTING_S = 120.0
INSTALL_S = 1800.0

_LISTED = """
import hashlib, json, os, sys
from importlib.metadata import distributions
packages = {}
for each in distributions():
    name, record = each.metadata["Name"], each.read_text("RECORD")
    if not name or name in packages:  # the first on the path is the one that is imported
        continue
    packages[name] = {
        "name": name,
        "version": each.version,
        "root": str(each.locate_file("")),
        "files": [str(file) for file in each.files] if record else [],
        "digest": hashlib.sha256("".join(sorted(
            line for line in (record or "").splitlines() if ".dist-info/" not in line and not line.endswith(",,")
        )).encode()).hexdigest(),
        "requires": each.requires or [],
    }
base = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
print(json.dumps({"base": base, "version": sys.version.split()[0], "packages": list(packages.values())}))
"""


class InstalledDistribution(Struct, frozen=True):
    """An installed distribution: `files` are relative to `root`, and `digest` is a hash of their hashes."""

    name: str
    version: str
    root: str
    files: list[str]
    digest: str
    requires: list[str] = []

    @property
    def key(self) -> str:
        """The name, normalised as defined in the packaging standards."""
        return canonicalize_name(self.name)


class InstalledPackages(Struct, frozen=True):
    """What an interpreter can import: its base interpreter, its version and its packages."""

    base: str
    version: str
    packages: list[InstalledDistribution]

    @property
    def by_name(self) -> dict[str, InstalledDistribution]:
        """The packages by their `key`."""
        return {package.key: package for package in self.packages}


class EnvironmentSide(Struct, frozen=True):
    """One of the two sides: its installed packages, its environment variables, and the `case_id` that it runs."""

    installed: InstalledPackages
    variables: dict[str, str] = {}
    case: str = ""

    @property
    def identity(self) -> tuple[object, ...]:
        """The facts that must be equal in two searches for one to continue with the other's comparisons."""
        packages = sorted((package.key, package.version, package.digest) for package in self.installed.packages)
        return (self.installed.base, self.installed.version, packages, sorted(self.variables.items()), self.case)


class Difference(Struct, frozen=True):
    """A difference between A and B, which may be a cause: a setting, or packages that can only be exchanged together.

    `part` is the case's setting that differs, such as `threads`.
    """

    name: str
    packages: dict[str, InstalledDistribution | None] = {}
    variable: str | None = None
    part: str | None = None


def installed(python: str) -> InstalledPackages:
    """Return the contents of an interpreter's environment; raise UsageError if the interpreter does not run."""
    try:
        return _listed(python)
    except (OSError, subprocess.SubprocessError, msgspec.DecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it does not run Python code"
        raise UsageError(f"--python {python}: {why}; give the interpreter of an environment") from error


def _listed(python: str, first: str = "") -> InstalledPackages:
    """Return what an interpreter can import with the folder `first` at the start of its path."""
    code = f"import sys; sys.path[:] = [*filter(None, [{first!r}]), *sys.path]\n{_LISTED}"
    done = subprocess.run(
        interpreter.of_code(code, python=python), capture_output=True, text=True, check=True, timeout=LISTING_S
    )
    return msgspec.json.decode(done.stdout, type=InstalledPackages)


def with_pins(into: InstalledPackages, pins: Sequence[str], cache: Path, options: Sequence[str]) -> InstalledPackages:
    """Return the environment with each pinned `name==version` in place of its own, installed once below `cache`.

    `options` tell pip where to find the wheels. Raises UsageError for a wheel that cannot be installed.
    """
    packages = into.by_name
    for pin in pins:
        name, _, version = pin.partition("==")
        wanted = InstalledDistribution(name, version, "", [], "")
        present = packages.get(wanted.key)
        if present is None or present.version != version:
            packages[wanted.key] = _installed_pin(into, wanted, cache, options)
    return msgspec.structs.replace(into, packages=list(packages.values()))


def _installed_pin(
    into: InstalledPackages, wanted: InstalledDistribution, cache: Path, options: Sequence[str]
) -> InstalledDistribution:
    target = cache / f"{wanted.key}-{wanted.version}-{into.version.rpartition('.')[0]}"
    if not target.is_dir():
        if not has_pip():
            raise UsageError(f"pip, which installs {wanted.name}=={wanted.version}, is missing: python -m ensurepip")
        unfinished = target.with_name(f"{target.name}.{os.getpid()}")
        # isolated, because pip's own configuration could set a different index or pins
        command = [sys.executable, "-m", "pip", "--isolated", "--python", into.base, "install", "--quiet", *options]
        command += ["--disable-pip-version-check", "--no-deps", "--only-binary", ":all:", "--target", str(unfinished)]
        try:
            environment = {**os.environ, "PIP_CONFIG_FILE": os.devnull}
            subprocess.run(
                [*command, f"{wanted.name}=={wanted.version}"],
                check=True,
                capture_output=True,
                text=True,
                timeout=INSTALL_S,
                env=environment,
            )
        except subprocess.SubprocessError as error:
            shutil.rmtree(unfinished, ignore_errors=True)
            lines = str(getattr(error, "stderr", "") or error).strip().splitlines()
            raise UsageError(f"{wanted.name}=={wanted.version} cannot be installed: {lines[-1]}") from error
        unfinished.rename(target)
    return _listed(into.base, str(target)).by_name[wanted.key]


def pins(path: Path) -> list[str]:
    """Return the `name==version` lines of a lock file, or the packages of the newest record in a file of results.

    Raises UsageError with the line if it contains anything else.
    """
    if path.suffix == ".jsonl":
        versions = results.read(path)[-1].environment.versions
        return [
            f"{name}=={versions[name]}" for name in environment.DISTRIBUTIONS if name in versions.keys() - {"benchd"}
        ]
    read = []
    for number, line in enumerate(_lines(path), 1):
        pin = re.sub(r"\s--hash=\S+|\\$|(^|\s)#.*", "", line).strip()
        if not pin or pin.startswith("--hash"):
            continue
        try:
            wanted = Requirement(pin)
        except InvalidRequirement:
            wanted = None
        if not wanted or not re.fullmatch(r"==[\w.!+-]+", str(wanted.specifier)):
            raise UsageError(f"{path}:{number}: {line.strip()[:80]!r}: expected NAME==VERSION, as pip freeze writes")
        if not wanted.marker or wanted.marker.evaluate():
            read.append(f"{wanted.name}{wanted.specifier}")
    return read


def variables(path: Path) -> dict[str, str]:
    """Return the `NAME=VALUE` lines of a file, or the variables of the newest record in a file of results.

    Raises UsageError with the line if it contains anything else.
    """
    if path.suffix == ".jsonl":
        recorded = results.read(path)[-1].environment
        return {**(recorded.allocator or {}), **(recorded.variables or {})}
    read = {}
    for number, line in enumerate(_lines(path), 1):
        name, equals, value = line.strip().partition("=")
        if not line.strip() or name.startswith("#"):
            continue
        if not equals or not re.fullmatch(r"[A-Za-z_]\w*", name) or "\0" in value:
            raise UsageError(f"{path}:{number}: {line.strip()[:80]!r}: expected NAME=VALUE")
        read[name] = value
    return read


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8-sig").splitlines()
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 text") from error


def differences(first: EnvironmentSide, second: EnvironmentSide) -> tuple[list[Difference], dict[str, Set[str]]]:
    """Return the differences of B from A, each after those that it needs, and the names of those that each one needs.

    Raises UsageError if the interpreters' packages cannot be exchanged or a package does not list its files.
    """
    a, b = first.installed, second.installed
    if a.version.rpartition(".")[0] != b.version.rpartition(".")[0]:
        raise UsageError(
            f"the sides run Python {a.version} and {b.version}, whose packages cannot be mixed: create both "
            "environments with the same Python version"
        )
    changed = _changed(a, b)
    groups, needs = _groups(a, b, changed)
    package_differences = [
        Difference(_named(a, b, group), {name: b.by_name.get(name) for name in group}) for group in groups
    ]
    names = {name: difference.name for difference in package_differences for name in difference.packages}
    needed: dict[str, Set[str]] = {
        difference.name: {names[other] for name in difference.packages for other in needs[name]} - {difference.name}
        for difference in package_differences
    }
    return [*_settings(first, second), *package_differences], needed


def _changed(a: InstalledPackages, b: InstalledPackages) -> list[str]:
    before, after = a.by_name, b.by_name
    changed = [name for name in sorted({*before, *after}) if _identity(before.get(name)) != _identity(after.get(name))]
    for name in changed:
        for package in filter(None, (before.get(name), after.get(name))):
            if not package.files:
                raise UsageError(
                    f"{package.name} {package.version} in {package.root} was not installed by pip, so its files are "
                    "unknown: install it with pip in both environments"
                )
    return changed


def _identity(package: InstalledDistribution | None) -> tuple[str, str] | None:
    return (package.version, package.digest) if package else None


def _settings(first: EnvironmentSide, second: EnvironmentSide) -> Iterator[Difference]:
    for name in sorted({*first.variables, *second.variables}):
        before, after = first.variables.get(name, ABSENT), second.variables.get(name, ABSENT)
        if before != after:
            yield Difference(f"{name} {before} → {after}", variable=name)
    for kind, (own, other) in changed_parts(first.case, second.case).items():
        yield Difference(f"{own or 'default'} → {other or 'default'}", part=kind)


def changed_parts(first: str, second: str) -> dict[str, tuple[str | None, str | None]]:
    """Return the parts that differ between two case_ids, by what they set; a missing part is None."""
    a, b = _parts(first), _parts(second)
    return {kind: (a.get(kind), b.get(kind)) for kind in {**a, **b} if a.get(kind) != b.get(kind)}


def with_parts(case_id: str, parts: Iterable[str]) -> str:
    """Return a case_id with these parts in place of its own."""
    return ",".join((_parts(case_id) | {plan.kind_of(part): part for part in parts}).values())


def _parts(case_id: str) -> dict[str, str]:
    model, *parts = case_id.split(",")
    return {"model": model, **{plan.kind_of(part): part for part in parts}}


def _named(a: InstalledPackages, b: InstalledPackages, group: Sequence[str]) -> str:
    words = []
    for name in group:
        before, after = a.by_name.get(name), b.by_name.get(name)
        versions = [package.version if package else ABSENT for package in (before, after)]
        words.append(
            f"{name} {' → '.join(versions)}" if len({*versions}) == 2 else f"{name} {versions[0]}, different files"
        )
    return " + ".join(words)


def _groups(
    a: InstalledPackages, b: InstalledPackages, changed: Sequence[str]
) -> tuple[list[tuple[str, ...]], dict[str, Set[str]]]:
    """Return the changed packages in groups to be exchanged together, in dependency order, and their needs."""
    direct: dict[str, set[str]] = {name: set() for name in changed}
    for name in changed:
        for other in _unmet(b, name, a, changed):
            direct[name].add(other)  # B's version of `name` excludes A's of `other`
        for other in _unmet(a, name, b, changed):
            direct[other].add(name)  # A's version of `name` excludes B's of `other`
    reached: dict[str, Set[str]] = {name: _reached(name, direct) for name in changed}
    groups = {
        tuple(sorted(other for other in reached[name] | {name} if name in reached[other] or other == name))
        for name in changed
    }
    group_of = {name: group for group in groups for name in group}
    graph = {
        group: {group_of[other] for name in group for other in reached[name]} - {group} for group in sorted(groups)
    }
    return list(TopologicalSorter(graph).static_order()), reached


def _reached(name: str, direct: Mapping[str, Set[str]]) -> set[str]:
    reached, left = set[str](), [name]
    while left:
        new = direct[left.pop()] - reached
        reached |= new
        left += new
    return reached


def _unmet(own: InstalledPackages, name: str, other: InstalledPackages, changed: Sequence[str]) -> Iterator[str]:
    """Yield the requirements of `name` that packages on its own side meet but those on the other side do not."""
    package, own_packages, other_packages = own.by_name.get(name), own.by_name, other.by_name
    for text in package.requires if package else ():
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue  # an invalid requirement of an old package: if a mixture breaks it, it will not run
        required = canonicalize_name(requirement.name)
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        # a requirement that is already broken on its own side is ignored
        is_met = _meets(requirement, own_packages.get(required))
        if required in changed and applies and is_met and not _meets(requirement, other_packages.get(required)):
            yield required


def _meets(requirement: Requirement, package: InstalledDistribution | None) -> bool:
    return package is not None and requirement.specifier.contains(package.version, prereleases=True)


def mixed(first: EnvironmentSide, second: EnvironmentSide, applied: Sequence[Difference]) -> EnvironmentSide:
    """Return A with the settings of B that are among these differences."""
    variables = _taken(first.variables, second.variables, (difference.variable for difference in applied))
    parts = _taken(_parts(first.case), _parts(second.case), (difference.part for difference in applied))
    return EnvironmentSide(first.installed, variables, ",".join(parts.values()))


def _taken(first: Mapping[str, str], second: Mapping[str, str], names: Iterable[str | None]) -> dict[str, str]:
    """Return the first mapping, with the second's values for these names; names that the second lacks are removed."""
    replaced = {name for name in names if name}
    merged = {**first, **{name: value for name, value in second.items() if name in replaced}}
    return {name: value for name, value in merged.items() if name in second or name not in replaced}


def mixture(folder: Path, first: InstalledPackages, applied: Iterable[Difference]) -> str:
    """Create an environment in `folder` from A with these differences; return its interpreter, or raise Full."""
    packages: dict[str, InstalledDistribution | None] = {**first.by_name}
    for difference in applied:
        packages |= difference.packages
    python = folder / "bin" / "python"
    with explaining(folder):
        python.parent.mkdir(parents=True)
        python.symlink_to(first.base)
        home = Path(first.base).parent
        (folder / "pyvenv.cfg").write_text(f"home = {home}\ninclude-system-site-packages = false\n", encoding="utf-8")
        version = ".".join(first.version.split(".")[:2])
        target = folder / "lib" / f"python{version}" / "site-packages"
        target.mkdir(parents=True)
        for package in packages.values():
            if package:
                _link(package, target)
    return str(python)


def _link(package: InstalledDistribution, target: Path) -> None:
    created = set[Path]()
    for file in package.files:
        relative = PurePosixPath(file)
        if relative.is_absolute() or ".." in relative.parts:
            continue  # a command in bin, which workers never start
        source, link = Path(package.root, relative), target / relative
        for origin, place in ((source, link), (_bytecode(source), _bytecode(link))):
            if place.parent not in created:
                place.parent.mkdir(parents=True, exist_ok=True)
                created.add(place.parent)
            _linked(origin, place)


def _bytecode(path: Path) -> Path:
    """Return the path of a module's bytecode, which RECORD may not list; other paths are returned unchanged."""
    return Path(importlib.util.cache_from_source(str(path))) if path.suffix == ".py" else path


def _linked(origin: Path, place: Path) -> None:
    if place.exists() or not origin.is_file():
        return
    try:
        os.link(origin, place)
    except OSError:  # on a different file system, or owned by a different user
        place.symlink_to(origin)
