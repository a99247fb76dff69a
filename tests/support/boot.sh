#!/usr/bin/env bash
# Boots systemd as the first process of namespaces of its own, on a copy of this machine's root that is kept in memory, or of the
# root in BENCHD_USERLAND, for another systemd: mmdebstrap --include=dbus,g++,git,make,mosquitto,mosquitto-clients trixie FOLDER
#
# Usage: unshare --mount --pid --fork --net --ipc --uts --cgroup tests/support/boot.sh FOLDER [SOURCE...]; each SOURCE is seen in the
# booted machine under /srv, by its last name. Nothing outside changes: /sys and /proc/sys are read-only, and what could load
# a module, set the clock or restart this machine is taken from all that runs in there.
set -euo pipefail

folder=$1
shift
root=$folder/root

mount_memory() {
    mount -t tmpfs -o mode=0755 tmpfs "$1"
}

mount_root() {
    mount --make-rprivate /
    mount_memory "$folder"
    mkdir "$folder"/{changes,work,root}
    mount -t overlay -o "lowerdir=${BENCHD_USERLAND:-/},upperdir=$folder/changes,workdir=$folder/work" overlay "$root"
}

mount_kernel() {
    mount -t proc proc "$root/proc"
    mount --bind "$root/proc/sys" "$root/proc/sys"
    mount -o remount,ro,bind "$root/proc/sys"
    mount -t sysfs -o ro sysfs "$root/sys"
    mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
}

mount_devices() {
    local name
    mount_memory "$root/dev"
    for name in null zero full random urandom tty; do
        touch "$root/dev/$name"
        mount --bind "/dev/$name" "$root/dev/$name"
    done
    mkdir "$root/dev/pts" "$root/dev/shm"
    ln -s pts/ptmx "$root/dev/ptmx"
    mount -t devpts -o newinstance,ptmxmode=0666 devpts "$root/dev/pts"
    mount -t tmpfs tmpfs "$root/dev/shm"
}

mount_sources() {
    local source target
    mount_memory "$root/srv"
    for source in "$@"; do
        target=$root/srv/$(basename "$source")
        mkdir "$target"
        mount --bind "$source" "$target"
    done
}

# Not by chroot, below which a unit may have no users of its own (PrivateUsers=).
enter() {
    cd "$root"
    pivot_root . .
    umount --lazy .
    mount --make-rshared / # a unit's credentials are mounted beside and have to arrive
}

mount_root
mount_kernel
mount_devices
mount_memory "$root/run"
mount_memory "$root/tmp"
chmod 1777 "$root/tmp"
mount_sources "$@"
enter
exec setpriv --bounding-set=-sys_module,-sys_time,-sys_boot,-sys_rawio \
    env -i container=test PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    /lib/systemd/systemd --unit=sysinit.target --show-status=no --log-target=journal
