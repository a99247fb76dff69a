#!/usr/bin/env bash
# Installs or upgrades the benchd service or the dashboard. See `--help`, and README.md in this folder for what is installed where.
#
# Each version is a separate virtual environment, and `current` points to the one in use. It is switched by one rename, after
# everything that can fail: an interrupted install leaves the running version unchanged.
set -euo pipefail
umask 022 # the service's user reads what root writes

units=$(cd "$(dirname "$0")" && pwd)
tree=$(dirname "$units") # a checkout or a bundle, which have the same layout
root=${DESTDIR:-}
home=$root/opt/benchd
configuration=/etc/benchd/benchd.toml
requirements=$root/etc/benchd/requirements.txt
broker=/etc/systemd/system/benchd-dashboard.service.d/broker.conf
unit_files=/etc/systemd/system
declare -A services=([service]=benchd [dashboard]=benchd-dashboard)
python=${PYTHON:-/usr/bin/python3}
action=install asked='' mqtt='' device_id='' device_name='' wheels='' changed=''

usage() {
    cat <<'END'
Usage: sudo systemd/install.sh [--service | --dashboard] [--mqtt URL] [--device-id ID] [--device-name NAME]
                               [--wheels FOLDER] | --rollback | --uninstall

Installs benchd in /opt/benchd and starts it as a service. Run it again to upgrade; it does nothing if nothing has changed.
The packages in /etc/benchd/requirements.txt are installed into every version.

  --service           install the service (default on a machine without a dashboard)
  --dashboard         install the dashboard; either option also upgrades what is already installed
  --mqtt URL          the broker, mqtt://[user@]host[:port] or mqtts://...; its password goes into /etc/benchd/mqtt_password,
                      the dashboard's with --dashboard into /etc/benchd/dashboard_mqtt_password
  --device-id ID      the device's id, and the name of its user on the broker
  --device-name NAME  a display name
  --wheels FOLDER     install from the wheels in this folder, without a network (made by `make bundle`)
  --rollback          return to the previous version; run it again to undo that
  --uninstall         remove the program and its units; configuration and results are kept

Environment: PYTHON (default /usr/bin/python3), JETSON_INDEX (the package index with torch for a Jetson's JetPack), DESTDIR
(install below that folder and start nothing).
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
        --mqtt | --device-id | --device-name | --wheels)
            [ -n "${2:-}" ] || die "$1 needs a value; --help lists the options"
            case $1 in
            --mqtt) mqtt=$2 ;;
            --device-id) device_id=$2 ;;
            --device-name) device_name=$2 ;;
            --wheels) wheels=$(cd "$2" 2>/dev/null && pwd) || die "--wheels $2: there is no such folder" ;;
            esac
            shift
            ;;
        --service | --dashboard) asked=${1#--} ;;
        --rollback | --uninstall) action=${1#--} ;;
        --help) usage && exit ;;
        *) die "unknown option $1; --help lists them" ;;
        esac
        shift
    done
}

check_values() {
    case ${mqtt#*://} in
    *:*@*) die "a password does not belong in --mqtt: anyone can read $configuration. Put it in /etc/benchd/mqtt_password," \
        "or for the dashboard in /etc/benchd/dashboard_mqtt_password" ;;
    esac
    case $mqtt in
    '' | mqtt://?* | mqtts://?*) ;;
    *) die "--mqtt $mqtt: expected mqtt://[user@]host[:port] or mqtts://..." ;;
    esac
    case $mqtt$device_id$device_name in *[\"\\\|\&[:cntrl:]]*) die 'values must not contain any of " \ | &' ;; esac
}

check_machine() {
    "$python" -c '' 2>/dev/null || die "PYTHON=$python does not run; leave it out to use /usr/bin/python3"
    if [ -n "$root" ]; then return; fi
    [ "$(id -u)" = 0 ] || die "root is needed to write to /opt/benchd and /etc: sudo $0"
    if [ "$action" != install ]; then return; fi
    case $("$python" -c 'import sys; print(sys.base_prefix)') in
    /home/* | /root/*)
        die "$python is in a user's home, which the service cannot read (ProtectHome=)." \
            "Use the system's: sudo apt install python3-venv, and sudo PYTHON=/usr/bin/python3 $0"
        ;;
    esac
}

lock() {
    mkdir -p "$home"
    exec 9>"$home/.lock"
    flock --nonblock 9 || die "another install is under way"
    if [ -e "$home/.restart" ]; then changed=yes; fi
}

# Called before any change: until every unit has been restarted, the mark, which lists the new units, lets a later run finish
# the job.
note_change() {
    changed=yes
    printf '%s\n' "${new[@]}" >"$home/.restart"
}

find_platform() {
    if grep -qsa tegra "$root"/proc/{device-tree/compatible,sys/kernel/osrelease}; then
        echo jetson
    elif nvidia-smi >/dev/null 2>&1; then
        echo gpu
    else
        echo cpu
    fi
}

has() {
    [ "$asked" = "$1" ] || [ -e "$root$unit_files/${services[$1]}.service" ]
}

# The default is the part that is already installed, or else the service.
choose_part() {
    if [ -n "$asked" ]; then return; fi
    if has dashboard && ! has service; then asked=dashboard; else asked=service; fi
}

find_parts() {
    local part
    parts=() names=()
    for part in service dashboard; do
        if has "$part"; then parts+=("$part") names+=("${services[$part]}"); fi
    done
    if ! has service; then platform=cpu; fi # a board's torch is only needed for measuring
    extras=${parts[*]/service/$platform}
    extras=${extras/dashboard/dashboard,notify,postgres}
    extras=${extras// /,}
}

# Asked first, because a JetPack that is too old, or another than the bundle's, needs no pip to be refused.
find_constraints() {
    constraints=$tree/constraints.txt
    if [ "$platform" = jetson ]; then
        constraints=$tree/$(of_board constraints) || exit 1
        [ -e "$constraints" ] || die "this bundle is for another JetPack. Where there is a network: $(of_board bundle)"
    fi
    [ -e "$constraints" ] || die "this bundle is for a Jetson, which this machine is not; install from a checkout"
}

of_board() {
    "$python" "$tree/exporters/tegra.py" "$1" "${root:-/}"
}

# Built from a copy, because a build would leave files owned by root in the checkout.
build_wheel() {
    local copy=$scratch/tree
    mkdir "$copy"
    cp -r "$tree"/{daemon,models,kernels,exporters,dashboard,pyproject.toml,README.md,LICENSE} "$copy"
    "$python" -m venv "$scratch/venv"
    # omits the time of day, so that the same files give the same wheel
    SOURCE_DATE_EPOCH=315532800 "$scratch/venv/bin/python" -m pip wheel --quiet --disable-pip-version-check --no-deps \
        --wheel-dir "$scratch" "$copy"
}

find_wheel() {
    local found
    if [ -z "$wheels" ]; then build_wheel; fi
    found=("${wheels:-$scratch}"/benchd-*.whl)
    [ -e "${found[0]}" ] || die "there is no benchd wheel in $wheels"
    [ "${#found[@]}" = 1 ] || die "there are several benchd wheels in $wheels: leave only the one to install"
    wheel=${found[0]}
}

# The name identifies the installed packages: a development build has the number of the last release, and a GPU found later or
# an upgraded system needs different packages.
name_version() {
    local hash number
    if [ ! -e "$requirements" ]; then requirements=''; fi
    hash=$( (cat "$wheel" "$constraints" ${requirements:+"$requirements"} && echo "$extras" && "$python" -V) | sha256sum)
    number=$(basename "$wheel")
    number=${number#benchd-}
    version=${number%%-*}-${hash:0:6}
    if [ "$version" != "$(running)" ] && [ -e "$home/${version}r" ]; then version+=r; fi
}

# The environment's base Python may have been removed, and a board's index may by now contain packages that it lacked before.
is_whole() {
    [ -e "$home/$version/.complete" ] && { [ "$platform" != jetson ] || [ -z "${JETSON_INDEX:-}" ]; } &&
        runs "$version" 2>/dev/null
}

runs() {
    "$home/$1/bin/python" -c 'import benchd.daemon.cli'
}

# Never in the folder that the service runs from: the name of a rebuilt version gains or loses a final r.
make_environment() {
    if is_whole; then
        say "$version is already installed"
        return
    fi
    if [ "$version" = "$(running)" ]; then
        case $version in *r) version=${version%r} ;; *) version+=r ;; esac
    fi
    rm -f "$home/$version/.complete"
    PYTHON=$python WHEELS=$wheels REQUIREMENTS=$requirements RETRY="sudo SETTING $0${wheels:+ --wheels $wheels}" \
        BOARD=${root:-/} \
        "$tree/.ci/setup" "$home/$version" "$platform" "$extras" "$constraints" "$wheel"
    touch "$home/$version/.complete"
}

check_version() {
    local need=cuda
    check_dashboard "$version"
    if ! has service; then return; fi
    if [ "$platform" = cpu ]; then need=torch; fi
    "$home/$version/bin/benchd" doctor --need "$need" ||
        die "$version cannot measure here: see the line \"no  $need\" above. $(running) stays in use"
}

check_dashboard() {
    if ! has dashboard || "$home/$1/bin/python" -c 'import benchd.dashboard.app'; then return; fi
    die "$1 cannot show the dashboard (see above). $(running) stays in use"
}

running() {
    readlink "$home/current" || echo nothing
}

# Prints the source and the target of each file for this platform.
list_files() {
    printf '%s\n' \
        "tmpfiles.conf /etc/tmpfiles.d/benchd.conf" \
        "README.md /usr/share/doc/benchd/README.md"
    if [ "$1" = all ] || has dashboard; then
        echo "benchd-dashboard.service $unit_files/benchd-dashboard.service"
    fi
    if [ "$1" = all ] || has service; then list_service_files "$1"; fi
}

list_service_files() {
    printf '%s\n' \
        "benchd.service $unit_files/benchd.service" \
        "bench-once@.service $unit_files/bench-once@.service" \
        "bench-once@.timer $unit_files/bench-once@.timer" \
        "sysusers.conf /etc/sysusers.d/benchd.conf"
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

# A file that differs is kept as .old, because a site may have changed it.
place() {
    local to=$root$2
    if cmp --quiet "$1" "$to"; then return; fi
    note_change
    if [ -e "$to" ]; then
        mv "$to" "$to.old"
        say "$2 was replaced; the previous file is $2.old"
    fi
    install -D --mode=644 "$1" "$to"
}

place_files() {
    local from to
    if has dashboard; then place_password; fi
    while read -r from to; do place "$units/$from" "$to"; done < <(list_files "$platform")
    if has service; then place_configuration; fi
    if [ "$asked" = dashboard ]; then place_broker; fi
}

place_password() {
    local to=$root/etc/benchd/dashboard_mqtt_password
    if [ ! -e "$to" ]; then install -D --mode=600 /dev/null "$to"; fi
}

# The site's file keeps its owner, its mode and any link to it.
place_configuration() {
    local to
    to=$(readlink -m "$root$configuration")
    if cmp --quiet "$draft" "$to"; then return; fi
    if [ ! -e "$to" ]; then
        place "$draft" "${to#"$root"}"
        return
    fi
    note_change
    cp --preserve=all "$to" "$root$configuration.old"
    cp --preserve=all "$to" "$to.new"
    cat "$draft" >"$to.new"
    mv "$to.new" "$to"
    say "$configuration was changed; the previous file is $configuration.old"
}

# The dashboard has no configuration: its broker is set in a drop-in, where % must be doubled.
place_broker() {
    if [ -z "$mqtt" ]; then return; fi
    printf '[Service]\nEnvironment="MQTT_URL=%s"\n' "${mqtt//%/%%}" >"$scratch/broker.conf"
    place "$scratch/broker.conf" "$broker"
}

# The new configuration: the site's own, or the sample, with the values from the command line.
draft_configuration() {
    if ! has service; then return; fi
    draft=$scratch/benchd.toml
    cat "$root$configuration" >"$draft" 2>/dev/null || cat "$tree/docs/benchd.toml" >"$draft"
    if [ "$asked" = service ]; then set_key mqtt url "$mqtt"; fi
    set_key device id "$device_id"
    set_key device name "$device_name"
    check_password
    check_configuration "$version" "$draft"
}

check_configuration() {
    local status=0
    "$home/$1/bin/benchd" run --check --config "$2" || status=$?
    # any other status means that some cases cannot run here, which the service skips
    [ "$status" != 2 ] || die "$1 cannot read $configuration (see above). $(running) stays in use"
}

check_password() {
    if [ -e "$root$configuration" ] && [ -z "$(find -L "$root$configuration" -perm /o=r)" ]; then return; fi
    if grep -Eq "^[[:space:]]*url[[:space:]]*=[[:space:]]*[\"'][a-z]+://[^\"'@]*:[^\"'@]*@" "$draft"; then
        die "the url in $configuration contains a password, and anyone can read that file. Move the password to" \
            "/etc/benchd/mqtt_password and leave mqtt://USER@HOST. $(running) stays in use"
    fi
}

set_key() {
    if [ -z "$3" ]; then return; fi
    sed -i "/^\[$1\]/,/^\[/ s|^\(# \)\{0,1\}$2 = \"[^\"]*\"|$2 = \"$3\"|" "$draft"
    grep -qF "$2 = \"$3\"" "$draft" || die "$configuration has no line \`$2 = \"...\"\` under [$1]: add one"
}

point() {
    ln -sfn "$2" "$home/.$1"
    mv -T "$home/.$1" "$home/$1"
}

switch_to() {
    local before
    before=$(running)
    if [ "$before" = "$1" ]; then return; fi
    note_change
    if [ "$before" != nothing ] && ! is_rebuilt "$before" "$1"; then point previous "$before"; fi
    point current "$1"
    say "/opt/benchd/current is now $1; before: $before"
}

# A rebuilt version does not replace the previous version, if there is one.
is_rebuilt() {
    [ "$action" = install ] && [ "${1%r}" = "${2%r}" ] && [ -L "$home/previous" ]
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

has_systemd() {
    [ -z "$root" ] && [ -d /run/systemd/system ]
}

# A new unit is enabled and started; an existing one is restarted unless the site has disabled it.
find_units() {
    local unit
    new=() wanted=()
    if ! has_systemd; then return; fi
    for unit in "${names[@]}"; do
        if [ ! -e "$root$unit_files/$unit.service" ] || grep -qsx "$unit" "$home/.restart"; then
            new+=("$unit")
        elif systemctl is-enabled --quiet "$unit" || systemctl is-active --quiet "$unit"; then
            wanted+=("$unit")
        else
            say "$unit is off and stays off; to start it: sudo systemctl enable --now $unit"
        fi
    done
}

start() {
    local unit
    if ! has_systemd; then
        say "nothing was started. To start the service on a machine with systemd:" \
            "  sudo systemd-sysusers && sudo systemd-tmpfiles --create && sudo systemctl enable --now$(printf ' %s' "${names[@]}")"
        rm -f "$home/.restart"
        return
    fi
    if has service; then systemd-sysusers benchd.conf; fi
    systemd-tmpfiles --create benchd.conf
    load_module
    systemctl daemon-reload
    for unit in "${new[@]}"; do systemctl enable --quiet "$unit"; done
    for unit in "${new[@]}" "${wanted[@]}"; do start_unit "$unit"; done
    rm -f "$home/.restart"
}

start_unit() {
    # a restart would end the current case
    systemctl "${changed:+re}start" "$1" || show_failure "$1"
    if [ "$1" = benchd-dashboard ]; then check_stays "$1"; fi
    say "$1 runs; systemctl status $1 shows what it does"
}

# The dashboard's unit counts as started even before the program has opened its database.
check_stays() {
    if [ -z "$changed" ]; then return; fi
    for _ in {1..10}; do
        sleep 1
        systemctl is-active --quiet "$1" || show_failure "$1"
    done
}

load_module() {
    if [ ! -e "$root/etc/modules-load.d/benchd.conf" ]; then return; fi
    modprobe nvidia-uvm || say "nvidia-uvm does not load (see above); the service starts without it, as it does under WSL"
}

show_failure() {
    journalctl --no-pager --lines=10 --unit="$1" >&2
    die "$1 does not start (see above). To return to the previous version: sudo $0 --rollback"
}

do_install() {
    scratch=$(mktemp -d)
    trap 'rm -rf "$scratch"' EXIT
    platform=$(find_platform)
    choose_part
    find_parts
    find_units
    find_constraints
    find_wheel
    name_version
    make_environment
    check_version
    draft_configuration
    place_files
    switch_to "$version"
    start
    remove_older # only now, because the service runs from one of them until it is restarted
}

do_rollback() {
    local to
    [ -L "$home/previous" ] || die "there is no earlier version to return to"
    to=$(readlink "$home/previous")
    asked='' platform=''
    find_parts
    find_units
    runs "$to" || die "$to no longer runs (see above). $(running) stays in use"
    check_dashboard "$to"
    check_database "$to"
    if has service && [ -e "$root$configuration" ]; then check_configuration "$to" "$root$configuration"; fi
    if has service && has_systemd; then systemctl stop benchd; fi
    switch_to "$to"
    start
}

# A version rejects a dashboard database whose tables differ from its own.
check_database() {
    local database=$root/var/lib/benchd-dashboard/dashboard.db
    if ! has dashboard || [ ! -e "$database" ]; then return; fi
    "$home/$1/bin/python" - "$database" <<'END' && return
import sqlite3, sys
from benchd.dashboard.schema import VERSION
((version,),) = sqlite3.connect(f"file:{sys.argv[1]}?mode=ro", uri=True).execute("SELECT number FROM version")
sys.exit(version != VERSION)
END
    die "$1 cannot read the dashboard's database, which another version wrote. $(running) stays in use. To roll back anyway," \
        "stop benchd-dashboard and move $database* away: $1 then creates an empty one"
}

end_units() {
    local unit
    for unit in benchd.service benchd-dashboard.service bench-once@.timer; do
        if [ ! -e "$root$unit_files/$unit" ]; then continue; fi
        systemctl disable --quiet "$unit" || true
        systemctl stop "${unit/@.timer/@*}" || true # only the instances of a template can be stopped
    done
}

do_uninstall() {
    local to
    if has_systemd; then end_units; fi
    while read -r _ to; do rm -f "$root$to"; done < <(list_files all)
    rmdir --ignore-fail-on-non-empty "$root$unit_files"/{benchd,bench-once@}.service.d "$root/usr/share/doc/benchd" \
        2>/dev/null || true
    rm -rf "${home:?}"
    if has_systemd; then systemctl daemon-reload; fi
    say "removed. Kept: /etc/benchd, $broker," \
        "/var/lib/benchd, /var/lib/bench-once, /var/lib/benchd-dashboard, /var/cache/benchd and the user benchd"
}

main() {
    parse "$@"
    check_values
    check_machine
    lock
    "do_$action"
}

main "$@"
