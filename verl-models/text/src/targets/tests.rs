use serde_json::json;

use super::*;
use crate::chat_template::message;

/// A tokenizer of complete pieces in the style of SentencePiece: each text between special tokens starts with a blank.
fn sentence_pieces() -> Tokenizer {
    let words = [
        "<unk>",
        "<s>",
        "</s>",
        "<end>",
        "▁The",
        "The",
        "▁cat",
        "▁sat",
        ".",
        "\n",
        "▁four",
        "four",
        "▁",
        "▁two",
        "two",
        "<think>",
        "</think>",
        "<bot>",
        "<user>",
        "▁\n",
        "▁<user>",
        "▁<bot>",
    ];
    let vocab: Map<String, Value> = words
        .iter()
        .enumerate()
        .map(|(id, word)| ((*word).to_owned(), json!(id)))
        .collect();
    let special = ["<unk>", "<s>", "</s>", "<end>"];
    let added: Vec<Value> = special
        .iter()
        .enumerate()
        .map(|(id, word)| {
            json!({"id": id, "content": word, "single_word": false, "lstrip": false, "rstrip": false,
                   "normalized": false, "special": true})
        })
        .collect();
    let split = |pattern: Value, behavior: &str| json!({"type": "Split", "pattern": pattern, "behavior": behavior, "invert": false});
    let file = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added,
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        ]},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            split(json!({"String": "▁"}), "MergedWithNext"),
            split(json!({"Regex": "</?[a-z]+>|\\."}), "Isolated"),
            split(json!({"Regex": "\\n"}), "Isolated"),
        ]},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}
        },
        "decoder": null,
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"}
    });
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("tokenizer.json"), file.to_string()).unwrap();
    let ends = json!({"eos_token_id": [2, 3]}).to_string();
    std::fs::write(dir.path().join("generation_config.json"), ends).unwrap();
    Tokenizer::load(dir.path()).unwrap()
}

fn template(source: &str) -> ChatTemplate {
    let variables = json!({"bos_token": "<s>", "eos_token": "</s>"});
    let template = ChatTemplate::new(source).unwrap();
    template.with_variables(variables.as_object().unwrap().clone())
}

/// Turns that start with the role and a line end.
const TURNS: &str = "{% for m in messages %}{{ '<' + m['role'] + '>\n' + m['content'] + eos_token + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<assistant>\n' }}{% endif %}";

/// Names of tokens in the vocabulary.
fn names(tokenizer: &Tokenizer, tokens: &[u32]) -> Vec<String> {
    let name = |id: &u32| tokenizer.id_to_token(*id).unwrap();
    tokens.iter().map(name).collect()
}

/// Names of the target's tokens for the answer `text` to a question, and the notes.
fn written(source: &str, text: &str) -> (Vec<String>, Vec<Note>) {
    let tokenizer = sentence_pieces();
    let template = template(source);
    let writer = Writer::new(&tokenizer, Some(&template), Map::new());
    let messages = [message("user", "two"), message("assistant", text)];
    let lesson = writer.last_turn(&messages).unwrap();
    let judged = writer.answers(&messages[..1], &messages[1..]).unwrap();
    assert_eq!(lesson, judged);
    (names(&tokenizer, &lesson.targets[0].tokens), lesson.notes)
}

fn plain(question: &str, answer: &str) -> (Vec<String>, Vec<String>, Vec<Note>) {
    let tokenizer = sentence_pieces();
    let writer = Writer::new(&tokenizer, None, Map::new());
    let lesson = writer.plain(question, &[answer]).unwrap();
    let target = names(&tokenizer, &lesson.targets[0].tokens);
    (names(&tokenizer, &lesson.prompt), target, lesson.notes)
}

#[test]
fn a_target_has_no_blank_that_the_conversation_lacks() {
    let (tokens, notes) = written(TURNS, "The cat sat.");
    assert_eq!(tokens, ["The", "▁cat", "▁sat", ".", "</s>"]);
    assert_eq!(notes, []);
    // A prompt that ends with a blank, as `[/INST] ` does.
    let bracket = "{% for m in messages %}{{ m['content'] + (' <bot> ' if m['role'] == 'user' else eos_token) }}{% endfor %}";
    let (tokens, notes) = written(bracket, "four");
    assert_eq!(tokens, ["▁four", "</s>"]);
    assert!(
        matches!(&notes[..], [Note::PromptDiffers { .. }]),
        "{notes:?}"
    );
}

#[test]
fn blanks_that_the_template_trims_are_not_trained() {
    let trims = TURNS.replace("m['content'] +", "m['content'] | trim +");
    let (tokens, _) = written(&trims, "\n four \n");
    assert_eq!(tokens, ["four", "</s>"]);
    let (tokens, _) = written(TURNS, "\n four \n");
    assert_eq!(tokens, ["\n", "▁four", "▁", "\n", "</s>"]);
}

#[test]
fn a_target_has_a_single_end() {
    let (prompt, target, notes) = plain("two", "\nfour</s>");
    assert_eq!(prompt, ["<s>", "▁two"]);
    assert_eq!(target, ["\n", "four", "</s>"]);
    assert_eq!(notes, []);
    let (_, target, _) = plain("two", "\nfour");
    assert_eq!(target, ["\n", "four", "</s>"]);
    // Any token at which generation stops is an end.
    let (_, target, _) = plain("two", "\nfour<end>");
    assert_eq!(target, ["\n", "four", "<end>"]);
    let (_, target, notes) = plain("two", "\nfour</s>\n");
    assert_eq!(target, ["\n", "four", "</s>", "▁", "\n", "</s>"]);
    assert_eq!(notes, [Note::EndsWithin]);
    let (tokens, _) = written(TURNS, "four</s>");
    assert_eq!(tokens, ["four", "</s>"]);
    let (tokens, notes) = written(TURNS, "four</s>\n");
    assert_eq!(tokens, ["four", "</s>", "▁", "\n", "</s>"]);
    assert_eq!(notes, [Note::EndsWithin]);
}

#[test]
fn a_turn_without_an_end_gets_the_tokenizers_end() {
    let bare = TURNS.replace(" + eos_token", "");
    let (tokens, notes) = written(&bare, "four");
    assert_eq!(tokens, ["four", "</s>"]);
    assert_eq!(notes, [Note::Unended]);
    // Text after the answer belongs to the target, blanks do not.
    let named = TURNS.replace("eos_token + '\n'", "'<bot>\n\n'");
    let (tokens, notes) = written(&named, "four");
    assert_eq!(tokens, ["four", "<bot>", "</s>"]);
    assert_eq!(notes, [Note::Unended]);
    let (tokens, notes) = written(&bare, "four<end>");
    assert_eq!(tokens, ["four", "<end>"]);
    assert_eq!(notes, []);
}

#[test]
fn text_that_only_a_finished_turn_has_is_trained() {
    let thinks = TURNS.replace(
        "m['content'] +",
        "('<think>\n</think>\n' if m['role'] == 'assistant' else '') + m['content'] +",
    );
    let (tokens, notes) = written(&thinks, "four");
    assert_eq!(tokens, ["<think>", "\n", "</think>", "\n", "four", "</s>"]);
    assert_eq!(notes, []);
}

#[test]
fn a_prompt_that_opens_more_than_the_turn_is_reported_with_both_texts() {
    let opens = TURNS.replace("'<assistant>\n'", "'<assistant>\n<think>\n'");
    let tokenizer = sentence_pieces();
    let template = template(&opens);
    let writer = Writer::new(&tokenizer, Some(&template), Map::new());
    let lesson = writer
        .answers(&[message("user", "two")], &[message("assistant", "four")])
        .unwrap();
    assert_eq!(lesson.text, "<user>\ntwo</s>\n<assistant>\n");
    let tokens = &lesson.targets[0].tokens;
    assert_eq!(names(&tokenizer, tokens), ["four", "</s>"]);
    let asked = "<user>\ntwo</s>\n<assistant>\n<think>\n".to_owned();
    let finished = "<user>\ntwo</s>\n<assistant>\nfour</s>".to_owned();
    assert_eq!(
        lesson.notes,
        [Note::PromptDiffers {
            prompt: asked,
            finished
        }]
    );
}

/// The template puts the system message into the user's message only while that is the last message.
#[test]
fn a_question_that_changes_once_it_is_answered_is_not_trained() {
    let moves = "{{ bos_token }}{% for m in messages %}{{ ('The cat ' if loop.last and m['role'] == 'user' else '') + m['content'] + ('\n' if m['role'] == 'user' else eos_token) }}{% endfor %}";
    let tokenizer = sentence_pieces();
    let template = template(moves);
    let writer = Writer::new(&tokenizer, Some(&template), Map::new());
    let lesson = writer
        .answers(&[message("user", "two")], &[message("assistant", "four")])
        .unwrap();
    assert_eq!(names(&tokenizer, &lesson.prompt), ["<s>", "▁two", "\n"]);
    assert_eq!(
        names(&tokenizer, &lesson.targets[0].tokens),
        ["four", "</s>"]
    );
    assert!(
        matches!(&lesson.notes[..], [Note::PromptDiffers { .. }]),
        "{:?}",
        lesson.notes
    );
}

#[test]
fn a_template_that_skips_an_answer_is_refused() {
    let silent = TURNS.replace("m in messages", "m in messages if not m['tool_calls']");
    let tokenizer = sentence_pieces();
    let template = template(&silent);
    let writer = Writer::new(&tokenizer, Some(&template), Map::new());
    let call =
        json!({"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "two"}}]});
    let error = writer
        .last_turn(&[message("user", "two"), call])
        .unwrap_err();
    assert_eq!(
        error.to_string(),
        "the chat template does not write the assistant's message (message 2)"
    );
    let nobody = writer.last_turn(&[message("user", "two")]).unwrap_err();
    assert!(matches!(nobody, TargetError::NoAnswer));
    let nobody = writer
        .all_turns(&[message("assistant", "two")])
        .unwrap_err();
    assert!(matches!(nobody, TargetError::NoAnswer));
}

/// Names of the target's tokens, which of them are trained, and the notes.
fn conversation(source: &str, all: bool) -> (Vec<String>, Vec<bool>, Vec<Note>) {
    let tokenizer = sentence_pieces();
    let template = template(source);
    let writer = Writer::new(&tokenizer, Some(&template), Map::new());
    let messages = [
        message("user", "two"),
        message("assistant", "four"),
        message("user", "The"),
        message("assistant", "cat."),
    ];
    let lesson = match all {
        true => writer.all_turns(&messages).unwrap(),
        false => writer.last_turn(&messages).unwrap(),
    };
    let Target { tokens, trained } = lesson.targets[0].clone();
    (names(&tokenizer, &tokens), trained, lesson.notes)
}

#[test]
fn all_turns_are_trained_but_nothing_between_them() {
    let (tokens, trained, notes) = conversation(TURNS, true);
    let expected = [
        ("four", true),
        ("</s>", true),
        ("▁", false),
        ("\n", false),
        ("<user>", false),
        ("\n", false),
        ("The", false),
        ("</s>", false),
        ("▁", false),
        ("\n", false),
    ];
    for (at, (name, is_trained)) in expected.into_iter().enumerate() {
        assert_eq!(
            (tokens[at].as_str(), trained[at]),
            (name, is_trained),
            "{at}"
        );
    }
    let last = tokens.len() - 3;
    assert_eq!(tokens[last..], ["<unk>", ".", "</s>"]);
    assert!(trained[last..].iter().all(|trained| *trained));
    assert!(trained[expected.len()..last].iter().all(|trained| !trained));
    assert_eq!(notes, []);
    let (tokens, trained, _) = conversation(TURNS, false);
    assert_eq!(tokens, ["<unk>", ".", "</s>"]);
    assert_eq!(trained, [true; 3]);
}

#[test]
fn earlier_turns_that_are_written_differently_are_reported() {
    let thinks = TURNS.replace(
        "m['content'] +",
        "('<think>\n</think>\n' if m['role'] == 'assistant' and loop.last else '') + m['content'] +",
    );
    let (tokens, _, notes) = conversation(&thinks, true);
    assert_eq!(tokens[..2], ["four", "</s>"]);
    assert!(matches!(&notes[..], [Note::Rewritten { .. }]), "{notes:?}");
}

#[test]
fn only_marked_text_is_trained() {
    let marked = "{% for m in messages %}{{ '<' + m['role'] + '>\n' }}{% if m['role'] == 'assistant' %}<bot>{% generation %}{{ m['content'] + eos_token }}{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<assistant>\n' }}{% endif %}";
    let (tokens, trained, notes) = conversation(marked, false);
    assert_eq!(tokens, ["<bot>", "<unk>", ".", "</s>"]);
    assert_eq!(trained, [false, true, true, true]);
    assert_eq!(notes, []);
    let (tokens, trained, _) = conversation(marked, true);
    assert_eq!(tokens[..3], ["<bot>", "four", "</s>"]);
    let count = trained.iter().filter(|trained| **trained).count();
    assert_eq!((count, trained[..3].to_vec()), (5, vec![false, true, true]));
    let open = marked.replace(
        " + eos_token }}{% endgeneration %}",
        " }}{% endgeneration %}{{ eos_token }}",
    );
    let (tokens, _, notes) = conversation(&open, false);
    assert_eq!(tokens, ["<bot>", "<unk>", "."]);
    assert_eq!(notes, [Note::UnmarkedEnd]);
    let none = marked.replace(
        "{{ m['content'] + eos_token }}{% endgeneration %}",
        "{% endgeneration %}{{ m['content'] + eos_token }}",
    );
    let tokenizer = sentence_pieces();
    let template = template(&none);
    let writer = Writer::new(&tokenizer, Some(&template), Map::new());
    let messages = [message("user", "two"), message("assistant", "four")];
    let error = writer.last_turn(&messages).unwrap_err();
    assert!(matches!(error, TargetError::Unmarked), "{error}");
    // Judged answers are trained completely.
    let lesson = writer.answers(&messages[..1], &messages[1..]).unwrap();
    let tokens = &lesson.targets[0].tokens;
    assert_eq!(names(&tokenizer, tokens), ["<bot>", "four", "</s>"]);
}

#[test]
fn plain_prompts_that_merge_with_their_answer_are_reported() {
    let (prompt, target, notes) = plain("two ", "four");
    assert_eq!(prompt, ["<s>", "▁two"]);
    assert_eq!(target, ["▁four", "</s>"]);
    assert!(
        matches!(&notes[..], [Note::PromptDiffers { .. }]),
        "{notes:?}"
    );
    let (prompt, target, notes) = plain("two", " four");
    assert_eq!(prompt, ["<s>", "▁two"]);
    assert_eq!(target, ["▁four", "</s>"]);
    assert_eq!(notes, []);
}
