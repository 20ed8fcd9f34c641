//! `pipe schema`: JSON Schema of the pipeline file.

use std::io::{self, Write};

use crate::registry::Registry;
use crate::schema::pipeline_schema;

/// Prints the schema of pipeline files. Returns the exit code.
///
/// # Errors
/// When `out` cannot be written.
pub fn schema(registry: &Registry, out: &mut dyn Write) -> io::Result<u8> {
    let text =
        serde_json::to_string_pretty(&pipeline_schema(registry)).map_err(io::Error::other)?;
    writeln!(out, "{text}")?;
    Ok(0)
}
