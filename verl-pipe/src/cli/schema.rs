//! `pipe schema`: the settings of a pipeline file, the keys that each kind reads and writes, and the files of a run, as
//! JSON Schema or as Markdown pages.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use clap::Args;
use verl_declare::registry::Registry;
use verl_plan::Plannable;
use verl_words::diagnostic::{Diagnostic, suggest};

use super::json_error::{FILE, JsonError};
use super::{PipelineArgs, write_findings};
use crate::schema::edges::PipelineEdges;
use crate::schema::folder::{Document, Format, json_text};
use crate::schema::kinds::Catalogue;
use crate::schema::markdown::edges_page;
use crate::schema::pipeline_schema;

/// Arguments of `pipe schema`.
#[derive(Debug, Clone, Default, Args)]
#[command(after_help = AFTER_HELP)]
pub struct SchemaArgs {
    /// One kind of stage: its settings, the keys that it reads and writes, its metrics.
    #[arg(long, value_name = "KIND", group = "what")]
    pub stage: Option<String>,
    /// One kind of part, such as `loss/grpo`; just the kind if only one slot has it.
    #[arg(long, value_name = "SLOT/KIND", group = "what")]
    pub part: Option<String>,
    /// One kind of model.
    #[arg(long, value_name = "KIND", group = "what")]
    pub model: Option<String>,
    /// One kind of data set.
    #[arg(long, value_name = "KIND", group = "what")]
    pub data: Option<String>,
    /// One file of a run folder, such as `metrics.jsonl` or `trace/format.json`; just the name if it is unique.
    #[arg(long, value_name = "FILE", group = "what")]
    pub run_file: Option<String>,
    /// One pipeline file: every edge with its writer, its readers and its sizes.
    #[arg(long, value_name = "FILE", group = "what")]
    pub pipeline: Option<PathBuf>,
    /// Overrides of that file's settings.
    #[arg(value_name = "KEY=VALUE", requires = "pipeline")]
    pub overrides: Vec<String>,
    /// Output format.
    #[arg(long, value_enum, default_value = "json")]
    pub format: Format,
    /// The same as `--format json`, but errors are JSON too.
    #[arg(long, conflicts_with = "format")]
    pub json: bool,
    /// Writes files into this folder instead: all documents and an index, or only the selected one.
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
}

const AFTER_HELP: &str = "\
Examples:
  pipe schema --stage generate --format md
  pipe schema --part loss/grpo --format md
  pipe schema --pipeline examples/pipelines/grpo_addition.toml --format md
  pipe schema --out schemas
Without a selection, JSON output is the schema of pipeline files, and Markdown output a list of all documents.";

/// Prints a document, or writes files. Returns the exit code.
///
/// # Errors
/// If `out` cannot be written.
pub fn schema(args: &SchemaArgs, registry: &Registry, out: &mut dyn Write) -> io::Result<u8> {
    let format = args.format;
    let files = match selected(args, registry) {
        Ok(Some(file)) => vec![file],
        Ok(None) if args.out.is_some() => Catalogue::of(registry).files(format),
        Ok(None) if format == Format::Md => {
            vec![(String::new(), Catalogue::of(registry).index(format))]
        }
        Ok(None) => vec![(String::new(), json_text(&pipeline_schema(registry)))],
        Err(findings) if args.json => {
            return JsonError::of_findings(&findings).write(out).map(|()| 1);
        }
        Err(findings) => return write_findings(&findings, out).map(|()| 1),
    };
    let Some(dir) = &args.out else {
        for (_, text) in &files {
            write!(out, "{text}")?;
        }
        return Ok(0);
    };
    if let Err((path, error)) = write_files(dir, &files) {
        let message = format!("cannot write `{}`: {error}", path.display());
        let help = "set `--out` to a writable folder";
        match args.json {
            true => JsonError::new(FILE, message, help).write(out)?,
            false => writeln!(out, "error[{FILE}]: {message}; {help}")?,
        }
        return Ok(1);
    }
    match files.as_slice() {
        _ if args.json => {
            let paths = files.iter().map(|(path, _)| path);
            let written = serde_json::json!({ "folder": dir, "files": paths.collect::<Vec<_>>() });
            write!(out, "{}", json_text(&written))?;
        }
        [(path, _)] => writeln!(out, "{}", dir.join(path).display())?,
        all => writeln!(out, "{} files in {}", all.len(), dir.display())?,
    }
    Ok(0)
}

/// Writes files into a folder; returns the first that cannot be written, and why.
fn write_files(dir: &Path, files: &[(String, String)]) -> Result<(), (PathBuf, io::Error)> {
    for (path, text) in files {
        let path = dir.join(path);
        let made = path.parent().map_or(Ok(()), fs::create_dir_all);
        if let Err(error) = made.and_then(|()| fs::write(&path, text)) {
            return Err((path, error));
        }
    }
    Ok(())
}

/// The file name and text of the selected document, if one is selected.
fn selected(
    args: &SchemaArgs,
    registry: &Registry,
) -> Result<Option<(String, String)>, Vec<Diagnostic>> {
    let format = args.format;
    if let Some(file) = &args.pipeline {
        let pipeline = PipelineArgs {
            file: file.clone(),
            overrides: args.overrides.clone(),
        };
        let plan = pipeline.read(registry).and_then(|pipe| pipe.plan())?;
        let edges = PipelineEdges::of(&plan);
        let text = match format {
            Format::Json => json_text(&edges),
            Format::Md => edges_page(&edges),
        };
        let stem = file.file_stem().unwrap_or_default().to_string_lossy();
        return Ok(Some((format.file(&stem), text)));
    }
    let document = match args {
        SchemaArgs {
            stage: Some(name), ..
        } => stage(name, registry)?,
        SchemaArgs {
            part: Some(name), ..
        } => part(name, registry)?,
        SchemaArgs {
            model: Some(name), ..
        } => {
            let found = Catalogue::of(registry).model(name);
            found
                .map(|schema| (format!("models/{name}"), schema))
                .ok_or_else(|| {
                    unknown(
                        "model kind",
                        "--model",
                        name,
                        registry.models().suggest(name),
                    )
                })?
        }
        SchemaArgs {
            data: Some(name), ..
        } => {
            let found = Catalogue::of(registry).data(name);
            found
                .map(|schema| (format!("data/{name}"), schema))
                .ok_or_else(|| {
                    unknown(
                        "data set kind",
                        "--data",
                        name,
                        registry.data_kinds().suggest(name),
                    )
                })?
        }
        SchemaArgs {
            run_file: Some(name),
            ..
        } => run_file(name, registry)?,
        _ => return Ok(None),
    };
    let (path, schema) = document;
    Ok(Some((format.file(&path), format.text(&schema))))
}

fn stage(name: &str, registry: &Registry) -> Result<(String, serde_json::Value), Vec<Diagnostic>> {
    let found = Catalogue::of(registry).stage(name);
    let found = found.map(|schema| (format!("stages/{name}"), schema));
    found.ok_or_else(|| {
        unknown(
            "stage kind",
            "--stage",
            name,
            registry.stages().suggest(name),
        )
    })
}

/// A part by its slot and kind, or only by its kind if no other slot has it.
fn part(name: &str, registry: &Registry) -> Result<(String, serde_json::Value), Vec<Diagnostic>> {
    let catalogue = Catalogue::of(registry);
    let known = catalogue.parts.iter();
    let known: Vec<String> = known
        .map(|(slot, kind, _)| format!("{slot}/{kind}"))
        .collect();
    let matches = |full: &&String| **full == name || full.rsplit('/').next() == Some(name);
    let found: Vec<&String> = known.iter().filter(matches).collect();
    let help = match found.as_slice() {
        [one] => {
            let (slot, kind) = one.split_once('/').unwrap_or_default();
            if let Some(schema) = catalogue.part(slot, kind) {
                return Ok((format!("parts/{one}"), schema));
            }
            String::new()
        }
        [] => suggest(name, "parts", known.iter().map(String::as_str)),
        several => {
            let all: Vec<&str> = several.iter().map(|full| full.as_str()).collect();
            format!("several slots have it: use {}", all.join(" or "))
        }
    };
    Err(unknown("part kind", "--part", name, help))
}

fn run_file(
    name: &str,
    registry: &Registry,
) -> Result<(String, serde_json::Value), Vec<Diagnostic>> {
    let documents = Catalogue::of(registry).documents();
    let files: Vec<Document> = documents
        .into_iter()
        .filter(|document| document.path.starts_with("run/"))
        .collect();
    let title = |document: &Document| {
        document.schema["title"]
            .as_str()
            .unwrap_or_default()
            .to_owned()
    };
    let known: Vec<String> = files.iter().map(title).collect();
    let matches = |document: &Document| {
        let title = title(document);
        title == name || title.rsplit('/').next() == Some(name)
    };
    match files.into_iter().find(matches) {
        Some(document) => Ok((document.path, document.schema)),
        None => {
            let help = suggest(name, "files", known.iter().map(String::as_str));
            Err(unknown("run file", "--run-file", name, help))
        }
    }
}

fn unknown(what: &str, flag: &str, name: &str, help: String) -> Vec<Diagnostic> {
    let finding = Diagnostic::error("C003", format!("unknown {what} `{name}`"))
        .at(format!("{flag} {name}"))
        .because(format!("there is no {what} with this name"))
        .help(help);
    vec![finding]
}
