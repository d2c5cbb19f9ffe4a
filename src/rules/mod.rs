//! The rule table: what a configuration must hold, judged once on the effective configuration and before any
//! device is touched, whatever flag or override produced it.
//!
//! R ids are upstream's rules (Megatron-Bridge's harness, Bridge and Megatron Core) with our user's document first;
//! M ids are mbperf's own. They are judged in the order of the table, and the first one broken is reported.

mod effective;
mod graphs;
mod idle;
mod model;
mod overlap;
mod sizes;

pub use effective::{Effective, Values};
pub use idle::off;
pub use sizes::layout_of;

use std::fmt::Write;

/// One rule.
pub struct Rule {
    pub id: &'static str,
    /// What is refused, in one sentence.
    pub wrong: &'static str,
    /// What to do instead.
    pub remedy: &'static str,
    /// `None` if the configuration is fine, else what is wrong with the numbers in it.
    pub broken: fn(&Effective) -> Option<String>,
}

/// A rule that a configuration breaks.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{id}: {what}.\n  {remedy}")]
pub struct Violation {
    pub id: &'static str,
    pub what: String,
    pub remedy: &'static str,
}

/// Every rule, in the order of judgement: sizes first, so that later rules may rely on them; what has no
/// effect last, for what is wrong matters more.
pub fn rules() -> impl Iterator<Item = &'static Rule> {
    let of_ranks = overlap::RULES.iter().chain(sizes::LAYOUT);
    sizes::NUMBERS.iter().chain(model::RULES).chain(graphs::RULES).chain(of_ranks).chain(idle::RULES)
}

/// The first rule that the configuration breaks.
///
/// # Errors
/// The rule's id, what is wrong, and the remedy.
pub fn judge(effective: &Effective) -> Result<(), Violation> {
    match rules().find_map(|r| (r.broken)(effective).map(|what| (r, what))) {
        None => Ok(()),
        Some((rule, what)) => Err(Violation { id: rule.id, what, remedy: rule.remedy }),
    }
}

/// How a command line becomes a configuration: what is corrected without being an error.
pub const COERCIONS: &[(&str, &str)] = &[
    ("R01", "--cuda_graph_impl is exactly none, local or transformer_engine"),
    (
        "R02",
        "--cuda_graph_scope is names joined by single commas; a repeated name is kept once (notice duplicate_scope)",
    ),
    (
        "R03",
        "--flag=value and --flag value are the same; the last of a repeated flag wins; names are written in full",
    ),
    ("R05", "key=value overrides come before the flags: the flags win"),
    ("R07", "--cuda_graph_impl other than none switches both RNG tracker keys on"),
    (
        "R08",
        "implementation none: the scope is dropped (notice scope_ignored) and the RNG tracker is off (notice rng_tracker_ignored \
         where an override had it on)",
    ),
    (
        "R09",
        "a scope without an implementation: full_iteration means local, any other transformer_engine (notice impl_inferred)",
    ),
    (
        "R10",
        "transformer_engine without a scope: the recipe's, else each whole layer (notice whole_layer_capture)",
    ),
    (
        "R14",
        "full-iteration capture is spelled local + full_iteration: one graph of every micro-batch's forward and backward; \
         token generation, gradient norm and optimizer stay outside (newer Megatron-Core calls other things local too)",
    ),
    (
        "R22",
        "the older keys enable_cuda_graph and external_cuda_graph are refused: model.cuda_graph_impl says local or \
         transformer_engine",
    ),
    ("R15", "NaN checks are off unless an override switches them on"),
    ("R16", "-rl: full recompute by blocks; --recompute_modules replaces the recipe's recompute as a whole"),
    ("R17", "-ol N: activations of N layers go to the CPU; 0 switches it off"),
    (
        "R18",
        "--moe_a2a_overlap: true also delays weight gradients and stops the shared expert's overlap; false switches off",
    ),
    (
        "R19",
        "--use_tokendrop true: capacity factor 1.0, padded to it, own routing; on a dense model ignored (notice tokendrop_ignored)",
    ),
    ("R20", "--moe_flex_dispatcher_backend: None means alltoall, a name means flex with that backend"),
    (
        "M32",
        "train.manual_gc, train.manual_gc_interval and dataset.kind are taken for the harness's sake and have no effect (notice \
         no_effect); a key=value that an option replaces is told (notice setting_overruled)",
    ),
    ("R21", "--data squad_packed pads the list of sequence starts when graphs are on"),
    ("R38", "a recomputed module that fits no layer changes nothing (notice recompute_matches_no_layer)"),
    ("R38", "recomputing core_attn is pointless with fused attention (notice core_attn_recompute)"),
    (
        "R64",
        "layernorm recompute beside a captured router may be switched off (notice pre_mlp_layernorm_recompute_disabled)",
    ),
];

/// The table as `mbperf rules` prints it.
pub fn print() -> String {
    let mut text = String::from("How a command line is read:\n");
    for (id, what) in COERCIONS {
        let _ = writeln!(text, "  {id}  {what}");
    }
    text.push_str("\nWhat is refused (exit 2), in this order:\n");
    for rule in rules() {
        let _ = writeln!(text, "  {}  {}\n       {}", rule.id, rule.wrong, rule.remedy);
    }
    text
}
