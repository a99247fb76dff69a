"""Finds the valid range of a model's integer inputs: the numbers that it accepts in trial runs."""

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from benchd.daemon.worker.structures import Batch, values

MOST = 2**20
"""A model that accepts this number uses it neither as an index nor as a length."""


def spans(
    forms: Sequence[Callable[..., object]],
    ones: Batch,
    names: Collection[str],
    wanted: Collection[str],
    sizes: Iterable[int],
) -> dict[str, tuple[int, int]]:
    """Return the first and last number that a model accepts, for each of the `wanted` inputs that has a limit.

    The first of its `forms` that runs is tried. `ones` is a batch whose wanted inputs are all 1, and `names` are those
    of all its inputs. A number equal to one of `sizes`, those of the model's tensors, is the most likely to be the
    first that is refused, which saves trials.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        for form in forms:
            for example in (ones[:1], ones):  # a model may accept only its own batch size
                trials = _Trials(form, dict(zip(names, values(example), strict=True)), sizes)
                if trials.takes({}):
                    return trials.spans(wanted)
    return {}


class _Trials:
    """Runs of a model on integers, which it may refuse."""

    def __init__(self, model: Callable[..., object], inputs: Mapping[str, Tensor], sizes: Iterable[int]) -> None:
        self._model, self._inputs = model, inputs
        self._sizes = {*sizes, *(size for value in inputs.values() for size in value.shape)}

    def takes(self, numbers: Mapping[str, int]) -> bool:
        """Return whether the model runs with these inputs, each filled with its number."""
        filled = {name: torch.full_like(self._inputs[name], number) for name, number in numbers.items()}
        try:
            self._model(*{**self._inputs, **filled}.values())
        except Exception:  # a user's module may raise anything
            return False
        return True

    def spans(self, names: Iterable[str]) -> dict[str, tuple[int, int]]:
        """Return the spans of the inputs with a limit, whose largest numbers are accepted together."""
        lasts: dict[str, int] = {}
        for name in names:
            most = min(MOST, torch.iinfo(self._inputs[name].dtype).max)
            if not self.takes({name: most}):
                lasts[name] = self._last(name, most, lasts)
        return {name: (0 if self.takes({name: 0}) else 1, last) for name, last in lasts.items()}

    def _last(self, name: str, most: int, others: Mapping[str, int]) -> int:
        """Return the largest number below `most` that the model accepts in combination with the others."""
        refuses = partial(self._refuses, name, others)
        likely = [1, *sorted(size - 1 for size in self._sizes if 2 < size <= most), most]
        place = bisect_left(likely, True, lo=1, hi=len(likely) - 1, key=refuses)
        low, high = likely[place - 1], likely[place]
        return low if refuses(low + 1) else bisect_left(range(high), True, lo=low + 2, key=refuses) - 1

    def _refuses(self, name: str, others: Mapping[str, int], number: int) -> bool:
        return not self.takes({**others, name: number})
