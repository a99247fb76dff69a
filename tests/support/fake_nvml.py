"""Cards of a known load behind the real nvidia-ml-py: fake_nvml.c compiled, its settings, and a sampler in a process.

The binding takes its library from LD_LIBRARY_PATH, which a process reads at its start. Run as a program with a
sampler's name and device, this file answers commands on standard input: unavailable, power_sources, sample, watch PID.
"""

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
        self.set()

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
    """The sampler `nvml` or `gpm` in a process that finds the fake library."""

    def __init__(self, fake: FakeNvml, name: str, device: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, name, device],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | fake.environment,
        )

    def __enter__(self) -> "SamplerChild":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()
        assert self._process.returncode == 0

    def ask(self, command: str):
        """Return the answer as JSON has it."""
        self._process.stdin.write(f"{command}\n")
        self._process.stdin.flush()
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


def main() -> None:
    from benchd.daemon.sampling.sources import nvml

    sampler = {"nvml": nvml.Nvml, "gpm": nvml.Gpm}[sys.argv[1]](sys.argv[2])
    for line in sys.stdin:
        command, *arguments = line.split()
        pids = [int(pid) for pid in arguments]
        answer = sampled(sampler) if command == "sample" else getattr(sampler, command)(*pids)
        sys.stdout.write(msgspec.json.encode(answer).decode() + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
