"""Cold start: only the first run counts, from the spawn of its process to its answer."""

from benchd.daemon.records import Window
from benchd.daemon.verdicts import timings
from benchd.daemon.worker.scenarios.base import Run, Scenario


class ColdStart(Scenario):
    """Only the first run, which has already ended when it is to be recorded."""

    is_cold = True
    is_inference = False

    def time(self, run: Run) -> list[int]:
        """Record the first run."""
        spawned_ns, process = run.job.spawned_ns, run.outcome.process
        process.window = Window(spawned_ns, run.first_ended_ns)
        taken_ns = run.first_ended_ns - spawned_ns
        process.timing = timings.timing([taken_ns], None, taken_ns)
        run.take_peaks()
        run.outcome.flags.append("rss_peak_since_start")
        run.outcome.missing["probes"] = "no floor is computed for a cold start"
        return []


SCENARIO = ColdStart()
