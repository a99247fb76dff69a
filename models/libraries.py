"""Models from other libraries by name, as in `torchvision:resnet18`: lists the names without importing torch."""

import difflib
import importlib.util
import re
from functools import cache
from pathlib import Path

from benchd.daemon.errors import NotAvailable, UsageError

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
# @register_model, @register_model() or @register_model(name="..."), then other decorators and the function
_REGISTERED = re.compile(r"^@register_model\b(?:\(name=[\"'](\w+)[\"']\))?.*?^def (\w+)\(", re.MULTILINE | re.DOTALL)
# torchvision models that benchd cannot measure, by a part of their names, with the reason
_NOT_MEASURED = {
    "quantized_": "its int8 modules run only in eager; measure the float model of the same name",
    "raft_": "optical flow takes two images; measure it as your own module, with --module",
    "rcnn": "a two-stage detector proposes a varying number of regions per image, but shapes are fixed here; "
    "one-stage detectors (ssd, retinanet, fcos) can be measured",
}


def refuse_unknown(name: str) -> None:
    """Raise UsageError unless the library before the colon in `name` has such a model that can be measured here.

    Raises NotAvailable if the library is not installed.
    """
    library, _, model = name.partition(":")
    known = _registered(library)
    architecture = model.partition(".")[0] if library == "timm" else model  # resnet18.a1_in1k: suffix for weights
    if not _NAME.fullmatch(model) or (known and architecture not in known):
        close = difflib.get_close_matches(model, sorted(known), n=1)
        hint = f"; did you mean {library}:{close[0]}?" if close else ""
        raise UsageError(f"{library} has no model {model!r}{hint}")
    reason = next((why for part, why in _NOT_MEASURED.items() if library == "torchvision" and part in model), None)
    if reason:
        raise UsageError(f"{name}: {reason}")


@cache
def _registered(library: str) -> frozenset[str]:
    """Return the names registered in the library's source; none if a future version registers them differently."""
    spec = importlib.util.find_spec(library)
    if spec is None or spec.origin is None:
        raise NotAvailable(f"the package {library} is not installed: pip install {library}")
    sources = Path(spec.origin).with_name("models").rglob("*.py")
    registered = (_REGISTERED.findall(source.read_text(encoding="utf-8")) for source in sources)
    return frozenset(given or function for names in registered for given, function in names)
