"""How Inductor is asked to compile a module, by benchd and by the lines of LOAD.md alike. Needs no torch."""

FROZEN = "Inductor with freezing"
"""The runtime whose compiled code holds the weights as constants: packed, folded, and no longer those of the module."""

PLAIN = "Inductor"
"""The runtime whose compiled code reads the weights in each call."""
