# The commands that continuous integration runs; `just check` before every push.

check: fmt lint test docs

fmt:
    cargo fmt --all --check

lint:
    cargo clippy --workspace --all-targets -- -D warnings

test:
    cargo test --workspace

docs:
    RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps

schemas:
    cargo run --bin pipe -- schema --out schemas

cuda-check:
    DOCS_RS=1 cargo check --features cuda
