#!/usr/bin/env bash
# The steps of a release, as .github/workflows/release.yml runs them one after the other. The files of the release are made in
# target/release-files.
#
#   scripts/release.sh version TAG     fails unless the tag, Cargo.toml and CHANGELOG.md name the same version
#   scripts/release.sh build [IMAGE]   the program, taken out of the image that this machine's architecture gets; pushes that image
#                                      as IMAGE without a tag
#   scripts/release.sh plugin          kubectl-flux for this machine's system and architecture, with man pages
#   scripts/release.sh plugin-files DIRECTORY   what that consists of; plugin has it made in Docker on Linux
#   scripts/release.sh krew URL        the manifest for krew, if the release's files are below URL
#   scripts/release.sh sign IMAGE      joins the pushed images as IMAGE:VERSION, signs it, writes the other files and signs them
#   scripts/release.sh publish         makes the release on GitHub
#
# build needs Docker with buildx, and so does plugin on Linux; sign also cosign; publish gh. Signatures need no key: they name the workflow that signs.
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

build_image() {
    # Docker's own builder attests no provenance, and all builds share the cache of this one.
    docker buildx inspect "$builder" >/dev/null 2>&1 || docker buildx create --name "$builder" --driver docker-container
    docker buildx build --builder "$builder" -f docker/Dockerfile "$@" .
}

plugin_files() { # DIRECTORY
    local target
    target=$(rustc --print host-tuple)
    cargo build --profile image --locked --package kubectl --bin kubectl-flux
    cargo run --profile image --locked --package kubectl --example man -- "$1/man/man1"
    mkdir -p "$1/licenses"
    cp "target/$target/image/kubectl-flux" "$1"
    cp LICENSE "$1/licenses"
    python3 scripts/licenses.py --plugin "$target" | gzip -9 -n >"$1/licenses/third-party.txt.gz"
}

plugin() {
    local machine system
    case $(uname -m) in
        x86_64) machine=amd64 ;;
        aarch64 | arm64) machine=arm64 ;;
        *) fail "no release has a program for $(uname -m)" ;;
    esac
    rm -rf target/plugin
    mkdir -p "$files"
    case $(uname -s) in
        Linux)
            system=linux
            build_image --target plugin --output "type=local,dest=target/plugin"
            file --brief target/plugin/kubectl-flux | grep -E 'static(ally|-pie) linked' || fail "kubectl-flux is not static"
            ;;
        Darwin)
            system=darwin
            plugin_files target/plugin
            ;;
        *) fail "no release has a program for $(uname -s)" ;;
    esac
    [ "$(target/plugin/kubectl-flux --version)" = "kubectl-flux $version" ] || fail "kubectl-flux is not version $version"
    # macOS's tar would pack extended attributes as files of their own.
    COPYFILE_DISABLE=1 tar -czf "$files/kubectl-flux-$version-$system-$machine.tar.gz" -C target/plugin kubectl-flux licenses man
}

krew() { # URL
    local platform archive sum manifest=$files/flux.yaml
    sed -e '/^#/d' -e "s|REPOSITORY|${GITHUB_REPOSITORY:-OWNER/REPOSITORY}|; s|URL/|$1/|; s|VERSION|$version|" deploy/krew/flux.yaml >"$manifest"
    for platform in linux-amd64 linux-arm64 darwin-amd64 darwin-arm64; do
        archive=kubectl-flux-$version-$platform.tar.gz
        [ -f "$files/$archive" ] || fail "$files has no $archive"
        sum=$(sha256sum <"$files/$archive")
        sed -i "/$archive/{n; s/SHA256/${sum%% *}/; }" "$manifest"
    done
    ! grep -n 'SHA256\|VERSION\|URL/' "$manifest" || fail "not everything in $manifest is filled in"
}

build() { # [IMAGE]
    local machine name digest
    machine=$(uname -m)
    name=flux-distribute-$version-linux-$machine
    mkdir -p "$files" "$digests"

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
    [ "$(find "$files" -name 'flux-distribute-*.tar.gz' | wc -l)" = 2 ] || fail "$files has not the programs of two architectures"
    mapfile -t parts < <(cat "$digests"/*)
    [ "${#parts[@]}" = 2 ] || fail "$digests has not the images of two architectures"
    docker buildx imagetools create --tag "$image:$version" "${parts[@]/#/$image@}"
    digest=$(docker buildx imagetools inspect "$image:$version" --format '{{.Manifest.Digest}}')
    cosign sign --yes "$image@$digest"

    # buildx can make one too, but looks into the image, and finds no crate in a stripped program.
    scripts/licenses.py --sbom x86_64-unknown-linux-musl aarch64-unknown-linux-musl >"$sbom"
    cosign attest --yes --type cyclonedx --predicate "$sbom" "$image@$digest"
    scripts/licenses.py --sbom --plugin x86_64-unknown-linux-musl aarch64-unknown-linux-musl x86_64-apple-darwin aarch64-apple-darwin \
        >"$files/kubectl-flux-$version.cdx.json"
    krew "$GITHUB_SERVER_URL/$GITHUB_REPOSITORY/releases/download/v$version"

    sed "s|^\( *image: \).*|\1$image:$version@$digest|" deploy/daemonset-installer.yaml >"$files/daemonset-installer.yaml"
    cp deploy/pods.yaml "$files"
    tar --create --gzip --file "$files/monitoring-$version.tar.gz" --directory deploy --owner=0 --group=0 monitoring
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
    plugin) plugin ;;
    plugin-files) plugin_files "${2:?which directory?}" ;;
    krew) krew "${2:?which URL?}" ;;
    sign) sign "${2:?which image?}" ;;
    publish) publish ;;
    *) sed -n '2,14p' "$0" >&2; exit 2 ;;
esac
