#!/bin/sh
# compute-sanitizer over every family of kernels on this GPU: one line a tool, exit 1 on any fault.
#
#   benchmarks/device/sanitize.sh [folder for the logs]
#
#   PYTHON=python3           that runs the driver
#   SANITIZE_JOBS            processes at a time; default: the number of CPUs
#   SANITIZE_PARTS           processes that share a tool's launches; default: half the jobs
#   SANITIZE_BUDGET_S        seconds for all; what has not ended by then is told, and is a fault
#   SANITIZE_BARRIERS        mbarriers of a block that racecheck makes room for; 0: it guesses
#
# The kernels are compiled by a plain run first, in SANITIZE_JOBS processes; then all tools run at
# once, each over all parts. Several GPUs get the parts in turn. The planted faults show that the
# tools see into kernels that were compiled at run time; handoffs through an mbarrier, right ones and
# a hasty one, show whether racecheck's reports on kernels with rings count (racecheck_report.py).
set -u
here=$(cd "$(dirname "$0")" && pwd)

# one process: name of its log, tool or "plain", arguments of the driver; its status is in a file
if [ "${1:-}" = --one ]; then
  name=$2 check=$3
  shift 3
  if [ "$SANITIZE_GPUS" -gt 1 ]; then
    part=${name##*.}
    case $part in *[!0-9]*) part=0 ;; esac
    export CUDA_VISIBLE_DEVICES=$((part % SANITIZE_GPUS))
  fi
  case $1 in --part) script=sanitize_driver.py ;; *) script=planted.py ;; esac
  ended=
  if [ -n "$SANITIZE_END" ]; then
    left=$((SANITIZE_END - $(date +%s)))
    if [ "$left" -lt 1 ]; then
      echo "not begun: the time was up" >"$SANITIZE_LOGS/$name"
      echo 124 >"$SANITIZE_LOGS/$name.status"
      exit 0
    fi
    ended="timeout -k 5 $left"
  fi
  if [ "$check" = plain ]; then
    $ended "$PYTHON" "$here/$script" "$@"
  else
    case $check in
      # the bindings ask a driver for functions that it may not have: no fault of a kernel
      memcheck) options="--report-api-errors no" ;;
      racecheck) options="--num-cuda-barriers $SANITIZE_BARRIERS" ;;
      *) options= ;;
    esac
    $ended "$SANITIZE_TOOL" --tool "$check" --print-limit 200 --error-exitcode 9 $options \
      "$PYTHON" "$here/$script" "$@"
  fi >"$SANITIZE_LOGS/$name" 2>&1
  echo $? >"$SANITIZE_LOGS/$name.status"
  exit 0
fi

logs=${1:-$(mktemp -d)}
mkdir -p "$logs"
tool=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)
if [ ! -x "$tool" ]; then
  echo "compute-sanitizer is not here; it comes with the CUDA toolkit" >&2
  exit 2
fi
number() {
  case $2 in
    '' | 0* | *[!0-9]*) echo "$1 is '$2'; needed a number from 1 on" >&2 && exit 2 ;;
  esac
}
jobs=${SANITIZE_JOBS:-$(getconf _NPROCESSORS_ONLN)}
number SANITIZE_JOBS "$jobs"
parts=${SANITIZE_PARTS:-$(((jobs + 1) / 2))}
number SANITIZE_PARTS "$parts"
export SANITIZE_BARRIERS="${SANITIZE_BARRIERS:-128}" SANITIZE_END=
if [ -n "${SANITIZE_BUDGET_S:-}" ]; then
  number SANITIZE_BUDGET_S "$SANITIZE_BUDGET_S"
  SANITIZE_END=$(($(date +%s) + SANITIZE_BUDGET_S))
fi
gpus=1 # where the caller chose some, those stay
[ -n "${CUDA_VISIBLE_DEVICES+set}" ] || gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ')
export PYTHON="${PYTHON:-python3}" SANITIZE_LOGS="$logs" SANITIZE_TOOL="$tool" SANITIZE_GPUS="$gpus"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # the reference's, of processes that share the CPUs

each_part() { # log, tool, parts: a line for each
  i=1
  while [ "$i" -le "$3" ]; do
    echo "$1.$i $2 --part $i/$3"
    i=$((i + 1))
  done
}
at_once() { xargs -P "$jobs" -L 1 sh "$here/sanitize.sh" --one; }
of_all() { # prefix of logs, a word before the first "right"; how many launches
  cat "$logs/$1".*[0-9] | awk -v kind="$2" '$2 == kind && $3 == "launches" { n += $1 } END { print n + 0 }'
}
seconds() { date +%s; }

rm -f "$logs"/plain.* "$logs"/*check.* "$logs"/planted-* "$logs"/handoffs-*
began=$(seconds)
each_part plain plain "$jobs" | at_once
for log in "$logs"/plain.*[0-9]; do
  if [ "$(cat "$log.status" 2>&1)" != 0 ]; then
    echo "plain      FAILED ($log):" && tail -5 "$log"
    exit 1
  fi
done
skipped=$(cat "$logs"/plain.*[0-9] | grep skipped | sort -u | tr '\n' ';')
right="$(of_all plain native) native launches right; $(of_all plain Triton) Triton launches right"
echo "plain      $right; $skipped$(($(seconds) - began)) s"

right_handoffs="right_stores right_small_copies right_bulk_copies right_tensor_copies"
began=$(seconds)
{
  each_part racecheck racecheck "$parts" # the slowest first
  each_part memcheck memcheck "$parts"
  each_part synccheck synccheck "$parts"
  echo planted-memcheck memcheck beyond
  echo planted-racecheck racecheck unordered
  echo handoffs-right racecheck $right_handoffs
  echo handoffs-hasty racecheck hasty_stores
} | at_once

totals() { # the summaries of all parts as one, number by number
  for log in "$logs/$1".*[0-9]; do grep SUMMARY "$log" | tail -1; done | awk '
    { text = line = $0; count = 0
      while (match(text, /[0-9]+/)) {
        sum[++count] += substr(text, RSTART, RLENGTH); text = substr(text, RSTART + RLENGTH) } }
    END { for (i = 1; i <= count && match(line, /[0-9]+/); i++) {
        out = out substr(line, 1, RSTART - 1) sum[i]; line = substr(line, RSTART + RLENGTH) }
      sub(/^=* */, "", out); print out line }'
}

failed=0
for name in memcheck racecheck synccheck; do
  summary=$(totals $name)
  status=$(sort -n "$logs/$name".*.status | tail -1)
  ended=$(cat "$logs/$name".*[0-9] | grep -c "^part .* ended$")
  echo "$name  exit $status; ${summary:-no summary}; $ended of $parts parts of the driver ended"
  if [ $name = racecheck ] && [ "$status" = 9 ] && [ "$ended" = "$parts" ]; then
    continue # racecheck_report.py judges
  fi
  if [ "$status" != 0 ] || [ "$ended" != "$parts" ]; then
    failed=1
    # each kind of report once, with how often it came
    cat "$logs/$name".*[0-9] |
      grep -E "^=+ +(Error|Warning|Invalid|Barrier|Divergent|Potential)" |
      sed -E 's/\+0x[0-9a-f]+//g; s/[0-9]+ hazards?/N hazards/' | cut -c1-180 |
      sort | uniq -c | sort -rn | head -5
  fi
done
if [ "$(grep -c ' is right$' "$logs/handoffs-right")" != 4 ]; then
  echo "handoffs   NOT RIGHT ($logs/handoffs-right): $(tail -1 "$logs/handoffs-right")"
  failed=1
fi
"$PYTHON" "$here/racecheck_report.py" "$logs/handoffs-right" "$logs/handoffs-hasty" \
  "$logs"/racecheck.*[0-9] || failed=1
for name in planted-memcheck planted-racecheck; do
  if grep -qE "Invalid __global__ write|[1-9][0-9]* hazards? displayed" "$logs/$name"; then
    echo "$name found"
  else
    echo "$name NOT FOUND: $(grep SUMMARY "$logs/$name" | tail -1)"
    failed=1
  fi
done
echo "the tools took $(($(seconds) - began)) s; logs are in $logs"
exit $failed
