# Runs programs with the names of a job's shell and of an agent.
cp /bin/sleep flux-shell
cp /bin/sh flux-distribute
echo 'read -r _' >agent
./flux-shell infinity >/dev/null &
shell=$!
echo "under way"
./flux-distribute agent
kill $shell
rm flux-shell flux-distribute agent
