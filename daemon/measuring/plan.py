"""Expands a command line or a configuration into cases and limits, and finds the reasons why a case cannot run here."""

import errno
import importlib.util
import itertools
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from benchd.daemon.config import LimitsConfig, Suite
from benchd.daemon.errors import UsageError, require_measure, unknown
from benchd.daemon.machine import environment, gpu, sandbox
from benchd.daemon.measuring import hub, loads, user_inputs, user_model
from benchd.daemon.measuring.process import allocator
from benchd.daemon.measuring.protocol import Limits, encoded, entry_of
from benchd.daemon.records import (
    DIRECTIONS,
    HUB,
    SCENARIOS,
    Case,
    Direction,
    Environment,
    ImageCount,
    Inputs,
    Neighbour,
    OptionValue,
    Record,
    Scenario,
    UserFile,
    UserModel,
    UserModule,
    UserNir,
    Variant,
    usable_variants,
)
from benchd.daemon.runtimes import FILE_BACKENDS, PACKAGES, RUNTIMES
from benchd.daemon.verdicts.demand import CONFIRMATIONS, MOST_TRIALS, TRIAL_SHARE
from benchd.daemon.verdicts.statistics import STOP_RULES, minimum_samples
from benchd.exporters import files, sessions
from benchd.exporters.tegra import is_tegra, remedy
from benchd.models import catalog, data_named, demo, libraries

TEGRA_BUILD_S = 3600.0
PRESETS = {
    "quick": Limits(processes=1, warm_up_cap_s=2.0, rule=STOP_RULES["quick"], check_images=8),
    "standard": Limits(processes=3, warm_up_cap_s=30.0, rule=STOP_RULES["standard"], check_images=64),
    "thorough": Limits(processes=7, warm_up_cap_s=60.0, rule=STOP_RULES["thorough"], check_images=64),
}
DEFAULT_MODELS = tuple(name for name, model in catalog.MODELS.items() if model.is_planned)
START_S = 5.0  # spawn, import, build and check of one process of a small model, measured on two cores
GPU_NODES = ("dev/nvidiactl", "dev/nvmap")  # device nodes of the desktop driver and of a Tegra
NOT_ITS_DEVICE = 'the suite has device = "cuda", but this run is on the CPU (no visible NVIDIA GPU, or --device cpu)'
OWN_REFERENCE = "the reference for an ONNX file is its own run in ONNX Runtime"
OFFLINE_BATCH_SIZES = [1, 4, 16, 64]
SEARCHED_BATCH_SIZES = [2**power for power in range(11)]
SUSTAINED_S = 600.0
COLD_STARTS = 5
LEAST_RISE = 0.02  # gain in throughput required to double the batch again
MEMORY_SHARE = 0.8  # limit for twice the peak, as a share of memory: beyond it, the kernel may kill other processes too
POOL_IMAGES = 256  # number of images for accuracy if data and weights are given without a number


@dataclass(frozen=True)
class Machine:
    """The machine's properties that a plan depends on, found without torch; `packages` are the usable PACKAGES."""

    device: str
    has_cxx: bool
    has_cc: bool = True
    packages: frozenset[str] = frozenset({"triton", "onnxruntime"})
    gpu_uuid: str | None = None
    closed_gpu: str | None = None

    def environment(self) -> Environment:
        """Return the environment for the machine's records, with all CPU threads."""
        return environment.describe(self.device, None, allocator=allocator(self.device), gpu_uuid=self.gpu_uuid)


@dataclass(frozen=True)
class PlannedCase:
    """A case of the plan. `reason` says why it cannot run here; `by_name` is set if its variant was requested by name.

    `is_searched` is set if its batch size is part of a search, which ends when the throughput stops rising. `beside` is
    its planned neighbour.
    """

    case: Case
    preset: str
    limits: Limits
    by_name: bool
    reason: str | None
    own: UserModel | None = None
    inputs: Inputs = field(default_factory=Inputs)
    is_searched: bool = False
    beside: "PlannedCase | None" = None

    @property
    def seconds(self) -> float:
        """Return about how long the case takes on two cores.

        The estimate excludes accuracy, which depends on the data, and the requests that a search needs for its
        percentile.
        """
        runs = CONFIRMATIONS + MOST_TRIALS * TRIAL_SHARE if self.searched_percentile else 1
        process_s = (START_S + self.limits.warm_up_cap_s) * (2 if self.beside else 1) + self.limits.rule.cap_s * runs
        return 0.0 if self.reason else process_s * self.limits.processes

    @property
    def searched_percentile(self) -> float | None:
        """Return the percentile to be met in the search for a server's highest rate, None without a search."""
        load = self.case.load
        return load.percentile if load and load.rate_hz is None else None


def inspect(device: str) -> Machine:
    """Return this machine; `device` is cpu, a GPU, or auto, which selects the GPU if there is one.

    Raises NotAvailable for a missing GPU and for an installation that cannot measure.
    """
    require_measure()
    requested = device
    if device != "cpu":
        device = "cuda" if device != "auto" or has_gpu() else "cpu"
    compilers = (os.environ.get("CXX", "g++"), os.environ.get("CC", "cc"))
    has_cxx, has_cc = (shutil.which(compiler) is not None for compiler in compilers)
    gpu_uuid = gpu.measured(requested) if device == "cuda" else None
    packages = frozenset(name for name in PACKAGES if importlib.util.find_spec(name))
    packages -= {"onnxruntime"} if sessions.why_not() else set()
    closed = closed_gpu() if device == "cuda" else None
    return Machine(device, has_cxx, has_cc, packages, gpu_uuid, closed)


def has_gpu(root: Path = Path("/")) -> bool:
    """Return whether this machine has an NVIDIA GPU with a driver, even if this process is not allowed to open it.

    A closed GPU counts: its cases then report the reason, whereas a fallback to the CPU would be silent.
    """
    return closed_gpu(root) is not None or any(_refusal(root / node) is None for node in GPU_NODES)


def closed_gpu(root: Path = Path("/")) -> str | None:
    """Return why this process cannot open the machine's GPU and what to do; None if it can, or without a GPU."""
    for node in GPU_NODES:
        refusal = _refusal(root / node)
        if refusal == errno.EPERM:  # only the device rules of a unit or a container cause this error
            unit = sandbox.hidden(root / node, root)
            rule = f"{unit.reason}; `sudo systemctl edit benchd`: {unit.remedy}" if unit else "a device rule closes it"
            return f"/{node} cannot be opened: {rule}"
        if refusal == errno.EACCES:
            return f"/{node} cannot be opened: its mode excludes this user; `sudo usermod -aG video,render $USER`"
    if is_tegra(root) and _refusal(root / "dev/nvmap") == errno.ENOENT:
        return (
            "/dev/nvmap is missing on this Tegra: PrivateDevices= hides it, or the container lacks the NVIDIA runtime"
        )
    return None


def _refusal(node: Path) -> int | None:
    """Return the errno after opening a node for reading, None on success."""
    try:
        os.close(os.open(node, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        return error.errno
    return None


def has_missed_gpu(machine: Machine, root: Path = Path("/")) -> bool:
    """Return whether `inspect` might now find a GPU whose driver was not ready before; false for an open Tegra."""
    if machine.device == "cpu":
        return has_gpu(root)
    if machine.closed_gpu:
        return closed_gpu(root) != machine.closed_gpu
    return machine.gpu_uuid is None and not (root / "dev/nvmap").exists()


def plan(
    suites: Sequence[Suite],
    limits: LimitsConfig,
    machine: Machine,
    own: UserModel | None = None,
    *,
    search: bool = False,
) -> list[PlannedCase]:
    """Return the cases of all suites, each once; raise UsageError for an unknown name or value, or a duplicate case_id.

    With the weights "demo", a case gets the options that its model was trained with. With `search`, an offline case
    without batch sizes doubles the batch as long as that raises the throughput.
    """
    planned: dict[str, tuple[str, PlannedCase]] = {}
    for number, suite in enumerate(suites or [Suite()], 1):
        this = suite.name or str(number)
        for entry in _cases(suite, limits, machine, own, search):
            encoded((entry.own, entry.inputs))  # raises UsageError for a path that cannot be sent to a worker
            other, first = planned.setdefault(entry.case.case_id, (this, entry))
            if _reads(first) != _reads(entry):
                raise UsageError(
                    f"the suites {other} and {this} measure {entry.case.case_id} with different inputs, "
                    "weights, images or calibration: use the same in both, or measure them in separate runs"
                )
    if not planned:
        raise UsageError("the plan has no cases: training is measured only with --scenario single_stream")
    return [entry for _, entry in planned.values()]


def _reads(planned: PlannedCase) -> tuple[UserModel | None, Inputs]:
    """Return a case's weights and inputs, which are not part of its case_id."""
    variant = planned.case.variant
    calibration = planned.inputs.calibration if variant.precision == "int8" and variant.kernels == "torch" else None
    return planned.own, msgspec.structs.replace(planned.inputs, accuracy=None, calibration=calibration)


def refuse_unknown(model: str) -> None:
    """Raise UsageError for an unknown or unmeasurable model, NotAvailable for a model from a missing library."""
    if catalog.find(model) is None:
        raise unknown(
            "model", model, [*catalog.MODELS, *(f"{library}:NAME" for library in catalog.LIBRARIES), f"{HUB}:ORG/NAME"]
        )
    if model not in catalog.MODELS:
        libraries.refuse_unknown(model)


def again(record: Record) -> dict[str, Any]:
    """Return the fields of a suite that repeats a record's case; files are looked up in the current folder."""
    case, own, load, inputs = record.case, record.own, record.case.load, record.inputs
    fields: dict[str, Any] = {
        "variants": [case.variant.name],
        "batch_sizes": [case.batch_size],
        "options": {name: [value] for name, value in case.options.items()},
        "directions": [case.direction],
        "scenarios": [case.scenario],
        "seed": case.seed,
        "provider": case.provider,
        "dla": case.dla,
        "threads": [case.threads] if case.threads else [],
        "streams": [case.streams],
        "beside": str(case.beside) if case.beside else None,
        "preset": record.preset if record.preset in PRESETS else "quick",
        "processes": int(record.limits.get("processes") or len(record.processes) or 1),
        **msgspec.structs.asdict(inputs),
    }
    if load:
        fields |= msgspec.structs.asdict(load) | {"rates_hz": [load.rate_hz] if load.rate_hz else []}
        fields["find_rate"] = fields.pop("rate_hz") is None
    if isinstance(own, UserModule):
        fields["nir" if isinstance(own, UserNir) else "module"] = own.path
    elif own:
        fields |= {"onnx": own.path, "reference": own.reference}
    else:
        fields |= {"models": [case.model], "weights": inputs.weights or demo.RANDOM}
    fields["inputs"] = [str(spec) for spec in own.inputs] if own else []
    return {name: value for name, value in fields.items() if value not in (None, [], {})}


def suite_of(case_id: str, preset: str) -> Suite:
    """Return the suite with the single case `case_id`; batch size and options may be omitted.

    Raises UsageError for an unknown part; the plan checks names and values.
    """
    model, *parts = case_id.split(",")
    model = re.sub(rf"^({'|'.join(catalog.LIBRARIES)})_", r"\1:", model)  # as written in a case_id
    given: dict[str, list[str]] = {"variants": [], "batch_sizes": [], "directions": [], "scenarios": [], "threads": []}
    given["streams"] = []
    named: dict[str, str] = {}
    for part in parts:
        if part.startswith("beside="):
            raise UsageError(f"case {case_id}: a case with a neighbour cannot be given by id; use bench-once --beside")
        name, equals, value = part.partition("=")
        if name in ("threads", "streams"):
            given[name].append(value)
        elif equals:
            named[name] = value
        else:
            given[kind_of(part)].append(part.removeprefix("b") if kind_of(part) == "batch_sizes" else part)
    single = loads.named(named)
    given_once = ("seed", "provider", "dla", "percentile", "queue")
    single |= {name: named.pop(name) for name in given_once if name in named}
    fields = {"models": [model], "preset": preset, "options": {name: [value] for name, value in named.items()}}
    try:
        return msgspec.convert(given | fields | single, Suite, strict=False)
    except msgspec.ValidationError as error:
        raise UsageError(f"case {case_id}: {error}") from error


def kind_of(part: str) -> str:
    """Return what a part of a case_id stands for, after the model: a field of a Suite, or an option's name."""
    if "=" in part:
        return part.partition("=")[0]
    if part in DIRECTIONS:
        return "directions"
    if part in SCENARIOS:
        return "scenarios"
    return "batch_sizes" if re.fullmatch(r"b\d+", part) else "variants"


def _limits(suite: Suite, config: LimitsConfig) -> Limits:
    """Return the preset's limits, modified by the configuration and the suite's number of processes."""
    if suite.preset not in PRESETS:
        raise unknown("preset", suite.preset, PRESETS)
    preset = limited(PRESETS[suite.preset], config)
    return msgspec.structs.replace(preset, processes=suite.processes or preset.processes)


def limited(preset: Limits, config: LimitsConfig) -> Limits:
    """Return the preset's limits, modified by the configuration; on a Jetson, engine builds may take longer."""
    preset = msgspec.structs.replace(preset, build_deadline_s=TEGRA_BUILD_S) if is_tegra() else preset
    given = {name: value for name, value in msgspec.structs.asdict(config).items() if value is not None}
    rule = msgspec.structs.replace(preset.rule, cap_s=given.pop("measure_cap_s", preset.rule.cap_s))
    return msgspec.structs.replace(preset, **given, rule=rule)


def _of_scenario(limits: Limits, case: Case, suite: Suite, config: LimitsConfig) -> Limits:
    """Return a case's limits: a sustained run is one long process, and a cold start has one run per process.

    A server runs until there are enough requests for its percentile.
    """
    if case.load and case.load.rate_hz:
        least_s = minimum_samples(case.load.percentile) / case.load.rate_hz
        rule = msgspec.structs.replace(limits.rule, cap_s=max(limits.rule.cap_s, least_s))
        return msgspec.structs.replace(limits, rule=rule)
    if case.scenario == "sustained":
        rule = msgspec.structs.replace(limits.rule, cap_s=config.measure_cap_s or SUSTAINED_S, half_width=None)
        return msgspec.structs.replace(limits, rule=rule, processes=suite.processes or 1)
    if case.scenario == "cold_start":
        return msgspec.structs.replace(limits, processes=suite.processes or max(COLD_STARTS, limits.processes))
    return limits


def _cases(
    suite: Suite, config: LimitsConfig, machine: Machine, own: UserModel | None, search: bool
) -> Iterator[PlannedCase]:
    limits, own = _limits(suite, config), own or _of_suite(suite)
    loads.refuse(suite)
    is_elsewhere = suite.device is not None and machine.device != suite.device
    machine = replace(machine, device=suite.device) if suite.device else machine
    beside = _neighbour(suite, config, machine) if suite.beside else None
    models = [own.model] if own else suite.models or list(DEFAULT_MODELS)
    _refuse(suite, models, own)
    threads: Sequence[int | None] = suite.threads or [None]
    for model in models:
        for variant, direction in _variants(suite, model, machine, own):
            for scenario in suite.scenarios or SCENARIOS[:1]:
                if direction == "training" and scenario != "single_stream":
                    continue
                is_searched = (
                    search and scenario == "offline" and not suite.batch_sizes and not isinstance(own, UserFile)
                )
                sizes = SEARCHED_BATCH_SIZES if is_searched else _batch_sizes(suite, model, own, scenario)
                streams = suite.streams if direction == "inference" and suite.streams else [1]
                demands = itertools.product(threads, streams, loads.of(suite, scenario))
                combinations = itertools.product(sizes, _options(suite, model, own), demands)
                for batch_size, options, (count, stream_count, load) in combinations:
                    case = Case(
                        model=model,
                        variant=variant,
                        batch_size=batch_size,
                        options=options,
                        direction=direction,
                        scenario=scenario,
                        seed=suite.seed,
                        provider=suite.provider if variant.backend == "onnxruntime" else None,
                        dla=suite.dla if variant.backend == "tensorrt" else None,
                        threads=count,
                        streams=stream_count,
                        load=load,
                        beside=Neighbour(beside.case.case_id, loads.neighbour(suite.beside)[1]) if beside else None,
                    )
                    reason = NOT_ITS_DEVICE if is_elsewhere else why_not(case, machine, isinstance(own, UserFile))
                    if beside and beside.reason:
                        reason = reason or f"its neighbour {beside.case.case_id}: {beside.reason}"
                    its_limits = _of_scenario(limits, case, suite, config)
                    by_name = bool(suite.variants) and not (is_searched and batch_size > 1)
                    inputs = _inputs(suite, case, own)
                    yield PlannedCase(
                        case, suite.preset, its_limits, by_name, reason, own, inputs, is_searched, beside=beside
                    )


def _refuse(suite: Suite, models: Sequence[str], own: UserModel | None) -> None:
    """Raise UsageError for settings that make no sense for any case of these models."""
    for model in models:
        if not own:
            refuse_unknown(model)
    _refuse_unknown_options(suite, models, own)
    if suite.dla is not None and not any(name.startswith("tensorrt") for name in suite.variants):
        raise UsageError(f"--dla {suite.dla}: only TensorRT uses a DLA; add --variants tensorrt-fp16")
    _refuse_weights(suite, models, own)


def _neighbour(suite: Suite, config: LimitsConfig, machine: Machine) -> PlannedCase:
    """Return the neighbour of a suite's cases; raise UsageError unless it is a single case."""
    text, _ = loads.neighbour(suite.beside)
    planned = plan([suite_of(text, suite.preset)], config, machine)
    case = planned[0].case
    if (case.scenario, case.direction, case.streams) != ("single_stream", "inference", 1):
        raise UsageError(f"--beside {text}: a neighbour runs as one stream: leave out scenario, direction and streams")
    if len(planned) > 1:
        names = " or ".join(entry.case.case_id for entry in planned[:2])
        raise UsageError(f"--beside {text}: give a single case by adding the variant, as in {names}")
    return planned[0]


def named_weights(named: str) -> str:
    """Return "demo", "random" or the full path of a file."""
    return named if named in (demo.DEMO, demo.RANDOM) else str(Path(named).resolve())


def _refuse_weights(suite: Suite, models: Sequence[str], own: UserModel | None) -> None:
    """Raise UsageError for missing weights, or for weights with several models."""
    if own and suite.weights == demo.DEMO:
        raise UsageError(f"--weights {demo.DEMO}: your own model has no demo weights; give a checkpoint for it")
    if isinstance(own, UserFile) and suite.weights:
        raise UsageError("--weights: an ONNX file contains its own; omit it, or give --models")
    if suite.weights in (None, demo.DEMO, demo.RANDOM):
        return
    if not Path(suite.weights).is_file():
        raise UsageError(f"--weights {suite.weights}: no such file; {demo.DEMO} and {demo.RANDOM} need no file")
    if len(models) > 1:
        planned = ", ".join(models)
        raise UsageError(f"--weights is for one model; name that model with --models (the plan has {planned})")


def _inputs(suite: Suite, case: Case, own: UserModel | None) -> Inputs:
    """Return a case's inputs: those of the suite, with the model's defaults filled in."""
    if own:
        weights, data = None if suite.weights == demo.RANDOM else suite.weights, suite.data
    else:
        weights, data = demo.sources(case.model, case.options, suite.weights, suite.data)
    inputs = Inputs(**{name: getattr(suite, name) for name in Inputs.__struct_fields__})
    if suite.samples:
        if suite.data:
            raise UsageError("--inputs and --data both set the model's inputs: give one of them")
        data, inputs = None, msgspec.structs.replace(inputs, samples=user_inputs.of_samples("--inputs", suite.samples))
    if suite.metric:
        inputs = msgspec.structs.replace(inputs, metric=user_inputs.of_metric(suite.metric))
    accuracy = _accuracy(suite, weights, data, own)
    return msgspec.structs.replace(inputs, weights=weights, data=data, accuracy=accuracy)


def _accuracy(suite: Suite, weights: str | None, data: str | None, own: UserModel | None) -> ImageCount | None:
    """Return the number of images for accuracy: as requested, otherwise POOL_IMAGES if accuracy would be meaningful.

    Raises UsageError if accuracy is requested without images, or for a catalogued model with random weights.
    """
    if suite.metric and not (suite.samples or data):
        raise UsageError("--metric needs targets: also give --inputs FILE with an array `targets`, or --data")
    if suite.metric and suite.samples:
        return suite.accuracy or "full"
    if (suite.accuracy or suite.labels) and not data:
        raise UsageError("accuracy needs images with labels: also give --data imagefolder:DIR or cifar10:DIR")
    is_trained = bool(weights) or isinstance(own, UserFile)
    if suite.accuracy and not (is_trained or own):
        raise UsageError("accuracy needs trained weights, but these would be random: also give --weights FILE")
    return suite.accuracy or (POOL_IMAGES if data and (is_trained or suite.metric) else None)


def refuse_absent_images(planned: Sequence[PlannedCase], max_accuracy_drop: float | None) -> None:
    """Raise UsageError for missing images or labels, and for an accuracy limit if no case measures accuracy."""
    try:
        for images, labels in {(entry.inputs.data, entry.inputs.labels) for entry in planned}:
            if images is None:
                continue
            _, folder = data_named.parse(images, labels)
            if labels:
                data_named.read_listed(folder, labels)
    except data_named.DataError as error:
        raise UsageError(str(error)) from error
    if max_accuracy_drop is not None and not any(entry.inputs.accuracy for entry in planned):
        raise UsageError(
            "--max-drop: no accuracy is measured; add --data, and --accuracy or --weights, or --metric and --inputs"
        )


def _of_suite(suite: Suite) -> UserModel | None:
    """Return the user's own model that a suite names instead of `models`."""
    if named := next(filter(hub.is_named, suite.models), None):
        if suite.models[1:]:
            raise UsageError(f"{named}: a net from the Hub must be the only model; give just that one")
        return user_model.module(named, suite.inputs)
    try:
        if suite.module:
            return user_model.installed(suite.module, suite.inputs)
        if suite.nir:
            return user_model.nir_file(Path(suite.nir), suite.inputs)
        reference = Path(suite.reference) if suite.reference else None
        return user_model.onnx_file(Path(suite.onnx), suite.inputs, reference) if suite.onnx else None
    except UsageError as error:
        raise UsageError(f"suite.{suite.own}: {error}") from error


def _variants(suite: Suite, model: str, machine: Machine, own: UserModel | None) -> list[tuple[Variant, Direction]]:
    """Return the variants of a model to run: the requested ones, otherwise the preset's choice for this machine."""
    directions = suite.directions or list(DIRECTIONS[:1])
    if suite.variants:
        variants = [Variant.parse(name) for name in suite.variants]
        if own and any(variant.kernels == "custom" for variant in variants):
            raise UsageError("--variants: your own model has no custom kernels; omit those variants")
        return list(itertools.product(variants, directions))
    is_ours = not own and model in catalog.MODELS
    names = _module_variants(suite, model, machine) if is_ours else _own_variants(own, machine)
    chosen = list(itertools.product(map(Variant.parse, names), directions))
    if not suite.directions and is_ours and catalog.MODELS[model].custom_training:
        chosen.append((Variant(), "training"))
    return [(variant, direction) for variant, direction in chosen if direction == "inference" or variant == Variant()]


def _own_variants(own: UserModel | None, machine: Machine) -> list[str]:
    """Return the variants that are most often shipped for a model without our kernels.

    A variant that cannot run here stays, so that its row reports what is missing.
    """
    on_gpu = machine.device == "cuda"
    if isinstance(own, UserFile):
        suffix = "" if own.precision == "fp32" else f"-{own.precision}"
        return [f"onnxruntime{suffix}", *([f"tensorrt{suffix}"] if on_gpu else [])]
    return ["eager", "compile", "onnxruntime", *(["fp16", "cudagraph", "tensorrt-fp16"] if on_gpu else [])]


def _module_variants(suite: Suite, model: str, machine: Machine) -> list[str]:
    """Return the variants worth measuring: for quick those most often shipped, otherwise all that can run here."""
    on_gpu, is_full = machine.device == "cuda", suite.preset != "quick"
    has_custom = machine.device in catalog.entry(model).custom_kernels
    has_triton = "triton" in machine.packages
    names = ["eager", *(["fp16"] if on_gpu else [])]
    names += ["custom"] if has_custom and machine.has_cc and (has_triton or not on_gpu) else []
    names += ["compile", "compile-amp"] if is_full else []
    names += ["cudagraph", "cudagraph-fp16"] if on_gpu and is_full else []
    names += ["custom-cudagraph-fp16"] if on_gpu and has_custom and has_triton else []
    for backend in FILE_BACKENDS:
        runtime = RUNTIMES[backend]
        if runtime.device in (None, machine.device) and runtime.package in machine.packages:
            names += [backend] if is_full else []
            names += [f"{backend}-fp16"] if on_gpu and (is_full or runtime.device) else []
    return names


def _batch_sizes(suite: Suite, model: str, own: UserModel | None, scenario: Scenario) -> list[int]:
    if isinstance(own, UserFile) and own.batch_size:
        other = next((size for size in suite.batch_sizes if size != own.batch_size), None)
        if other:
            raise UsageError(f"--batch-sizes {other}: {Path(own.path).name} has a fixed batch size of {own.batch_size}")
        return [own.batch_size]
    defaults = (
        OFFLINE_BATCH_SIZES
        if scenario == "offline"
        else [catalog.MODELS[model].batch_size if model in catalog.MODELS else 1]
    )
    return suite.batch_sizes or defaults


def _options(suite: Suite, model: str, own: UserModel | None) -> list[dict[str, OptionValue]]:
    """Return every combination of the options that this model has, without default values."""
    entry = entry_of(model, own)
    if entry is None:
        return [{}]
    parsed = [
        [(name, entry.options[name].parse(name, value)) for value in values]
        for name, values in sorted(suite.options.items())
        if name in entry.options
    ]
    combinations = [dict(chosen) for chosen in itertools.product(*parsed)]
    if suite.weights == demo.DEMO:
        combinations = [demo.complete(model, combination) for combination in combinations]
    for combination in combinations:
        entry.resolve(combination)
    return [entry.without_defaults(combination) for combination in combinations]


def _refuse_unknown_options(suite: Suite, models: Sequence[str], own: UserModel | None) -> None:
    """Raise UsageError for an option that none of the models has; models that lack an option ignore it."""
    entries = [entry for model in models if (entry := entry_of(model, own))]
    if suite.options and not entries:
        raise UsageError(f"option {next(iter(suite.options))!r}: your own model has no options")
    known = {name for entry in entries for name in entry.options}
    for name in suite.options:
        if name not in known:
            raise unknown(f"option of {', '.join(models)}", name, sorted(known))


def why_not(case: Case, machine: Machine, user_onnx: bool = False) -> str | None:
    """Return why this case cannot run on this machine, as far as is known without torch, else None."""
    device, variant = machine.device, case.variant
    reasons = itertools.chain(
        [machine.closed_gpu] if machine.closed_gpu else [],
        _of_runtime(variant, machine, user_onnx=user_onnx),
        _of_int8(case, machine, user_onnx=user_onnx),
        _of_settings(case, device),
        _of_kernels(case, machine),
        [catalog.TRAINING] if case.direction == "training" and not catalog.trains(case.model, variant.name) else [],
        _of_streams(case, device),
        ["no NVIDIA GPU is visible on this machine"] if device == "cuda" and not has_gpu() else [],
        _of_compiler(variant, machine),
    )
    return next(iter(reasons), None)


def _lacks(name: str, machine: Machine) -> str | None:
    """Return what to do about a package that is not usable here, None if it is usable."""
    if name in machine.packages:
        return None
    absent = f"the package {name} is not installed: {remedy(PACKAGES[name])}"
    return sessions.why_not() or absent if name == "onnxruntime" else absent


def _of_runtime(variant: Variant, machine: Machine, *, user_onnx: bool) -> Iterator[str]:
    runtime = RUNTIMES[variant.backend]
    if user_onnx and not runtime.runs_files:
        *others, last = FILE_BACKENDS
        yield f"an ONNX file runs on {', '.join(others)} and {last}"
    if runtime.device not in (None, machine.device):
        yield runtime.elsewhere
    if variant.runs_nowhere:
        yield variant.runs_nowhere
    if user_onnx and (lacks := _lacks("onnxruntime", machine)):
        yield lacks if runtime.package == "onnxruntime" else f"{OWN_REFERENCE}: {lacks}"
    if runtime.package and (lacks := _lacks(runtime.package, machine)):
        yield lacks


def _of_int8(case: Case, machine: Machine, *, user_onnx: bool) -> Iterator[str]:
    variant, device = case.variant, machine.device
    if variant.needs_torchao:
        if device != "cpu" or not files.is_x86():
            yield "int8 within PyTorch needs an x86 CPU: use onnxruntime-int8, or tensorrt-int8 on a GPU"
        if lacks := _lacks("torchao", machine):
            yield f"int8 within PyTorch: {lacks}, or use onnxruntime-int8"
    is_by_cuda = (variant.backend, variant.precision, device) == ("onnxruntime", "int8", "cuda")
    # a user's file may use integer operators that CUDA supports
    if is_by_cuda and case.provider != "tensorrt" and not user_onnx:
        other = "use tensorrt-int8, or onnxruntime-int8 with --provider tensorrt"
        yield f"ONNX Runtime has no int8 kernels for CUDA: {other}"


def _of_settings(case: Case, device: str) -> Iterator[str]:
    if case.provider in ("cuda", "tensorrt") and device != "cuda":
        yield f"the provider {case.provider} needs an NVIDIA GPU"
    if case.dla is not None and not is_tegra():
        yield "only a Jetson has a DLA"
    if case.dla is not None and case.variant.precision == "fp32":
        yield "a DLA computes in fp16 and int8 only: give --variants tensorrt-fp16"
    if case.provider == "cpu" and device != "cpu":
        yield "the provider cpu runs on the CPU: give --device cpu"


def _of_kernels(case: Case, machine: Machine) -> Iterator[str]:
    entry, is_int8 = catalog.find(case.model), case.variant.built_on == "custom-int8"
    lacks_triton = machine.device == "cuda" and "triton" not in machine.packages
    if case.variant.backend in ("compile", "aoti") and lacks_triton:
        yield f"{RUNTIMES[case.variant.backend].title} needs the package triton on a GPU: {remedy(PACKAGES['triton'])}"
    if case.variant.kernels != "custom":
        return
    if entry and not entry.custom_kernels:
        yield f"{case.model} has no custom kernels"
    if entry and machine.device not in entry.custom_kernels:
        yield f"{case.model} has custom kernels for CPUs only"
    if is_int8 and entry and not entry.custom_int8:
        yield f"{case.model} has no int8 kernels: {catalog.NO_INT8}"
    if is_int8 and machine.device != "cpu":
        yield "custom-int8 has kernels for CPUs only: on a GPU, use tensorrt-int8"
    if lacks_triton:
        yield f"custom kernels need the package triton on a GPU: {remedy(PACKAGES['triton'])}"
    if not machine.has_cc:
        yield "custom kernels need a C compiler; install gcc or set CC"


def _of_streams(case: Case, device: str) -> Iterator[str]:
    most, backend = loads.most_on_gpu(case.variant), case.variant.backend
    if device == "cuda" and case.streams > most:
        enough = f"torch's {loads.CUDA_STREAMS} CUDA streams allow at most {most} streams of {backend}"
        yield f"{enough}: give --streams {most} or fewer"


def _of_compiler(variant: Variant, machine: Machine) -> Iterator[str]:
    if (variant.backend == "compile" or variant.needs_torchao) and not machine.has_cxx:
        yield "torch.compile needs a C++ compiler; install g++ or set CXX"


def cannot_run(machine: Machine) -> dict[str, list[str]]:
    """Return the names of the variants that cannot run on this machine, by reason."""
    by_reason: dict[str, list[str]] = {}
    for name in usable_variants():
        reason = why_not(Case(model="", variant=Variant.parse(name)), machine)
        if reason:
            by_reason.setdefault(reason, []).append(name)
    return by_reason


def in_rounds(planned: Sequence[PlannedCase]) -> list[list[PlannedCase]]:
    """Return the cases in groups: competing cases with several processes are measured together, in rounds.

    Competing cases differ only in the variant or, for `offline`, also in the batch size. A searched batch depends on
    the previous one, and is a group by itself.
    """
    groups: dict[object, list[PlannedCase]] = {}
    for place, entry in enumerate(planned):
        is_alone = entry.is_searched or entry.limits.processes == 1
        groups.setdefault(place if is_alone else _but_for_its_variant(entry.case), []).append(entry)
    return list(groups.values())


def _but_for_its_variant(case: Case) -> bytes:
    batch_size = 0 if case.scenario == "offline" else case.batch_size
    rest = msgspec.structs.replace(case, variant=Variant(), provider=None, dla=None, batch_size=batch_size)
    return msgspec.json.encode(rest, order="sorted")


def search_is_over(case: Case, measured: Sequence[Record]) -> bool:
    """Return whether the smaller batches of this searched case show that its batch need not be measured."""
    smaller = [record for record in measured if _but_for_its_batch(record.case) == _but_for_its_batch(case)]
    if not smaller:
        return False
    *before, last = smaller
    if last.throughput_per_s is None or last.memory is None:
        return True
    peak_bytes: float = last.memory.rss_peak_bytes
    if last.environment.is_tegra and last.environment.device == "cuda":  # a Jetson's GPU shares the CPU's memory
        # the memory of all processes: only root can read the part of ONNX Runtime and TensorRT
        of_all = last.telemetry.get("nvmap_used_bytes")
        peak_bytes += last.memory.device_peak_bytes or (of_all.maximum if of_all else 0)
    limits = re.findall(r"\d+", last.environment.system.get("memory_limit", ""))  # the limit of a container
    if 2 * peak_bytes > MEMORY_SHARE * min([last.environment.memory_bytes, *map(int, limits)]):
        return True
    best = max((record.throughput_per_s or 0.0 for record in before), default=0.0)
    return last.throughput_per_s < (1 + LEAST_RISE) * best


def _but_for_its_batch(case: Case) -> Case:
    return msgspec.structs.replace(case, batch_size=0)
