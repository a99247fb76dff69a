"""Type stubs for the part of TensorRT's Python API that benchd uses, identical in TensorRT 10.3 (JetPack 6.2) and 11.

TensorRT's wheels ship no types. Classes keep TensorRT's names, so that `make test-tensorrt` can check each member, its
parameters and its result against the real bindings of both versions. Members that only some versions have are left out
and are looked up with getattr where they are used.
"""

# ruff: noqa: A002 - and names its own parameters

from collections.abc import Sequence
from typing import Protocol, SupportsInt, TypeAlias

class Severity(Protocol): ...

class ILogger(Protocol):
    INTERNAL_ERROR: Severity
    ERROR: Severity

class IProfiler(Protocol): ...
class IProgressMonitor(Protocol): ...

class Dims(Protocol):
    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> int: ...

class IHostMemory(Protocol):
    nbytes: int

    def __buffer__(self, flags: int, /) -> memoryview: ...

class DataType(Protocol):
    name: str

class TensorIOMode(Protocol):
    INPUT: object

class MemoryPoolType(Protocol):
    WORKSPACE: object

class ProfilingVerbosity(Protocol):
    DETAILED: object

class BuilderFlag(Protocol):
    TF32: object
    GPU_FALLBACK: object

class DeviceType(Protocol):
    DLA: object

class NetworkDefinitionCreationFlag(Protocol):
    STRONGLY_TYPED: SupportsInt

class ITensor(Protocol):
    name: str
    shape: Dims

class ILayer(Protocol): ...

class INetworkDefinition(Protocol):
    name: str
    num_inputs: int
    num_layers: int

    def get_layer(self, index: int) -> ILayer: ...
    def get_input(self, index: int) -> ITensor: ...

class IOptimizationProfile(Protocol):
    def set_shape(self, input: str, min: Dims, opt: Dims, max: Dims) -> None: ...

class ITimingCache(Protocol):
    def serialize(self) -> IHostMemory: ...

class IBuilderConfig(Protocol):
    profiling_verbosity: object
    progress_monitor: IProgressMonitor
    default_device_type: object
    DLA_core: int

    def set_flag(self, flag: object) -> None: ...
    def clear_flag(self, flag: object) -> None: ...
    def set_memory_pool_limit(self, pool: object, pool_size: int) -> None: ...
    def get_memory_pool_limit(self, pool: object) -> int: ...
    def create_timing_cache(self, serialized_timing_cache: bytes) -> ITimingCache | None: ...
    def set_timing_cache(self, cache: ITimingCache, ignore_mismatch: bool) -> bool: ...
    def get_timing_cache(self) -> ITimingCache: ...
    def add_optimization_profile(self, profile: IOptimizationProfile) -> int: ...
    def can_run_on_DLA(self, layer: ILayer) -> bool: ...  # noqa: N802

class Builder(Protocol):
    num_DLA_cores: int  # noqa: N815

    def create_network(self, flags: int) -> INetworkDefinition: ...
    def create_builder_config(self) -> IBuilderConfig: ...
    def create_optimization_profile(self) -> IOptimizationProfile: ...
    def build_serialized_network(self, network: INetworkDefinition, config: IBuilderConfig) -> IHostMemory | None: ...

class ParserError(Protocol):
    def desc(self) -> str: ...
    def node(self) -> int: ...
    def node_name(self) -> str: ...
    def node_operator(self) -> str: ...
    def file(self) -> str: ...
    def line(self) -> int: ...

class OnnxParser(Protocol):
    num_errors: int

    def parse_from_file(self, model: str) -> bool: ...
    def get_error(self, index: int) -> ParserError: ...

class IExecutionContext(Protocol):
    profiler: IProfiler

    def set_input_shape(self, name: str, shape: Dims) -> bool: ...
    def infer_shapes(self) -> list[str]: ...
    def get_tensor_shape(self, name: str) -> Dims: ...
    def set_tensor_address(self, name: str, memory: int) -> bool: ...
    def execute_async_v3(self, stream_handle: int) -> bool: ...

class ICudaEngine(Protocol):
    name: str
    num_io_tensors: int
    num_aux_streams: int
    device_memory_size_v2: int

    def get_tensor_name(self, index: int) -> str: ...
    def get_tensor_mode(self, name: str) -> TensorIOMode: ...
    def get_tensor_dtype(self, name: str) -> DataType: ...
    def get_tensor_shape(self, name: str) -> Dims: ...
    def create_execution_context(self) -> IExecutionContext | None: ...

class Runtime(Protocol):
    DLA_core: int

    def deserialize_cuda_engine(self, serialized_engine: bytes) -> ICudaEngine | None: ...

Logger: TypeAlias = ILogger  # inside the class below, that name is the attribute

class TensorRT(Protocol):
    """The module itself."""

    __version__: str
    ILogger: type[ILogger]
    IProfiler: type[IProfiler]
    IProgressMonitor: type[IProgressMonitor]
    TensorIOMode: type[TensorIOMode]
    MemoryPoolType: type[MemoryPoolType]
    ProfilingVerbosity: type[ProfilingVerbosity]
    BuilderFlag: type[BuilderFlag]
    DeviceType: type[DeviceType]
    NetworkDefinitionCreationFlag: type[NetworkDefinitionCreationFlag]

    def Dims(self, shape: Sequence[int]) -> Dims: ...  # noqa: N802
    def Builder(self, logger: Logger) -> Builder: ...  # noqa: N802
    def OnnxParser(self, network: INetworkDefinition, logger: Logger) -> OnnxParser: ...  # noqa: N802
    def Runtime(self, logger: Logger) -> Runtime: ...  # noqa: N802
