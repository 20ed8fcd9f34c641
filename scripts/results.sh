#!/usr/bin/env bash
# Runs the CPU jobs of docs/results.md one after the other and prints their tables.
#
#   scripts/results.sh [OUT [GROUP…]]     OUT: runs/results; GROUP: quickstart, base, algorithms, controls (all of them)
#
# It can be interrupted at any time: completed runs are kept, and the next call starts the interrupted run again. Runs
# of another build of `pipe` are kept, too, but marked in the tables.
# PIPE is the path of the executable (target/release/pipe), SEEDS the list of seeds (17 18 19).
set -euo pipefail
cd "$(dirname "$0")/.."

out=${1:-runs/results}
groups=("${@:2}")
[ ${#groups[@]} -gt 0 ] || groups=(quickstart base algorithms controls)
pipe=${PIPE:-target/release/pipe}
seeds=${SEEDS:-17 18 19}

for group in "${groups[@]}"; do
  case $group in
  quickstart | base | algorithms | controls) ;;
  *)
    echo "error: there is no group \`$group\`; groups are quickstart, base, algorithms, controls" >&2
    exit 2
    ;;
  esac
done
if [ ! -x "$pipe" ]; then
  echo "error: \`$pipe\` does not exist; run \`cargo build --release --bin pipe\`, or set PIPE to its path" >&2
  exit 2
fi
mkdir -p "$out"
build=$(sha256sum "$pipe" | cut -c1-12)

# Prints a row of a table: exact match of each evaluation, in per cent, with a mark for another build.
row() {
  local dir=$1 mark=
  [ "$(cat "$dir/build")" = "$build" ] || mark=' (another build)'
  sed -n 's/.*"step":\([0-9]*\),.*"eval\/exact_match":\([0-9.]*\).*/\1 \2/p' "$dir/metrics.jsonl" |
    awk -v name="$(basename "$dir")$mark" '{ line = line sprintf(" %.1f (%d)", 100 * $2, $1) } END { print name ":" line }'
}

# run NAME SEED ARGUMENT…: runs it unless it exists already.
run() {
  local name=$1 seed=$2 dir="$out/$1-$2"
  shift 2
  if [ ! -d "$dir" ]; then
    rm -rf "$dir.partial"
    echo "… $name, seed $seed ($(date +%H:%M:%S))" >&2
    if ! "$pipe" train "$@" "seed=$seed" "run.dir=$dir.partial" >"$out/$name-$seed.log" 2>&1; then
      tail -n 5 "$out/$name-$seed.log" >&2
      # A run may end by itself, such as a control without any signal left; its evaluations count.
      grep -q '"status": *"finished"\|"status": *"failed"' "$dir.partial/status.json" || exit 1
    fi
    echo "$build" >"$dir.partial/build"
    mv "$dir.partial" "$dir"
  fi
  row "$dir"
}

each() {
  local name=$1 seed
  shift
  for seed in $seeds; do run "$name" "$seed" "$@"; done
}

examples=examples/pipelines
long=actor.optimizer.schedule.total_steps
for group in "${groups[@]}"; do
  echo "== $group: exact match in per cent (step)"
  case $group in
  quickstart)
    each grpo $examples/grpo_addition.toml
    run control 17 $examples/grpo_addition_control.toml
    ;;
  base)
    run sft 17 $examples/sft_addition.toml
    ;;
  algorithms)
    each dapo $examples/dapo_addition.toml steps=200
    each dr_grpo $examples/grpo_addition.toml steps=200 $long=400 advantages.estimator=dr_grpo \
      update.loss.aggregation=seq-mean-token-sum-norm update.loss.loss_scale_factor=12
    each rloo $examples/grpo_addition.toml steps=200 $long=400 advantages.estimator=rloo
    each reinforce_plus_plus $examples/grpo_addition.toml steps=200 $long=400 \
      advantages.estimator=reinforce_plus_plus
    each remax $examples/remax_addition.toml steps=200 $long=400
    each gspo $examples/gspo_addition.toml steps=200
    each ppo $examples/ppo_addition.toml $long=150
    each dpo $examples/dpo_addition.toml
    each kto $examples/kto_addition.toml
    each orpo $examples/orpo_addition.toml
    each ilql $examples/ilql_addition.toml
    run simpo 17 $examples/simpo_addition.toml
    ;;
  controls)
    run rloo_control 17 $examples/grpo_addition_control.toml steps=100 $long=400 advantages.estimator=rloo
    run dpo_control 17 $examples/dpo_addition.toml data.train.shuffled=true
    run kto_control 17 $examples/kto_addition.toml data.train.shuffled=true
    run orpo_control 17 $examples/orpo_addition.toml data.train.shuffled=true
    ;;
  esac
done
lscpu 2>/dev/null | sed -n 's/^Model name: */processor: /p'
