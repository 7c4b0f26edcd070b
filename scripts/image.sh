#!/usr/bin/env bash
# Makes a container image without a container engine, out of a static binary that is already built. The same files give
# the same image, bit by bit. Load it with `ctr -n k8s.io images import`, `docker load -i` or `podman load -i`.
#
#   scripts/image.sh OUT.tar        BINARY=… IMAGE=name:tag
set -euo pipefail
cd "$(dirname "$0")/.."
out=$1
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)
image=${IMAGE:-localhost/flux-distribute:$version}
triple=$(rustc --print host-tuple)
binary=${BINARY:-${CARGO_TARGET_DIR:-target}/$triple/image/flux-distribute}
[ -x "$binary" ] || { echo "no $binary: run \`make image-binary\`, or set BINARY" >&2; exit 1; }
case $triple in
    x86_64-*) architecture=amd64 ;;
    aarch64-*) architecture=arm64 ;;
    *) echo "no image for $triple" >&2; exit 1 ;;
esac

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
archive() { # DIRECTORY FILE…: to stdout, without times and owners
    tar --create --directory "$1" --sort=name --format=gnu --mtime=@0 --owner=0 --group=0 --numeric-owner "${@:2}"
}
digest() { sha256sum "$1" | cut -d ' ' -f 1; }

scripts/rootfs.sh "$binary" "$work/root"
chmod -R u=rwX,go=rX "$work/root"
mkdir "$work/image"
archive "$work/root" etc flux-distribute licenses >"$work/image/layer.tar"
cat >"$work/image/config.json" <<END
{"architecture":"$architecture","os":"linux","created":"1970-01-01T00:00:00Z","config":{"Entrypoint":["/flux-distribute"],"Labels":{"org.opencontainers.image.title":"flux-distribute","org.opencontainers.image.version":"$version","org.opencontainers.image.licenses":"MIT"}},"rootfs":{"type":"layers","diff_ids":["sha256:$(digest "$work/image/layer.tar")"]}}
END
config=$(digest "$work/image/config.json").json
mv "$work/image/config.json" "$work/image/$config"
printf '[{"Config":"%s","RepoTags":["%s"],"Layers":["layer.tar"]}]\n' "$config" "$image" >"$work/image/manifest.json"
archive "$work/image" manifest.json "$config" layer.tar >"$work/out.tar"
mkdir -p "$(dirname "$out")"
cp "$work/out.tar" "$out"
echo "$image: $out, $(stat --format %s "$out") bytes, of which the binary is $(stat --format %s "$binary")"
