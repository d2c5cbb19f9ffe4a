//! Recipes: `recipes/<family>/<model>.json` as types, and the choice of one.
//!
//! A file states a model's architecture once and then settings that differ by GPU, dtype and task; what holds
//! for all models is in `recipes/defaults.json`. `recipes/README.md` describes the format. All files are
//! compiled into the binary; `--recipes_dir` adds a user's own.

mod derived;
mod file;
mod parameters;
mod print;
mod select;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::Value;
use thiserror::Error;

pub use derived::{DELTA_NET, LayerError, MAX_LAYERS, SHARED_KV, hybrid_kinds, layer_kinds, padded_vocab};
pub use parameters::{Parameters, graphable, parameters, uncounted};
pub use print::{ShowError, print_list, print_show};
pub use select::Selector;

/// Values by dotted key. Every key is in [`crate::keys::KEYS`], every value has its key's type.
pub type Values = BTreeMap<String, Value>;

/// One recipe with all that applies to it.
#[derive(Debug, Clone, PartialEq)]
pub struct Recipe {
    pub family: String,
    /// The `-mr` name.
    pub model: String,
    pub gpu: String,
    pub dtype: String,
    /// `pretrain`, `sft` or `peft`.
    pub task: String,
    pub variant: Option<String>,
    /// GPUs of the recipe as written.
    pub num_gpus: usize,
    /// Upstream's name of the recipe, e.g. `llama3_8b_pretrain_8gpu_h100_bf16_config`.
    pub function: String,
    /// The function whose settings these are, if the recipe is another name for one.
    pub alias_of: Option<String>,
    /// Chosen when no recipe of its group has the asked GPU count.
    pub is_default: bool,
    /// `dense`, `moe`, `hybrid-mamba`, `linear-attention-hybrid`, `vlm` or `diffusion`.
    pub kind: String,
    /// What the model has beyond plain attention and MLP, e.g. `mla`, `shared-expert`.
    pub traits: Vec<String>,
    /// Architecture and settings. A key that neither the model nor the recipe sets is absent;
    /// keys of experts are absent in models without experts.
    pub values: Values,
    /// Environment variables that the recipe sets upstream.
    pub env: BTreeMap<String, String>,
    /// Codes of known oddities, explained by [`issue_meaning`].
    pub issues: Vec<String>,
}

impl Recipe {
    /// Why the recipe cannot run as written, if so; other settings may make it possible.
    /// `RankShare` refuses the same layouts with the numbers.
    pub fn impossible(&self) -> Option<&'static str> {
        let codes = self.issues.iter().filter(|code| IMPOSSIBLE.contains(&code.as_str()));
        codes.filter_map(|code| issue_meaning(code)).next()
    }
}

/// Issues that make a recipe impossible as written.
const IMPOSSIBLE: &[&str] = &[
    "expert_grid_does_not_fit",
    "gbs_not_multiple_of_mbs_times_dp",
    "layers_do_not_fill_pipeline",
    "vp_conflicts_with_pipeline_layout",
];

/// One model, without its recipes' settings.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelInfo {
    pub family: String,
    pub model: String,
    pub kind: String,
    pub traits: Vec<String>,
    pub hf_model_id: Option<String>,
    /// Parameters in billions, total and active, without multi-token prediction and vision.
    pub params_b: Option<[f64; 2]>,
    /// Numbers that could not be confirmed.
    pub uncertain: Vec<String>,
    /// `model.*` keys.
    pub architecture: Values,
    /// File it came from.
    pub source: PathBuf,
    pub num_recipes: usize,
}

/// Why recipes do not load or none fits.
#[derive(Debug, Error)]
pub enum RecipeError {
    #[error("cannot read recipes in {path}: {reason}")]
    Unreadable { path: PathBuf, reason: std::io::Error },
    #[error("{file}: at `{path}`: {reason} (recipes/README.md says what a recipe file holds)", file = .file.display())]
    Malformed { file: PathBuf, path: String, reason: String },
    /// `level` is the flag that failed, `available` what exists there.
    #[error("no recipe with {flag} {asked}{context}; there is {}{}", .available.join(", "), suggest(.suggestion))]
    NotFound {
        flag: &'static str,
        asked: String,
        context: String,
        available: Vec<String>,
        suggestion: Option<String>,
    },
}

fn suggest(suggestion: &Option<String>) -> String {
    suggestion.as_ref().map(|s| format!("; did you mean {s}?")).unwrap_or_default()
}

/// All recipes: those in the binary, and a user's own.
#[derive(Debug, Clone)]
pub struct Catalogue {
    models: Vec<ModelInfo>,
    recipes: Vec<Recipe>,
}

impl Catalogue {
    /// Loads the recipes in the binary, then every `.json` file under `recipes_dir`.
    ///
    /// A user's file with an `architecture` replaces the built-in model of the same family and name; one without
    /// extends it, and a recipe of the same GPU, dtype, task, variant and GPU count replaces the built-in one.
    ///
    /// # Errors
    /// A directory that cannot be read; a file that is not JSON, has an unknown key or a value of the wrong type.
    pub fn load(recipes_dir: Option<&Path>) -> Result<Catalogue, RecipeError> {
        file::load(recipes_dir)
    }

    /// Models by family and name.
    pub fn models(&self) -> &[ModelInfo] {
        &self.models
    }

    /// Recipes by family, model and upstream name; aliases included.
    pub fn recipes(&self) -> &[Recipe] {
        &self.recipes
    }
}

/// What a recipe's issue code means, for `recipes show` and notices.
pub fn issue_meaning(code: &str) -> Option<&'static str> {
    ISSUES.iter().find(|(c, _)| *c == code).map(|(_, meaning)| *meaning)
}

/// Known oddities of the recipes, by code.
const ISSUES: &[(&str, &str)] = &[
    ("alias_of_other_gpu_recipe_not_seen_by_selector", "another GPU's recipe under this GPU's name"),
    (
        "body_graph_setting_replaced_by_later_helper",
        "the recipe writes another graph setting than it ends with",
    ),
    (
        "body_scope_dropped_because_impl_is_none",
        "the recipe writes a graph scope but no implementation: it runs eagerly",
    ),
    ("conflicting_dispatcher_sm_knobs", "two settings for the dispatcher's SMs disagree"),
    ("dispatcher_type_depends_on_gpu_probe", "the dispatcher is flex only where the GPU is not probed"),
    ("dtype_not_selectable_on_command_line", "-c has no such dtype: reachable by --config_variant only"),
    ("expert_grid_does_not_fit", "etp x ep x pp does not divide the GPU count"),
    (
        "full_iteration_with_avoid_record_streams_1",
        "full-iteration graph with TORCH_NCCL_AVOID_RECORD_STREAMS=1",
    ),
    (
        "full_iteration_without_record_stream_reuse_allocator",
        "full-iteration graph without the allocator's stream reuse",
    ),
    (
        "gbs_not_multiple_of_mbs_times_dp",
        "the global batch is no multiple of micro-batch x data-parallel size",
    ),
    ("graph_allocator_setting_without_graph", "the allocator is set for graphs, but there is none"),
    ("graph_env_vars_absent", "the recipe sets no graph environment variables"),
    ("graph_on_but_te_rng_tracker_off", "graphs are on, the RNG tracker off (switched on here)"),
    (
        "impl_none_but_external_cuda_graph_set",
        "implementation none, but the deprecated external_cuda_graph is set",
    ),
    ("layers_do_not_fill_pipeline", "the layers cannot be split evenly over pp and vp"),
    ("mhc_flag_name_differs_in_mcore", "a hyper-connection flag has another name in Megatron Core"),
    ("model_and_dataset_seq_length_differ", "model.seq_length and dataset.seq_length differ"),
    ("nccl_ub_without_fsdp", "NCCL user buffers without FSDP have no effect"),
    ("offload_layer_count_without_cpu_offloading", "a layer count for offloading, but offloading is off"),
    ("recompute_modules_without_granularity", "recompute modules without a granularity have no effect"),
    ("scope_given_with_impl_none", "a graph scope with implementation none has no effect"),
    ("sequence_parallel_with_tp1", "sequence parallelism with tp 1 has no effect"),
    ("te_rng_flags_differ", "model and rng section disagree on the RNG tracker"),
    ("vp_conflicts_with_pipeline_layout", "the pipeline layout has another number of stages than pp x vp"),
];

#[cfg(test)]
mod tests;
