#!/usr/bin/env bash
# Runs a command, in namespaces of its own, on a machine whose files under /proc, /sys and /etc are those of a fake board.
#
# Usage: unshare --mount --pid --fork --kill-child tests/support/on_board.sh BOARD FOLDER COMMAND...; FOLDER is empty. Only what the
# command writes below its working directory stays.
set -euo pipefail

board=$1 folder=$2
shift 2
root=$folder/root

mount_root() {
    mount --make-rprivate /
    mount -t tmpfs tmpfs "$folder"
    mkdir "$folder"/{board,changes,work,root}
    find "$board" -mindepth 1 -maxdepth 1 ! -name proc ! -name sys -exec cp -rt "$folder/board" {} +
    mount -t overlay -o "lowerdir=$folder/board:/,upperdir=$folder/changes,workdir=$folder/work" overlay "$root"
    mount --bind "$PWD" "$root$PWD"
    mount --rbind /dev "$root/dev"
    mount --bind "$board/sys" "$root/sys"
}

# No folder can be made in procfs, so that /proc leads to the real one but for the board's files.
mount_proc() {
    local number real=/run/proc
    mount -t tmpfs tmpfs "$root/run"
    mkdir "$root$real"
    mount -t proc proc "$root$real"
    mount -t tmpfs tmpfs "$root/proc"
    for number in {1..9999}; do echo "$real/$number"; done | xargs ln -st "$root/proc"
    find "$root$real" -mindepth 1 -maxdepth 1 -name '[!0-9]*' -printf "$real/%f\n" | xargs ln -st "$root/proc"
    rm "$root/proc/sys"
    cp -r --remove-destination "$board/proc/." "$root/proc"
    find "$root$real/sys" -mindepth 1 -maxdepth 1 ! -name kernel -printf "$real/sys/%f\n" | xargs ln -st "$root/proc/sys"
}

mount_root
mount_proc
exec chroot "$root" env --chdir="$PWD" "$@"
