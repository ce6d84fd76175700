#!/usr/bin/env bash
# compute-sanitizer over one step and one forward pass, launch by launch, of digits and a small ResNet-18.
#   bash benchmarks/sanitizer.sh [python]     exit status 0: memcheck and initcheck are clean
# The four packages are built and looked at side by side: nothing is timed.
set -u
python=${1:-python3}
here=$(cd "$(dirname "$0")" && pwd)
results=${MBC_RESULTS:-$here/results}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$results"

look() { # name precision -> $work/NAME_PRECISION.txt, and .failed where something was found
  local package=$work/$1_$2 tool status summary
  if ! "$python" "$here/sanitized_step.py" build "$1" "$2" "$package"; then
    echo "$1 $2: not built" >"$package.txt"
    touch "$package.failed"
    return
  fi
  for tool in memcheck initcheck; do
    timeout 280 compute-sanitizer --tool "$tool" --error-exitcode 9 \
      "$python" "$here/sanitized_step.py" run "$package" >"$package.log" 2>&1
    status=$?
    summary=$(grep -a "ERROR SUMMARY" "$package.log" | tail -1 | sed 's/=* *//')
    echo "$1 $2 $tool: exit $status, ${summary:-no summary}" >>"$package.txt"
    if [ $status -ne 0 ]; then
      touch "$package.failed"
      grep -a "=========" "$package.log" | head -40
      tail -5 "$package.log"
    fi
  done
}

packages=()
for name in digits resnet; do
  for precision in fp32 bf16; do
    packages+=("$work/${name}_$precision.txt")
    look "$name" "$precision" &
  done
done
wait
{
  "$python" "$here/stale.py" --code
  date -u +%Y-%m-%dT%H:%M:%S+00:00
  nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null | head -1
  cat "${packages[@]}"
} >"$work/all"
cp "$work/all" "$results/sanitizer.part" && mv "$results/sanitizer.part" "$results/sanitizer.txt"
cat "$results/sanitizer.txt"
! ls "$work"/*.failed >/dev/null 2>&1
