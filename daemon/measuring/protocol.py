"""The protocol between supervisor and worker, in JSON lines: one Job in, Stage messages and one Outcome back."""

from pathlib import Path
from typing import Literal

from msgspec import Struct, json, structs

from benchd.daemon.errors import UsageError
from benchd.daemon.machine import folders
from benchd.daemon.records import (
    Accuracy,
    ArtifactFacts,
    Case,
    Check,
    Inputs,
    ModelFacts,
    NeuroBench,
    Occupancy,
    OptionValue,
    ProcessResult,
    RuntimeFacts,
    Status,
    UserFile,
    UserModel,
    UserModule,
    UserNir,
    WorkCount,
)
from benchd.daemon.verdicts.statistics import StopRule
from benchd.exporters.files import Form, QuantisedFor
from benchd.exporters.files import Precision as FilePrecision
from benchd.models import catalog

StageName = Literal[
    "import", "ready", "build", "export", "load", "check", "accuracy", "idle", "warm_up", "measure", "probe"
]
CALIBRATION_IMAGES = 512
SILENT = "without a sign"  # ends the progress of a timed stage, in which nothing may be printed


def encoded(message: object) -> bytes:
    """Return a message to a child as JSON; raise UsageError for a path that is not UTF-8, as JSON requires."""
    try:
        return json.encode(message)
    except UnicodeEncodeError as error:
        raise UsageError(f"{error.object}: its path is not UTF-8; rename it") from error


class Limits(Struct, frozen=True, kw_only=True):
    """The duration and the precision of a case's measurement: a preset, possibly modified by the configuration.

    The `_deadline_s` fields limit the stages without a cap, and each part of `accuracy`, whose duration depends on the
    size of the data set; `grace_s` is added to the caps, so that the worker can finish the run in progress.
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
        """Return the limits that affect a measurement, without the deadlines, for its Record."""
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


class Measure(Struct, frozen=True, tag=True):
    """Measure the case in full. The device rests for `idle_s` before and after; `probes` requests its peak rates.

    With `counts`, the work of a model without a formula is counted; one process is enough, because all have the same.
    """

    idle_s: float = 0.0
    probes: bool = True
    counts: bool = True


class Compare(Struct, frozen=True, tag=True):
    """Time the case for a comparison, without rests, peak rates, parts of an inference or occupancy.

    `repeats` tests whether a repeated input is answered faster; `layers` requests a profile after the timed section.
    With `one_input`, every run reads the same batch, which stays in the caches; with `span`, the floats of every batch
    are drawn uniformly between these ends.
    """

    repeats: bool = True
    layers: bool = False
    one_input: bool = False
    span: tuple[float, float] | None = None


class CompareDeployable(Compare, frozen=True, tag=True):
    """Like Compare, but a variant that cannot be deployed as files is rejected first."""


class Verify(Compare, frozen=True, tag=True, kw_only=True):
    """Compare the files of a shipped `folder`, which must first reproduce its golden answers.

    `engine` is a TensorRT plan or an AOTInductor package to load instead of building one.
    """

    folder: str
    engine: str = ""


class Accompany(Struct, frozen=True, tag=True):
    """Run alongside another process, at this rate, until SIGTERM."""

    rate_hz: float


class Pack(Struct, frozen=True, tag=True):
    """Write the files needed to deploy the variant to `folder`, without timing anything."""

    folder: str


Recipe = Measure | Compare | CompareDeployable | Verify | Accompany | Pack


def entry_of(model: str, own: UserModel | None) -> catalog.Model | None:
    """Return the entry with a model's options, None for a user's model that has none."""
    return catalog.entry(model) if own is None else catalog.NIR if isinstance(own, UserNir) else None


class Job(Struct, frozen=True, kw_only=True):
    """Everything a worker needs to run one process of a case. Paths come from the command line, never from a message.

    Files made from a user's module are deleted after the run `suite_id`, whose processes share them. `own` replaces the
    catalogued model. For the energy sensor, the load runs for `hold_s` before and after the measured blocks.
    `inputs.accuracy` is None in a process that skips it. With `waits`, the worker reports that it is ready once torch
    is imported (with a neighbour, once the model is checked) and continues at the next line on stdin; with
    `interleaved`, it does the same before each measured block, and then uses only `cpus`, if given.
    """

    case: Case
    limits: Limits
    device: str
    cache: str
    recipe: Recipe = Measure()
    own: UserModel | None = None
    inputs: Inputs = Inputs()
    calibration_images: int = CALIBRATION_IMAGES
    suite_id: str = ""
    output: str = ""
    raw_name: str = ""
    spawned_ns: int = 0
    artifacts: str = ""
    given_artifacts: str | None = None
    workspace_bytes: int | None = None
    hold_s: float = 0.0
    gpu_uuid: str | None = None
    waits: bool = False
    interleaved: bool = False
    cpus: list[int] = []

    @property
    def module(self) -> UserModule | None:
        """Return the user's module, None for any other model."""
        return self.own if isinstance(self.own, UserModule) else None

    @property
    def onnx(self) -> UserFile | None:
        """Return the user's ONNX file, None for any other model."""
        return self.own if isinstance(self.own, UserFile) else None

    @property
    def options(self) -> dict[str, OptionValue]:
        """Return the case's options, with the catalog's defaults filled in."""
        entry = entry_of(self.case.model, self.own)
        return entry.resolve(self.case.options) if entry else self.case.options


class Stage(Struct, frozen=True, tag="stage"):
    """The worker has begun a stage, or reports its progress, such as `image 12 of 64` or `about 5 s without a sign`."""

    name: StageName
    done: str = ""


def silent(seconds: float) -> str:
    """Return the progress of a stage in which nothing may be printed for about so long."""
    return f"about {max(1.0, seconds):.0f} s {SILENT}"


class Tensor(Struct, frozen=True):
    """An input or an output: its name, its dtype and its shape including the batch."""

    name: str
    dtype: str
    shape: list[int]


class Golden(Struct, frozen=True):
    """The criteria for the golden answers: of all `rows`, at most `rows_off` may exceed an output's tolerance.

    `tolerances` are shares of the largest float64 answer, by output; rows may be off only for networks with thresholds,
    in which one spike changes everything after it.
    """

    batches: int
    rows: int
    tolerances: dict[str, float]
    rows_off: int = 0


class PackedFiles(Struct, frozen=True, kw_only=True):
    """The worker's description of the files that it wrote: how to call them, and the answers to expect.

    `entry` builds a module: `package.module:function` in `code/`, or the model's name in the catalog. `stored` are the
    files of the measured inputs, in order, unless they were drawn.
    """

    inputs: list[Tensor]
    outputs: list[Tensor]
    golden: Golden
    stored: list[str] = []
    preprocessing: str
    entry: str = ""
    provider: str = ""
    packages: dict[str, str] = {}


class Outcome(Struct, kw_only=True, tag="outcome"):
    """The results of one process, filled in as it runs and sent as the last line of its output.

    One with `is_partial` is sent before the end, so that the measurements survive a later failure.
    """

    process: ProcessResult
    is_partial: bool = False
    model: ModelFacts | None = None
    artifacts: list[ArtifactFacts] = []
    runtime: RuntimeFacts | None = None
    check: Check | None = None
    synaptic_flops: float | None = None
    counted: WorkCount | None = None
    neurobench: NeuroBench | None = None
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
    packed: PackedFiles | None = None


Message = Stage | Outcome


def unmeasured(status: Status, reason: str | None) -> Outcome:
    """Return the outcome of a process that has no results."""
    return Outcome(process=ProcessResult(status=status, reason=reason))


class ExportRequest(Struct, frozen=True, kw_only=True):
    """The requested exports; None stands for a dynamic batch, and for the target's best form."""

    models: list[str]
    to: Literal["onnx", "tensorrt"]
    precisions: list[FilePrecision]
    batches: list[int | None]
    form: Form | None
    options: dict[str, list[str]]
    inputs: Inputs
    seed: int
    out: str | None
    workspace_bytes: int | None
    calibration_images: int = CALIBRATION_IMAGES
    quantised_for: QuantisedFor | None = None
    own: UserModel | None = None

    @property
    def single(self) -> bool:
        """Return whether `out` is a single file."""
        return bool(self.out and self.out.endswith(".onnx"))

    @property
    def folder(self) -> Path:
        """Return the folder to write the artifacts to."""
        return Path(self.out) if self.out and not self.single else folders.artifacts()
