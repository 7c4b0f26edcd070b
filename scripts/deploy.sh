#!/usr/bin/env bash
# Puts flux-distribute on the cluster that kubectl speaks to, or takes it off again.
#
#   scripts/deploy.sh up IMAGE
#   scripts/deploy.sh down
set -euo pipefail
cd "$(dirname "$0")/.."
manifest=deploy/daemonset-installer.yaml
pods=deploy/pods.yaml
kubectl=${KUBECTL:-kubectl}
command -v "$kubectl" >/dev/null || {
    echo "there is no $kubectl: install kubectl (https://kubernetes.io/docs/tasks/tools), or set KUBECTL to where it is" >&2
    exit 2
}
in_namespace=("$kubectl" -n flux-distribute)

# Older ones leave out the ValidatingAdmissionPolicies of the manifest, and apply the rest.
refuse_old() {
    local version major minor
    version=$("$kubectl" get --raw /version)
    major=$(sed -n 's/^ *"major": *"\([0-9]*\).*/\1/p' <<<"$version")
    minor=$(sed -n 's/^ *"minor": *"\([0-9]*\).*/\1/p' <<<"$version")
    # What is no version is not refused here: the planner asks as the agents' ServiceAccount, and refuses it.
    [ -n "$major" ] && [ -n "$minor" ] || return 0
    if [ "$major" -lt 1 ] || { [ "$major" = 1 ] && [ "$minor" -lt 30 ]; }; then
        echo "this is Kubernetes $major.$minor, which has no ValidatingAdmissionPolicy v1, and without the policies any agent's" \
            "token may speak for every node: upgrade the cluster to Kubernetes 1.30 or newer" >&2
        exit 2
    fi
}

up() {
    refuse_old
    sed "s|^\( *image: \).*|\1$1|" "$manifest" | "$kubectl" apply -f -
    for set in install-flux install-flux-control-planes; do
        "${in_namespace[@]}" rollout status "daemonset/$set" --timeout="${TIMEOUT:-20m}"
    done
    "${in_namespace[@]}" get fluxinstances,fluxnodes -o wide
}

# One line for each host that is not clean yet, with its own words.
left() {
    "${in_namespace[@]}" get fluxnodes \
        -o jsonpath='{range .items[*]}{.metadata.name}{": "}{.status.phase}{", "}{.status.message}{"\n"}{end}'
}

# First the hosts, while the agents are there to clean them; then the rest.
down() {
    # If no API server answers, that must not look like a cluster without our kinds: their hosts would not be cleaned.
    "$kubectl" get --raw /version >/dev/null
    if "$kubectl" get crd fluxinstances.distribute.flux-framework.org >/dev/null 2>&1; then
        "${in_namespace[@]}" delete fluxinstance flux --ignore-not-found
        timeout=${TIMEOUT:-10m}
        # In a condition, a failure of kubectl would look like hosts that are clean.
        first=$(left)
        if [ -n "$first" ]; then
            echo "waiting up to $timeout until every host is clean"
            # What it says of a time-out is said better below; whatever else went wrong shows there as hosts that are left.
            "${in_namespace[@]}" wait --for=delete fluxnode --all --timeout="$timeout" >/dev/null 2>&1 &
            waiting=$!
            trap 'kill "$waiting" 2>/dev/null || true' EXIT
            said=
            while kill -0 "$waiting" 2>/dev/null; do
                # An API server that is away may be there again.
                now=$(left) || now=
                if [ -n "$now" ] && [ "$now" != "$said" ]; then
                    printf '%s\n\n' "$now"
                    said=$now
                fi
                sleep 2
            done
            wait "$waiting" || true
            trap - EXIT
            still=$(left)
            if [ -n "$still" ]; then
                cat >&2 <<END
Not clean after $timeout:
$(sed 's/^/  /' <<<"$still")
- A host that waits for running jobs: let them end or cancel them (flux cancel --all), then run make undeploy again.
- A node that is gone for good: $kubectl -n flux-distribute delete fluxnode NODE
- A node without an agent, as by a taint or label that came later: take that off, or run flux-distribute uninstall there
- To delete the rest now and leave these hosts as they are: $kubectl delete --ignore-not-found -f $pods -f $manifest
END
                exit 1
            fi
        fi
    fi
    # Whoever gets the agents' ServiceAccount next must not get the rights of the bridge with it; RoleBindings in namespaces that have
    # opted in name a ClusterRole that is gone then.
    "$kubectl" delete -f "$pods" --ignore-not-found
    "$kubectl" delete -f "$manifest" --ignore-not-found
}

case ${1:-} in
    up) up "${2:?which image?}" ;;
    down) down ;;
    *) sed -n '2,6p' "$0" >&2; exit 2 ;;
esac
