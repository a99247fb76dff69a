"""The protocol between supervisor and worker: one Job in, Stage lines and one Outcome back, as JSON lines."""

from pathlib import Path
from typing import Literal

from msgspec import Struct, json, structs

from benchd.daemon.errors import UsageError
from benchd.daemon.machine import folders
from benchd.daemon.measuring.user_model import UserFile, UserModule
from benchd.daemon.records import (
    Accuracy,
    ArtifactFacts,
    Case,
    Check,
    InputSpec,
    ModelFacts,
    Occupancy,
    OptionValue,
    ProcessResult,
    RuntimeFacts,
    Status,
)
from benchd.daemon.verdicts.manifest import Packed
from benchd.daemon.verdicts.statistics import StopRule
from benchd.exporters.files import Form, QuantisedFor
from benchd.exporters.files import Precision as FilePrecision

StageName = Literal[
    "import", "ready", "build", "export", "load", "check", "accuracy", "idle", "warm_up", "measure", "probe"
]
ImageCount = int | Literal["full"]
"""How many images of a data set accuracy is measured on."""

CALIBRATION_IMAGES = 512


def encoded(message: object) -> bytes:
    """Return a message to a child as JSON; raise UsageError for a path that is not UTF-8, which JSON cannot hold."""
    try:
        return json.encode(message)
    except UnicodeEncodeError as error:
        raise UsageError(f"{error.object}: its path is not UTF-8; rename it") from error


class Limits(Struct, frozen=True, kw_only=True):
    """How long and how precisely one case is measured: a preset, or a preset changed by the configuration.

    The `_deadline_s` bound the stages without a cap, and each part of `accuracy`, whose time depends on the size of the
    data set; `grace_s` is added to the caps, because the worker finishes the run it has begun.
    """

    processes: int
    warm_up_cap_s: float
    rule: StopRule
    check_images: int
    import_deadline_s: float = 180.0
    build_deadline_s: float = 900.0
    check_deadline_s: float = 600.0
    grace_s: float = 120.0

    def asked(self) -> dict[str, float | None]:
        """Return the limits that shape a measurement, without the deadlines, for its Record."""
        rule = {name: None if value is None else float(value) for name, value in structs.asdict(self.rule).items()}
        return {
            "processes": float(self.processes),
            "warm_up_cap_s": self.warm_up_cap_s,
            "check_images": float(self.check_images),
            **rule,
        }

    def deadline_s(self, stage: StageName) -> float:
        """Return how long a worker may stay in this stage."""
        return {
            "import": self.import_deadline_s,
            "ready": self.grace_s,
            "build": self.build_deadline_s,
            "export": self.build_deadline_s,
            "load": self.build_deadline_s,
            "check": self.check_deadline_s,
            "accuracy": self.check_deadline_s,
            "idle": self.grace_s,
            "warm_up": self.warm_up_cap_s + self.grace_s,
            "measure": self.rule.cap_s + self.grace_s,
            "probe": self.grace_s,
        }[stage]


class Job(Struct, frozen=True, kw_only=True):
    """One process of one case: everything a worker needs to know. Paths come from the command line, never a message.

    Files made from a user's module do not outlive the run `suite_id`, whose processes share them. `weights` is a file,
    or "demo" for those included, as for `data`; None is random. For the energy sensor, the load continues for `hold_s`
    around the measured blocks, and the device rests for `idle_s` before and after. `module` is FILE.py:function, or
    package.module:function in `module_folder`; without `inputs` the model defines them. `probes` requests the device's
    peak rates. `is_compared` skips what a comparison does not use: rests, rates, the parts of an inference, occupancy.
    `calibration` names the images of an int8 file as `data` does, or is "random"; None is the default of the weights.
    `reference` is the fp32 file that a user's quantised file was made from. `repeats` tests whether a repeated input is
    answered faster. `accuracy` is None in a process that skips it. `ships` refuses a variant that cannot be deployed as
    files before it is measured. With `ship_to` those files are written to that folder instead of timing anything;
    `deployed` is the folder whose files this measures, and whose golden answers they must give first; `engine` is a
    TensorRT plan to load instead of building one. With `neighbour_hz` this process only runs beside another one, at
    that rate, until SIGTERM. With `waits` it says that it is ready once torch is imported, or with a neighbour once the
    model is checked, and goes on at the next line of stdin; with `interleaved` also before each measured block. It then
    uses these `cpus` only, if any are given.
    """

    case: Case
    options: dict[str, OptionValue]
    limits: Limits
    device: str
    cache: str
    suite_id: str = ""
    output: str = ""
    raw_name: str = ""
    spawned_ns: int = 0
    threads: int | None = None
    weights: str | None = None
    data: str | None = None
    labels: str | None = None
    accuracy: ImageCount | None = None
    calibration: str | None = None
    calibration_images: int = CALIBRATION_IMAGES
    reference: str | None = None
    module: str | None = None
    module_folder: str = ""
    onnx: str | None = None
    inputs: list[InputSpec] = []
    artifacts: str = ""
    given_artifacts: str | None = None
    workspace_bytes: int | None = None
    hold_s: float = 0.0
    idle_s: float = 0.0
    gpu_uuid: str | None = None
    probes: bool = True
    repeats: bool = True
    is_compared: bool = False
    ships: bool = False
    ship_to: str = ""
    deployed: str = ""
    engine: str = ""
    neighbour_hz: float | None = None
    waits: bool = False
    interleaved: bool = False
    cpus: list[int] = []


class Stage(Struct, frozen=True, tag="stage"):
    """The worker begins a stage or reports progress: `percent` of it is done, None if unknown."""

    name: StageName
    percent: int | None = None


class Outcome(Struct, kw_only=True, tag="outcome"):
    """The results of one process, filled in as it runs: the worker's last line.

    With `is_partial` one comes before the last, when what was measured must not depend on what follows.
    """

    process: ProcessResult
    is_partial: bool = False
    model: ModelFacts | None = None
    artifacts: list[ArtifactFacts] = []
    runtime: RuntimeFacts | None = None
    check: Check | None = None
    synaptic_flops: float | None = None
    accuracy: Accuracy | None = None
    occupancy: Occupancy | None = None
    kernels_ran: str | None = None
    threads: int | None = None
    device_name: str | None = None
    device_uuid: str | None = None
    versions: dict[str, str] = {}
    variables: dict[str, str] | None = None
    software: dict[str, str] = {}
    flags: list[str] = []
    missing: dict[str, str] = {}
    packed: Packed | None = None


Message = Stage | Outcome


def unmeasured(status: Status, reason: str | None) -> Outcome:
    """Return the outcome of a process that has no results."""
    return Outcome(process=ProcessResult(status=status, reason=reason))


class ExportRequest(Struct, frozen=True, kw_only=True):
    """The exports requested; a batch of None is dynamic, a form of None is the target's best."""

    models: list[str]
    to: Literal["onnx", "tensorrt"]
    precisions: list[FilePrecision]
    batches: list[int | None]
    form: Form | None
    options: dict[str, list[str]]
    weights: str | None
    seed: int
    out: str | None
    workspace_bytes: int | None
    calibration: str | None = None
    calibration_images: int = CALIBRATION_IMAGES
    quantised_for: QuantisedFor | None = None
    module: UserModule | None = None
    onnx: UserFile | None = None

    @property
    def single(self) -> bool:
        """Return whether `out` names one file."""
        return bool(self.out and self.out.endswith(".onnx"))

    @property
    def folder(self) -> Path:
        """Return the store to write to."""
        return Path(self.out) if self.out and not self.single else folders.artifacts()
