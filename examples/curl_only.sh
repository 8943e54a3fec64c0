#!/usr/bin/env bash
# A caller that has curl and nothing else: looks, reads bytes, runs a plan.
#   curl_only.sh ADDRESS TOKEN_FILE       `tensorcast http` says both
# It takes an artifact toy/weights with a tensor `bias`: curl_only.py makes a cluster that has one.
# ADDRESS is a gateway's: http://scheduler:8787/tensorcast, or that of a node with http-ports.
set -euo pipefail
address=$1 token_file=$2

# The token goes by a file, never by an argument that `ps` would show.
header=$(mktemp)
trap 'rm -f "$header"' EXIT
printf 'Authorization: Bearer %s\n' "$(cat "$token_file")" >"$header"
ask() { curl --silent --show-error --fail --max-time 60 --header "@$header" "$@"; }

echo "what can be asked:"
ask "$address/openapi.json" | cut -c 1-60

echo "artifacts below toy/:"
ask --get "$address/v1/artifacts" --data-urlencode "prefix=toy/"
echo

echo "the first 16 bytes of a tensor, in hexadecimal:"
ask --range 0-15 "$address/v1/artifacts/toy%2Fweights/tensors/bias" | od -An -tx1

echo "room by node:"
ask "$address/v1/signals?prefix=node/" | cut -c 1-200

echo "a plan that publishes the weights and gives them another name:"
ask --data @- "$address/v1/plans" <<'PLAN'
{"context": {"id": "curl", "key": "curl-only-1", "ddl": 60},
 "steps": [{"name": "live", "kind": "publish", "target": {"is": "name", "id": "toy/weights"}},
           {"name": "now", "kind": "alias", "target": {"is": "step", "step": "live"}, "options": {"name": "toy/now"}}]}
PLAN
echo
ask "$address/v1/plans/curl-only-1?wait=60"
echo

echo "the same under its new name, all of it:"
ask "$address/v1/artifacts/toy%2Fnow/tensors/bias" | od -An -tf8

echo "what happened, as it is told to who watches:"
ask --no-buffer "$address/v1/plans/curl-only-1/stream"
