"""Fake machines: the files under /proc, /sys and /etc of a Jetson Orin Nano and of a desktop, in a folder."""

from pathlib import Path

MEMINFO = "MemTotal:       {total} kB\nMemFree:         2097152 kB\nMemAvailable:    {available} kB\n"


def write(root: Path, files: dict[str, str]) -> None:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


def orin_nano(root: Path, *, serial: str = "1421223012345", governor: str = "schedutil") -> Path:
    write(
        root,
        {
            "etc/os-release": 'NAME="Ubuntu"\nPRETTY_NAME="Ubuntu 22.04.5 LTS"\n',
            "etc/nv_tegra_release": "# R36 (release), REVISION: 4.3, GCID: 38968081, BOARD: generic, EABI: aarch64\n",
            "etc/machine-id": "3d1219c7c4c5404aaa1f6d2a48adfda4\n",
            "proc/sys/kernel/arch": "aarch64\n",
            "proc/sys/kernel/osrelease": "5.15.148-tegra\n",
            "proc/sys/kernel/hostname": "orin\n",
            "proc/sys/kernel/random/boot_id": "c81f324a-8cee-44ef-9e73-7927e7fee33c\n",
            "proc/device-tree/model": "NVIDIA Jetson Orin Nano Developer Kit\0",
            "proc/device-tree/compatible": "nvidia,p3768-0000+p3767-0005\0nvidia,p3767-0005\0nvidia,tegra234\0",
            "proc/device-tree/serial-number": f"{serial}\0",
            "proc/meminfo": MEMINFO.format(total=7800000, available=5000000),
            "proc/cpuinfo": "".join(
                f"processor\t: {i}\nBogoMIPS\t: 62.50\nCPU implementer\t: 0x41\nCPU part\t: 0xd42\n\n" for i in range(6)
            ),
            "sys/class/devfreq/17000000.gpu/min_freq": "306000000\n",
            "sys/class/devfreq/17000000.gpu/max_freq": "624750000\n",
        },
    )
    for policy, cpus in (("policy0", "0 1 2 3"), ("policy4", "4 5")):
        clocks = {"scaling_cur_freq": 1036800, "scaling_min_freq": 729600, "scaling_max_freq": 1510400}
        folder = f"sys/devices/system/cpu/cpufreq/{policy}"
        write(root, {f"{folder}/{name}": f"{value}\n" for name, value in clocks.items()})
        write(root, {f"{folder}/affected_cpus": f"{cpus}\n", f"{folder}/scaling_governor": f"{governor}\n"})
    return root


def desktop(root: Path, *, mac: str = "3c:ec:ef:12:34:56") -> Path:
    write(
        root,
        {
            "usr/lib/os-release": "PRETTY_NAME='Debian GNU/Linux 12 (bookworm)'\n",
            "etc/machine-id": "3d1219c7c4c5404aaa1f6d2a48adfda4\n",
            "proc/sys/kernel/arch": "x86_64\n",
            "proc/sys/kernel/osrelease": "6.1.0-25-amd64\n",
            "proc/sys/kernel/hostname": "Lab_PC.example.org\n",
            "proc/meminfo": MEMINFO.format(total=32768000, available=16000000),
            "proc/cpuinfo": "".join(
                f"processor\t: {i}\nmodel name\t: AMD Ryzen 7 5800X  8-Core Processor\ncpu MHz\t\t: {mhz}\n\n"
                for i, mhz in enumerate((3800.0, 2200.0))
            ),
            "sys/class/dmi/id/sys_vendor": "To Be Filled By O.E.M.\n",
            "sys/class/dmi/id/product_name": "To Be Filled By O.E.M.\n",
            "sys/class/dmi/id/board_vendor": "ASRock\n",
            "sys/class/dmi/id/board_name": "X570 Taichi\n",
            "sys/class/dmi/id/product_uuid": "03000200-0400-0500-0006-000700080009\n",
            "sys/class/dmi/id/board_serial": "Default string\n",
            "sys/firmware/acpi/platform_profile": "balanced\n",
        },
    )
    network_card(root, "enp5s0", mac, "devices/pci0000:00/0000:05:00.0")
    write(
        root,
        {"sys/class/net/lo/address": "00:00:00:00:00:00\n", "sys/class/net/docker0/address": "02:42:aa:bb:cc:dd\n"},
    )
    return root


def network_card(root: Path, name: str, mac: str, device: str, assign_type: int = 0) -> None:
    card = root / "sys/class/net" / name
    write(card, {"address": f"{mac}\n", "addr_assign_type": f"{assign_type}\n"})
    (root / "sys" / device).mkdir(parents=True, exist_ok=True)
    (card / "device").symlink_to(root / "sys" / device)
