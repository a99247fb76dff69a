#!/usr/bin/env bash
# Installs the benchd service, or a newer version of it. `--help` says how; README.md beside it says what goes where.
#
# A version is a virtual environment of its own, and `current` names the one that runs. It is switched by one rename, after
# everything that can fail has been done: an install that is interrupted leaves the running version as it was.
set -euo pipefail
umask 022 # the service's user reads what root writes

units=$(cd "$(dirname "$0")" && pwd)
tree=$(dirname "$units") # a checkout or a bundle, which is laid out alike
root=${DESTDIR:-}
home=$root/opt/benchd
configuration=/etc/benchd/benchd.toml
unit_files=/etc/systemd/system
python=${PYTHON:-/usr/bin/python3}
action=install mqtt='' device_name='' wheels='' changed=''

usage() {
    cat <<'END'
Usage: sudo systemd/install.sh [--mqtt URL] [--device-name NAME] [--wheels FOLDER] | --rollback | --uninstall

Installs benchd under /opt/benchd and starts it as a service. Run it again to upgrade; where nothing changed it does nothing.

  --mqtt URL          the broker, mqtt://[user@]host[:port] or mqtts://...; its password goes into /etc/benchd/mqtt_password
  --device-name NAME  what people call this machine
  --wheels FOLDER     install from the wheels in there, ours among them, without a network (`make bundle` fills one)
  --rollback          go back to the version before; a second time: forth again
  --uninstall         remove the program and its units; configuration and results stay

Environment: PYTHON (default /usr/bin/python3), JETSON_INDEX (the index of torch for a Jetson's JetPack), DESTDIR (install
below that folder and start nothing).
END
}

say() {
    printf 'benchd: %s\n' "$@"
}

die() {
    say "$@" >&2
    exit 1
}

parse() {
    while [ $# -gt 0 ]; do
        case $1 in
        --mqtt | --device-name | --wheels)
            [ -n "${2:-}" ] || die "$1 needs a value; --help shows them all"
            case $1 in
            --mqtt) mqtt=$2 ;;
            --device-name) device_name=$2 ;;
            --wheels) wheels=$(cd "$2" && pwd) ;;
            esac
            shift
            ;;
        --rollback | --uninstall) action=${1#--} ;;
        --help) usage && exit ;;
        *) die "no option $1; --help shows them all" ;;
        esac
        shift
    done
}

check_values() {
    case $mqtt in
    *://*:*@*) die "a password does not belong into --mqtt: all may read $configuration. Put it into /etc/benchd/mqtt_password" ;;
    '' | mqtt://?* | mqtts://?*) ;;
    *) die "--mqtt $mqtt is no mqtt://[user@]host[:port] nor mqtts://..." ;;
    esac
    case $mqtt$device_name in *[\"\\\|\&[:cntrl:]]*) die 'a value may not hold any of " \ | &' ;; esac
}

check_machine() {
    if [ -n "$root" ]; then return; fi
    [ "$(id -u)" = 0 ] || die "root is needed to write to /opt/benchd and /etc: sudo $0"
    if [ "$action" != install ]; then return; fi
    case $("$python" -c 'import sys; print(sys.base_prefix)') in
    /home/* | /root/*)
        die "$python lies in a user's home, where the service may not look (ProtectHome=)." \
            "Take the system's: sudo apt install python3-venv, and sudo PYTHON=/usr/bin/python3 $0"
        ;;
    esac
}

lock() {
    mkdir -p "$home"
    exec 9>"$home/.lock"
    flock --nonblock 9 || die "another install is under way"
}

find_platform() {
    if [ -e "$root/etc/nv_tegra_release" ]; then
        echo jetson
    elif nvidia-smi >/dev/null 2>&1; then
        echo gpu
    else
        echo cpu
    fi
}

# Built from a copy, because a build leaves files of root's in the checkout.
build_wheel() {
    local copy=$scratch/tree
    mkdir "$copy"
    cp -r "$tree"/{daemon,models,kernels,exporters,dashboard,pyproject.toml,README.md,LICENSE} "$copy"
    "$python" -m venv "$scratch/venv"
    # without the time of day, so that the same files give the same wheel
    SOURCE_DATE_EPOCH=315532800 "$scratch/venv/bin/python" -m pip wheel --quiet --disable-pip-version-check --no-deps \
        --wheel-dir "$scratch" "$copy"
}

find_wheel() {
    local found
    if [ -z "$wheels" ]; then build_wheel; fi
    found=("${wheels:-$scratch}"/benchd-*.whl)
    [ -e "${found[0]}" ] || die "there is no wheel of benchd in $wheels"
    [ "${#found[@]}" = 1 ] || die "there are several wheels of benchd in $wheels: leave the one to install"
    wheel=${found[0]}
}

# What is installed belongs to the name: a development build keeps the number of the release before.
name_version() {
    local hash number
    constraints=$tree/constraints.txt
    if [ "$platform" = jetson ]; then constraints=$tree/constraints-jetson62.txt; fi
    hash=$(cat "$wheel" "$constraints" | sha256sum)
    number=$(basename "$wheel")
    number=${number#benchd-}
    version=${number%%-*}-${hash:0:6}
}

make_environment() {
    if [ -e "$home/$version/.complete" ]; then
        say "$version is installed already"
        return
    fi
    PYTHON=$python WHEELS=$wheels RETRY="sudo SETTING $0${wheels:+ --wheels $wheels}" \
        "$tree/.ci/setup" "$home/$version" "$platform" "$platform" "$constraints" "$wheel"
    touch "$home/$version/.complete"
}

check_version() {
    local need=cuda
    if [ "$platform" = cpu ]; then need=torch; fi
    "$home/$version/bin/benchd" doctor --need "$need" ||
        die "$version cannot measure here: the line \"no  $need\" above says why. $(running) stays"
}

running() {
    readlink "$home/current" || echo nothing
}

# Prints where each file comes from and goes to, on this platform.
list_files() {
    printf '%s\n' \
        "benchd.service $unit_files/benchd.service" \
        "bench-once@.service $unit_files/bench-once@.service" \
        "bench-once@.timer $unit_files/bench-once@.timer" \
        "sysusers.conf /etc/sysusers.d/benchd.conf" \
        "tmpfiles.conf /etc/tmpfiles.d/benchd.conf" \
        "README.md /usr/share/doc/benchd/README.md"
    case $1 in jetson | all) list_drop_in jetson.conf benchd.service bench-once@.service ;; esac
    case $1 in gpu | all) echo "modules-load.conf /etc/modules-load.d/benchd.conf" ;; esac
    if [ "$1" = all ] || grep -qs '^jtop:' "$root/etc/group"; then
        list_drop_in jtop.conf benchd.service bench-once@.service
    fi
    if [ "$1" = all ] || [ "$(systemd_version)" -ge 253 ]; then list_drop_in notify-reload.conf benchd.service; fi
}

list_drop_in() {
    local unit
    for unit in "${@:2}"; do echo "drop-ins/$1 $unit_files/$unit.d/$1"; done
}

systemd_version() {
    systemctl --version 2>/dev/null | sed -n '1s/^systemd \([0-9]*\).*/\1/p' | grep . || echo 0
}

# A file that differs stays beside as .old, because a site may have changed it.
place() {
    local to=$root$2
    if cmp --quiet "$1" "$to"; then return; fi
    if [ -e "$to" ]; then
        mv "$to" "$to.old"
        say "$2 is a new one; the one before is $2.old"
    fi
    install -D --mode=644 "$1" "$to"
    changed=yes
}

place_files() {
    local from to
    while read -r from to; do place "$units/$from" "$to"; done < <(list_files "$platform")
    place "$draft" "$configuration"
}

# The configuration as it will be: the site's own, or the sample, with what was asked for on the command line.
draft_configuration() {
    draft=$scratch/benchd.toml
    cat "$root$configuration" >"$draft" 2>/dev/null || cat "$tree/docs/benchd.toml" >"$draft"
    set_key mqtt url "$mqtt"
    set_key device name "$device_name"
    check_configuration
}

check_configuration() {
    local status=0
    "$home/$version/bin/bench-once" --config "$draft" --dry-run >/dev/null || status=$?
    # any other status is of what cannot run here, which the service passes over
    [ "$status" != 2 ] || die "$version does not read $configuration, as it says above. $(running) stays"
}

set_key() {
    if [ -z "$3" ]; then return; fi
    sed -i "/^\[$1\]/,/^\[/ s|^\(# \)\{0,1\}$2 = \"[^\"]*\"|$2 = \"$3\"|" "$draft"
    grep -qF "$2 = \"$3\"" "$draft" || die "$configuration has no line \`$2 = \"...\"\` under [$1]: write one there"
}

point() {
    ln -sfn "$2" "$home/.$1"
    mv -T "$home/.$1" "$home/$1"
}

switch_to() {
    local before
    before=$(running)
    if [ "$before" = "$1" ]; then return; fi
    if [ "$before" != nothing ]; then point previous "$before"; fi
    point current "$1"
    changed=yes
    say "/opt/benchd/current is $1 now; before: $before"
}

remove_older() {
    local folder
    for folder in "$home"/*-*/; do
        folder=$(basename "$folder")
        case $folder in "$(readlink "$home/current")" | "$(readlink "$home/previous")") continue ;; esac
        rm -rf "${home:?}/$folder"
        say "removed $folder"
    done
}

start() {
    if [ -n "$root" ] || [ ! -d /run/systemd/system ]; then
        say "systemd was not asked to do anything. To start the service where it runs:" \
            "  sudo systemd-sysusers && sudo systemd-tmpfiles --create && sudo systemctl enable --now benchd"
        return
    fi
    systemd-sysusers benchd.conf
    systemd-tmpfiles --create benchd.conf
    load_module
    systemctl daemon-reload
    systemctl enable --quiet benchd
    # a restart ends the case that runs
    systemctl "${changed:+re}start" benchd || show_failure
    say "the service runs; systemctl status benchd shows what it does"
}

load_module() {
    if [ ! -e "$root/etc/modules-load.d/benchd.conf" ]; then return; fi
    modprobe nvidia-uvm || say "nvidia-uvm does not load, as it says above; the service starts without, as it does under WSL"
}

show_failure() {
    journalctl --no-pager --lines=10 --unit=benchd >&2
    die "the service does not start, as it says above. Back to the version before: sudo $0 --rollback"
}

do_install() {
    scratch=$(mktemp -d)
    trap 'rm -rf "$scratch"' EXIT
    platform=$(find_platform)
    find_wheel
    name_version
    make_environment
    check_version
    draft_configuration
    place_files
    switch_to "$version"
    remove_older
    start
}

do_rollback() {
    [ -L "$home/previous" ] || die "there is no version before $(running)"
    switch_to "$(readlink "$home/previous")"
    start
}

do_uninstall() {
    local to
    if [ -z "$root" ] && [ -d /run/systemd/system ]; then
        systemctl disable --now benchd.service bench-once@.timer || true
    fi
    while read -r _ to; do rm -f "$root$to"; done < <(list_files all)
    rmdir --ignore-fail-on-non-empty "$root$unit_files"/{benchd,bench-once@}.service.d "$root/usr/share/doc/benchd" \
        2>/dev/null || true
    rm -rf "${home:?}"
    if [ -z "$root" ] && [ -d /run/systemd/system ]; then systemctl daemon-reload; fi
    say "removed. Kept: /etc/benchd, /var/lib/benchd, /var/cache/benchd and the user benchd"
}

main() {
    parse "$@"
    check_values
    check_machine
    lock
    "do_$action"
}

main "$@"
