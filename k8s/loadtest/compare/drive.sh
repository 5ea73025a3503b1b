#!/bin/sh
# drive.sh TARGET...: load the target of this pod's index, say with which status that ended, and wait to be stopped.
set -u
run=${RUN:-/run/compare}
results=${RESULTS:-/results}
config=${CONFIG:-/etc/compare/config.yaml}
shift "$JOB_COMPLETION_INDEX"
if [ ! -e "$run/status" ]; then
    python -m baselines.compare --config "$config" --targets "$1" --out "$results" --resume
    echo $? >"$run/status"
fi
exec sleep infinity
