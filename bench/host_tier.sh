#!/bin/bash
# Conversations in turn, of which the devices hold a third: reuse, first tokens and the gaps of a stream beside them.
#   bash bench/host_tier.sh CONFIG_OR_MODEL HOST [ARGUMENTS OF agents.py] [-- ARGUMENTS OF lucevisor start]
# HOST: cache.host, 0 to measure without.  A 27B shape on an H200, 100 s an arm:
#   for host in 0 auto; do
#     bash bench/host_tier.sh 27b.gguf $host --agents 24 --turns 3 --system 1100 --tool 440 --answer 20 \
#       -- --set cache.memory=8GiB
#   done
set -eu
cd "$(dirname "$0")/.."
what=$1 host=$2 name=host-tier-$$ arguments=()
shift 2
while [ $# -gt 0 ] && [ "$1" != -- ]; do arguments+=("$1"); shift; done
[ $# -eq 0 ] || shift
python=${PYTHON:-python}
trap '"$python" -m lucevisor stop --name "$name" >/dev/null' EXIT
"$python" -m lucevisor start "$what" --daemon --name "$name" --timeout 600 \
  --set server.port=0 --set cache.host="$host" "$@" >/dev/null
url=$("$python" -m lucevisor status --json --name "$name" | "$python" -c 'import json,sys; print(json.load(sys.stdin)["url"])')
echo "cache.host = $host"
"$python" bench/agents.py "$url" --in-turn --stream "${arguments[@]}"
"$python" -m lucevisor status --json --name "$name" | "$python" -c '
import json, sys
status = json.load(sys.stdin)
cache = status["cache"]
print({key: cache[key] for key in ("tokens", "prefix_slots", "used_bytes", "max_bytes", "evictions", "host_slots", "host_bytes", "host_max_bytes")})
print([use for use in status["host_memory"] if use["owner"] == "prefixes"])'
