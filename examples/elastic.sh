#!/bin/bash
# A job that survives the death of a rank: torchrun ends the other ranks and starts all of them again, and the script
# goes on from the newest checkpoint.
#
#   examples/elastic.sh --steps 80                          zero.py on 2 ranks of this host
#   RANKS=8 SCRIPT=examples/ddp.py examples/elastic.sh      another script that loads its Checkpointer first
#
# On several hosts start it on each, with the address of one: NODES=4 HOST=node1:29400 examples/elastic.sh
set -euo pipefail
script=${SCRIPT:-$(dirname "$0")/zero.py}
if [ -n "${HOST:-}" ]; then
  meet=(--nnodes "${NODES:-1}" --rdzv-backend c10d --rdzv-endpoint "$HOST" --rdzv-id "${ID:-elastic}")
else
  meet=(--standalone)
fi
exec python -m torch.distributed.run "${meet[@]}" --nproc-per-node "${RANKS:-2}" --max-restarts "${RESTARTS:-3}" \
  "$script" "$@"
