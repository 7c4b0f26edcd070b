#!/usr/bin/env bash
# Runs a command in a clone of this repository's HEAD, as root of a Debian that was just made by debootstrap and has namespaces of
# its own, but the machine's network and kernel: what a new user would see.
#
#   scripts/fresh-root.sh COMMAND…      such as `make test`
#
#   SUITE=trixie  MIRROR=http://deb.debian.org/debian  PACKAGES="make git ca-certificates"
#   RUST_HOME=DIR   lend it the Rust toolchain and the crates of DIR/.cargo and DIR/.rustup (it sees copies), in place of rustup's
#   FRESH_ROOT=DIR  keep the root there, with the clone in root/flux-distribute; the next run goes on in it, with HEAD of then
# Ends as COMMAND ends; with 2 if this machine lacks what it needs, and with 75 if debootstrap fails.
set -euo pipefail
cd "$(dirname "$0")/.."
suite=${SUITE:-trixie} mirror=${MIRROR:-http://deb.debian.org/debian} packages=${PACKAGES:-make git ca-certificates}

say() { echo "fresh-root: $*"; }
[ $# != 0 ] || { sed -n 's/^# \?//p' "$0" | head -n 10 >&2; exit 2; }
[ "$(id -u)" = 0 ] || { say "run this as root" >&2; exit 2; }
command -v debootstrap >/dev/null || { say "debootstrap is missing: apt install debootstrap" >&2; exit 2; }

# Other users can't put anything into it.
work=$(mktemp -d)
# Its mounts are in a namespace that ends before this does.
trap 'rm -rf --one-file-system "$work"' EXIT
# apt reads the root as a user of its own.
chmod 755 "$work"
root=${FRESH_ROOT:-$work/root}
mkdir -p "$root"
if [ ! -O "$root" ] || [ -n "$(find "$root" -maxdepth 0 -perm /022)" ]; then
    say "$root belongs to another user or is open to others: what is in it would run as root" >&2
    exit 2
fi
if [ ! -e "$root/etc/debian_version" ]; then
    say "making $suite with $packages"
    # Without the keyring, debootstrap would only warn that it trusts whoever answers.
    debootstrap --force-check-gpg --variant=minbase --include="${packages// /,}" "$suite" "$root" "$mirror" >"$work/log" 2>&1 ||
        { tail "$work/log" >&2; say "no $suite could be made from $mirror" >&2; exit 75; }
fi

# The network as this machine has it: name servers, proxies of apt, authorities that its administrator trusts.
cp --remove-destination -L /etc/resolv.conf /etc/hosts "$root/etc/"
apt-config dump Acquire >"$root/etc/apt/apt.conf.d/00machine"
find /usr/local/share/ca-certificates -name '*.crt' -exec cp -t "$root/usr/local/share/ca-certificates/" {} + 2>/dev/null || true
rm -rf "$root/var/tmp/source.git"
git clone --quiet --bare . "$root/var/tmp/source.git"

environment=(HOME=/root PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8 TERM="${TERM:-dumb}")
for name in http_proxy https_proxy no_proxy HTTP_PROXY HTTPS_PROXY NO_PROXY REQUIRE; do
    [ -z "${!name:-}" ] || environment+=("$name=${!name}")
done

export root
export RUST_HOME=${RUST_HOME:-}
# This is process 1 of the namespaces: bash, since it has to reap what others leave behind.
# shellcheck disable=SC2016
exec_in_root='
    set -euo pipefail
    mount --make-rprivate /
    mount --bind "$root" "$root"
    cd "$root"
    mount -t proc proc proc
    mount -t sysfs sysfs sys
    mount --rbind /dev dev
    mount -t tmpfs -o mode=1777 tmp tmp
    mount -t tmpfs -o mode=755 run run
    if [ "$(stat -f -c %T /sys/fs/cgroup)" = cgroup2fs ]; then
        mount -t cgroup2 cgroup sys/fs/cgroup
    else
        mount -t tmpfs -o mode=755 cgroup sys/fs/cgroup
        while IFS=: read -r number controllers _; do
            name=${controllers#name=}
            mkdir -p "sys/fs/cgroup/${name:-unified}"
            if [ "$number" = 0 ]; then
                mount -t cgroup2 cgroup sys/fs/cgroup/unified
            else
                mount -t cgroup -o "$controllers" cgroup "sys/fs/cgroup/$name"
            fi
        done </proc/self/cgroup
    fi
    if [ -n "$RUST_HOME" ]; then
        mkdir -p root/.rust
        mount -t tmpfs -o size=100% rust root/.rust
        for part in cargo rustup; do
            mkdir -p root/.rust/$part root/.rust/$part.work root/.$part
            layers=lowerdir=$RUST_HOME/.$part,upperdir=root/.rust/$part,workdir=root/.rust/$part.work
            # One overlay on another one is not always possible.
            mount -t overlay -o "$layers" overlay root/.$part 2>/dev/null || cp -a "$RUST_HOME/.$part/." root/.$part
        done
    fi
    mkdir -p .machine
    pivot_root . .machine
    umount -l .machine
    rmdir .machine
    cd /root
    "$@"
    exit $?'
# shellcheck disable=SC2016
in_clone='
    set -e
    update-ca-certificates >/dev/null 2>&1
    if [ -d flux-distribute ]; then
        git -C flux-distribute fetch --quiet /var/tmp/source.git HEAD
        git -C flux-distribute -c advice.detachedHead=false checkout --quiet FETCH_HEAD
    else
        git -c advice.detachedHead=false clone --quiet /var/tmp/source.git flux-distribute
    fi
    cd flux-distribute
    git log -1 --format="fresh-root: %h %s"
    echo "fresh-root: $*"
    exec "$@"'
unshare --mount --pid --ipc --uts --cgroup --fork --kill-child bash -c "$exec_in_root" init \
    env -i "${environment[@]}" bash -c "$in_clone" clone "$@"
