"""Where the search for the best batch size ends."""

import msgspec
import pytest
from records_made import ENVIRONMENT, made

from benchd.daemon.measuring import plan
from benchd.daemon.records import Case, Memory, Summary, Variant

OFFLINE = Case(model="square", scenario="offline")


def batch(size, throughput, share_of_memory=0.1, share_on_gpu=None, of_nvmap=0.0, soc=None, device="cuda", **fields):
    shares = (share_of_memory, share_on_gpu, of_nvmap)
    cpu, gpu, nvmap = (share and int(share * ENVIRONMENT.memory_bytes) for share in shares)
    case = msgspec.structs.replace(OFFLINE, batch_size=size, **fields)
    return made(
        run_id=f"r{size}",
        case=case,
        throughput_per_s=throughput,
        memory=Memory(rss_peak_bytes=cpu, device_peak_bytes=gpu),
        environment=msgspec.structs.replace(ENVIRONMENT, soc=soc, device=device),
        telemetry={"nvmap_used_bytes": Summary(0.0, 0.0, nvmap, 9, "procfs")} if nvmap else {},
    )


@pytest.mark.parametrize(
    ("measured", "over"),
    [
        ([], False),
        ([batch(1, 100.0)], False),
        ([batch(1, 100.0), batch(2, 103.0)], False),
        ([batch(1, 100.0), batch(2, 101.0)], True),
        ([batch(1, 100.0), batch(2, 150.0), batch(4, 120.0)], True),
        ([batch(1, 100.0, share_of_memory=0.39)], False),
        ([batch(1, 100.0, share_of_memory=0.41)], True),
        ([batch(1, 100.0, share_on_gpu=0.31)], False),
        ([batch(1, 100.0, share_on_gpu=0.31, soc="tegra234")], True),
        ([batch(1, 100.0, soc="tegra234")], False),
        ([batch(1, 100.0, of_nvmap=0.31, soc="tegra234")], True),
        ([batch(1, 100.0, of_nvmap=0.29, soc="tegra234")], False),
        ([batch(1, 100.0, of_nvmap=0.31, share_on_gpu=0.1, soc="tegra234")], False),
        ([batch(1, 100.0, of_nvmap=0.31, soc="tegra234", device="cpu")], False),
        ([batch(1, None)], True),
        ([batch(1, 100.0, seed=3), batch(2, 50.0, seed=3)], False),
        ([batch(1, 9.0, variant=Variant(precision="amp")), batch(2, 9.0, variant=Variant(precision="amp"))], False),
    ],
)
def test_it_ends_where_the_throughput_rises_no_more_or_twice_the_memory_is_not_there(measured, over):
    assert plan.search_is_over(msgspec.structs.replace(OFFLINE, batch_size=64), measured) is over


TOTAL = ENVIRONMENT.memory_bytes


@pytest.mark.parametrize(
    ("limit", "over"),
    [("none", False), (f"{TOTAL // 3}", False), (f"{TOTAL // 5}", True), (f"{2 * TOTAL}, {TOTAL // 5}", True)],
)
def test_a_container_has_no_more_memory_than_its_limit(limit, over):
    measured = batch(1, 100.0, share_of_memory=0.1)
    environment = msgspec.structs.replace(measured.environment, system={"memory_limit": limit})
    measured = msgspec.structs.replace(measured, environment=environment)
    assert plan.search_is_over(msgspec.structs.replace(OFFLINE, batch_size=64), [measured]) is over
