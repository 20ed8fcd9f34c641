//! What can be added to a pipeline as a stage ([`IntoStage`]), and the operator form ([`Chain`]).

use std::collections::BTreeMap;
use std::ops::Shr;
use std::sync::Arc;

use verl_words::batch::Batch;
use verl_words::stage::{
    BuildContext, ConfigError, Stage, StageConfig, StageContext, StageError, StageSpec,
};

use crate::pipe::{CUSTOM, StageDecl};

/// What can be added to a pipeline as a stage: every [`StageConfig`], [`Named`] and [`CustomStage`].
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a stage",
    note = "a stage is a configuration such as `Generate`, or what `stage_fn`, `stage_with` or `named` returns"
)]
pub trait IntoStage: Sized {
    /// The declaration; its default name is the kind.
    fn declare(self) -> StageDecl;

    /// The stage under another name.
    fn named(self, name: impl Into<String>) -> Named {
        Named(StageDecl {
            name: name.into(),
            ..self.declare()
        })
    }

    /// Makes the stage read its key `own` from the pipeline's `key`.
    fn reading(self, own: impl Into<String>, key: impl Into<String>) -> Named {
        let mut decl = self.declare();
        decl.rename.insert(own.into(), key.into());
        Named(decl)
    }

    /// Makes the stage write its key `own` as the pipeline's `key`.
    fn writing(self, own: impl Into<String>, key: impl Into<String>) -> Named {
        self.reading(own, key)
    }

    /// Records the stage in full at every step, within the size budget of the trace.
    fn debug(self) -> Named {
        Named(StageDecl {
            debug: true,
            ..self.declare()
        })
    }
}

impl<C: StageConfig> IntoStage for C {
    fn declare(self) -> StageDecl {
        StageDecl::new(C::KIND, self)
    }
}

/// A stage with an explicit name or renamed keys.
#[derive(Debug, Clone)]
pub struct Named(StageDecl);

impl IntoStage for Named {
    fn declare(self) -> StageDecl {
        self.0
    }
}

/// A custom stage, given as an object; made by [`stage_fn`] and [`stage_with`].
pub struct CustomStage(crate::pipe::StageBuilder);

impl IntoStage for CustomStage {
    fn declare(self) -> StageDecl {
        StageDecl {
            name: CUSTOM.to_owned(),
            kind: CUSTOM.to_owned(),
            config: serde_json::Value::Null,
            rename: BTreeMap::new(),
            stated_reads: None,
            stated_writes: None,
            debug: false,
            group: None,
            build: self.0,
        }
    }
}

/// A stage that a closure builds; the closure is called once for the plan and once for each run.
pub fn stage_with<F>(make: F) -> CustomStage
where
    F: Fn(&BuildContext) -> Result<Box<dyn Stage>, Vec<ConfigError>> + Send + Sync + 'static,
{
    CustomStage(Arc::new(make))
}

/// A stateless stage from its spec and a function of its input; its rows may run in parallel.
///
/// ```
/// use verl_pipe::chain::{IntoStage, stage_fn};
/// use verl_pipe::keys::{RESPONSE_TEXTS, REWARDS};
/// use verl_pipe::stage::StageSpec;
///
/// let spec = StageSpec::new().reads(RESPONSE_TEXTS).writes(REWARDS);
/// let polite = stage_fn(spec, |batch, ctx| {
///     let texts = batch.get(&RESPONSE_TEXTS)?;
///     let rewards: Vec<f32> = texts.rows().map(|text| f32::from(text.contains("please"))).collect();
///     let mut scored = batch.rows_only();
///     scored.put(&REWARDS, rewards)?;
///     ctx.emit(scored)
/// });
/// assert_eq!(polite.named("politeness").declare().name, "politeness");
/// ```
pub fn stage_fn<F>(spec: StageSpec, run: F) -> CustomStage
where
    F: Fn(Batch, &mut StageContext<'_>) -> Result<(), StageError> + Send + Sync + 'static,
{
    let run = Arc::new(run);
    stage_with(move |_| {
        Ok(Box::new(FnStage {
            spec: spec.clone(),
            run: run.clone(),
        }))
    })
}

struct FnStage<F> {
    spec: StageSpec,
    run: Arc<F>,
}

impl<F> Stage for FnStage<F>
where
    F: Fn(Batch, &mut StageContext<'_>) -> Result<(), StageError> + Send + Sync + 'static,
{
    fn spec(&self) -> StageSpec {
        self.spec.clone()
    }

    fn run(&mut self, input: Batch, context: &mut StageContext<'_>) -> Result<(), StageError> {
        (self.run)(input, context)
    }

    fn duplicate(&self) -> Option<Box<dyn Stage>> {
        Some(Box::new(FnStage {
            spec: self.spec.clone(),
            run: self.run.clone(),
        }))
    }
}

/// A chain of stages: `a >> b >> c`. Shorthand for adding them one by one; keys decide which stage reads what.
#[derive(Debug, Clone, Default)]
pub struct Chain(Vec<StageDecl>);

impl Chain {
    /// A chain of one stage.
    pub fn new(stage: impl IntoStage) -> Self {
        Chain(vec![stage.declare()])
    }

    /// The declarations, in order.
    pub fn into_stages(self) -> Vec<StageDecl> {
        self.0
    }
}

impl<S: IntoStage> From<S> for Chain {
    fn from(stage: S) -> Self {
        Chain::new(stage)
    }
}

impl<S: IntoStage> Shr<S> for Chain {
    type Output = Chain;
    fn shr(mut self, next: S) -> Chain {
        self.0.push(next.declare());
        self
    }
}

/// Lets a chain start with a type: `chainable!(Prompts)` allows `Prompts { .. } >> Generate { .. }`.
///
/// ```
/// use schemars::JsonSchema;
/// use serde::{Deserialize, Serialize};
/// use verl_pipe::chain::IntoStage;
/// use verl_pipe::keys::{PROMPTS, REWARDS};
/// use verl_pipe::pipe::{DataPipe, stage_fn};
/// use verl_pipe::plan::Plannable;
/// use verl_pipe::stage::{BuildContext, ConfigError, RowRule, Stage, StageConfig, StageSpec};
/// # use verl_pipe::batch::Batch;
/// # use verl_pipe::stage::{StageContext, StageError};
///
/// #[derive(Debug, Clone, Default, Serialize, Deserialize, JsonSchema)]
/// #[serde(deny_unknown_fields, default)]
/// struct Ones {
///     count: usize,
/// }
/// # struct OnesStage;
/// # impl Stage for OnesStage {
/// #     fn spec(&self) -> StageSpec { StageSpec::new().rows(RowRule::Source).writes(PROMPTS) }
/// #     fn run(&mut self, input: Batch, ctx: &mut StageContext<'_>) -> Result<(), StageError> { ctx.emit(input) }
/// # }
///
/// impl StageConfig for Ones {
///     const KIND: &'static str = "ones";
///     const SUMMARY: &'static str = "prompts of ones";
///     fn build(&self, _: &BuildContext) -> Result<Box<dyn Stage>, Vec<ConfigError>> {
///         Ok(Box::new(OnesStage))
///     }
/// }
/// verl_pipe::chainable!(Ones);
///
/// let judge = StageSpec::new().reads(PROMPTS).writes(REWARDS);
/// let chain = Ones { count: 3 } >> stage_fn(judge, |batch, ctx| ctx.emit(batch)).named("judge");
/// let plan = DataPipe::new("ones").chain(chain).plan().unwrap();
/// let names: Vec<_> = plan.stages().iter().map(|stage| stage.name()).collect();
/// assert_eq!(names, ["ones", "judge"]);
/// ```
#[macro_export]
macro_rules! chainable {
    ($($stage:ty),+ $(,)?) => {$(
        impl<S: $crate::chain::IntoStage> ::std::ops::Shr<S> for $stage {
            type Output = $crate::chain::Chain;
            fn shr(self, next: S) -> $crate::chain::Chain {
                $crate::chain::Chain::new(self) >> next
            }
        }
    )+};
}

chainable!(Named, CustomStage);
