"""What stands on the broker about a plan that changes while nobody listens."""

from links import unstarted

from benchd.daemon.delivery.topics import Topics
from benchd.daemon.service import announcements
from benchd.daemon.service.announcements import MAX_GONE

TOPICS = Topics("d")


def introduced(tmp_path, known, planned):
    """Return what a new connection is told to take away, and what is known then."""
    with unstarted(tmp_path, TOPICS) as (link, _):
        known = announcements.clear_gone(link, known, map(TOPICS.latest, planned))
        return {topic for topic, body in link._documents.items() if not body}, known


def test_a_case_that_has_left_is_taken_away_at_every_start_until_it_is_planned_again(tmp_path):
    removed, known = introduced(tmp_path, [], ["a", "b"])
    assert removed == set()
    for _ in ("reload while the broker is away", "restart"):
        removed, known = introduced(tmp_path, known, ["a"])
        assert removed == {TOPICS.latest("b")}
    assert introduced(tmp_path, known, ["a", "b"]) == (set(), [TOPICS.latest("a"), TOPICS.latest("b")])


def test_of_many_that_have_left_the_last_ones_stay_known(tmp_path):
    old, new = [[f"{letter}{number:03}" for number in range(MAX_GONE)] for letter in "ab"]
    removed, known = introduced(tmp_path, list(map(TOPICS.latest, old + new)), ["c"])
    assert removed == {TOPICS.latest(case_id) for case_id in old + new}
    assert known == [TOPICS.latest(case_id) for case_id in (*new, "c")]
