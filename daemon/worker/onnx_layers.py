"""Finds the nodes of a file that each ONNX Runtime node covers, from the graph that the runtime saves on loading.

The runtime names a fused node after its last output or after one of the nodes, with a suffix for its own layout; a node
inserted to change a layout has its own name and belongs to the node that reads it.
"""

import re
from collections.abc import Mapping
from pathlib import Path

import onnx

_SUFFIX = re.compile(r"(_nchwc|_token_\d+)+$")
_PREFIX = re.compile(r"^(fused |Fused)")


def covered(original: Path, optimised: Path) -> dict[str, list[str]]:
    """Return the original nodes of each optimised one, by name; an unnamed node is named after its first output."""
    before = onnx.load(str(original), load_external_data=False).graph.node
    after = onnx.load(str(optimised), load_external_data=False).graph.node
    names = {name_of(node) for node in before}
    producers = {output: node for node in before for output in node.output}
    covers: dict[str, list[str]] = {}
    assigned = set[str]()
    for node in after:
        ends = [_anchor(name, names, producers) for name in (node.name, *node.output)]
        anchors = list(dict.fromkeys(end for end in ends if end and end not in assigned))
        covers[node.name] = _with_operator(anchors, node.op_type, before, producers, assigned)
        assigned.update(covers[node.name])
    _add_absorbed(covers, before, producers, assigned)
    _add_inserted(covers, after)
    return covers


def makers(path: Path) -> dict[str, str]:
    """Return the name of the node that computes each tensor of a file, by the tensor's name."""
    nodes = onnx.load(str(path), load_external_data=False).graph.node
    return {output: name_of(node) for node in nodes for output in node.output}


def name_of(node: onnx.NodeProto) -> str:
    """Return the name of a node, or of its first output if it has none."""
    return str(node.name or (node.output[0] if node.output else ""))


def _anchor(name: str, names: set[str], producers: Mapping[str, onnx.NodeProto]) -> str | None:
    """Return the original node meant by a name in the optimised graph, None for a name invented by the runtime."""
    plain = _SUFFIX.sub("", _PREFIX.sub("", name))
    if plain in names:
        return plain
    return name_of(producers[plain]) if plain in producers else None


def _with_operator(
    anchors: list[str],
    operator: str,
    before: list[onnx.NodeProto],
    producers: Mapping[str, onnx.NodeProto],
    assigned: set[str],
) -> list[str]:
    """Return the anchors and the nodes back to the upstream one after whose operator the fused node is named."""
    by_name = {name_of(node): node for node in before}
    kinds = {by_name[name].op_type for name in anchors}
    wanted = _PREFIX.sub("", operator)
    path = list(anchors)
    while anchors and wanted not in kinds:
        node = by_name[path[-1]]
        feeding = [name_of(producers[name]) for name in node.input if name in producers]
        upstream = next((name for name in feeding if name not in assigned and name not in path), None)
        if upstream is None:
            return anchors  # the fused node was made from other nodes
        path.append(upstream)
        kinds.add(by_name[upstream].op_type)
    return path[::-1]  # the upstream node first


def _add_absorbed(
    covers: dict[str, list[str]],
    before: list[onnx.NodeProto],
    producers: Mapping[str, onnx.NodeProto],
    assigned: set[str],
) -> None:
    """Assign each uncovered node to the one that covers its input's node, else to one that covers a reader."""
    owner = {name: optimised for optimised, nodes in covers.items() for name in nodes}
    readers: dict[str, list[str]] = {}
    for node in before:
        for name in node.input:
            readers.setdefault(name, []).append(name_of(node))
    for node in before:
        name = name_of(node)
        if name in assigned:
            continue
        near = [name_of(producers[value]) for value in node.input if value in producers]
        near += [reader for output in node.output for reader in readers.get(output, [])]
        covering = next((owner[neighbour] for neighbour in near if neighbour in owner), None)
        if covering is not None:
            covers[covering].append(name)
            owner[name] = covering


def _add_inserted(covers: dict[str, list[str]], after: list[onnx.NodeProto]) -> None:
    """Let a node inserted by the runtime cover the same nodes as its reader, else as its input's node."""
    feeding = {output: node.name for node in after for output in node.output}
    reading: dict[str, list[str]] = {}
    for node in after:
        for name in node.input:
            reading.setdefault(name, []).append(node.name)
    for node in after:
        if covers[node.name]:
            continue
        near = [reader for output in node.output for reader in reading.get(output, [])]
        near += [feeding[name] for name in node.input if name in feeding]
        covers[node.name] = next((list(covers[neighbour]) for neighbour in near if covers[neighbour]), [])
