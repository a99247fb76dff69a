"""TensorRT's libraries as a few lines of C whose every virtual method asks Python: the real bindings run over them.

The bindings call C++ objects through tables of methods. Each object here has a table whose entries tell their number
to Python, so that a test finds out which entry a binding calls and answers in its place. x86-64 only: there a struct
that comes back by value goes where the first argument points.
"""

import ctypes
import subprocess
from collections.abc import Callable
from pathlib import Path

SLOTS, KINDS = 256, 16
MONITOR_STEP = 5  # behind the four methods of a versioned interface, and the start of a phase
BUILDER, PARSER, RUNTIME = range(3)  # what the three exported functions give

SOURCE = """
#include <string.h>
struct object { void **methods; struct object *implementation; long kind; };
typedef long (*answer)(long kind, long slot, long a, long b, long c);
static struct object objects[%(kinds)d];
static answer on_call;

static long called(long slot, struct object *self, long a, long b, long c) {
    if (self >= objects && self < objects + %(kinds)d)
        return on_call ? on_call(self->kind, slot, a, b, c) : 0;
    void *dims = on_call ? (void *)on_call(((struct object *)a)->kind, slot, b, c, 0) : 0;
    if (dims) memcpy(self, dims, 72); else memset(self, 0, 72);
    return (long)self;
}
%(functions)s
static void *methods[] = {%(names)s};

void *object_of(long kind) {
    objects[kind] = (struct object){methods, &objects[kind], kind};
    return &objects[kind];
}
void listen(answer callback) { on_call = callback; }
void log_error(void *logger, int method, const char *text) {
    (*(void (***)(void *, int, const char *))logger)[method](logger, 1, text);
}
void report_layer(void *profiler, int method, const char *layer, float ms) {
    (*(void (***)(void *, const char *, float))profiler)[method](profiler, layer, ms);
}
int goes_on(void *monitor, int method, const char *phase, int step) {
    return (*(char (***)(void *, const char *, int))monitor)[method](monitor, phase, step);
}
static void *made(long kind, void *logger) {
    if (!on_call) return 0;
    on_call(kind, -1, (long)logger, 0, 0);
    return object_of(kind);
}
void *createInferBuilder_INTERNAL(void *logger, int version) { return made(0, logger); }
void *createNvOnnxParser_INTERNAL(void *network, void *logger, int version) { return made(1, logger); }
void *createInferRuntime_INTERNAL(void *logger, int version) { return made(2, logger); }
void *createInferRefitter_INTERNAL(void) { return 0; }
void *createNvOnnxParserRefitter_INTERNAL(void) { return 0; }
int getNvOnnxParserVersion(void) { return 0; }
int initLibNvInferPlugins(void) { return 0; }
void *getBuilderPluginRegistry(void) { return 0; }
void *getPluginRegistry(void) { return 0; }
"""
FUNCTION = "static long slot{0}(void *o, long a, long b, long c) {{ return called({0}, o, a, b, c); }}"


class Dims(ctypes.Structure):
    """TensorRT's own layout: a rank and eight sizes."""

    _fields_ = (("rank", ctypes.c_int32), ("sizes", ctypes.c_int64 * 8))


def compile_libraries(folder: Path, major: int) -> None:
    """Put the three libraries that the bindings of this major version load into the folder."""
    functions = "\n".join(FUNCTION.format(slot) for slot in range(SLOTS))
    names = ", ".join(f"slot{slot}" for slot in range(SLOTS))
    source = folder / "stub.c"
    source.write_text(SOURCE % {"kinds": KINDS, "functions": functions, "names": names})
    for name, file in (("nvinfer", source), ("nvonnxparser", "/dev/null"), ("nvinfer_plugin", "/dev/null")):
        library = f"lib{name}.so.{major}"
        command = [
            "cc",
            "-shared",
            "-fPIC",
            f"-Wl,-soname,{library}",
            "-x",
            "c",
            str(file),
            "-o",
            str(folder / library),
        ]
        subprocess.run(command, check=True, capture_output=True, text=True)


class Stub:
    """The libraries of this process. Without a `Stub` they give no objects, as TensorRT does where CUDA fails.

    `called` is what was called since the last lesson: the kind of the object and the number of its method.
    """

    def __init__(self, major: int) -> None:
        self._library = ctypes.CDLL(f"libnvinfer.so.{major}")
        self._library.object_of.restype = ctypes.c_void_p
        self._library.report_layer.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_float)
        # in TensorRT 11, four methods of a versioned interface precede the one that a listener has
        self._listens_at = 0 if major == 10 else 4
        self._library.goes_on.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_int)
        self._answers: dict[tuple[int, int], Callable[[int, int, int], int]] = {}
        self.called: list[tuple[int, int]] = []
        self._kept: list[object] = []  # what the libraries were given the address of
        self._loggers: dict[int, int] = {}
        self._callback = ctypes.CFUNCTYPE(*[ctypes.c_long] * 6)(self._answer)
        self._library.listen(self._callback)

    def _answer(self, kind: int, slot: int, a: int, b: int, c: int) -> int:
        if slot == -1:
            self._loggers[kind] = a
            return 0
        self.called.append((kind, slot))
        return self._answers.get((kind, slot), lambda *_: 0)(a, b, c)

    def teach(self, call: Callable[[], object], answer: Callable[[int, int, int], int] | int) -> None:
        """Find the method that `call` calls last, and have it answer this from now on."""
        self.called.clear()
        result = call()
        self._answers[self.called[-1]] = answer if callable(answer) else lambda *_: answer
        del result  # only now, for that calls a method too

    def silence(self) -> None:
        """Answer no more: objects that go after this one still call."""
        self._library.listen(None)

    def object_of(self, kind: int) -> int:
        """Return the address of the object of this kind."""
        return int(self._library.object_of(kind))

    def text(self, value: str) -> int:
        """Return the address of the text, which stays."""
        buffer = ctypes.create_string_buffer(value.encode())
        self._kept.append(buffer)
        return ctypes.addressof(buffer)

    def dims(self, shape: tuple[int, ...]) -> int:
        """Return the address of the shape, which stays."""
        dims = Dims(len(shape), (ctypes.c_int64 * 8)(*shape))
        self._kept.append(dims)
        return ctypes.addressof(dims)

    def log_error(self, kind: int, text: str) -> None:
        """Log an error as the object of this kind would, to the logger it was made with."""
        self._library.log_error(ctypes.c_void_p(self._loggers[kind]), self._listens_at, text.encode())

    def report_layer(self, profiler: int, layer: str, ms: float) -> None:
        """Report a layer's time to the profiler at this address."""
        self._library.report_layer(profiler, self._listens_at, layer.encode(), ms)

    def goes_on(self, monitor: int, phase: str, step: int) -> bool:
        """Report a step of a build to the monitor at this address; return whether it lets the build go on."""
        return bool(self._library.goes_on(monitor, MONITOR_STEP, phase.encode(), step))


def shape_at(address: int) -> tuple[int, ...]:
    """Return the shape at an address that a binding gave."""
    dims = Dims.from_address(address)
    return tuple(dims.sizes[: dims.rank])


def text_at(address: int) -> str:
    """Return the text at an address that a binding gave."""
    return ctypes.string_at(address).decode()
