//! Disks with too little space: errors before the first step, and what is given up during a run.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use serde_json::json;
use verl_declare::pipe::{DataPipe, ModelDecl, ModelFactory};
use verl_plan::Plannable;
use verl_run::error::RunError;
use verl_words::resource::{ModelInfo, ModelResource, ResourceError};
use verl_words::stage::{BuildContext, ConfigError};

use super::fakes::*;
use super::trainer::{Page, lines, status};
use crate::console::Console;
use crate::trainer::{Trainer, TrainerOptions};

/// The numbers, declared to occupy a megabyte when saved.
struct Large;

const MODEL: u64 = 1 << 20;

impl ModelFactory for Large {
    fn describe(&self, _context: &BuildContext) -> Result<ModelInfo, Vec<ConfigError>> {
        Ok(ModelInfo {
            num_parameters: 3,
            saved_bytes: MODEL,
            ..ModelInfo::default()
        })
    }
    fn trainable(&self) -> bool {
        true
    }
    fn load(
        &self,
        name: &str,
        device: &str,
        context: &BuildContext,
    ) -> Result<Box<dyn ModelResource>, ResourceError> {
        NumbersFactory.load(name, device, context)
    }
}

fn large(dir: &Path, steps: u64) -> DataPipe {
    let mut pipe = pipeline(vec![]);
    pipe.run.steps = steps;
    pipe.run.dir = dir.to_owned();
    pipe.trace.rules = super::trace::quiet().rules;
    pipe.models[0] = ModelDecl {
        factory: Arc::new(Large),
        ..pipe.models[0].clone()
    };
    pipe
}

/// The path where an error says that a model was saved.
pub(super) fn saved_path(error: &str) -> PathBuf {
    let (_, rest) = error.split_once("it is saved in `").expect("a path");
    PathBuf::from(rest.split('`').next().expect("its end"))
}

/// Bytes of the files below a folder.
fn size_of(dir: &Path) -> u64 {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let sizes = entries.map(|entry| match entry.metadata() {
        Ok(about) if about.is_dir() => size_of(&entry.path()),
        Ok(about) => about.len(),
        Err(_) => 0,
    });
    sizes.sum()
}

/// A trainer on a disk of `disk` bytes that contains only the run folder.
fn on_a_disk(pipe: &DataPipe, disk: u64) -> (Result<Trainer, RunError>, Page) {
    let page = Page::default();
    let options = TrainerOptions {
        run: options(),
        console: Some(Console::to(Box::new(page.clone()), pipe.run.steps, 0)),
        free_space: Some(Arc::new(move |dir| Some(disk.saturating_sub(size_of(dir))))),
        ..TrainerOptions::default()
    };
    let plan = pipe
        .plan()
        .unwrap_or_else(|findings| panic!("{findings:#?}"));
    (Trainer::with_options(plan, options), page)
}

#[test]
fn a4_a_disk_without_space_for_the_model_is_an_error_before_the_first_step() {
    let temp = tempfile::tempdir().unwrap();
    let dir = temp.path().join("run");
    let (made, _) = on_a_disk(&large(&dir, 3), MODEL);
    let error = made.err().expect("not enough space");
    assert_eq!(error.code(), "R020");
    let text = error.to_string();
    assert!(
        text.contains(" free, but saving `actor` at the end needs 1.1 MiB"),
        "{text}"
    );
    assert!(!dir.exists());
    // A run that saves no model needs no space.
    let mut pipe = large(&dir, 1);
    pipe.run.save = Some(Vec::new());
    let (made, _) = on_a_disk(&pipe, MODEL);
    made.unwrap().train().unwrap();
}

#[test]
fn a4_the_trace_leaves_space_for_the_model() {
    for in_full in [false, true] {
        let temp = tempfile::tempdir().unwrap();
        let dir = temp.path().join("run");
        let steps = 60;
        let mut pipe = large(&dir, steps);
        pipe.trace.every = in_full.then_some(1);
        // Space for the model and little else: the trace of all steps needs more.
        let disk = MODEL + (400 << 10);
        let (made, page) = on_a_disk(&pipe, disk);
        made.unwrap().train().unwrap();
        let end = status(&dir);
        assert_eq!(
            (&end["status"], &end["saved"]),
            (&json!("finished"), &json!(["actor"]))
        );
        assert_eq!(lines(&dir, "metrics.jsonl").len(), steps as usize);
        assert!(size_of(&dir) + MODEL <= disk, "{} bytes", size_of(&dir));
        let text = page.text();
        assert!(
            text.contains("are reserved for saving the models; the run continues"),
            "{text}"
        );
        assert_eq!(
            text.contains("full steps may use 4096 MB"),
            in_full,
            "{text}"
        );
        // With enough space there is no warning, and more is recorded.
        let roomy = temp.path().join("roomy");
        pipe.run.dir = roomy.clone();
        let (made, page) = on_a_disk(&pipe, 64 << 30);
        made.unwrap().train().unwrap();
        assert!(size_of(&roomy.join("trace")) > size_of(&dir.join("trace")));
        assert!(!page.text().contains("warning"), "{}", page.text());
    }
}

#[test]
fn a_disk_filled_by_others_ends_the_run_while_the_models_still_fit() {
    let temp = tempfile::tempdir().unwrap();
    let dir = temp.path().join("run");
    let left = Arc::new(AtomicU64::new(64 << 20));
    let reported = left.clone();
    let options = TrainerOptions {
        run: options(),
        free_space: Some(Arc::new(move |_| Some(reported.load(Ordering::SeqCst)))),
        ..TrainerOptions::default()
    };
    let plan = large(&dir, 9).plan().expect("a plan");
    let mut trainer = Trainer::with_options(plan, options).unwrap();
    trainer.on_step(move |metrics| {
        if metrics.step == 3 {
            left.store(MODEL + (64 << 10), Ordering::SeqCst);
        }
    });
    let error = trainer.train().unwrap_err();
    assert_eq!(error.code(), "R014");
    let text = error.to_string();
    assert!(
        text.contains("are reserved for saving the models"),
        "{text}"
    );
    let end = status(&dir);
    assert_eq!(
        (&end["status"], &end["saved"]),
        (&json!("failed"), &json!(["actor"]))
    );
    assert!(dir.join("model/actor/weights.txt").is_file());
}

#[test]
fn a_model_that_does_not_fit_is_saved_to_a_temporary_folder() {
    let temp = tempfile::tempdir().unwrap();
    let dir = temp.path().join("refused");
    let mut pipe = large(&dir, 2);
    pipe.trace.stats = false;
    let (made, _) = on_a_disk(&pipe, 64 << 20);
    let mut trainer = made.unwrap();
    trainer.step().unwrap();
    trainer.step().unwrap();
    // A file in place of the folder of the models.
    fs::write(dir.join("model"), "taken").unwrap();
    let text = trainer.finish().unwrap_err().to_string();
    assert!(text.starts_with("cannot save model `actor`: "), "{text}");
    let end = status(&dir);
    assert_eq!(
        (&end["status"], &end["step"]),
        (&json!("failed"), &json!(2))
    );
    assert_eq!(end.get("saved"), None);
    let place = saved_path(&text);
    assert!(
        end["reason"]
            .as_str()
            .unwrap()
            .contains(&place.display().to_string())
    );
    let saved = fs::read_to_string(place.join("weights.txt")).expect("the weights");
    fs::remove_dir_all(place.parent().expect("a folder")).unwrap();
    assert!(saved.starts_with('['), "{saved}");
    // The weights are still in memory: once there is space, saving succeeds.
    fs::remove_file(dir.join("model")).unwrap();
    trainer.finish().unwrap();
    let end = status(&dir);
    assert_eq!(
        (&end["status"], &end["saved"]),
        (&json!("finished"), &json!(["actor"]))
    );
    let again = fs::read_to_string(dir.join("model/actor/weights.txt"));
    assert_eq!(again.unwrap(), saved);
}

#[test]
fn the_system_reports_the_free_space_of_a_disk() {
    let temp = tempfile::tempdir().unwrap();
    let free = verl_run::space::free_space(temp.path());
    assert_eq!(free.is_some(), cfg!(unix));
    assert_eq!(
        verl_run::space::free_space(Path::new("/no/such/folder")),
        None
    );
}
