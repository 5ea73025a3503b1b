#!/bin/sh
# serve.sh INDEX COMMAND...: in the pod of that index, run a server until the load test is over; in others, do nothing.
set -u
run=${RUN:-/run/compare}
index=$1
shift
[ "$index" = "$JOB_COMPLETION_INDEX" ] || exit 0
"$@" &
server=$!
until [ -e "$run/status" ]; do
    if ! kill -0 "$server" 2>/dev/null; then
        echo "the server ended before the load test did" >&2
        exit 1
    fi
    sleep 1
done
kill "$server"
wait "$server"
exit 0
