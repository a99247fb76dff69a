"""Single stream: one inference after another on each of the case's streams, or one training step after another."""

from benchd.daemon.errors import Unsupported
from benchd.daemon.worker.backends import LoadedModel
from benchd.daemon.worker.scenarios import base
from benchd.daemon.worker.scenarios.base import Run, Scenario
from benchd.daemon.worker.steps import Step, Training
from benchd.daemon.worker.streams import Streams, back_to_back


class SingleStream(Scenario):
    """Runs back to back; several streams run concurrently, and the first one defines the blocks."""

    def step(self, run: Run, loaded: LoadedModel) -> Step:
        """Return the step of one stream."""
        if run.job.case.direction == "inference":
            return super().step(run, loaded)
        if loaded.module is None:
            raise Unsupported("this backend does not support training")
        return Training(loaded.module, loaded.device, run.pool, run.job.case.seed)

    def measure(self, run: Run, streams: Streams) -> None:
        """Time the runs of all streams and record them."""
        if len(streams.steps) == 1:
            super().measure(run, streams)
            return
        measured, by_stream, values_ns, run_count = back_to_back(streams, run.job.limits.rule, run.job.hold_s)
        base.end(run, measured, {"total": values_ns, **base.by_stream(by_stream)})
        run.outcome.process.throughput_per_s = run.job.case.batch_size * run_count / measured.window.seconds


SCENARIO = SingleStream()
