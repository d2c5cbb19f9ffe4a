//! Implementation, scope and RNG tracker: what is inferred, dropped or switched on (R06 to R10, R14), and the
//! notices that go with it.

use super::Notice;
use crate::args::{Args, GRAPH_IMPLS, SCOPES, impl_name};
use crate::config::{GraphImpl, Scope};
use crate::rules::{Effective, Values};
use std::collections::BTreeSet;

/// What graphs are made of, coerced.
pub struct Graph {
    pub implementation: GraphImpl,
    pub scope: Vec<Scope>,
    pub te_rng_tracker: bool,
}

const IMPL: &str = "model.cuda_graph_impl";
const SCOPE: &str = "model.cuda_graph_scope";
/// Upstream's older word for no scope: each whole layer.
const FULL: &str = "full";
const TRACKERS: [&str; 2] = ["model.use_te_rng_tracker", "rng.te_rng_tracker"];

/// Decides implementation, scope and tracker from flags, overrides and recipe, and writes them back.
pub fn coerce(
    args: &Args,
    values: &mut Values,
    explicit: &BTreeSet<String>,
    notices: &mut Vec<Notice>,
) -> Graph {
    let perf = &args.performance;
    let named =
        values.text(IMPL).and_then(|n| GRAPH_IMPLS.iter().find(|(name, _)| *name == n)).map(|(_, v)| *v);
    let before = named.unwrap_or(GraphImpl::None);
    let mut implementation = perf.cuda_graph_impl.unwrap_or(before);
    let scope_asked =
        perf.cuda_graph_scope.is_some() || (explicit.contains(SCOPE) && !values.list(SCOPE).is_empty());
    let mut scope: Vec<Scope> = match &perf.cuda_graph_scope {
        Some(list) => list.0.clone(),
        None => values
            .list(SCOPE)
            .iter()
            .filter_map(|n| SCOPES.iter().find(|(name, _)| name == n))
            .map(|(_, s)| *s)
            .collect(),
    };
    let given = scope.len();
    scope.sort_unstable();
    scope.dedup();
    if scope.len() < given {
        let names: Vec<&str> = scope.iter().map(|s| s.name()).collect();
        notices.push(Notice::new(
            "duplicate_scope",
            format!("--cuda_graph_scope: a repeated name is kept once: {}", names.join(",")),
        ));
    }
    let mut switched_on = perf.cuda_graph_impl.is_some_and(|i| i != GraphImpl::None);
    let free = perf.cuda_graph_impl.is_none() && !explicit.contains(IMPL) && before == GraphImpl::None;
    if free && scope_asked {
        implementation = if scope.contains(&Scope::FullIteration) {
            GraphImpl::Local
        } else {
            GraphImpl::TransformerEngine
        };
        switched_on = true;
        let text = format!(
            "--cuda_graph_scope without --cuda_graph_impl, and the recipe has none: {} is taken",
            impl_name(implementation)
        );
        notices.push(Notice::new("impl_inferred", text));
    }
    let tracker_named = TRACKERS.iter().any(|k| explicit.contains(*k));
    let mut tracker = TRACKERS.iter().any(|k| values.on(k));
    if tracker_named {
        // What the user named is in force; named on in one section, it is on in both.
        tracker = TRACKERS.iter().any(|k| explicit.contains(*k) && values.on(k));
    }
    if implementation == GraphImpl::None {
        if scope_asked {
            notices.push(Notice::new(
                "scope_ignored",
                "--cuda_graph_impl none: the scope is dropped, the run is eager",
            ));
        }
        if tracker_named && tracker {
            notices.push(Notice::new(
                "rng_tracker_ignored",
                "implementation none: the RNG tracker is off in spite of the override, the run is eager",
            ));
        }
        scope.clear();
        tracker = false;
    } else if switched_on {
        if tracker_named && !tracker {
            notices.push(Notice::new(
                "rng_tracker_switched_on",
                "graphs need the RNG tracker: it is on in spite of the override",
            ));
        }
        tracker = true;
    } else if !tracker && !tracker_named && !explicit.contains(IMPL) {
        // The recipe itself has graphs on and the tracker off: its oddity, not the user's wish.
        notices.push(Notice::new(
            "rng_tracker_switched_on",
            "the recipe has graphs on and the RNG tracker off: it is switched on",
        ));
        tracker = true;
    }
    values.set(IMPL, impl_name(implementation));
    let mut names: Vec<&str> = scope.iter().map(|s| s.name()).collect();
    let listed = values.list(SCOPE);
    if perf.cuda_graph_scope.is_none() && listed.len() > 1 && listed.contains(&FULL) {
        // R23 refuses it.
        names.push(FULL);
    }
    values.set(SCOPE, names);
    for key in TRACKERS {
        values.set(key, tracker);
    }
    Graph { implementation, scope, te_rng_tracker: tracker }
}

/// Notices that need the judged configuration (section 13 of the rules: R10, R38, R57, R64).
pub fn notices(e: &Effective, notices: &mut Vec<Notice>) {
    if e.whole_layer() {
        let text = "transformer_engine without a scope: each whole layer is captured; --cuda_graph_scope attn is a narrower start";
        notices.push(Notice::new("whole_layer_capture", text));
    }
    if e.te() {
        for scope in e.scope.iter().filter(|s| e.layers_of(**s) == 0) {
            let text = format!("--cuda_graph_scope {}: no layer of {} has this part", scope.name(), e.recipe);
            notices.push(Notice::new("scope_matches_no_layer", text));
        }
    }
    if e.recomputes("core_attn") {
        let text = "recomputing core_attn is pointless: fused attention stores no scores";
        notices.push(Notice::new("core_attn_recompute", text));
    }
    for module in e.recomputed().into_iter().filter(|m| !recomputable(e, m)) {
        let why = if module == "layernorm" {
            "upstream fuses the norms of these layers with the products behind them and recomputes none"
        } else {
            "no layer has this part"
        };
        let text =
            format!("--recompute_modules {module}: nothing of {} is recomputed by it, {why}", e.recipe);
        notices.push(Notice::new("recompute_matches_no_layer", text));
    }
    let kept = e.has(Scope::MoePreprocess)
        && (e.dispatcher() == "alltoall" || e.values.is_set("model.moe_latent_size"))
        && !e.values.on("model.moe_shared_expert_overlap");
    if e.te() && e.recomputes("layernorm") && e.has(Scope::MoeRouter) && !kept {
        let text =
            "layernorm recompute beside a captured router: the norm before the MoE layer is not recomputed";
        notices.push(Notice::new("pre_mlp_layernorm_recompute_disabled", text));
    }
}

/// Some layer of the model has this recomputable module. The rules have seen to those that need a kind of their own.
fn recomputable(e: &Effective, module: &str) -> bool {
    let experts = e.layers_of(Scope::Moe) > 0;
    match module {
        // Upstream has no checkpoint around DeepSeek-V4's core, nor selective ones in a diffusion block.
        "core_attn" => e.layers_of(Scope::Attn) > 0 && !e.shared_kv() && !e.values.is_set("model.diffusion"),
        "mlp" => e.layers_of(Scope::Mlp) > 0 && !e.values.is_set("model.diffusion"),
        "moe" | "moe_act" => experts,
        "shared_experts" => experts && e.shared_expert(),
        "layernorm" => experts || e.values.on("model.multi_latent_attention"),
        // Parts of a gated delta product, which no model here has.
        "gdp_in_proj" | "gdp_qkv" => false,
        _ => true,
    }
}
