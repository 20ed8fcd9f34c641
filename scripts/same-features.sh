#!/usr/bin/env bash
# Reports each crate that some selection of packages builds with other features than `--workspace`, and so a second
# time. Add the reported crates to verl-deps/Cargo.toml.
set -euo pipefail
cd "$(dirname "$0")/.."

# The crates of a selection, each with its features.
crates() {
  cargo tree --prefix none --format '{p} [{f}]' "$@" | sed 's/ (\*)$//' | sort -u
}

everything=$(crates --workspace --edges normal,build,dev)
different=0
compare() {
  local found
  found=$(comm -23 <(crates "$@") <(echo "$everything"))
  if [ -n "$found" ]; then
    printf '%s\n' "cargo tree $*: other features than with --workspace" "$found"
    different=1
  fi
}
# What `cargo build --bin pipe` and `cargo install` select; tests, examples and benches; a single package.
compare --package verl --edges normal,build
for package in verl verl-algos verl-collective verl-declare verl-decoder verl-kernels verl-models verl-pipe verl-plan verl-reshard verl-rollout verl-rules verl-run verl-stages verl-text verl-trace verl-train verl-view verl-wire verl-words; do
  compare --package "$package" --edges normal,build,dev
done
exit "$different"
