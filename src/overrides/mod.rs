//! Recipe + `key=value` + flags -> [`RunConfig`]: settings replaced in that order, coerced, and judged once by
//! the rule table. Nothing here touches a device.

mod apply;
mod build;
mod graphs;
mod idle;
mod layers;

pub use idle::{HARNESS, not_built as not_built_by_key};

use crate::args::{Args, impl_name};
use crate::config::RunConfig;
use crate::features;
use crate::keys::KeyError;
use crate::recipe::{Catalogue, Recipe, RecipeError, Selector};
use crate::rules::{self, Effective, Values, Violation};
use crate::workloads::schedule::Pipeline;
use crate::workloads::share::{RankShare, ShareError};
use serde::Serialize;
use serde_json::{Map, Value, json};
use std::collections::BTreeSet;

/// Something the user should know that is no error: goes to standard error and into the dry run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Notice {
    pub id: &'static str,
    pub message: String,
}

impl Notice {
    pub fn new(id: &'static str, message: impl Into<String>) -> Notice {
        Notice { id, message: message.into() }
    }
}

/// Why a command line gives no configuration: exit code 2.
#[derive(Debug, thiserror::Error)]
pub enum UsageError {
    #[error(transparent)]
    Recipe(#[from] RecipeError),
    #[error(transparent)]
    Key(#[from] KeyError),
    #[error(transparent)]
    Rule(#[from] Violation),
    /// The job does not split over its ranks.
    #[error(transparent)]
    Share(#[from] ShareError),
    /// The configuration is legal, but there is no code for it: a dry run passes, a run does not.
    #[error("{recipe} cannot be run yet: {}; a plain --dryrun explains it", reasons.join("; "))]
    NotBuilt { recipe: String, reasons: Vec<String> },
}

impl UsageError {
    /// Id of the broken rule, if it is one.
    pub fn rule(&self) -> Option<&'static str> {
        match self {
            UsageError::Rule(v) => Some(v.id),
            _ => None,
        }
    }
}

/// A command line, resolved.
#[derive(Debug, Clone)]
pub struct Resolved {
    pub config: RunConfig,
    pub notices: Vec<Notice>,
    pub recipe: Recipe,
    /// Every setting by dotted name, as it is in force.
    pub values: Values,
    pub args: Args,
    /// Steps of each arm, where the user limits them (`-ms`).
    pub max_steps: Option<usize>,
}

impl Resolved {
    /// Refuses a configuration that there is no code for. To be called before a run, not before a dry run.
    ///
    /// # Errors
    /// [`UsageError::NotBuilt`] with every reason.
    pub fn require_built(&self) -> Result<(), UsageError> {
        if self.config.not_built.is_empty() {
            return Ok(());
        }
        Err(UsageError::NotBuilt {
            recipe: self.recipe.function.clone(),
            reasons: self.config.not_built.clone(),
        })
    }
}

/// The recipe that a command line asks for.
pub fn selector(args: &Args) -> Selector {
    Selector {
        family: args.general.model_family_name.clone(),
        recipe: args.general.model_recipe_name.clone(),
        gpu: args.performance.gpu.clone(),
        dtype: args.performance.compute_dtype.clone(),
        task: args.training.task.clone(),
        variant: args.variant.config_variant.clone(),
        num_gpus: args.general.num_gpus.and_then(|n| usize::try_from(n).ok()),
    }
}

/// Resolves a command line. `env` reads an environment variable.
///
/// # Errors
/// No such recipe, an unknown key or a wrong value, a broken rule or an impossible layout.
pub fn resolve(
    args: &Args,
    catalogue: &Catalogue,
    env: &dyn Fn(&str) -> Option<String>,
) -> Result<Resolved, UsageError> {
    let recipe = catalogue.select(&selector(args))?;
    let mut settings: Vec<Setting> = Vec::new();
    for text in &args.overrides {
        let (key, value) = text.split_once('=').unwrap_or((text, ""));
        let (key, value) = crate::keys::parse_value(key, value)?;
        // The last of a repeated one wins.
        settings.retain(|(known, _)| *known != key);
        settings.push((key, value));
    }
    let again = |settings: &[Setting]| configure(args, &recipe, settings, env);
    let mut configured = again(&settings)?;
    idle::treat(&mut configured, &Values(recipe.values.clone()), &settings, &again)?;
    let Configured { effective, config, notices } = configured;
    let max_steps = effective.max_steps.and_then(|n| usize::try_from(n).ok());
    Ok(Resolved { config, notices, recipe, values: effective.values, args: args.clone(), max_steps })
}

/// One `key=value`.
type Setting = (&'static str, Value);

/// Options and settings on a recipe, judged.
struct Configured {
    effective: Effective,
    config: RunConfig,
    notices: Vec<Notice>,
}

fn configure(
    args: &Args,
    recipe: &Recipe,
    settings: &[Setting],
    env: &dyn Fn(&str) -> Option<String>,
) -> Result<Configured, UsageError> {
    let mut notices = Vec::new();
    let mut values = Values(recipe.values.clone());
    let mut explicit = BTreeSet::new();
    for (key, value) in settings {
        values.set(key, value.clone());
        explicit.insert((*key).to_owned());
    }
    apply::flags(args, recipe, &mut values, &explicit, &mut notices);
    let graph = graphs::coerce(args, &mut values, &explicit, &mut notices);
    let effective = build::effective(args, recipe, values, explicit, graph, env, &mut notices);
    rules::judge(&effective)?;
    let (approximations, not_built) = features::sort(&effective);
    graphs::notices(&effective, &mut notices);
    notices.extend(features::told_of(&effective).map(|(id, text)| Notice::new(id, text)));
    for text in &not_built {
        notices.push(Notice::new("not_built", text.clone()));
    }
    let config = build::config(&effective, recipe, approximations, not_built);
    let share = RankShare::of(&config)?;
    notices.extend(shortened_pipeline(&config));
    notices.extend(recompute_clamped(&effective, &config, &share));
    Ok(Configured { effective, config, notices })
}

/// A number of layers to recompute that the user gave, and that no chunk of the stage has.
fn recompute_clamped(e: &Effective, cfg: &RunConfig, share: &RankShare) -> Option<Notice> {
    let key = "model.recompute_num_layers";
    let given = e.args.performance.recompute_num_layers.is_some() || e.explicit.contains(key);
    let asked = cfg.recompute.num_layers.filter(|_| given && e.full_recompute())?;
    let has = share.chunks.iter().map(|c| c.len()).max().unwrap_or(0);
    let what = if cfg.recompute.method.as_deref() == Some("uniform") {
        "one group of all of them is recomputed"
    } else {
        "all of them are recomputed"
    };
    (asked > has).then(|| {
        let text = format!("recompute of {asked} layers: the stage (or its virtual one) has {has}, {what}");
        Notice::new("recompute_clamped", text)
    })
}

/// A run of fewer micro-batches than the stage has in flight holds fewer activations, and graphs, than the job.
fn shortened_pipeline(cfg: &RunConfig) -> Option<Notice> {
    let in_flight = |count| Pipeline::of(cfg, count).in_flight();
    let (run, job) = (cfg.batch.num_microbatches, cfg.batch.num_microbatches_recipe);
    let (has, would) = (in_flight(run), in_flight(job));
    (cfg.parallel.pp > 1 && !cfg.stack_only && has < would).then(|| {
        Notice::new(
            "pipeline_shortened",
            format!(
                "{run} of {job} micro-batches are run: pipeline rank {} has {has} passes in flight, {would} in the whole \
                 job; a larger --max_microbatches (0: all) holds what the job holds",
                cfg.parallel.pp_rank
            ),
        )
    })
}

/// The head of `--dryrun --format json`; the program is added by the caller.
pub fn dryrun_head(resolved: &Resolved) -> Map<String, Value> {
    let graph = &resolved.config.graph;
    let scope: Vec<&str> = graph.scope.iter().map(|s| s.name()).collect();
    let mut head = Map::new();
    head.insert("recipe".into(), json!(resolved.recipe.function));
    head.insert("cuda_graph_impl".into(), json!(impl_name(graph.implementation)));
    head.insert("cuda_graph_scope".into(), json!(scope));
    head.insert("te_rng_tracker".into(), json!(graph.te_rng_tracker));
    head.insert("notices".into(), json!(resolved.notices));
    head.insert("program".into(), Value::Null);
    head
}
