#!/usr/bin/env bash
# Creates a user and a password for the collector, for readers and for each device, with matching access rules, in this
# machine's mosquitto. See `--help`. Run it again to add devices; existing passwords are kept.
set -euo pipefail
umask 077

units=$(cd "$(dirname "$0")" && pwd)
rules=$(dirname "$units")/docs/integrations/mosquitto.acl
root=${DESTDIR:-}
home=/etc/mosquitto
port=''

usage() {
    cat <<'END'
Usage: sudo systemd/broker.sh [--port PORT] [--site NAME]... DEVICE_ID...

Restricts this machine's mosquitto to known users: `collector` (dashboards), `reader` (read-only) and one per device, named
after its id. Each password is in /etc/mosquitto/benchd/USER, which only root can read; existing ones are kept. The broker
listens on --port, which later runs keep. The default is 1883, unless another mosquitto file has a listener.

--site creates a user for the bridge of a site's broker, which forwards its devices' messages. Put your own access rules into
/etc/mosquitto/benchd.acl.d/NAME.acl, below `user NAME`; every run appends these files.

Environment: DESTDIR (write below that folder and restart nothing).
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
    devices=() sites=()
    while [ $# -gt 0 ]; do
        case $1 in
        --help) usage && exit ;;
        --port)
            port=${2:-}
            [[ $port =~ ^[0-9]+$ ]] || die "--port needs a number"
            shift
            ;;
        --site)
            [ $# -gt 1 ] || die "--site needs a name"
            sites+=("$2")
            shift
            ;;
        *) devices+=("$1") ;;
        esac
        shift
    done
    users=("${devices[@]}" "${sites[@]}")
    [ "${#users[@]}" -gt 0 ] || die "give the devices' ids ([device] id in their configuration); see --help"
    local user
    for user in "${users[@]}"; do
        case $user in collector | reader) die "$user is a reserved user name: choose another one" ;; esac
        [[ $user =~ ^[a-z0-9][a-z0-9_-]*$ ]] || die "$user is not a valid device id or site: use lower-case letters, digits, - and _"
    done
}

check_machine() {
    [ -n "$root" ] || [ "$(id -u)" = 0 ] || die "root is needed to write to $home: sudo $0"
    command -v mosquitto_passwd >/dev/null || die "mosquitto is missing: sudo apt install mosquitto"
    [ -e "$rules" ] || die "$rules is missing: run this in a checkout"
}

# Passwords are not passed on a command line, where every user of the machine could see them.
add_user() {
    local hashed plain=$root$home/benchd/$1
    if grep -qs "^$1:" "$passwords"; then
        say "$1 already has a password"
        return
    fi
    [ -s "$plain" ] || head -c 24 /dev/urandom | base64 | tr +/ -_ >"$plain"
    hashed=$(mktemp)
    printf '%s:%s\n' "$1" "$(cat "$plain")" >"$hashed"
    mosquitto_passwd -U "$hashed"
    cat "$hashed" >>"$passwords"
    rm "$hashed"
    say "$1: the password is in $home/benchd/$1"
}

# Exactly the topics of docs/integrations/bridge.conf, so that a site cannot send commands to a different site.
write_site() {
    {
        printf '%s\n' "# written by benchd's broker.sh" "user $1"
        printf 'topic write benchd/v1/+/%s\n' 'result/#' event status info health 'latest/#' 'shipped/#' 'resp/#' telemetry
        printf 'topic read benchd/v1/+/%s\n' 'cmd/#'
    } >"$own_rules/$1.acl"
}

write_rules() {
    local file
    for file in "$rules" "$own_rules"/*.acl; do
        [ ! -e "$file" ] || printf '%s\n\n' "$(cat "$file")"
    done >"$root$home/benchd.acl"
}

write_settings() {
    # 1883 may be our default, which gives way to the site's own listener
    [ -n "$port" ] || port=$(sed -n 's/^listener //p' "$settings" 2>/dev/null | grep -vx 1883) || true
    {
        echo "# written by benchd's broker.sh"
        has_listener "${port:-[0-9]+}" || echo "listener ${port:-1883}"
        printf '%s\n' "allow_anonymous false" "password_file $home/benchd.passwords" "acl_file $home/benchd.acl"
    } >"$settings.new"
    mv "$settings.new" "$settings"
}

# mosquitto does not start if two files define listeners on the same port.
has_listener() {
    grep -rqsE --include='*.conf' --exclude=benchd.conf "^(listener|port) +$1( |\$)" "$root$home"
}

# When reloading, mosquitto reads these files as its own user.
let_mosquitto_read() {
    chmod 644 "$settings" "$root$home/benchd.acl"
    if getent group mosquitto >/dev/null && [ "$(id -u)" = 0 ]; then chgrp mosquitto "$passwords"; fi
    chmod 640 "$passwords"
}

restart() {
    if [ -n "$root" ] || [ ! -d /run/systemd/system ]; then
        say "mosquitto was not restarted; it reads $home/conf.d/benchd.conf when it starts"
        return
    fi
    systemctl restart mosquitto
    say "mosquitto now accepts only these users"
}

main() {
    parse "$@"
    check_machine
    passwords=$root$home/benchd.passwords settings=$root$home/conf.d/benchd.conf own_rules=$root$home/benchd.acl.d
    (umask 022 && mkdir -p "$root$home/conf.d" "$own_rules")
    mkdir -p "$root$home/benchd"
    touch "$passwords"
    local user
    for user in collector reader "${users[@]}"; do add_user "$user"; done
    for user in "${sites[@]}"; do write_site "$user"; done
    write_rules
    write_settings
    let_mosquitto_read
    restart
}

main "$@"
