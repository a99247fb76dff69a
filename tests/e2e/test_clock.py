"""The real service while the clock of its machine is set by hours."""

import time

from fake_clock import FakeClock
from test_service import site  # noqa: F401 - a fixture

HOUR_S = 3600.0


def test_setting_the_clock_back_and_forth_keeps_the_schedule_and_the_results(site, tmp_path):  # noqa: F811
    clock = FakeClock(tmp_path)
    with site.configure(sizes="[16]", more='every = "1h"\n').service(is_apart=True, **clock.environment):
        is_due_within_the_hour(site)
        clock.set(5 * HOUR_S)
        assert site.until("result/")["status"] == "ok"
        clock.set(-4 * HOUR_S)
        is_due_within_the_hour(site)
        clock.set(-2 * HOUR_S)
        assert site.until("result/")["status"] == "ok"


def is_due_within_the_hour(site):  # noqa: F811
    """Wait until the service has looked at its schedule and finds the suite due within its period."""
    while (due_s := site.command("status")["health"]["next_suite_in_s"]) is None or not 0 < due_s <= HOUR_S:
        time.sleep(1.0)
