#!/bin/sh
# compute-sanitizer over every family of kernels on this GPU: one line a tool, exit 1 on any fault.
#
#   benchmarks/device/sanitize.sh [folder for the logs]      PYTHON=python3 by default
#
# The kernels are compiled by a plain run first; then all tools run at once. The planted faults show
# that the tools see into kernels that were compiled at run time.
set -u
here=$(cd "$(dirname "$0")" && pwd)
logs=${1:-$(mktemp -d)}
python=${PYTHON:-python3}
mkdir -p "$logs"
tool=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)
if [ ! -x "$tool" ]; then
  echo "compute-sanitizer is not here; it comes with the CUDA toolkit" >&2
  exit 2
fi

if ! "$python" "$here/sanitize_driver.py" >"$logs/plain" 2>&1; then
  echo "plain      FAILED:" && tail -5 "$logs/plain"
  exit 1
fi
echo "plain      $(tr '\n' ';' <"$logs/plain")"

watch() { # name, tool, arguments of the driver
  name=$1 check=$2
  shift 2
  "$tool" --tool "$check" --print-limit 200 --error-exitcode 9 \
    "$python" "$here/sanitize_driver.py" "$@" >"$logs/$name" 2>&1
  echo $? >"$logs/$name.status"
}
watch memcheck memcheck &
watch racecheck racecheck &
watch synccheck synccheck &
watch planted-memcheck memcheck --planted &
watch planted-racecheck racecheck --planted &
wait

failed=0
for name in memcheck racecheck synccheck; do
  summary=$(grep -E "SUMMARY" "$logs/$name" | tail -1 | sed 's/^=* *//')
  status=$(cat "$logs/$name.status")
  right=$(grep -c "launches right" "$logs/$name")
  echo "$name  exit $status; ${summary:-no summary}; $right of 2 parts of the driver ended"
  if [ "$status" != 0 ]; then
    failed=1
    # each kind of report once, with how often it came
    grep -E "^=+ +(Error|Warning|Invalid|Barrier|Divergent|Potential)" "$logs/$name" |
      sed -E 's/\+0x[0-9a-f]+//g; s/[0-9]+ hazards?/N hazards/' | cut -c1-180 |
      sort | uniq -c | sort -rn | head -5
  fi
done
for name in planted-memcheck planted-racecheck; do
  if grep -qE "Invalid __global__ write|[1-9][0-9]* hazards? displayed" "$logs/$name"; then
    echo "$name found"
  else
    echo "$name NOT FOUND: $(grep SUMMARY "$logs/$name" | tail -1)"
    failed=1
  fi
done
echo "logs are in $logs"
exit $failed
