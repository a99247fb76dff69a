"""Spiking frameworks and NeuroBench for comparisons: `make test-neurobench` and `make test-nir`.

What they depend on is left out: much of it is for audio, data sets and GPUs, which nothing here needs.
"""

import packages

PACKAGES = (
    *("neurobench==2.3.0", "snntorch==1.0.0", "norse==1.1.0", "spikingjelly==2.0.0"),
    *("nir==1.0.8", "nirtorch==2.6", "loguru", "tqdm"),
)


def require():
    """Make the packages importable, or skip the test."""
    packages.installed("BENCHD_SPIKING", "test-neurobench and make test-nir", *PACKAGES)
