# Plants pipes that nobody writes to in the place of state.json: opening one waits for ever. Argument: where to plant them.
mkdir -p "$1" && chmod 755 "$1"
mkfifo "$1/state.json" "$1/prefix.json"
echo "under way"
cat
rm -r "$1"
