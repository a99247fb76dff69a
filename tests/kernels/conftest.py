"""The ops of these tests have their equations as one implementation more, "reference"."""

import references  # noqa: F401 - registers them
