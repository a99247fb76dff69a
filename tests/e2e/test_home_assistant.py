"""The announcement to Home Assistant goes when it is switched off, and under a device id that is no longer used."""

import pytest
from test_service import Site
from waiting import WAIT_S, wait_for


@pytest.fixture
def site(tmp_path, mosquitto, child_environment):
    site = Site(tmp_path, mosquitto, child_environment)
    yield site
    site.close()


def is_removed(site):
    """Return whether the announcement has been deleted since; a later subscriber would get none."""
    site.listen(0.2)
    topic = f"homeassistant/device/benchd-{site.device}/config"
    return any(message.topic == topic and not message.payload for message in site.heard)


def configured(site, announced):
    site.configure(sizes="[16]")
    toml = site.folder / "benchd.toml"
    toml.write_text(toml.read_text().replace("[limits]", f"home_assistant = {announced}\n[limits]"))


@pytest.mark.parametrize("renamed", [False, True])
def test_discovery_is_removed_when_it_is_switched_off_or_the_device_gets_another_id(site, renamed):
    configured(site, "true")
    with site.service() as process:
        process.terminate()
        assert process.wait(WAIT_S) == 0
    assert not is_removed(site)
    configured(site, "true" if renamed else "false")
    toml = site.folder / "benchd.toml"
    if renamed:
        toml.write_text(toml.read_text().replace(site.device, f"{site.device}x"))
    with site.service(connects=False) as process:
        wait_for(lambda: is_removed(site), process)
