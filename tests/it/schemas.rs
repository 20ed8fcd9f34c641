//! Committed schemas are those of the types that run.

use crate::kit::root;

/// `pipe schema > schemas/pipeline.json` writes the file anew.
#[test]
fn the_pipeline_schema_is_not_stale() {
    let path = root().join("schemas/pipeline.json");
    let committed = std::fs::read_to_string(&path).expect("a committed schema");
    let mut printed = Vec::new();
    verl::pipe::cli::schema::schema(&verl::registry(), &mut printed).expect("a schema");
    assert_eq!(
        committed,
        String::from_utf8(printed).expect("JSON is text"),
        "write it anew: cargo run -- schema > schemas/pipeline.json"
    );
}
