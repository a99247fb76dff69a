"""A pytest plugin that changes the kernels and counts who notices: `-p tests.ptx.mutation --mutants 60`.

It runs the tests once as they are and notes which PTX each of them launched. Then it draws mutants of that PTX, the
kernels in turn, and for each runs the tests that launched it until one fails. Beside `-p tests.ptx.session`.
"""

import random
from collections import defaultdict
from itertools import cycle, islice

import pytest
from _pytest.runner import runtestprotocol

from tests.ptx import mutants
from tests.ptx import session as ptx_session
from tests.ptx.program import parse


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--mutants", type=int, required=True, help="how many to draw")
    parser.addoption("--seed", type=int, default=0)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool:
    """Run the tests as they are, then against each mutant; fail where more than one in twenty survives."""
    if session.config.option.collectonly:
        return False
    launched = _launched(session.items)
    survivors = []
    for number, (ptx, mutant) in enumerate(_drawn(launched, session.config)):
        found = _found(launched[ptx], ptx, mutant)
        line = ptx.splitlines()[mutant.line].partition("//")[0].strip()
        what = f"{parse(ptx).name}: {mutant.kind}: {line!r} with {mutant.before!r} as {mutant.after!r}"
        print(f"{number + 1:3} {'found by ' + found if found else 'SURVIVED'} {what}", flush=True)  # noqa: T201
        survivors += [] if found else [what]
    print(f"{len(survivors)} of {session.config.option.mutants} mutants survived", *survivors, sep="\n")  # noqa: T201
    session.testsfailed += 20 * len(survivors) > session.config.option.mutants
    return True


def _launched(items: list[pytest.Item]) -> dict[str, list[pytest.Item]]:
    """Return the tests by the PTX that they launch, the fastest first."""
    launched: dict[str, list] = defaultdict(list)
    for item in items:
        ptx_session.EXECUTED.clear()
        reports = runtestprotocol(item, log=True, nextitem=None)
        if any(report.failed for report in reports):
            pytest.exit(f"{item.nodeid} fails as it is", 1)
        for ptx in sorted(ptx_session.EXECUTED):  # a seed draws the same in every run
            launched[ptx].append((sum(report.duration for report in reports), item.nodeid, item))
    return {ptx: [item for *_, item in sorted(found)] for ptx, found in launched.items()}


def _drawn(launched: dict[str, list], config: pytest.Config):
    """Yield a text and a mutant of it, from each kernel in turn."""
    chance = random.Random(config.option.seed)
    kernels: dict[tuple[str, str], list[str]] = defaultdict(list)
    for ptx, items in launched.items():
        kernels[items[0].path.parent.name, parse(ptx).name].append(ptx)
    for texts in islice(cycle(kernels.values()), config.option.mutants):
        ptx = chance.choice(texts)
        yield ptx, mutants.draw(ptx, chance)


def _found(items: list[pytest.Item], ptx: str, mutant: mutants.Mutant) -> str:
    """Return the name of a test that fails with the mutant, "" if there is none."""
    ptx_session.REPLACED[ptx] = mutant.of(ptx)
    try:
        for item in items:
            item._initrequest()  # as for a first run
            if any(report.failed for report in runtestprotocol(item, log=False, nextitem=None)):
                return item.name
    finally:
        del ptx_session.REPLACED[ptx]
    return ""
