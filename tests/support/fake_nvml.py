"""Cards of a known load behind the real nvidia-ml-py: fake_nvml.c compiled, its settings, and a sampler in a process.

The binding takes its library from LD_LIBRARY_PATH, which a process reads at its start. Run as a program,
this file forks samplers, which answer commands on standard input: unavailable, power_sources, sample, watch PID, end.
"""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
from broker import program

SOURCE = Path(__file__).with_name("fake_nvml.c")
FIRST, SECOND = (f"GPU-{digit * 4}1a2b-0000-4000-8000-00000000000{digit}" for digit in "01")


class FakeNvml:
    """The library in a folder, and its settings.

    The load of the first card: watts (50), with swing (0) on top in every other half of square_s (1); the counter is
    renewed each tick_s (0.1) unless stopped_s is set and counts from reset_j (0), power each power_tick_s (0.02).
    Codes of NVML: init, fail, fail.FUNCTION, field.ID.SCOPE, gpm.ID. The rest: cards (2), name.N, uuid.N, mig, sm_mhz,
    memory_mhz, throttle, utilization, celsius, pids (with commas), gpm (1 where there is one).
    """

    def __init__(self, folder: Path) -> None:
        self._settings: dict[str, object] = {}
        self._file = folder / "settings"
        library = folder / "libnvidia-ml.so.1"
        flags = ["-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-O1", "-shared", "-fPIC"]
        subprocess.run([program(os.environ.get("CC", "cc")), *flags, "-o", library, SOURCE, "-lm"], check=True)
        self.environment = {"LD_LIBRARY_PATH": str(folder), "FAKE_NVML": str(self._file)}
        self._first: subprocess.Popen[str] | None = None
        self.set()

    def first_process(self) -> "subprocess.Popen[str]":
        """Return the process that samplers are forked from; it ends with this one."""
        if self._first is None:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            self._first = subprocess.Popen([sys.executable, __file__], env=os.environ | self.environment, **pipes)
        return self._first

    def close(self) -> None:
        """End that process."""
        if self._first:
            self._first.communicate()

    def set(self, **settings: object) -> None:
        """Change settings at once for all processes; `__` stands for a dot."""
        self._settings |= {key.replace("__", "."): value for key, value in settings.items()}
        new = self._file.with_suffix(".new")
        new.write_text("".join(f"{key} {value}\n" for key, value in self._settings.items()))
        new.replace(self._file)

    def reset(self) -> None:
        self._settings = {}
        self.set()

    def energy_j(self, start_ns: int, end_ns: int, card: int = 0) -> float:
        """Return what the card took in between, by the same formula as the library."""
        return (card + 1) * (self._until_j(end_ns / 1e9) - self._until_j(start_ns / 1e9))

    def _until_j(self, t: float) -> float:
        watts, swing, square_s = (
            float(str(self._settings.get(key, value))) for key, value in (("watts", 50), ("swing", 0), ("square_s", 1))
        )
        whole, part = divmod(t, square_s)
        return watts * t + swing * (whole * square_s / 2 + max(0.0, part - square_s / 2))


class SamplerChild:
    """The sampler `nvml` or `gpm` in a process that finds the fake library, forked from one that has imported it."""

    def __init__(self, fake: FakeNvml, name: str, device: str) -> None:
        self._process = fake.first_process()
        given = {key: value for key, value in os.environ.items() if key.startswith("CUDA_")}
        self._say(json.dumps([name, device, given]))

    def __enter__(self) -> "SamplerChild":
        return self

    def __exit__(self, *_: object) -> None:
        assert self.ask("end") == 0

    def _say(self, line: str) -> None:
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def ask(self, command: str):
        """Return the answer as JSON has it."""
        self._say(command)
        return json.loads(self._process.stdout.readline())

    def sample(self) -> tuple[list[tuple[int, str, float, str, str]], str | None]:
        """Return the samples of one tick and what failed after them."""
        samples, failure = self.ask("sample")
        return [tuple(sample) for sample in samples], failure


def sampled(sampler) -> tuple[list[object], str | None]:
    samples = []
    try:
        for sample in sampler.sample():
            samples.append(sample)  # noqa: PERF402  # those before a failure stay
    except OSError as error:
        return samples, str(error)
    return samples, None


STDIN = io.FileIO(0)  # not buffered: what a sampler reads, its parent must not have read ahead


def serve(name: str, device: str) -> None:
    """Answer commands until `end`."""
    from benchd.daemon.sampling.sources import nvml

    sampler = {"nvml": nvml.Nvml, "gpm": nvml.Gpm}[name](device)
    while (line := STDIN.readline().decode().split()) != ["end"]:
        command, *pids = line
        answer = sampled(sampler) if command == "sample" else getattr(sampler, command)(*map(int, pids))
        sys.stdout.write(msgspec.json.encode(answer).decode() + "\n")
        sys.stdout.flush()


def main() -> None:
    """Fork a sampler for each line: its name, its device and its variables; say its status when it has ended."""
    import pynvml  # noqa: F401

    from benchd.daemon.sampling.sources import nvml  # noqa: F401

    while line := STDIN.readline():
        name, device, variables = json.loads(line)
        if not (pid := os.fork()):
            for each in [each for each in os.environ if each.startswith("CUDA_")]:
                del os.environ[each]
            os.environ.update(variables)
            serve(name, device)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
