#!/usr/bin/env bash
# The steps of a release, as .github/workflows/release.yml runs them one after the other. The files of the release are made in
# target/release-files.
#
#   scripts/release.sh version TAG     fails unless the tag, Cargo.toml and CHANGELOG.md name the same version
#   scripts/release.sh build [IMAGE]   the program, taken out of the image that this machine's architecture gets; pushes that image
#                                      as IMAGE without a tag
#   scripts/release.sh sign IMAGE      joins the pushed images as IMAGE:VERSION, signs it, writes the other files and signs them
#   scripts/release.sh publish         makes the release on GitHub
#
# build needs Docker with buildx; sign also cosign; publish gh. Signatures need no key: they name the workflow that signs.
set -euo pipefail
cd "$(dirname "$0")/.."
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)
files=target/release-files
digests=target/image-digests
builder=flux-distribute-release

fail() { echo "release: $*" >&2; exit 1; }

# What CHANGELOG.md says of this version.
notes() {
    awk -v heading="## [$version]" '/^## / { here = index($0, heading) == 1; next } here' CHANGELOG.md
}

check_version() { # TAG
    [ "$1" = "v$version" ] || fail "the tag is $1, but the version in Cargo.toml is $version"
    [ -n "$(notes)" ] || fail "CHANGELOG.md has no section [$version]"
}

build() { # [IMAGE]
    local machine name digest
    machine=$(uname -m)
    name=flux-distribute-$version-linux-$machine
    mkdir -p "$files" "$digests"
    # Docker's own builder attests no provenance, and both builds share the cache of this one.
    docker buildx inspect "$builder" >/dev/null 2>&1 || docker buildx create --name "$builder" --driver docker-container
    build_image() { docker buildx build --builder "$builder" -f docker/Dockerfile "$@" .; }

    rm -rf "target/$name"
    build_image --output "type=local,dest=target/$name"
    file --brief "target/$name/flux-distribute" | grep -E 'static(ally|-pie) linked' || fail "the program is not static"
    [ "$("target/$name/flux-distribute" --version)" = "flux-distribute $version" ] || fail "the program is not version $version"
    tar --create --gzip --file "$files/$name.tar.gz" --directory target --owner=0 --group=0 "$name/flux-distribute" "$name/licenses"

    [ -n "${1:-}" ] || return 0
    build_image --provenance=mode=max --metadata-file "target/$name.json" \
        --output "type=image,name=$1,push=true,push-by-digest=true,name-canonical=true"
    digest=$(sed -n 's/.*"containerimage.digest": *"\(sha256:[0-9a-f]*\)".*/\1/p' "target/$name.json")
    [ -n "$digest" ] || fail "docker buildx has printed no digest"
    echo "$digest" >"$digests/$machine"
}

sign() { # IMAGE
    local image=$1 sbom=$files/flux-distribute-$version.cdx.json parts digest
    [ "$(find "$files" -name '*.tar.gz' | wc -l)" = 2 ] || fail "$files has not the programs of two architectures"
    mapfile -t parts < <(cat "$digests"/*)
    [ "${#parts[@]}" = 2 ] || fail "$digests has not the images of two architectures"
    docker buildx imagetools create --tag "$image:$version" "${parts[@]/#/$image@}"
    digest=$(docker buildx imagetools inspect "$image:$version" --format '{{.Manifest.Digest}}')
    cosign sign --yes "$image@$digest"

    # buildx can make one too, but looks into the image, and finds no crate in a stripped program.
    scripts/licenses.py --sbom x86_64-unknown-linux-musl aarch64-unknown-linux-musl >"$sbom"
    cosign attest --yes --type cyclonedx --predicate "$sbom" "$image@$digest"

    sed "s|^\( *image: \).*|\1$image:$version@$digest|" deploy/daemonset-installer.yaml >"$files/daemonset-installer.yaml"
    cp deploy/pods.yaml "$files"
    (cd "$files" && rm -f SHA256SUMS* && sha256sum -- * >../SHA256SUMS && mv ../SHA256SUMS .)
    cosign sign-blob --yes --bundle "$files/SHA256SUMS.sigstore.json" "$files/SHA256SUMS"
}

publish() {
    local options=()
    [[ $version != *-* ]] || options=(--prerelease)
    notes | gh release create "v$version" --verify-tag --title "v$version" --notes-file - "${options[@]}" "$files"/*
}

case ${1:-} in
    version) check_version "${2:?which tag?}" ;;
    build) build "${2:-}" ;;
    sign) sign "${2:?which image?}" ;;
    publish) publish ;;
    *) sed -n '2,11p' "$0" >&2; exit 2 ;;
esac
