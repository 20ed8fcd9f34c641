//! Tokenizer and chat template of a model: loaded for a run, and described when a pipeline is checked.

use std::path::Path;
use std::sync::{Arc, OnceLock};

use serde_json::{Map, Value};
use verl_models::DecoderConfig;
use verl_models::chat_template::ChatTemplate;
use verl_models::tokenizer::{Tokenizer, TokenizerError};
use verl_words::resource::{ModelInfo, ResourceError, Texts, TokenTexts, Vocabulary};
use verl_words::stage::{BuildContext, ConfigError, Models, StageError, find_model};

use super::words::TokenDecoder;
use super::{PolicyResource, ValueResource, failed};
use crate::prompts::Template;

/// The tokenizer and chat template of a model of either kind.
#[derive(Debug, Clone, Default)]
pub(crate) struct TextTools {
    /// Its tokenizer, if it has one.
    pub tokenizer: Option<Arc<Tokenizer>>,
    /// Its chat template, if it has one.
    pub template: Option<Arc<ChatTemplate>>,
    /// Why there is no template, if one was looked for.
    pub no_template: Option<String>,
    /// Longest sequence in tokens.
    pub max_tokens: usize,
    /// Decodes single tokens; created when it is first used.
    token_decoder: Arc<OnceLock<TokenDecoder>>,
}

impl TextTools {
    /// The tokenizer and chat template of the model `name`.
    ///
    /// # Errors
    /// If there is no such model, or it is of another type.
    pub fn of(models: &mut Models, name: &str) -> Result<Self, StageError> {
        if let Ok(resource) = find_model::<PolicyResource>(models, name) {
            return Ok(TextTools {
                tokenizer: resource.tokenizer.clone(),
                template: resource.template.clone(),
                no_template: resource.no_template.clone(),
                max_tokens: resource.policy().max_tokens(),
                token_decoder: Arc::default(),
            });
        }
        let resource = find_model::<ValueResource>(models, name)?;
        Ok(TextTools {
            tokenizer: resource.tokenizer.clone(),
            template: resource.template.clone(),
            no_template: resource.no_template.clone(),
            max_tokens: resource.model.max_tokens(),
            token_decoder: Arc::default(),
        })
    }

    /// The tokenizer of the model `name`; `needs` says what needs it, for example `prompts need`.
    ///
    /// # Errors
    /// If the model has none.
    pub fn tokenizer(&self, name: &str, needs: &str) -> Result<Arc<Tokenizer>, StageError> {
        self.tokenizer.clone().ok_or_else(|| StageError::Model {
            name: name.to_owned(),
            reason: format!("has no tokenizer, which {needs}"),
        })
    }

    /// The chat template of the model `name` with additional variables; `None` if prompts are written without one.
    ///
    /// # Errors
    /// If the model has none, or none that can be used; the error includes the reason.
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
                Some(why) => format!("has no usable chat template: {why}; {PLAIN}"),
                None => format!("has no chat template; {PLAIN}"),
            },
        })?;
        Ok(Some(found.clone().with_variables(variables.clone())))
    }
}

impl TokenTexts for TextTools {
    fn token(&self, id: u32) -> String {
        let text = |tokenizer: &Arc<Tokenizer>| {
            let create = || TokenDecoder::new(tokenizer.clone());
            self.token_decoder.get_or_init(create).token(id)
        };
        self.tokenizer.as_ref().map(text).unwrap_or_default()
    }

    fn text(&self, ids: &[u32]) -> String {
        let tokenizer = self.tokenizer.as_deref();
        tokenizer
            .map(|tokenizer| tokenizer.decode_with_special(ids))
            .unwrap_or_default()
    }
}

/// What to do without a template.
const PLAIN: &str = "set `template = \"none\"` to use the question as it is";

/// The chat template of a folder, or why there is none.
pub(super) fn template_of(dir: &Path) -> (Option<Arc<ChatTemplate>>, Option<String>) {
    match ChatTemplate::load(dir) {
        Ok(template) => (Some(Arc::new(template)), None),
        Err(error) => (None, Some(error.to_string())),
    }
}

/// Loads the tokenizer and the chat template of a folder; the tokenizer must have no more ids than the embedding has
/// rows. A folder without a template can still be used with prompts as they are.
///
/// # Errors
/// A tokenizer that is missing, damaged or too large.
pub(super) fn load_texts(dir: &Path, config: &DecoderConfig) -> Result<TextTools, ResourceError> {
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
        token_decoder: Arc::default(),
    })
}

/// Fills in what a check can find out about the tokenizer and chat template of a folder; `rows` are those of the
/// embedding, if they are known. The tokenizer is built as in a run, so that the run cannot refuse it later.
///
/// # Errors
/// A tokenizer that is missing, malformed or too large.
pub(super) fn describe_texts(
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
        return Err(fault(reason, USE_ANOTHER));
    }
    info.vocabulary = Some(Vocabulary::new(tokenizer.tokens()));
    info.num_ids = rows.unwrap_or(0);
    info.warnings
        .extend(rows.and_then(|rows| end_warning(dir, &tokenizer, rows)));
    let (template, no_template) = template_of(dir);
    info.no_template = no_template.clone();
    info.texts = Some(Texts(Arc::new(TextTools {
        tokenizer: Some(Arc::new(tokenizer)),
        template,
        no_template,
        // A model of unknown length refuses no row before it is loaded.
        max_tokens: match info.max_tokens {
            0 => usize::MAX,
            known => known,
        },
        token_decoder: Arc::default(),
    })));
    Ok(())
}

/// Files that set end-of-sequence ids, in the order in which they are read.
const END_FILES: [&str; 2] = ["generation_config.json", "config.json"];

/// Warns about an end-of-sequence id that the model cannot generate, as it has only `rows` ids.
fn end_warning(dir: &Path, tokenizer: &Tokenizer, rows: usize) -> Option<ConfigError> {
    let id = tokenizer.ignored_eos_ids().first()?;
    let sets_it = |file: &&&str| {
        let text = std::fs::read_to_string(dir.join(file)).unwrap_or_default();
        let parsed: Option<Value> = serde_json::from_str(&text).ok();
        parsed.is_some_and(|parsed| match &parsed["eos_token_id"] {
            Value::Array(ids) => ids.contains(&Value::from(*id)),
            one => one.as_u64() == Some(u64::from(*id)),
        })
    };
    let file = END_FILES
        .iter()
        .find(sets_it)
        .unwrap_or(&"tokenizer_config.json");
    let path = dir.join(file);
    Some(ConfigError::new(
        "path",
        format!(
            "is a model that cannot end a response with the id {id}: `{}` sets it as `eos_token_id`, but the vocabulary ends at {rows}",
            path.display()
        ),
        format!("correct `eos_token_id` in `{}`", path.display()),
    ))
}

/// What to do without a usable tokenizer.
const USE_ANOTHER: &str =
    "set it to the folder of a model with the tokenizer.json that belongs to its weights";

/// What to do about a tokenizer that cannot be loaded.
fn help_with(error: &TokenizerError) -> &'static str {
    let (TokenizerError::Malformed { path, .. }
    | TokenizerError::UnknownToken { path, .. }
    | TokenizerError::EndBeyond { path, .. }
    | TokenizerError::Misplaced { path, .. }) = error
    else {
        return USE_ANOTHER;
    };
    match Path::new(path).file_name().and_then(|name| name.to_str()) {
        Some("tokenizer_config.json" | "added_tokens.json")
            if matches!(error, TokenizerError::Misplaced { .. }) =>
        {
            "fix that file: number new tokens from the end of the vocabulary, without gaps, to match the embedding"
        }
        Some("generation_config.json") => {
            "fix or delete that file: config.json and tokenizer_config.json set these ids too"
        }
        Some("tokenizer_config.json" | "special_tokens_map.json") => {
            "fix that file: use tokens of tokenizer.json, or define them in `added_tokens_decoder`"
        }
        Some("config.json") => "fix that file",
        _ => USE_ANOTHER,
    }
}

/// Refuses `template` if the model `name` has no usable chat template, as far as a check can find out.
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
        format!("is \"chat\", but `{name}` has no usable chat template: {why}"),
        format!("fix the template in the model's folder, or {PLAIN}"),
    ))
}

/// Refuses answers of up to `tokens` tokens if the context of the model `name` has no room for them.
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
                "is {tokens}, but the context of `{name}` is {limit} tokens, prompt and answer together"
            ),
            format!("set it to less than {limit} to leave room for the prompt"),
        )
    })
}

#[cfg(test)]
mod tests {
    use verl_words::stage::ModelFactory;

    use super::*;
    use crate::model::CausalLm;

    const FOLDER: &str = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../examples/models/addition-base"
    );

    /// A copy of the addition model whose file `name` contains `content`, or is missing if that is `None`.
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
    fn a_valid_folder_describes_its_vocabulary() {
        let info = describe(FOLDER.as_ref()).unwrap();
        assert_eq!(info.vocabulary.map(|vocabulary| vocabulary.len()), Some(32));
        assert_eq!(info.no_template, None);
    }

    #[test]
    fn a_check_reports_errors_without_loading_weights() {
        let weights = std::fs::read(Path::new(FOLDER).join("model.safetensors")).unwrap();
        let message = |dir: &tempfile::TempDir| match describe(dir.path()) {
            Ok(_) => String::new(),
            Err(faults) => faults[0].to_string(),
        };
        let none = changed("model.safetensors", None);
        assert!(message(&none).contains("has no model.safetensors"));
        std::fs::write(none.path().join("pytorch_model.bin"), "").unwrap();
        assert!(message(&none).contains("is pickled"));
        let index = r#"{"weight_map": {"model.norm.weight": "model-1.safetensors"}}"#;
        std::fs::write(none.path().join("model.safetensors.index.json"), index).unwrap();
        assert!(message(&none).contains("missing files: model-1.safetensors"));
        for length in [4, 200, weights.len() - 10] {
            std::fs::write(none.path().join("model.safetensors"), &weights[..length]).unwrap();
            assert!(message(&none).contains("model.safetensors"), "{length}");
        }
        let renamed = weights.clone();
        let text = String::from_utf8_lossy(&renamed[8..]).into_owned();
        let at = 8 + text.find("q_proj").unwrap();
        let mut renamed = renamed;
        renamed[at..at + 6].copy_from_slice(b"q_porj");
        std::fs::write(none.path().join("model.safetensors"), &renamed).unwrap();
        assert!(message(&none).contains("q_porj"), "{}", message(&none));

        let none = changed("tokenizer.json", None);
        assert!(message(&none).contains("no tokenizer.json"));
        let valid = std::fs::read_to_string(Path::new(FOLDER).join("tokenizer.json")).unwrap();
        let mut large: Value = serde_json::from_str(&valid).unwrap();
        large["model"]["vocab"]["more"] = 40.into();
        let large = changed("tokenizer.json", Some(&large.to_string()));
        assert!(message(&large).contains("has 41 ids, but the embedding has 32 rows"));
        let mut panics: Value = serde_json::from_str(&valid).unwrap();
        panics["normalizer"] =
            serde_json::json!({"type": "Precompiled", "precompiled_charsmap": "AAAA"});
        let panics = changed("tokenizer.json", Some(&panics.to_string()));
        assert!(message(&panics).contains("tokenizer.json`: "));

        let damaged = changed("generation_config.json", Some("{\"eos_token_id\": 2"));
        assert!(message(&damaged).contains("generation_config.json"));
        let fault = &describe(damaged.path()).unwrap_err()[0];
        assert!(fault.help.contains("fix or delete"), "{}", fault.help);
    }

    #[test]
    fn a_broken_chat_template_is_not_reported_as_missing() {
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
        let refused = tools.chat_template("actor", Template::Chat, &Map::new());
        let message = refused.unwrap_err().to_string();
        assert!(
            message.contains("malformed") && message.contains("template = \"none\""),
            "{message}"
        );
    }

    /// #6: a separate head in a folder whose config.json ties it is counted, and the plan warns about it.
    #[test]
    fn a_separate_head_of_a_tied_folder_is_counted_and_reported() {
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
        let mut described = |tied: bool| {
            config["tie_word_embeddings"] = tied.into();
            std::fs::write(path("config.json"), config.to_string()).unwrap();
            describe(dir.path()).unwrap()
        };
        let (declared_tied, declared_untied) = (described(true), described(false));
        assert_eq!(declared_tied.num_parameters, declared_untied.num_parameters);
        assert!(declared_untied.warnings.is_empty());
        let warning = &declared_tied.warnings[0];
        assert!(
            warning
                .reason
                .contains("lm_head.weight is not the embedding"),
            "{warning}"
        );
    }
}
