use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::{Map, Value, json};
use verl_declare::chain::stage_with;
use verl_words::batch::Batch;
use verl_words::keys::DATA_ROWS;
use verl_words::resource::{ModelInfo, ModelResource, ResourceError, Texts, TokenTexts};
use verl_words::stage::{
    BuildContext, ConfigError, LongRows, NotePreview, RowPreview, RowRule, Stage, StageContext,
    StageError, StageSpec, TargetPreview,
};

use super::*;
use crate::Plannable;

/// Rows with one text each.
struct Rows(Vec<Value>);

impl DataLoaderInterface for Rows {
    fn len(&self) -> usize {
        self.0.len()
    }
    fn row(&self, index: usize) -> Result<Map<String, Value>, DataError> {
        Ok(self.0[index].as_object().cloned().unwrap_or_default())
    }
    fn origin(&self) -> String {
        "rows".to_owned()
    }
    fn fingerprint(&self) -> String {
        "rows".to_owned()
    }
}

/// A source whose tokens are the bytes of the column `text`; text after a `|` is its target.
#[derive(Clone)]
struct Bytes {
    data: Option<Arc<dyn DataLoaderInterface>>,
    on_long: LongRows,
    tokenised: Arc<AtomicUsize>,
}

/// Most tokens of a row.
const LIMIT: usize = 8;

impl Bytes {
    fn text(&self, index: usize) -> Result<String, DataError> {
        let data = self.data.as_ref().expect("opened");
        let unusable = |reason: String| DataError::Row {
            path: data.origin(),
            row: index + 1,
            reason,
        };
        match data.value(index, "text")? {
            Some(Value::String(text)) => Ok(text),
            Some(other) => Err(unusable(format!(
                "column `text` contains {other}, not a text"
            ))),
            None => {
                let names = data.names(index)?;
                Err(DataError::missing_column(
                    data.origin(),
                    index,
                    "text",
                    &names,
                ))
            }
        }
    }
}

impl Stage for Bytes {
    fn spec(&self) -> StageSpec {
        StageSpec::new().rows(RowRule::Source).writes(DATA_ROWS)
    }
    fn run(&mut self, batch: Batch, context: &mut StageContext<'_>) -> Result<(), StageError> {
        context.emit(batch)
    }
    fn preview(
        &self,
        context: PreviewContext<'_>,
    ) -> Result<Option<Box<dyn RowPreviews>>, StageError> {
        let data = context.data.get("train").cloned();
        Ok(data.map(|data| -> Box<dyn RowPreviews> {
            let data = Some(data);
            Box::new(Bytes {
                data,
                ..self.clone()
            })
        }))
    }
}

impl RowPreviews for Bytes {
    fn data(&self) -> &str {
        "train"
    }
    fn model(&self) -> &str {
        "letters"
    }
    fn rows(&self) -> usize {
        self.data.as_ref().map_or(0, |data| data.len())
    }
    fn long_rows(&self) -> LongRows {
        self.on_long
    }
    fn measure(&self, index: usize) -> Result<usize, DataError> {
        self.text(index).map(|text| text.len())
    }
    fn row(&self, index: usize) -> Result<RowPreview, DataError> {
        self.tokenised.fetch_add(1, Ordering::SeqCst);
        let text = self.text(index)?;
        assert!(!text.contains('%'), "no room for `%`");
        if text.contains('!') {
            return Err(DataError::Row {
                path: "rows".to_owned(),
                row: index + 1,
                reason: "the template refuses `!`".to_owned(),
            });
        }
        let (prompt, target) = text.split_once('|').unwrap_or((&text, ""));
        let ids = |text: &str| text.bytes().map(u32::from).collect::<Vec<u32>>();
        let tokens = ids(target);
        Ok(RowPreview {
            prompt_text: prompt.to_owned(),
            prompt: ids(prompt),
            answer: None,
            targets: (!tokens.is_empty())
                .then(|| TargetPreview {
                    name: "target".to_owned(),
                    trained: tokens.iter().map(|id| *id != u32::from(b' ')).collect(),
                    tokens,
                })
                .into_iter()
                .collect(),
            too_long: (text.len() > LIMIT).then(|| format!("it has {} tokens", text.len())),
            notes: text
                .contains('?')
                .then(|| NotePreview {
                    sort: "doubtful",
                    text: format!("`{text}` is a question"),
                })
                .into_iter()
                .collect(),
        })
    }
}

/// A model whose token ids are bytes below 128.
struct Letters;

impl TokenTexts for Letters {
    fn token(&self, id: u32) -> String {
        char::from_u32(id).map(String::from).unwrap_or_default()
    }
}

impl verl_declare::pipe::ModelFactory for Letters {
    fn describe(&self, _: &BuildContext) -> Result<ModelInfo, Vec<ConfigError>> {
        Ok(ModelInfo {
            num_ids: 128,
            texts: Some(Texts(Arc::new(Letters))),
            ..ModelInfo::default()
        })
    }
    fn trainable(&self) -> bool {
        false
    }
    fn load(
        &self,
        _: &str,
        _: &str,
        _: &BuildContext,
    ) -> Result<Box<dyn ModelResource>, ResourceError> {
        Err(ResourceError::NotStored)
    }
}

/// Checks rows; returns the result, and how many rows were tokenised.
fn look_at(rows: Vec<Value>, on_long: LongRows, look: &Look) -> (Checked, usize) {
    let tokenised = Arc::new(AtomicUsize::new(0));
    let source = Bytes {
        data: None,
        on_long,
        tokenised: tokenised.clone(),
    };
    let pipe = DataPipe::new("looked")
        .data_object("train", Arc::new(Rows(rows)))
        .model_object("letters", Arc::new(Letters))
        .add_stage("source", stage_with(move |_| Ok(Box::new(source.clone()))));
    let checked = pipe.check(look);
    (checked, tokenised.load(Ordering::SeqCst))
}

fn texts(texts: &[&str]) -> Vec<Value> {
    texts.iter().map(|text| json!({ "text": text })).collect()
}

/// The findings about data, printed.
fn findings(checked: &Checked) -> String {
    let found = match &checked.plan {
        Ok(plan) => &plan.warnings,
        Err(findings) => findings,
    };
    let found = found.iter().filter(|finding| finding.code.starts_with('D'));
    found.map(|finding| format!("{finding}\n\n")).collect()
}

#[test]
fn every_fault_is_found_at_once() {
    let mut rows = texts(&["ab", "a?", "123456789", "1234567890", "!", "é"]);
    rows.extend([
        json!({"txt": "a"}),
        json!({"text": 1}),
        json!({"text": 1}),
        json!({"text": null}),
    ]);
    let (checked, _) = look_at(rows, LongRows::Refused, &Look::default());
    assert!(checked.plan.is_err());
    insta::assert_snapshot!(findings(&checked));
}

#[test]
fn a_column_that_no_row_has_is_reported_once() {
    let rows = (0..20).map(|row| json!({"question": row, "answer": {"text": "x"}}));
    let (checked, tokenised) = look_at(rows.collect(), LongRows::Refused, &Look::default());
    insta::assert_snapshot!(findings(&checked));
    assert_eq!(tokenised, 0);
}

#[test]
fn rows_left_out_are_a_warning_unless_none_is_left() {
    let rows = ["123456789", "ab"];
    let (checked, _) = look_at(texts(&rows), LongRows::Dropped, &Look::default());
    assert!(checked.plan.is_ok());
    let found = findings(&checked);
    assert!(
        found.starts_with("warning[D005]: 1 of 2 rows of `train` is too long and left out"),
        "{found}"
    );
    let (checked, _) = look_at(texts(&rows[..1]), LongRows::Dropped, &Look::default());
    let found = findings(&checked);
    assert!(
        found.starts_with("error[D004]: every row of `train` is too long"),
        "{found}"
    );
    let (checked, _) = look_at(texts(&rows), LongRows::Cut, &Look::default());
    assert_eq!(findings(&checked), "");
    assert_eq!(checked.rows[0].too_long, 1);
}

/// The row that is too long comes long after the rows that are checked completely.
#[test]
fn the_longest_rows_are_tokenised_wherever_they_are() {
    let mut rows = vec!["ab"; 500];
    rows[450] = "0123456789";
    let look = Look {
        rows: 3,
        longest: 2,
        ..Look::default()
    };
    let (checked, tokenised) = look_at(texts(&rows), LongRows::Refused, &look);
    assert_eq!(tokenised, 5);
    let found = findings(&checked);
    assert!(found.contains("row 451: it has 10 tokens"), "{found}");
    let report = &checked.rows[0];
    assert_eq!((report.rows, report.tokenised), (500, 5));
    let spread = report.prompt_tokens.expect("prompts");
    assert_eq!((spread.least, spread.median, spread.most), (2, 2, 10));
}

#[test]
fn rows_are_shown_as_they_are_written() {
    let look = Look {
        shown: 3,
        ..Look::default()
    };
    let mut rows = texts(&["ab|c d", "!"]);
    rows.extend([json!({}), json!({"text": "never shown"})]);
    let (checked, _) = look_at(rows, LongRows::Cut, &look);
    let shown = &checked.rows[0].shown;
    assert_eq!(
        shown.iter().map(|row| row.row).collect::<Vec<_>>(),
        [1, 2, 3]
    );
    assert_eq!(shown[0].prompt_text, "ab");
    assert_eq!(shown[0].targets[0].text, "c d");
    let trained: Vec<bool> = shown[0].targets[0]
        .tokens
        .iter()
        .map(|token| token.trained)
        .collect();
    assert_eq!(trained, [true, false, true]);
    assert!(
        shown[1]
            .refused
            .as_ref()
            .is_some_and(|why| why.contains("refuses `!`"))
    );
    assert!(
        shown[2]
            .refused
            .as_ref()
            .is_some_and(|why| why.contains("no column `text`"))
    );
}

#[test]
fn a_run_uses_the_data_sets_that_a_check_opened() {
    let (checked, _) = look_at(texts(&["ab"]), LongRows::Cut, &Look::default());
    let plan = checked
        .plan
        .unwrap_or_else(|findings| panic!("{findings:?}"));
    assert_eq!(plan.opened.keys().collect::<Vec<_>>(), ["train"]);
}

#[test]
fn a_panic_is_an_error_of_its_row() {
    let (checked, _) = look_at(texts(&["ab", "%"]), LongRows::Cut, &Look::default());
    let found = findings(&checked).replace("\n         ", " ");
    assert!(
        found.starts_with("error[D003]: 1 of 2 rows of `train` cannot be used"),
        "{found}"
    );
    assert!(
        found.contains("row 2: reading it panicked: no room for `%`"),
        "{found}"
    );
}
