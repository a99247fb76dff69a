"""NIR files for tests, written with h5py alone; and one neuron stepped in plain numbers, for what they must answer."""

from itertools import pairwise

import h5py
import numpy as np

DIALECT = {
    "time_steps": 4,
    "dt": 1e-3,
    "readout": "steps",
    "reset": "zero",
    "current": "new",
    "fires": "above",
    "gain": "absolute",
}


def graph(nodes, edges, sizes=(3,), out=(3,)):
    """Return a graph of these nodes, `edges` as in "input a, a output", with an Input and an Output."""
    ends = {"input": {"type": "Input", "shape": np.array(sizes)}, "output": {"type": "Output", "shape": np.array(out)}}
    pairs = [edge.split() for edge in edges.split(",")]
    return {"type": "NIRGraph", "nodes": ends | nodes, "edges": pairs}


def chain(*nodes, sizes=(3,)):
    """Return a graph of nodes one behind the other."""
    names = ["input", *(f"n{place}" for place in range(len(nodes))), "output"]
    edges = ", ".join(" ".join(pair) for pair in pairwise(names))
    return graph(dict(zip(names[1:], nodes, strict=False)), edges, sizes)


def write(path, content, **storage):
    """Write a graph as a NIR file, arrays as `storage` says, and return its path."""
    with h5py.File(path, "w") as file:
        file["version"] = "1.0.8"
        _write(file.create_group("node"), content, storage)
    return path


def _write(group, content, storage):
    for name, value in content.items():
        if isinstance(value, dict):
            _write(group.create_group(name), value, storage)
        elif isinstance(value, list):
            group.create_dataset(name, data=np.array(value, dtype=object), dtype=h5py.string_dtype())
        elif isinstance(value, str):
            group.create_dataset(name, data=value, dtype=h5py.string_dtype())
        else:
            options = storage if np.ndim(value) else {}
            group.create_dataset(name, data=value, **options)


def neuron(kind, count=3, **given):
    """Return neurons of this type whose parameters differ from neuron to neuron."""
    spread = np.linspace(0.8, 1.2, count)
    values = {"r": 3.0 * spread}
    if kind not in ("I", "IF"):
        values["v_leak"] = 0.1 * spread
        values |= {"tau_mem": 5e-3 * spread, "tau_syn": 3e-3 * spread, "w_in": 2 * spread} if "Cuba" in kind else {}
        values |= {} if "Cuba" in kind else {"tau": 4e-3 * spread}
    else:
        values["r"] = 600.0 * spread
    if kind.endswith("F"):
        values |= {"v_threshold": 0.9 * spread, "v_reset": 0.05 * spread}
    return {"type": kind} | values | given


def stepped(node, arriving, dialect):
    """Return what leaves a population (T, count) for what arrives (T, count), by the equations one after the other."""
    kind, dt = node["type"], dialect["dt"]
    v = np.array(node.get("v_leak", np.zeros_like(node["r"])))
    current, fired, leaving = np.zeros_like(v), np.zeros_like(v), []
    per_step = dialect["gain"] == "per_step"
    for x in arriving:
        if kind.startswith("Cuba"):
            before = current
            added = node["w_in"] * x * (1 if per_step else dt / node["tau_syn"])
            current = current - dt / node["tau_syn"] * current + added
            used = current if dialect["current"] == "new" else before
            v = v + dt / node["tau_mem"] * (node["v_leak"] - v + node["r"] * used)
        elif kind in ("I", "IF"):
            v = v + node["r"] * x * (1 if per_step else dt)
        else:
            rate = dt / node["tau"]
            v = v + rate * (node["v_leak"] - v) + node["r"] * x * (1 if per_step else rate)
        if not kind.endswith("F"):
            leaving.append(v)
            continue
        if dialect["reset"].startswith("delayed"):
            v = _reset(v, fired, node, dialect)
        fired = (v >= node["v_threshold"] if dialect["fires"] == "at" else v > node["v_threshold"]).astype(float)
        if not dialect["reset"].startswith("delayed"):
            v = _reset(v, fired, node, dialect)
        leaving.append(fired)
    return np.array(leaving)


def _reset(v, fired, node, dialect):
    if dialect["reset"].endswith("subtract"):
        return v - fired * node["v_threshold"]
    return np.where(fired > 0, node["v_reset"], v)
