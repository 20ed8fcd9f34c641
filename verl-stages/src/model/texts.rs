//! Tokenizer and chat template of a model: loaded for a run, and looked at when a pipeline is checked.

use std::path::Path;
use std::sync::{Arc, OnceLock};

use serde_json::{Map, Value};
use verl_models::DecoderConfig;
use verl_models::chat_template::ChatTemplate;
use verl_models::tokenizer::{Tokenizer, TokenizerError};
use verl_pipe::resource::{ModelInfo, ResourceError, Texts, TokenTexts, Vocabulary};
use verl_pipe::stage::{BuildContext, ConfigError, Models, StageError, find_model};

use super::words::Words;
use super::{PolicyResource, ValueResource, failed};
use crate::prompts::Template;

/// What turns texts into the tokens of a model of either kind.
#[derive(Debug, Clone, Default)]
pub(crate) struct TextTools {
    /// Its tokenizer, where it has one.
    pub tokenizer: Option<Arc<Tokenizer>>,
    /// Its chat template, where it has one.
    pub template: Option<Arc<ChatTemplate>>,
    /// Why there is no template, where one was looked for.
    pub no_template: Option<String>,
    /// Longest sequence in tokens.
    pub max_tokens: usize,
    /// The texts of single tokens, once somebody looks at them.
    words: Arc<OnceLock<Words>>,
}

impl TextTools {
    /// Those of the model `name`.
    ///
    /// # Errors
    /// When there is no such model, or it is of a type of its own.
    pub fn of(models: &mut Models, name: &str) -> Result<Self, StageError> {
        if let Ok(resource) = find_model::<PolicyResource>(models, name) {
            return Ok(TextTools {
                tokenizer: resource.tokenizer.clone(),
                template: resource.template.clone(),
                no_template: resource.no_template.clone(),
                max_tokens: resource.policy.max_tokens(),
                words: Arc::default(),
            });
        }
        let resource = find_model::<ValueResource>(models, name)?;
        Ok(TextTools {
            tokenizer: resource.tokenizer.clone(),
            template: resource.template.clone(),
            no_template: resource.no_template.clone(),
            max_tokens: resource.model.max_tokens(),
            words: Arc::default(),
        })
    }

    /// The tokenizer of the model `name`, for what `needs` it.
    ///
    /// # Errors
    /// When the model has none.
    pub fn tokenizer(&self, name: &str, needs: &str) -> Result<Arc<Tokenizer>, StageError> {
        self.tokenizer.clone().ok_or_else(|| StageError::Model {
            name: name.to_owned(),
            reason: format!("has no tokenizer, which {needs}"),
        })
    }

    /// The chat template of the model `name` with further variables, where prompts are written by it.
    ///
    /// # Errors
    /// When the model has none, or one that cannot be used, and tells why.
    pub fn chat_template(
        &self,
        name: &str,
        template: Template,
        variables: &Map<String, Value>,
    ) -> Result<Option<ChatTemplate>, StageError> {
        if template == Template::None {
            return Ok(None);
        }
        let found = self.template.as_deref().ok_or_else(|| StageError::Model {
            name: name.to_owned(),
            reason: match &self.no_template {
                Some(why) => format!("has no chat template that can be used: {why}; {PLAIN}"),
                None => format!("has no chat template; {PLAIN}"),
            },
        })?;
        Ok(Some(found.clone().with_variables(variables.clone())))
    }
}

impl TokenTexts for TextTools {
    fn token(&self, id: u32) -> String {
        let words = |tokenizer: &Arc<Tokenizer>| {
            let words = self.words.get_or_init(|| Words::new(tokenizer.clone()));
            words.token(id)
        };
        self.tokenizer.as_ref().map(words).unwrap_or_default()
    }

    fn text(&self, ids: &[u32]) -> String {
        let tokenizer = self.tokenizer.as_deref();
        tokenizer
            .map(|tokenizer| tokenizer.decode_with_special(ids))
            .unwrap_or_default()
    }
}

/// What to do without a template.
const PLAIN: &str = "`template = \"none\"` uses the question as it is";

/// The chat template of a folder, or why there is none.
pub(super) fn template_of(dir: &Path) -> (Option<Arc<ChatTemplate>>, Option<String>) {
    match ChatTemplate::load(dir) {
        Ok(template) => (Some(Arc::new(template)), None),
        Err(error) => (None, Some(error.to_string())),
    }
}

/// The tokenizer and the chat template of a folder, as [`TextTools`] holds them; the tokenizer must have no more ids than
/// the embedding has rows. A folder without a template can still be used with prompts as they are.
///
/// # Errors
/// A tokenizer that is missing, damaged or too large.
pub(super) fn texts(dir: &Path, config: &DecoderConfig) -> Result<TextTools, ResourceError> {
    let tokenizer = Tokenizer::load(dir).map_err(failed)?;
    config
        .check_vocabulary(tokenizer.vocab_size())
        .map_err(failed)?;
    let (template, no_template) = template_of(dir);
    Ok(TextTools {
        tokenizer: Some(Arc::new(tokenizer)),
        template,
        no_template,
        max_tokens: config.max_tokens,
        words: Arc::default(),
    })
}

/// Fills in what a check can tell of the tokenizer and chat template of a folder; `rows` are those of the embedding,
/// where they are known. The tokenizer is built as a run builds it, so that nothing is left for the run to refuse.
///
/// # Errors
/// A tokenizer that is missing, malformed or too large.
pub(super) fn look_at_texts(
    info: &mut ModelInfo,
    dir: &Path,
    rows: Option<usize>,
) -> Result<(), ConfigError> {
    let fault = |reason: String, help: &str| {
        ConfigError::new("path", format!("cannot be used: {reason}"), help)
    };
    let tokenizer =
        Tokenizer::read(dir).map_err(|error| fault(error.to_string(), help_with(&error)))?;
    let ids = tokenizer.vocab_size();
    if let Some(rows) = rows.filter(|rows| ids > *rows) {
        let reason = format!(
            "the tokenizer of `{}` has {ids} ids, but the embedding has {rows} rows: ids from {rows} on have no embedding",
            dir.display(),
        );
        return Err(fault(reason, GIVE_ANOTHER));
    }
    info.vocabulary = Some(Vocabulary::new(tokenizer.tokens()));
    info.num_ids = rows.unwrap_or(0);
    info.doubts
        .extend(rows.and_then(|rows| end_doubt(dir, &tokenizer, rows)));
    let (template, no_template) = template_of(dir);
    info.no_template = no_template.clone();
    info.texts = Some(Texts(Arc::new(TextTools {
        tokenizer: Some(Arc::new(tokenizer)),
        template,
        no_template,
        // A model that does not tell refuses no row before it is loaded.
        max_tokens: match info.max_tokens {
            0 => usize::MAX,
            known => known,
        },
        words: Arc::default(),
    })));
    Ok(())
}

/// Files that name ids that end a sequence, in the order in which they are read.
const END_FILES: [&str; 2] = ["generation_config.json", "config.json"];

/// An id that ends sequences and that the model cannot write, as it has `rows` ids.
fn end_doubt(dir: &Path, tokenizer: &Tokenizer, rows: usize) -> Option<ConfigError> {
    let id = tokenizer.ignored_eos_ids().first()?;
    let names_it = |file: &&&str| {
        let text = std::fs::read_to_string(dir.join(file)).unwrap_or_default();
        let named: Option<Value> = serde_json::from_str(&text).ok();
        named.is_some_and(|named| match &named["eos_token_id"] {
            Value::Array(ids) => ids.contains(&Value::from(*id)),
            one => one.as_u64() == Some(u64::from(*id)),
        })
    };
    let file = END_FILES
        .iter()
        .find(names_it)
        .unwrap_or(&"tokenizer_config.json");
    let path = dir.join(file);
    Some(ConfigError::new(
        "path",
        format!(
            "names a model that cannot end a response by the id {id}: `{}` has it as `eos_token_id`, but the vocabulary ends at {rows}",
            path.display()
        ),
        format!("correct `eos_token_id` in `{}`", path.display()),
    ))
}

/// What to do without a tokenizer that can be used.
const GIVE_ANOTHER: &str =
    "give the folder of a model with the tokenizer.json that belongs to its weights";

/// What to do about a tokenizer that cannot be loaded.
fn help_with(error: &TokenizerError) -> &'static str {
    let (TokenizerError::Malformed { path, .. }
    | TokenizerError::UnknownToken { path, .. }
    | TokenizerError::EndBeyond { path, .. }
    | TokenizerError::Misplaced { path, .. }) = error
    else {
        return GIVE_ANOTHER;
    };
    match Path::new(path).file_name().and_then(|name| name.to_str()) {
        Some("tokenizer_config.json" | "added_tokens.json")
            if matches!(error, TokenizerError::Misplaced { .. }) =>
        {
            "fix that file: number new tokens from the end of the vocabulary on, without gaps, as the embedding has them"
        }
        Some("generation_config.json") => {
            "fix or delete that file: config.json and tokenizer_config.json name such ids too"
        }
        Some("tokenizer_config.json" | "special_tokens_map.json") => {
            "fix that file: it must name tokens of tokenizer.json, or place them by `added_tokens_decoder`"
        }
        Some("config.json") => "fix that file",
        _ => GIVE_ANOTHER,
    }
}

/// What is wrong with writing prompts of the model `name` by `template`, as far as a check can tell.
pub(crate) fn template_config_fault(
    setting: &str,
    template: Template,
    name: &str,
    context: &BuildContext,
) -> Option<ConfigError> {
    if template == Template::None {
        return None;
    }
    let why = context.model_infos.get(name)?.no_template.as_ref()?;
    Some(ConfigError::new(
        setting,
        format!("is \"chat\", but `{name}` has no chat template that can be used: {why}"),
        format!("fix the template of the model's folder; or {PLAIN}"),
    ))
}

/// What is wrong with asking the model `name` for answers of up to `tokens` tokens.
pub(crate) fn room_fault(
    setting: &str,
    tokens: usize,
    name: &str,
    context: &BuildContext,
) -> Option<ConfigError> {
    let limit = context.max_tokens(name)?;
    (tokens >= limit).then(|| {
        ConfigError::new(
            setting,
            format!(
                "is {tokens}, but the context of `{name}` holds {limit} tokens, prompt and answer together"
            ),
            format!("set it to less than {limit}, so that there is room for the prompt"),
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::CausalLm;
    use verl_pipe::stage::ModelConfig;

    const FOLDER: &str = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../examples/models/addition-base"
    );

    /// A copy of the addition model whose file `name` holds `content`; without the file where that is none.
    fn changed(name: &str, content: Option<&str>) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for entry in std::fs::read_dir(FOLDER).unwrap() {
            let entry = entry.unwrap();
            std::fs::copy(entry.path(), dir.path().join(entry.file_name())).unwrap();
        }
        match content {
            Some(content) => std::fs::write(dir.path().join(name), content).unwrap(),
            None => std::fs::remove_file(dir.path().join(name)).unwrap(),
        }
        dir
    }

    fn describe(dir: &Path) -> Result<ModelInfo, Vec<ConfigError>> {
        CausalLm::frozen(dir).describe(&BuildContext::default())
    }

    #[test]
    fn a_sound_folder_tells_its_vocabulary() {
        let info = describe(FOLDER.as_ref()).unwrap();
        assert_eq!(info.vocabulary.map(|vocabulary| vocabulary.len()), Some(32));
        assert_eq!(info.no_template, None);
    }

    #[test]
    fn what_needs_no_weights_to_be_seen_is_told_by_a_check() {
        let weights = std::fs::read(Path::new(FOLDER).join("model.safetensors")).unwrap();
        let told = |dir: &tempfile::TempDir| match describe(dir.path()) {
            Ok(_) => String::new(),
            Err(faults) => faults[0].to_string(),
        };
        let none = changed("model.safetensors", None);
        assert!(told(&none).contains("has no model.safetensors"));
        std::fs::write(none.path().join("pytorch_model.bin"), "").unwrap();
        assert!(told(&none).contains("is pickled"));
        let index = r#"{"weight_map": {"model.norm.weight": "model-1.safetensors"}}"#;
        std::fs::write(none.path().join("model.safetensors.index.json"), index).unwrap();
        assert!(told(&none).contains("missing: model-1.safetensors"));
        for length in [4, 200, weights.len() - 10] {
            std::fs::write(none.path().join("model.safetensors"), &weights[..length]).unwrap();
            assert!(told(&none).contains("model.safetensors"), "{length}");
        }
        let renamed = weights.clone();
        let text = String::from_utf8_lossy(&renamed[8..]).into_owned();
        let at = 8 + text.find("q_proj").unwrap();
        let mut renamed = renamed;
        renamed[at..at + 6].copy_from_slice(b"q_porj");
        std::fs::write(none.path().join("model.safetensors"), &renamed).unwrap();
        assert!(told(&none).contains("q_porj"), "{}", told(&none));

        let none = changed("tokenizer.json", None);
        assert!(told(&none).contains("no tokenizer.json"));
        let sound = std::fs::read_to_string(Path::new(FOLDER).join("tokenizer.json")).unwrap();
        let mut large: Value = serde_json::from_str(&sound).unwrap();
        large["model"]["vocab"]["more"] = 40.into();
        let large = changed("tokenizer.json", Some(&large.to_string()));
        assert!(told(&large).contains("has 41 ids, but the embedding has 32 rows"));
        let mut panics: Value = serde_json::from_str(&sound).unwrap();
        panics["normalizer"] =
            serde_json::json!({"type": "Precompiled", "precompiled_charsmap": "AAAA"});
        let panics = changed("tokenizer.json", Some(&panics.to_string()));
        assert!(told(&panics).contains("tokenizer.json`: "));

        let damaged = changed("generation_config.json", Some("{\"eos_token_id\": 2"));
        assert!(told(&damaged).contains("generation_config.json"));
        let fault = &describe(damaged.path()).unwrap_err()[0];
        assert!(fault.help.contains("fix or delete"), "{}", fault.help);
    }

    #[test]
    fn a_broken_chat_template_is_not_called_none() {
        let broken = "{% for x in messages %}{{ x.foo.bar }}";
        let dir = changed("chat_template.jinja", Some(broken));
        let info = describe(dir.path()).unwrap();
        let why = info.no_template.clone().unwrap();
        assert!(why.contains("malformed"), "{why}");
        let mut context = BuildContext::default();
        context.model_infos.insert("actor".to_owned(), info);
        let fault = |template| template_config_fault("template", template, "actor", &context);
        assert!(fault(Template::Chat).unwrap().reason.contains("malformed"));
        assert_eq!(fault(Template::None), None);

        let load = CausalLm::frozen(dir.path()).load("actor", "cpu", &BuildContext::default());
        let mut models = Models::from([("actor".to_owned(), load.unwrap())]);
        let tools = TextTools::of(&mut models, "actor").unwrap();
        let told = tools.chat_template("actor", Template::Chat, &Map::new());
        let told = told.unwrap_err().to_string();
        assert!(
            told.contains("malformed") && told.contains("template = \"none\""),
            "{told}"
        );
    }

    /// #6: a head of its own in a folder whose config.json ties it counts, and the plan says so.
    #[test]
    fn an_own_head_of_a_tied_folder_is_counted_and_reported() {
        let source = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../verl-models/tests/models/tiny-random-llama-own-head");
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        std::fs::copy(source.join("model.safetensors"), path("model.safetensors")).unwrap();
        let config = std::fs::read_to_string(source.join("config.json")).unwrap();
        let mut config: Value = serde_json::from_str(&config).unwrap();
        let tokenizer = serde_json::json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
            "pre_tokenizer": null, "post_processor": null, "decoder": null,
            "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "c": 2}, "unk_token": "a"},
        });
        std::fs::write(path("tokenizer.json"), tokenizer.to_string()).unwrap();
        let mut about = |tied: bool| {
            config["tie_word_embeddings"] = tied.into();
            std::fs::write(path("config.json"), config.to_string()).unwrap();
            describe(dir.path()).unwrap()
        };
        let (declared_tied, declared_untied) = (about(true), about(false));
        assert_eq!(declared_tied.num_parameters, declared_untied.num_parameters);
        assert!(declared_untied.doubts.is_empty());
        let doubt = &declared_tied.doubts[0];
        assert!(
            doubt.reason.contains("lm_head.weight is not the embedding"),
            "{doubt}"
        );
    }
}
