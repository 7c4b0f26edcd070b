#!/usr/bin/env bash
# Prints what this machine has of what tests need (tests/support/needs.rs), in the form of REQUIRE; on stderr what it lacks.
set -euo pipefail
cd "$(dirname "$0")/.."

root() { if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n -E env PATH="$PATH" "$@"; fi; }
quietly() { "$@" >/dev/null 2>&1; }

found=()
look() { # NEED REASON COMMAND…: the machine has it if the command succeeds
    local need=$1 reason=$2
    shift 2
    if quietly "$@"; then found+=("$need"); else echo "not here: $need: $reason" >&2; fi
}

namespaces() { root unshare --mount --pid --uts --ipc --net --cgroup --fork mount -t tmpfs probe /tmp; }
cgroups() {
    local point points
    points=$(awk '$3 == "cgroup" || $3 == "cgroup2" { print $2 }' /proc/self/mounts)
    [ -n "$points" ] || return
    for point in $points; do
        root mkdir "$point/flux-distribute-probe.$$" || return
        root rmdir "$point/flux-distribute-probe.$$"
    done
}
disk() {
    # shellcheck disable=SC2016
    root unshare --mount sh -ec '
        mount -t tmpfs probe /tmp
        truncate -s 8M /tmp/image
        mkfs.ext4 -q -F /tmp/image
        mkdir /tmp/mounted
        mount -t ext4 -o loop /tmp/image /tmp/mounted'
}
api_server() { [ -x "${KUBEBUILDER_ASSETS:-}/etcd" ] && [ -x "$KUBEBUILDER_ASSETS/kube-apiserver" ]; }
# Flux starts Fluxion by a script in its own configuration directory, without which it loads sched-simple.
fluxion() {
    [ -e "$flux/lib/flux/modules/sched-fluxion-qmanager.so" ] || return
    [ -e "$("$flux/bin/flux" config builtin confdir)/rc1.d/01-sched-fluxion" ]
}
both_of_prometheus() { [ -x "${PROMETHEUS:-$(command -v prometheus)}" ] && [ -x "${PROMTOOL:-$(command -v promtool)}" ]; }
systemd() { [ -d /run/systemd/system ] && [ -n "${FLUX_DISTRIBUTE_TEST_SYSTEMD:-}" ]; }

flux=${FLUX_PREFIX:-/opt/flux}
look root "no root, and no sudo without a password" root true
look namespaces "root can't make namespaces and mounts" namespaces
look cgroups "root can't make a cgroup in each hierarchy" cgroups
look process1 "root can't read the root directory of process 1" root ls /proc/1/root/
look disk "a file can't be made into an ext4 file system and mounted" disk
look fuse "there is no /dev/fuse" test -e /dev/fuse
look memfd-noexec "this kernel has no vm.memfd_noexec" test -e /proc/sys/vm/memfd_noexec
look flux "no Flux in $flux (FLUX_PREFIX)" test -x "$flux/bin/flux"
look fluxion "no Fluxion in $flux (FLUX_PREFIX), or that Flux does not load it" fluxion
look apiserver "no etcd and kube-apiserver in KUBEBUILDER_ASSETS" api_server
look kubectl "no kubectl in PATH (KUBECTL)" test -x "${KUBECTL:-$(command -v kubectl)}"
look helm "no helm in PATH (HELM)" test -x "${HELM:-$(command -v helm)}"
look prometheus "no prometheus and promtool in PATH (PROMETHEUS, PROMTOOL)" both_of_prometheus
look systemd "systemd does not run, or FLUX_DISTRIBUTE_TEST_SYSTEMD does not permit to change its units" systemd
look channel "FLUX_TEST_CHANNEL names no conda channel" test -n "${FLUX_TEST_CHANNEL:-}"
look channel-directory "FLUX_TEST_CHANNEL is not a directory" test -d "${FLUX_TEST_CHANNEL:-}"
(IFS=, && echo "${found[*]}")
