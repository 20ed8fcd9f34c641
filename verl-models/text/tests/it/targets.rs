//! Compares training targets with transformers: the finished conversation starts with the tokens of prompt and target,
//! up to the end of the turn. `scripts/targets.py` wrote the golden tokens and documents how.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::{Map, Value, json};
use verl_text::chat_template::ChatTemplate;
use verl_text::targets::{Lesson, Note, Target, Writer};
use verl_text::tokenizer::Tokenizer;

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/targets")
}

#[derive(Deserialize)]
struct Golden {
    forms: Vec<Form>,
    plain: Vec<Plain>,
}

/// A template with a tokenizer.
#[derive(Deserialize)]
struct Form {
    template: String,
    tokenizer: String,
    bos: Option<String>,
    eos: String,
    stops: Vec<u32>,
    added_tokens: Value,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    before: Vec<Value>,
    answer: Value,
    tools: Option<Value>,
    #[serde(default)]
    variables: Map<String, Value>,
    mask: Option<String>,
    #[serde(flatten)]
    written: Written,
}

/// A tokenizer that adds something to a sequence.
#[derive(Deserialize)]
struct Plain {
    tokenizer: String,
    added_tokens: Value,
    post_processor: Value,
    cases: Vec<PlainCase>,
}

#[derive(Deserialize)]
struct PlainCase {
    question: String,
    answer: String,
    #[serde(flatten)]
    written: Written,
}

/// Ids from transformers.
#[derive(Deserialize)]
struct Written {
    prompt: String,
    shared: usize,
    rest: String,
}

fn ids(text: &str) -> Vec<u32> {
    text.split_whitespace()
        .map(|id| id.parse().unwrap())
        .collect()
}

impl Written {
    fn prompt(&self) -> Vec<u32> {
        ids(&self.prompt)
    }

    fn whole(&self) -> Vec<u32> {
        let mut whole = self.prompt();
        whole.truncate(self.shared);
        whole.extend(ids(&self.rest));
        whole
    }

    /// Whether the finished conversation starts with the prompt's tokens.
    fn continues_prompt(&self) -> bool {
        self.shared == ids(&self.prompt).len()
    }
}

fn golden() -> Golden {
    let text = fs::read_to_string(folder().join("cases.json")).unwrap();
    serde_json::from_str(&text).unwrap()
}

/// The tokenizer `name` with further tokens.
fn tokenizer(name: &str, added: &Value, post_processor: &Value, stops: &[u32]) -> Tokenizer {
    let text = fs::read_to_string(folder().join(format!("tokenizers/{name}.json"))).unwrap();
    let mut file: Value = serde_json::from_str(&text).unwrap();
    file["added_tokens"] = added.clone();
    file["post_processor"] = post_processor.clone();
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("tokenizer.json"), file.to_string()).unwrap();
    let ends = json!({ "eos_token_id": stops });
    fs::write(dir.path().join("generation_config.json"), ends.to_string()).unwrap();
    Tokenizer::load(dir.path()).unwrap()
}

fn template(form: &Form) -> ChatTemplate {
    let path = folder().join(format!("templates/{}.jinja", form.template));
    let mut variables = Map::new();
    variables.insert("eos_token".to_owned(), form.eos.clone().into());
    variables.extend(
        form.bos
            .clone()
            .map(|bos| ("bos_token".to_owned(), bos.into())),
    );
    let template = ChatTemplate::new(&fs::read_to_string(path).unwrap()).unwrap();
    template.with_variables(variables)
}

impl Case {
    fn variables(&self) -> Map<String, Value> {
        let mut variables = self.variables.clone();
        variables.extend(self.tools.clone().map(|tools| ("tools".to_owned(), tools)));
        variables
    }

    fn messages(&self) -> Vec<Value> {
        let mut messages = self.before.clone();
        messages.push(self.answer.clone());
        messages
    }

    fn text(&self) -> &str {
        self.answer["content"].as_str().unwrap_or_default()
    }
}

fn has(lesson: &Lesson, wanted: fn(&Note) -> bool) -> bool {
    lesson.notes.iter().any(wanted)
}

fn is_apart(note: &Note) -> bool {
    matches!(note, Note::PromptDiffers { .. })
}

/// Checks every lesson: the finished conversation must start with its tokens, except for an added end.
#[track_caller]
fn check(lesson: &Lesson, written: &Written, stops: &[u32], is_added: bool, about: &str) -> usize {
    let (asked, whole) = (written.prompt(), written.whole());
    let Target { tokens, trained } = &lesson.targets[0];
    assert_eq!(tokens.len(), trained.len(), "{about}");
    let mut joined = lesson.prompt.clone();
    joined.extend(tokens);
    if is_added {
        let end = joined.pop().unwrap();
        assert_eq!(end, stops[0], "{about}");
    }
    assert!(
        whole.starts_with(&joined),
        "{about}: {whole:?} does not start with {joined:?}"
    );
    if !written.continues_prompt() {
        assert!(has(lesson, is_apart), "{about}: {:?}", lesson.notes);
    }
    if !has(lesson, is_apart) {
        assert_eq!(lesson.prompt, asked, "{about}");
    }
    assert!(!lesson.prompt.is_empty(), "{about}");
    joined.len()
}

#[test]
fn prompts_and_targets_match_transformers() {
    let mut tried = HashMap::new();
    for form in golden().forms {
        let (tokenizer, template) = (
            tokenizer(
                &form.tokenizer,
                &form.added_tokens,
                &Value::Null,
                &form.stops,
            ),
            template(&form),
        );
        for case in &form.cases {
            let about = format!(
                "{} on {}, {} after {} messages, {:?}",
                form.template,
                form.tokenizer,
                case.answer,
                case.before.len(),
                case.variables
            );
            let writer = Writer::new(&tokenizer, Some(&template), case.variables());
            let asked = writer.prompt(&case.before).unwrap();
            assert_eq!(asked.1, case.written.prompt(), "{about}");
            let lesson = match writer.last_turn(&case.messages()) {
                Ok(lesson) => lesson,
                Err(error) => {
                    check_refused(&form, case, &error.to_string());
                    continue;
                }
            };
            *tried.entry(form.template.clone()).or_insert(0) += 1;
            // The unknown token of `words` may span the border of prompt and answer without changing.
            if form.tokenizer != "words" {
                assert_eq!(
                    has(&lesson, is_apart),
                    !case.written.continues_prompt(),
                    "{about}"
                );
            }
            let is_unended = has(&lesson, |note| *note == Note::Unended);
            let until = check(&lesson, &case.written, &form.stops, is_unended, &about);
            let whole = case.written.whole();
            let Target { tokens, trained } = &lesson.targets[0];
            if let Some(mask) = &case.mask {
                let mask: Vec<bool> = mask.chars().map(|kind| kind == '1').collect();
                let start = lesson.prompt.len();
                assert_eq!(trained[..until - start], mask[start..until], "{about}");
                assert!(mask[until..].iter().all(|marked| !marked), "{about}");
                continue;
            }
            assert!(trained.iter().all(|trained| *trained), "{about}");
            // There is a single end, which is the last token.
            let last = *tokens.last().unwrap();
            assert!(form.stops.contains(&last), "{about}: {tokens:?}");
            let ends = tokens.iter().filter(|id| form.stops.contains(id)).count();
            let is_clean = !form.special(case.text());
            assert!(ends == 1 || !is_clean, "{about}: {tokens:?}");
            assert_eq!(
                is_unended,
                form.template == "alpaca" && !case.text().trim().ends_with(&form.eos),
                "{about}"
            );
            // The rest is not part of the answer.
            let rest = tokenizer.decode(&whole[until..]);
            assert_eq!(rest.trim(), "", "{about}");
            // The target contains the answer unless a note says otherwise; blanks are ignored, because decoding a part
            // of a text loses them.
            if form.tokenizer != "words" && !has(&lesson, is_apart) && is_clean {
                let said = tokenizer.decode(tokens);
                let is_changed = has(&lesson, |note| matches!(note, Note::Changed { .. }));
                let is_contained = without_blanks(&said).contains(&without_blanks(case.text()));
                assert!(is_contained || is_changed, "{about}: {said:?}");
                let drops_thoughts = ["deepseek_r1", "qwen3"].contains(&form.template.as_str());
                assert!(!is_changed || drops_thoughts, "{about}: {:?}", lesson.notes);
            }
        }
    }
    assert!(
        tried.len() >= 20 && tried.values().all(|cases| *cases >= 20),
        "{tried:?}"
    );
}

fn without_blanks(text: &str) -> String {
    text.split_whitespace().collect()
}

impl Form {
    /// Whether a text contains a special token of the form.
    fn special(&self, text: &str) -> bool {
        let tokens = self.added_tokens.as_array().unwrap().iter();
        let mut names = tokens.filter_map(|token| token["content"].as_str());
        names.any(|name| text.contains(name))
    }
}

/// Only an answer that the template does not write is refused: this template drops everything up to the end of the
/// reasoning.
#[track_caller]
fn check_refused(form: &Form, case: &Case, error: &str) {
    let about = format!("{}: {} is refused: {error}", form.template, case.answer);
    assert_eq!(form.template, "deepseek_r1", "{about}");
    assert!(case.text().ends_with("</think>"), "{about}");
    let expected = format!(
        "the chat template does not write the assistant's message (message {})",
        case.before.len() + 1
    );
    assert_eq!(error, expected, "{about}");
}

/// Every turn of the assistant is trained; if the template has marks, the trained tokens match those of transformers.
#[test]
fn all_turns_are_trained_as_marked_or_to_their_ends() {
    let mut tried = 0;
    for form in golden().forms {
        let (tokenizer, template) = (
            tokenizer(
                &form.tokenizer,
                &form.added_tokens,
                &Value::Null,
                &form.stops,
            ),
            template(&form),
        );
        let spoke = |case: &&Case| {
            let is_answer = |message: &Value| message["role"] == "assistant";
            case.before.iter().any(is_answer) && !form.special(case.text())
        };
        for case in form.cases.iter().filter(spoke) {
            tried += 1;
            let about = format!("{} on {}: {}", form.template, form.tokenizer, case.answer);
            let writer = Writer::new(&tokenizer, Some(&template), case.variables());
            let lesson = writer.all_turns(&case.messages());
            let lesson = lesson.unwrap_or_else(|error| panic!("{about}: {error}"));
            let Target { tokens, trained } = &lesson.targets[0];
            let mut joined = lesson.prompt.clone();
            joined.extend(tokens);
            let whole = case.written.whole();
            if form.template == "alpaca" {
                joined.pop();
            }
            assert!(whole.starts_with(&joined), "{about}");
            if let Some(mask) = &case.mask {
                let mask: Vec<bool> = mask.chars().map(|kind| kind == '1').collect();
                let (start, end) = (lesson.prompt.len(), joined.len());
                assert_eq!(*trained, mask[start..end], "{about}");
                assert!(mask[end..].iter().all(|marked| !marked), "{about}");
                continue;
            }
            let actions = tokens.iter().zip(trained).filter(|(_, trained)| **trained);
            let ends = actions.filter(|(id, _)| form.stops.contains(id)).count();
            // The template without ends gets an end only after the last turn.
            let expected = if form.template == "alpaca" { 1 } else { 2 };
            assert_eq!(ends, expected, "{about}");
            // The user's messages between the turns are read but not trained.
            let read = tokens.iter().zip(trained).filter(|(_, trained)| !**trained);
            let read: Vec<u32> = read.map(|(id, _)| *id).collect();
            if form.tokenizer != "words" {
                let read = tokenizer.decode(&read);
                let between = if read.contains("Think again.") { 1 } else { 0 };
                let is_call = case.before.iter().any(|message| message["role"] == "tool");
                assert_eq!(between == 1, !is_call, "{about}: {read:?}");
            }
        }
    }
    assert!(tried > 150, "{tried}");
}

#[test]
fn several_answers_share_a_prompt() {
    for form in golden().forms {
        let (tokenizer, template) = (
            tokenizer(
                &form.tokenizer,
                &form.added_tokens,
                &Value::Null,
                &form.stops,
            ),
            template(&form),
        );
        let same = |case: &&Case, other: &Case| {
            case.before == other.before && case.variables() == other.variables()
        };
        for pair in form.cases.windows(2) {
            let [one, other] = pair else { continue };
            if !same(&one, other) {
                continue;
            }
            let about = format!(
                "{} on {}: {} and {}",
                form.template, form.tokenizer, one.answer, other.answer
            );
            let writer = Writer::new(&tokenizer, Some(&template), one.variables());
            let answers = [one.answer.clone(), other.answer.clone()];
            let lesson = match writer.answers(&one.before, &answers) {
                Ok(lesson) => lesson,
                Err(error) => {
                    let is_thought = |case: &&Case| case.text().ends_with("</think>");
                    let case = pair.iter().find(is_thought).unwrap_or(one);
                    check_refused(&form, case, &error.to_string());
                    continue;
                }
            };
            let is_unended = form.template == "alpaca";
            for (case, target) in pair.iter().zip(&lesson.targets) {
                let mut joined = lesson.prompt.clone();
                joined.extend(&target.tokens);
                if is_unended && !case.written.whole().starts_with(&joined) {
                    joined.pop();
                }
                assert!(
                    case.written.whole().starts_with(&joined),
                    "{about}: {joined:?}"
                );
                assert!(
                    form.stops.contains(target.tokens.last().unwrap()),
                    "{about}"
                );
            }
            let continues = one.written.continues_prompt() && other.written.continues_prompt();
            if form.tokenizer != "words" {
                assert_eq!(has(&lesson, is_apart), !continues, "{about}");
            }
            if !has(&lesson, is_apart) {
                assert_eq!(lesson.prompt, one.written.prompt(), "{about}");
            }
        }
    }
}

#[test]
fn plain_prompt_and_answer_are_tokenised_as_a_single_text() {
    for plain in golden().plain {
        let added = plain.added_tokens.as_array().unwrap();
        let end = added
            .iter()
            .find(|token| token["content"] == "</s>")
            .unwrap();
        let end = end["id"].as_u64().unwrap() as u32;
        let tokenizer = tokenizer(
            &plain.tokenizer,
            &plain.added_tokens,
            &plain.post_processor,
            &[end],
        );
        let writer = Writer::new(&tokenizer, None, Map::new());
        for PlainCase {
            question,
            answer,
            written,
        } in &plain.cases
        {
            let about = format!("{question:?} and {answer:?} on {}", plain.tokenizer);
            assert_eq!(
                writer.plain_prompt(question).unwrap(),
                written.prompt(),
                "{about}"
            );
            let lesson = writer.plain(question, &[answer]).unwrap();
            let tokens = &lesson.targets[0].tokens;
            let whole = written.whole();
            let is_added = whole.last() != Some(&end);
            check(&lesson, written, &[end], is_added, &about);
            assert_eq!(tokens.last(), Some(&end), "{about}");
            let ends = tokens.iter().filter(|id| **id == end).count();
            let within = answer.starts_with("fo</s>") || answer.ends_with("</s>\n");
            assert_eq!(ends, 1 + usize::from(within), "{about}: {tokens:?}");
        }
    }
}
