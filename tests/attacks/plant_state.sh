# Plants a state.json that names another FluxInstance and a directory of somebody else's: a host that believes it is cleaned of
# both. Arguments: where to plant it, and that directory.
mkdir -p "$1" && chmod 755 "$1"
for name in state.json prefix.json; do
    cat >"$1/$name" <<END
{"format": 1, "instanceUID": "planted", "prefix": "$2", "undo": [{"kind": "file", "path": "/etc/passwd"}]}
END
done
echo "under way"
cat
rm -r "$1"
