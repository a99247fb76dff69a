"""A sampler on a fake board: found available, and read up to the error that a reading ends with."""


def available(sampler):
    assert sampler.unavailable() is None
    return sampler


def read(sampler):
    """Return a reading's values by rail, and the words of the error that it ends with."""
    values = {}
    try:
        for sample in sampler.sample():
            assert sample.rail not in values
            values[sample.rail] = sample.value
    except OSError as error:
        return values, str(error)
    return values, None
