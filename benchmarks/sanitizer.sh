#!/usr/bin/env bash
# compute-sanitizer over one step and one forward pass, launch by launch, of digits and a small ResNet-18.
#   bash benchmarks/sanitizer.sh [python]     exit status 0: memcheck and initcheck are clean
set -u
python=${1:-python3}
here=$(cd "$(dirname "$0")" && pwd)
results=${MBC_RESULTS:-$here/results}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$results"
failed=0
lines=()
for name in digits resnet; do
  for precision in fp32 bf16; do
    package=$work/${name}_$precision
    if ! "$python" "$here/sanitized_step.py" build "$name" "$precision" "$package"; then
      lines+=("$name $precision: not built"); failed=1; continue
    fi
    for tool in memcheck initcheck; do
      log=$work/log
      timeout 280 compute-sanitizer --tool "$tool" --error-exitcode 9 "$python" "$here/sanitized_step.py" run "$package" >"$log" 2>&1
      status=$?
      summary=$(grep -a "ERROR SUMMARY" "$log" | tail -1 | sed 's/=* *//')
      lines+=("$name $precision $tool: exit $status, ${summary:-no summary}")
      if [ $status -ne 0 ]; then failed=1; grep -a "=========" "$log" | head -40; tail -5 "$log"; fi
    done
  done
done
printf '%s\n' "${lines[@]}" | tee "$results/sanitizer.txt"
exit $failed
