"""The state of a service on a machine without a GPU, without its loop."""

from contextlib import closing, contextmanager

from benchd.daemon.config import Config
from benchd.daemon.measuring.plan import Machine
from benchd.daemon.service import cases, configuration
from benchd.daemon.service.state import State

CPU = Machine("cpu", has_cxx=True)


@contextmanager
def state_in(folder, settings=None, link=None):
    """Yield the state; with a link its logs are the link's."""
    folder.mkdir(exist_ok=True)
    state = State(folder / "benchd.toml", folder)
    with closing(state.records), closing(state.events):
        configuration.apply(state, settings or Config(), CPU)
        if link:
            state.link = link
            state.records, state.events = (outgoing.log for outgoing in link.delivery.outgoing.values())
        cases.open_session(state)
        yield state
