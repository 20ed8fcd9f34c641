#!/usr/bin/env bash
# Checks that a decoding step is correct and fast on a Hopper GPU: test harnesses first, then the executable.
#
#     scripts/kernels/run_decode.sh [PIPE]        (default: target/cuda/release/pipe)
#
# Each part reports whether it failed; the exit code is 1 if any did.
set -uo pipefail
cd "$(dirname "$0")/../.."
pipe=${1:-target/cuda/release/pipe}
failed=0
part() {
    echo "== $*"
    "$@" || failed=1
}
part timeout 300 python3 scripts/kernels/decode.py check step16 step128 step512 step256 step64
part timeout 90 python3 scripts/kernels/gemm.py check
part timeout 90 python3 scripts/kernels/rowwise.py --only advance,sample
if [ -x "$pipe" ]; then
    part timeout 120 "$pipe" bench check --device cuda:0
    for rows in 16 64 128 256 512; do
        part timeout 60 "$pipe" bench rollout --device cuda:0 --model qwen2.5-0.5b --sequences "$rows" --prompt 128 --new 256
    done
    for sequences in 512 2048; do
        part timeout 120 "$pipe" bench rollout --device cuda:0 --model qwen2.5-0.5b --sequences "$sequences" --prompt 512 --new 1024 --mixed
    done
fi
exit $failed
