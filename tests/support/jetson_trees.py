"""Fake Jetsons: all that benchd reads under /proc, /sys and /etc of Orin Nano, Orin NX, AGX Orin and Thor, in a folder.

`build` makes a board; the functions behind it do to it what befalls real ones. A descriptor that was open before reads
as much as a real one would: nothing, once its device is gone.
"""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import machines
from machines import write

DEVICES = "sys/bus/i2c/devices"
NOT_CONNECTED = "NC"


@dataclass(frozen=True)
class Rail:
    label: str
    millivolts: int = 0
    milliamps: int = 0


@dataclass(frozen=True)
class Board:
    """A board; `zones` are millidegrees, None for a unit that is off, and `modes` those of nvpmodel from 0 on."""

    model: str
    compatible: tuple[str, ...]
    release: str
    system: str
    kernel: str
    gpu: str
    shunt_uohm: int
    chips: Mapping[str, Mapping[int, Rail]]
    zones: Mapping[str, int | None]
    modes: tuple[str, ...]
    mode: int
    microwatts: int | None = None  # of a Thor's INA238

    def rails(self) -> dict[str, float]:
        """The watts of each rail that is connected."""
        rails = [rail for chip in self.chips.values() for rail in chip.values() if rail.label != NOT_CONNECTED]
        return {rail.label: rail.millivolts * rail.milliamps / 1e6 for rail in rails}


JETPACK_6 = {
    "release": "# R36 (release), REVISION: 4.3, GCID: 38968081, BOARD: generic, EABI: aarch64",
    "system": "Ubuntu 22.04.5 LTS",
    "kernel": "5.15.148-tegra",
    "gpu": "17000000.gpu",
}
JETPACK_5 = {
    "release": "# R35 (release), REVISION: 4.1, GCID: 33958178, BOARD: t186ref, EABI: aarch64",
    "system": "Ubuntu 20.04.6 LTS",
    "kernel": "5.10.120-tegra",
    "gpu": "17000000.ga10b",
}
ZONES = {
    "cpu-thermal": 46125,
    "gpu-thermal": 44531,
    "cv0-thermal": None,
    "cv1-thermal": None,
    "cv2-thermal": None,
    "soc0-thermal": 45250,
    "soc1-thermal": 45812,
    "soc2-thermal": 44968,
    "tj-thermal": 46125,
}

ORIN_NANO = Board(
    model="NVIDIA Jetson Orin Nano Developer Kit",
    compatible=("nvidia,p3768-0000+p3767-0005", "nvidia,p3767-0005", "nvidia,tegra234"),
    shunt_uohm=5000,
    chips={
        "1-0040": {1: Rail("VDD_IN", 4984, 1200), 2: Rail("VDD_CPU_GPU_CV", 4976, 480), 3: Rail("VDD_SOC", 4976, 304)}
    },
    zones=ZONES,
    modes=("15W", "25W", "MAXN_SUPER", "7W"),
    mode=1,
    **JETPACK_6,
)
ORIN_NX = Board(
    model="NVIDIA Jetson Orin NX Engineering Reference Developer Kit",
    compatible=("nvidia,p3768-0000+p3767-0000", "nvidia,p3767-0000", "nvidia,tegra234"),
    shunt_uohm=5000,
    chips={
        "1-0040": {1: Rail("VDD_IN", 5016, 3408), 2: Rail("VDD_CPU_GPU_CV", 5000, 1696), 3: Rail("VDD_SOC", 5000, 800)}
    },
    zones=ZONES,
    modes=("MAXN", "10W", "15W", "25W"),
    mode=3,
    **JETPACK_6,
)
AGX_ORIN = Board(
    model="NVIDIA Jetson AGX Orin Developer Kit",
    compatible=("nvidia,p3737-0000+p3701-0005", "nvidia,p3701-0005", "nvidia,tegra234"),
    shunt_uohm=2000,
    chips={
        "1-0040": {
            1: Rail("VDD_GPU_SOC", 19040, 320),
            2: Rail("VDD_CPU_CV", 19040, 180),
            3: Rail("VIN_SYS_5V0", 5032, 960),
        },
        "1-0041": {1: Rail(NOT_CONNECTED), 2: Rail("VDDQ_VDD2_1V8AO", 5032, 260), 3: Rail(NOT_CONNECTED)},
    },
    zones=ZONES | {"Tboard_tegra": 38000, "Tdiode_tegra": 40250},
    modes=("MAXN", "MODE_15W", "MODE_30W", "MODE_50W"),
    mode=0,
    **JETPACK_5,
)
JETPACK_7 = {
    "release": "# R39 (release), REVISION: 2.0, GCID: 45113840, BOARD: generic, EABI: aarch64",
    "system": "Ubuntu 24.04.3 LTS",
    "kernel": "6.8.12-tegra",
    "gpu": "17000000.gpu",
}
ORIN_NANO_7 = replace(ORIN_NANO, **JETPACK_7)
AGX_ORIN_7 = replace(AGX_ORIN, **JETPACK_7)
THOR = Board(
    model="NVIDIA Jetson AGX Thor Developer Kit",
    compatible=("nvidia,p3971-0050+p3834-0005", "nvidia,p3834-0005", "nvidia,tegra264"),
    shunt_uohm=0,
    chips={},
    zones={"cpu-thermal": 46125, "gpu-thermal": 44531, "tj-thermal": 46125},
    modes=("MAXN", "120W", "90W", "70W"),
    mode=1,
    microwatts=31_250_000,
    **(JETPACK_7 | {"gpu": "gpu-gpc-0"}),
)
BOARDS = {
    "orin_nano": ORIN_NANO,
    "orin_nx": ORIN_NX,
    "agx_orin": AGX_ORIN,
    "orin_nano_7": ORIN_NANO_7,
    "agx_orin_7": AGX_ORIN_7,
}


def build(root: Path, board: Board) -> Path:
    machines.orin_nano(root)
    shutil.rmtree(root / "sys/class/devfreq")
    _identity(root, board)
    _nvpmodel(root, board)
    _memory(root, board)
    _power(root, board)
    _gpu(root, board)
    _throttling(root)
    for number, (kind, millidegrees) in enumerate(board.zones.items()):
        zone = root / f"sys/devices/virtual/thermal/thermal_zone{number}"
        write(zone, {"type": f"{kind}\n"} | ({} if millidegrees is None else {"temp": f"{millidegrees}\n"}))
    return root


def _identity(root: Path, board: Board) -> None:
    write(
        root,
        {
            "etc/os-release": f'NAME="Ubuntu"\nPRETTY_NAME="{board.system}"\nVERSION_ID="{board.system[7:12]}"\n',
            "etc/nv_tegra_release": f"{board.release}\n",
            "proc/sys/kernel/osrelease": f"{board.kernel}\n",
            "proc/device-tree/model": f"{board.model}\0",
            "proc/device-tree/compatible": "".join(f"{name}\0" for name in board.compatible),
        },
    )


def _nvpmodel(root: Path, board: Board) -> None:
    modes = "".join(
        f"< POWER_MODEL ID={i} NAME={mode} >\nGPU MAX_FREQ 624750000\n\n" for i, mode in enumerate(board.modes)
    )
    write(
        root,
        {
            "etc/nvpmodel.conf": f"{modes}< PM_CONFIG DEFAULT={board.mode} >\n",
            "var/lib/nvpmodel/status": f"pmode:{board.mode:04d}\n",
        },
    )


def _memory(root: Path, board: Board) -> None:
    with (root / "proc/meminfo").open("a") as meminfo:
        meminfo.write("SwapTotal:       3900000 kB\nSwapFree:        3400000 kB\n")
        if board.microwatts is None:  # the driver of a Thor's GPU does without nvmap (jetson_stats 849)
            meminfo.write("NvMapMemFree:          0 kB\nNvMapMemUsed:     102400 kB\n")


def _power(root: Path, board: Board) -> None:
    write(root, {f"{DEVICES}/0-0050/name": "24c02\n", f"{DEVICES}/1-004c/name": "tmp451\n"})
    write(root, {f"{DEVICES}/1-004c/hwmon/hwmon0/{name}": "1\n" for name in ("in1_input", "curr1_input")})
    write(root, {f"{DEVICES}/1-004c/hwmon/hwmon0/in1_label": "VDD_IN\n"})
    if board.microwatts is not None:
        chip = {
            "name": "ina238\n",
            "hwmon/hwmon1/name": "ina238\n",
            "hwmon/hwmon1/power1_input": f"{board.microwatts}\n",
        }
        write(root / DEVICES / "1-0044", chip)
        ucsi = {"type": "USB\n", "voltage_now": "20000000\n", "current_now": "3000000\n"}
        write(root / "sys/class/power_supply/ucsi-source-psy-2-00081", ucsi)
    for number, (address, channels) in enumerate(board.chips.items(), start=3):
        add_chip(root, address, number, channels, board.shunt_uohm)


def add_chip(root: Path, address: str, number: int, channels: Mapping[int, Rail], shunt_uohm: int) -> Path:
    """Add an INA3221 as hwmon device `number`; return its folder."""
    write(root, {f"{DEVICES}/{address}/name": "ina3221\n"})
    folder = root / DEVICES / address / f"hwmon/hwmon{number}"
    write(
        folder,
        {
            "name": "ina3221\n",
            "update_interval": "7\n",
            "samples": "1\n",
            "in7_label": "sum of shunt voltages\n",
            "in7_input": "9920\n",
        },
    )
    for channel, rail in channels.items():
        write(folder, {f"in{channel}_label": f"{rail.label}\n", f"shunt{channel}_resistor": f"{shunt_uohm}\n"})
        if rail.label != NOT_CONNECTED:  # its values are ENODATA
            write(folder, {f"in{channel}_input": f"{rail.millivolts}\n", f"curr{channel}_input": f"{rail.milliamps}\n"})
            limits = {"max": 5000, "crit": 5500, "max_alarm": 0, "crit_alarm": 0}
            write(folder, {f"curr{channel}_{name}": f"{value}\n" for name, value in limits.items()})
    return folder


def _gpu(root: Path, board: Board) -> None:
    node = root / "sys/class/devfreq" / board.gpu
    clocks = {"cur_freq": 510000000, "min_freq": 306000000, "max_freq": 624750000}
    write(node, {name: f"{hz}\n" for name, hz in clocks.items()})
    write(node, {"governor": "nvhost_podgov\n"} | ({"device/load": "437\n"} if board.microwatts is None else {}))


IDLE_COOLING = ("cpu-throttle-alert", "gpu-throttle-alert", "thermal-cpufreq-0", "devfreq-gpu")


def _throttling(root: Path) -> None:
    """A running fan and an alert lower no clock."""
    thermal = root / "sys/devices/virtual/thermal"
    for number, kind in enumerate(("pwm-fan", "hot-surface-alert", *IDLE_COOLING)):
        device = thermal / f"cooling_device{number}"
        write(device, {"type": f"{kind}\n", "cur_state": "0\n" if kind in IDLE_COOLING else "1\n"})
    (root / "sys/class/thermal").symlink_to(thermal)
    write(root / "sys/class/hwmon/hwmon9", {f"oc{number}_event_cnt": "4\n" for number in (1, 2, 3)})


def show_emc(root: Path) -> None:
    """Let the memory controller's debugfs be readable, as it is for root."""
    kernel = root / "sys/kernel"
    write(kernel, {"debug/bpmp/debug/clk/emc/rate": "2133000000\n", "debug/cactmon/mc_all": "53325000\n"})


def rail(root: Path, label: str) -> tuple[Path, int]:
    """Return the folder and the channel of a rail."""
    for file in (root / DEVICES).glob("*/hwmon/hwmon*/in?_label"):
        if file.read_text().strip() == label and "ina3221" in (file.parent / "name").read_text():
            return file.parent, int(file.name[2])
    raise LookupError(label)


def set_rail(root: Path, label: str, millivolts: int | str, milliamps: int | str) -> None:
    folder, channel = rail(root, label)
    write(folder, {f"in{channel}_input": f"{millivolts}\n", f"curr{channel}_input": f"{milliamps}\n"})


def rename_rail(root: Path, label: str, new: str) -> None:
    folder, channel = rail(root, label)
    write(folder, {f"in{channel}_label": f"{new}\n"})


def lose_rail(root: Path, label: str) -> None:
    folder, channel = rail(root, label)
    for name in (f"in{channel}_label", f"in{channel}_input", f"curr{channel}_input"):
        _remove(folder / name)


def rebind(root: Path) -> None:
    """Unbind the driver and bind it again, the chips in the other order: each hwmon device gets another number."""
    folders = sorted((root / DEVICES).glob("*/hwmon/hwmon?"), reverse=True)
    for number, folder in enumerate(folders, start=10):
        shutil.copytree(folder, folder.with_name(f"hwmon{number}"))
        for file in folder.iterdir():
            _remove(file)
        folder.rmdir()


def _remove(file: Path) -> None:
    file.write_text("")  # for those who have it open
    file.unlink()
