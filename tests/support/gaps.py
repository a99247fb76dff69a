"""Why a sampler that stood still may give no energy: a reason that a test of a real one takes for an answer."""

REASONS = ("gaps: ", "too_few_updates: ", "not_covered: ", "no_samples: ")


def is_for_gaps(reason: str) -> bool:
    return reason.startswith(REASONS)
