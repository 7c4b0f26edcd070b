#!/usr/bin/env bash
# The main job on a kind cluster: bring it up, build, load, apply, and see all workers free in Flux.
#
#   KEEP=1            leave the cluster there
#   NODE_IMAGE=IMAGE  another version of Kubernetes than kind's default, as kind's release notes list them
set -euo pipefail
cd "$(dirname "$0")/.."
for program in docker kind kubectl; do
    command -v "$program" >/dev/null || { echo "there is no $program: this needs docker, kind and kubectl" >&2; exit 2; }
done
docker info >/dev/null 2>&1 || { echo "docker is installed, but its daemon does not answer" >&2; exit 2; }
cluster=flux-distribute-test
image=localhost/flux-distribute:kind-test
workers=$(grep -c 'role: worker' example/kind-config.yaml)
work=$(mktemp -d)
export KUBECONFIG=$work/kubeconfig

finish() {
    code=$?
    if [ "$code" != 0 ]; then
        kubectl -n flux-distribute get pods,fluxinstances,fluxnodes -o wide || true
        kubectl -n flux-distribute logs daemonset/install-flux --tail=50 || true
    fi
    if [ "${KEEP:-0}" = 1 ]; then
        echo "the cluster is still up: KUBECONFIG=$KUBECONFIG; take it down: kind delete cluster --name $cluster"
    else
        kind delete cluster --name "$cluster" || true
        rm -rf "$work"
    fi
    exit "$code"
}
trap finish EXIT

docker build -f docker/Dockerfile -t "$image" .
kind create cluster --name "$cluster" --config example/kind-config.yaml ${NODE_IMAGE:+--image "$NODE_IMAGE"} --wait 5m
kind load docker-image --name "$cluster" "$image"
scripts/deploy.sh up "$image"

free() { # how many nodes are free, as Flux says
    kubectl -n flux-distribute exec daemonset/install-flux -- /flux-distribute connect -- \
        flux resource list --no-header --states=free --format '{nnodes}' | awk '{ sum += $1 } END { print sum + 0 }'
}
end=$((SECONDS + 300))
until found=$(free) && [ "$found" = "$workers" ]; do
    [ "$SECONDS" -lt "$end" ] || { echo "Flux has ${found:-no} free nodes of $workers" >&2; exit 1; }
    sleep 2
done
kubectl -n flux-distribute exec daemonset/install-flux -- /flux-distribute connect -- flux run -N"$workers" hostname
[ "${KEEP:-0}" = 1 ] || scripts/deploy.sh down
echo "kind: all $workers workers were free in Flux and ran a job"
