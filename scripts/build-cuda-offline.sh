#!/usr/bin/env bash
# Builds the `pipe` executable with CUDA on a machine that cannot download cubecl's LLVM bundle.
#
# burn's CUDA backend brings cubecl-llvm, whose build script downloads a prebuilt LLVM. verl compiles kernels through
# NVRTC (`cuda-cpp`) and never calls that LLVM: DOCS_RS=1 makes its build scripts return early, and the linker flags
# let the symbols that are never called stay unresolved. With network access, `cargo build --release --features cuda`
# is enough.
#
# At run time: CUDA_PATH (default /usr/local/cuda) with its headers, and libnvrtc on LD_LIBRARY_PATH.
set -euo pipefail
cd "$(dirname "$0")/.."
export DOCS_RS=1
export RUSTFLAGS="-C link-arg=-Wl,--unresolved-symbols=ignore-all -C link-arg=-Wl,-z,lazy -C relro-level=partial ${RUSTFLAGS:-}"
exec cargo build --release --features cuda --target-dir target/cuda "$@"
