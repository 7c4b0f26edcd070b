# Names environments in all the ways that a process can. Arguments: the directory of all, and their names.
envs=$1
shift
users=
for digest in "$@"; do
    perl -e 'sleep' "$envs/$digest/bin/flux" >/dev/null &
    users="$users $!"
    PATH="$envs/$digest/bin:$PATH" sleep infinity >/dev/null &
    users="$users $!"
    (cd "$envs/$digest" && exec sleep infinity >/dev/null) &
    users="$users $!"
done
echo "under way"
cat
kill $users
