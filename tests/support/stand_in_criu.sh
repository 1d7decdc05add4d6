#!/bin/sh
# Behaves towards Safepoint as CRIU does, for processes that only sleep. It needs no root.
#
# STAND_IN_DUMPS is a folder with a dump for each root process. STAND_IN_PROCESSES are all processes of all trees.
# STAND_IN_FAULT chooses what goes wrong: `ACTION PART WHAT`, such as `dump 1 fail`. WHAT is one of `fail`; `die`, as
# after SIGKILL; `wait`, until the file `release` exists in the current folder; `kill-root`, which kills the root
# process of the tree. Restored processes are those of the job with the folder STAND_IN_JOB. The files `dumped-PART` and
# `restored-PART` in the current folder show how far it came.
action=$1
shift
if [ "$action" = --version ]; then
  echo "Version: 4.2.1"
  exit 0
fi
while [ $# -gt 0 ]; do
  case $1 in
    --images-dir) images=$2 ;;
    --log-file) log=$2 ;;
    --tree) root=$2 ;;
    --action-script) script=$2 ;;
  esac
  shift
done
part=$(readlink "$images")
part=${part##*/part-}

leave() {
  echo "(00.1) Error (criu/x.c:1): $1" >"$log"
  exit 1
}

fault() {
  case $STAND_IN_FAULT in
    "$action $part fail") leave "Something went wrong" ;;
    "$action $part die") kill -KILL $$ ;;
    "$action $part kill-root") kill -KILL "$root"; leave "No such process" ;;
    "$action $part wait") while [ ! -e release ]; do sleep 0.02; done ;;
  esac
}

if [ "$action" = dump ]; then
  moving=
  for process in $STAND_IN_PROCESSES; do
    read -r _ _ state _ <"/proc/$process/stat"
    [ "$state" = T ] || moving="$moving $process"
  done
  echo "$moving" >"dumped-$part"
  fault
  cp "$STAND_IN_DUMPS/$root"/* "$images"
  exit 0
fi
setsid env SAFEPOINT_JOB_DIR="$STAND_IN_JOB" sleep 1000 &
root=$!
while read -r name <"/proc/$root/comm" && [ "$name" != sleep ]; do sleep 0.01; done
kill -STOP "$root"
echo "$root" >"restored-$part.new"
mv "restored-$part.new" "restored-$part"
fault
export CRTOOLS_INIT_PID="$root"
if ! CRTOOLS_SCRIPT_ACTION=post-restore "$script"; then
  kill -KILL "$root"
  leave "Aborting restore due to post-restore script"
fi
CRTOOLS_SCRIPT_ACTION=post-resume "$script"
