"""Reads a net in NIR, the exchange format of spiking frameworks: an HDF5 file of nodes and edges, without torch.

Such a file contains no code, but HDF5 can read other files and expand without limit. Links, external and virtual data
sets, plugin filters and overly large content are therefore rejected. Format: Pedersen et al., Neuromorphic intermediate
representation, Nature Communications, 2024.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchd.daemon.errors import Unsupported, UsageError

_MOST_NODES = 1024
_DEEPEST = 16
# maximum size of the content; above it, the largest ratio of content to file size
_MOST_BYTES, _MOST_EXPANDED = 2**30, 64
_FILTERS = {1, 2, 3, 32000}  # deflate, shuffle, checksum, lzf
_GRAPH, _INPUT, _OUTPUT = "NIRGraph", "Input", "Output"

Node = dict[str, Any]
"""A node's type and parameters: arrays, and text for some paddings."""


@dataclass(frozen=True)
class Graph:
    """The nodes by name, without subgraphs, and the edges between them; `input` and `output` are the net's own."""

    nodes: dict[str, Node]
    edges: list[tuple[str, str]]
    input: str
    output: str


def read(path: Path) -> Graph:
    """Return the net in a file; raise UsageError if it is damaged or rejected, Unsupported without h5py."""
    try:
        import h5py  # noqa: PLC0415 - an optional package
    except ImportError as error:
        raise Unsupported(f"reading a NIR file needs the package h5py: pip install h5py ({error})") from error
    try:
        with h5py.File(path, "r") as file:
            content = _Reader(h5py, max(_MOST_BYTES, _MOST_EXPANDED * path.stat().st_size)).group(file, 0)
    except (OSError, RuntimeError, KeyError, ValueError) as error:  # h5py raises any of these for a damaged file
        raise UsageError(f"{path.name}: not a complete NIR file: {error}") from error
    except UsageError as error:
        raise UsageError(f"{path.name}: {error}") from error
    root = content.get("node")
    if not isinstance(root, dict) or root.get("type") != _GRAPH:
        raise UsageError(f"{path.name}: not a NIR file: it has no graph under `node`")
    try:
        return _flat(root, "")
    except UsageError as error:
        raise UsageError(f"{path.name}: {error}") from error


class _Reader:
    """Reads groups as dictionaries, and rejects anything that reads other files or more than `bytes_left`."""

    def __init__(self, h5py: Any, bytes_left: int) -> None:
        self._h5py, self._bytes_left, self._objects_left = h5py, bytes_left, 32 * _MOST_NODES

    def group(self, group: Any, depth: int) -> dict[str, Any]:
        if depth > _DEEPEST:
            raise UsageError("its groups are nested too deeply")
        return {name: self._member(group, name, depth) for name in group}

    def _member(self, group: Any, name: str, depth: int) -> Any:
        self._objects_left -= 1
        if self._objects_left < 0:
            raise UsageError(f"it has more than {_MOST_NODES} nodes")
        if not isinstance(group.get(name, getlink=True), self._h5py.HardLink):
            raise UsageError(f"{name} is a link, which may lead to another file")
        member = group[name]
        if isinstance(member, self._h5py.Group):
            return self.group(member, depth + 1)
        if not isinstance(member, self._h5py.Dataset):
            raise UsageError(f"{name} is neither a group nor a data set")
        return self._values(name, member)

    def _values(self, name: str, dataset: Any) -> Any:
        if dataset.external or dataset.is_virtual:
            raise UsageError(f"the data of {name} is in a different file")
        chain = dataset.id.get_create_plist()
        if not {chain.get_filter(place)[0] for place in range(chain.get_nfilters())} <= _FILTERS:
            raise UsageError(f"{name} needs a filter that HDF5 loads as a plugin")
        self._bytes_left -= dataset.nbytes if dataset.shape is not None else 0
        if self._bytes_left < 0:
            raise UsageError("it expands to many times its size")
        if self._h5py.check_string_dtype(dataset.dtype):
            texts = np.asarray(dataset.asstr()[()])
            return texts.item() if texts.ndim == 0 else texts.tolist()
        if dataset.shape is None or dataset.dtype.kind not in "fiub":
            raise UsageError(f"{name} has no numbers")
        values = np.asarray(dataset[()])
        if not np.isfinite(values).all():
            raise UsageError(f"{name} has values that are not finite")
        return values


def _flat(graph: Mapping[str, Any], prefix: str) -> Graph:
    """Return a graph in which subgraphs are replaced by their nodes, named `outer.inner`."""
    inner: dict[str, Graph] = {}
    nodes: dict[str, Node] = {}
    edges: list[tuple[str, str]] = []
    own = graph.get("nodes")
    if not isinstance(own, dict):
        raise UsageError(f"the graph {prefix or 'node'} has no nodes")
    for name, node in own.items():
        if not isinstance(node, dict) or not isinstance(node.get("type"), str):
            raise UsageError(f"the node {prefix}{name} has no type")
        if node["type"] == _GRAPH:
            inner[name] = _flat(node, f"{prefix}{name}.")
            edges += inner[name].edges
        new = inner[name].nodes if name in inner else {f"{prefix}{name}": node}
        if twice := sorted(nodes.keys() & new.keys()):
            raise UsageError(f"two nodes are called {twice[0]}")
        nodes |= new
    for start, end in _pairs(graph.get("edges"), prefix):
        for name in (start, end):
            if name not in own:
                raise UsageError(f"an edge begins or ends at {prefix}{name}, and there is no such node")
        leaves = inner[start].output if start in inner else f"{prefix}{start}"
        edges.append((leaves, inner[end].input if end in inner else f"{prefix}{end}"))
    if len(nodes) > _MOST_NODES:
        raise UsageError(f"it has more than {_MOST_NODES} nodes")
    return Graph(nodes, list(dict.fromkeys(edges)), *_ends(own, prefix))


def _pairs(edges: Any, prefix: str) -> Iterator[tuple[str, str]]:
    for edge in edges if isinstance(edges, list) else [None]:
        if not isinstance(edge, list) or len(edge) != 2:
            raise UsageError(f"the edges of the graph {prefix or 'node'!r} are not pairs of names")
        yield edge[0], edge[1]


def _ends(own: Mapping[str, Node], prefix: str) -> Sequence[str]:
    """Return the names of the single Input and the single Output among a graph's own nodes."""
    ends = []
    for kind in (_INPUT, _OUTPUT):
        names = [name for name, node in own.items() if node["type"] == kind]
        if len(names) != 1:
            raise UsageError(f"the graph {prefix or 'node'!r} has {len(names)} {kind} nodes, but must have exactly one")
        ends.append(f"{prefix}{names[0]}")
    return ends
