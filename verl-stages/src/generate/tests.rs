use std::collections::BTreeMap;

use serde_json::Value;
use verl_words::batch::RowId;
use verl_words::keys::{BASELINE_RESPONSE_TEXTS, BASELINE_RESPONSES};
use verl_words::stage::{DataConfig, Models, StartContext};

use super::*;
use crate::baseline::Baseline;
use crate::data::addition::Addition;
use crate::evaluate::Evaluate;
use crate::prompts::{PromptFormat, Template};
use crate::scripted::Scripted;
use crate::sink::{RecordingSink, run_with};

/// `18####`, `<|user|>`, `777 …`: ids of the addition models, in which `####` is one token.
const SCRIPT: [u32; 9] = [21, 28, 31, 4, 27, 27, 27, 27, 27];

fn models(context: usize) -> Models {
    BTreeMap::from([(
        "actor".to_owned(),
        Box::new(Scripted::resource(&SCRIPT, context)) as _,
    )])
}

fn prompts() -> Batch {
    let mut batch = Batch::with_rows(&[RowId(0)]);
    let prompt: [u32; 3] = [1, 20, 9];
    batch
        .put(&PROMPTS, RaggedColumn::from_rows([prompt]))
        .unwrap();
    batch
}

/// What `generate` returns: tokens, text, finish reason, and the share that the context limited.
fn generated(stop: &[&str], include_stop: bool, context: usize) -> (Vec<u32>, String, u8, f64) {
    let config = Generate {
        stop: stop.iter().map(|text| (*text).to_owned()).collect(),
        include_stop,
        max_new_tokens: 6,
        ..Generate::default()
    };
    let mut stage = config.build(&BuildContext::default()).expect("a stage");
    let kept = run_with(stage.as_mut(), 1, prompts(), &mut models(context)).unwrap();
    let batch = &kept.batches[0];
    let limited = kept.mean(&CONTEXT_LIMITED).unwrap();
    let is_cut = finish::is_cut(batch.get(&FINISH_REASONS).unwrap().values()[0]);
    assert_eq!(kept.mean(&TRUNCATED), Some(f64::from(is_cut)));
    (
        batch.get(&RESPONSES).unwrap().row(0).to_vec(),
        batch.get(&RESPONSE_TEXTS).unwrap().row(0).to_owned(),
        batch.get(&FINISH_REASONS).unwrap().values()[0],
        limited,
    )
}

#[track_caller]
fn check(stop: &[&str], include_stop: bool, tokens: usize, text: &str, reason: u8) {
    let expected = (SCRIPT[..tokens].to_vec(), text.to_owned(), reason, 0.0);
    assert_eq!(generated(stop, include_stop, 64), expected);
}

/// #5 and A6: a special token, a text inside a token, texts over several tokens.
#[test]
fn stop_texts_end_a_response_and_are_not_part_of_its_text() {
    check(&["<|user|>"], false, 4, "18####", finish::STOP);
    check(&["<|user|>"], true, 4, "18####<|user|>", finish::STOP);
    check(&["8##"], false, 3, "1", finish::STOP);
    check(&["8##"], true, 3, "18##", finish::STOP);
    check(&["#<|user|>7"], false, 5, "18###", finish::STOP);
    check(&["<|us"], false, 4, "18####", finish::STOP);
    check(&["7", "<|user|>7"], false, 5, "18####", finish::STOP);
    check(&["nothing"], false, 6, "18####77", finish::LENGTH);
}

/// A5: the context limits the response.
#[test]
fn the_end_of_the_context_is_the_finish_reason() {
    let (tokens, text, reason, limited) = generated(&[], false, 8);
    assert_eq!((tokens.len(), text.as_str()), (5, "18####7"));
    assert_eq!((reason, limited), (finish::CONTEXT, 1.0));
    // When exactly `max_new_tokens` fit, the token limit is the reason.
    assert_eq!(generated(&[], false, 9).2, finish::LENGTH);
    assert_eq!(generated(&["<|user|>"], false, 8).2, finish::STOP);
}

#[test]
fn a_baseline_ends_its_answers_as_generate_does() {
    let text = |include_stop| {
        let config = Baseline {
            stop: vec!["<|user|>".to_owned()],
            include_stop,
            ..Baseline::default()
        };
        let mut stage = config.build(&BuildContext::default()).expect("a stage");
        let kept = run_with(stage.as_mut(), 1, prompts(), &mut models(64)).unwrap();
        let batch = &kept.batches[0];
        assert_eq!(batch.get(&BASELINE_RESPONSES).unwrap().row(0), &SCRIPT[..4]);
        batch
            .get(&BASELINE_RESPONSE_TEXTS)
            .unwrap()
            .row(0)
            .to_owned()
    };
    assert_eq!(text(false), "18####");
    assert_eq!(text(true), "18####<|user|>");
}

#[test]
fn an_evaluation_ends_its_answers_as_generate_does() {
    let answers = |stop: &[&str], include_stop: bool| -> RecordingSink {
        let config = Evaluate {
            questions: Some(2),
            max_new_tokens: 6,
            stop: stop.iter().map(|text| (*text).to_owned()).collect(),
            include_stop,
            format: PromptFormat {
                template: Template::None,
                ..PromptFormat::default()
            },
            ..Evaluate::default()
        };
        let context = BuildContext {
            models: vec!["actor".to_owned()],
            data: vec!["eval".to_owned()],
            ..BuildContext::default()
        };
        let mut stage = config.build(&context).expect("a stage");
        let data = Addition::default().open(&context).expect("rows");
        let mut models = models(64);
        let data = BTreeMap::from([("eval".to_owned(), data)]);
        stage
            .start(&mut StartContext {
                data: &data,
                models: &mut models,
            })
            .expect("a started stage");
        run_with(stage.as_mut(), 1, Batch::with_rows(&[]), &mut models).unwrap()
    };
    let response = |kept: &RecordingSink| kept.samples[0]["response"].clone();
    let cut = answers(&["<|user|>"], false);
    assert_eq!(response(&cut), Value::from("18####"));
    assert_eq!(
        response(&answers(&["<|user|>"], true)),
        Value::from("18####<|user|>")
    );
    assert_eq!(response(&answers(&[], false)), Value::from("18####77"));
    let faults = Evaluate {
        stop: vec![String::new()],
        ..Evaluate::default()
    };
    let faults = faults
        .build(&BuildContext::default())
        .err()
        .expect("faults");
    assert!(faults.iter().any(|fault| fault.setting == "stop"));
}

/// −log q of a sampled token is an unbiased estimate of the entropy of q: its mean over tokens in proportion to q is the
/// entropy.
#[test]
fn the_sampled_entropy_is_the_entropy_in_expectation() {
    let q = [0.5f32, 0.25, 0.25];
    let sampled = [0, 0, 1, 2].map(|token: usize| q[token].ln());
    let entropy: f64 = q.iter().map(|p| -f64::from(*p) * f64::from(p.ln())).sum();
    let found = sampled_entropy(&sampled).expect("tokens");
    assert!((found - entropy).abs() < 1e-7, "{found} is not {entropy}");
    assert_eq!(sampled_entropy(&[]), None);
}
