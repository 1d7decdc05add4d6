#!/bin/sh
# Stands for the interpreter of a job: `launcher.sh -P -m safepoint.jobs.local.attempt.node PLAN` does what its line of
# $ORDERS says, and leaves its exit code where a launcher does. For what a real one cannot be made to do, or only slowly.
# Each attempt has a line for each of its $NODES nodes.
for plan; do :; done # the last argument
leave() {
    echo "$1" >"${plan%.json}.exit"
    exit "$1"
}
attempt=${plan%/*} attempt=${attempt##*attempt-}
node=${plan##*node-} node=${node%.json}
[ -f "$plan" ] || attempt=1 node=0 # not a launcher: pip
order=$(sed -n "$(((attempt - 1) * NODES + node + 1))p" "$ORDERS")
case $order in
wait*) # until a signal; the second word is the exit code then
    trap 'leave "${order#* }"' TERM
    echo "$$" >>"$ORDERS.running"
    while :; do sleep 0.02; done
    ;;
until*) # a file appears; then with 0
    echo "$$" >>"$ORDERS.running"
    while [ ! -e "${order#* }" ]; do sleep 0.02; done
    leave 0
    ;;
stubborn)
    trap '' TERM
    echo "$$" >>"$ORDERS.running"
    while :; do sleep 0.02; done
    ;;
killed) kill -9 $$ ;;
*) leave "$order" ;;
esac
