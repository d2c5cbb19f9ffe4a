//! How the patterns of layers and the pipeline split follow a changed number of layers or stages.

use super::Notice;
use crate::args::Args;
use crate::keys::short;
use crate::recipe::MAX_LAYERS;
use crate::rules::Values;
use serde_json::{Value, json};
use std::collections::BTreeSet;

/// Patterns with one entry a layer.
const PER_LAYER: [&str; 2] = ["model.moe_layer_freq", "model.linear_attention_freq"];
/// How the recipe splits its own number of layers over pipeline stages.
const SPLITS: [&str; 3] = [
    "model.pipeline_model_parallel_layout",
    "model.num_layers_in_first_pipeline_stage",
    "model.num_layers_in_last_pipeline_stage",
];

/// Applies `--first_k_dense_replace`, and fits the recipe's patterns and pipeline split to another number of
/// layers or stages: patterns are cut or go on with their last entry, a split that no longer fits is dropped.
pub fn adapt(
    args: &Args,
    values: &mut Values,
    explicit: &BTreeSet<String>,
    before: Option<i64>,
    notices: &mut Vec<Notice>,
) {
    let Some(n) = values
        .get("model.num_layers")
        .as_u64()
        .filter(|n| (1..=MAX_LAYERS).contains(n))
        .and_then(|n| usize::try_from(n).ok())
    else {
        return; // a rule refuses it
    };
    let resized =
        args.general.num_layers.is_some_and(|n| Some(n) != before) || explicit.contains("model.num_layers");
    if resized {
        for key in PER_LAYER {
            let fitted =
                values.get(key).as_array().filter(|a| a.len() != n && !explicit.contains(key)).map(|a| {
                    let last = a.last().cloned().unwrap_or(json!(1));
                    a.iter().cloned().chain(std::iter::repeat(last)).take(n).collect::<Vec<Value>>()
                });
            if let Some(list) = fitted {
                values.set(key, list);
            }
        }
        let pattern = values.text("model.hybrid_override_pattern").map(str::to_owned);
        if let Some(p) =
            pattern.filter(|p| p.chars().count() > n && !explicit.contains("model.hybrid_override_pattern"))
        {
            let cut: String = p.chars().take(n).collect();
            notices.push(Notice::new(
                "layer_pattern_cut",
                format!("the hybrid pattern is cut to its first {n} layers: {}", short(&cut)),
            ));
            values.set("model.hybrid_override_pattern", cut);
        }
    }
    let restaged = args.parallelism.pipeline_model_parallel_size.is_some()
        || explicit.contains("model.pipeline_model_parallel_size")
        || args.parallelism.virtual_pipeline_model_parallel_size.is_some()
        || explicit.contains("model.virtual_pipeline_model_parallel_size");
    if resized || restaged {
        let own = |key: &str| {
            explicit.contains(key)
                || (key == SPLITS[0] && args.general.pipeline_model_parallel_layout.is_some())
        };
        for key in SPLITS.into_iter().filter(|k| !own(k)) {
            if values.is_set(key) {
                let text = format!(
                    "{key} {} is the recipe's for its own layers and stages: an even split is used",
                    short(&values.get(key).to_string())
                );
                notices.push(Notice::new("pipeline_split_dropped", text));
                values.set(key, Value::Null);
            }
        }
    }
    // Without multi-token prediction its place in the recipe's layout stays empty.
    let layout = values.text(SPLITS[0]).filter(|l| l.contains('m') && !l.contains("m*")).map(str::to_owned);
    if let Some(layout) = layout
        && explicit.contains("model.mtp_num_layers")
        && !explicit.contains(SPLITS[0])
        && args.general.pipeline_model_parallel_layout.is_none()
        && values.int("model.mtp_num_layers").unwrap_or(0) == 0
    {
        values.set(SPLITS[0], layout.replace('m', ""));
    }
    if let Some(k) =
        args.general.first_k_dense_replace.and_then(|k| usize::try_from(k).ok()).filter(|k| *k < n)
    {
        values.set("model.moe_layer_freq", [vec![0; k], vec![1; n - k]].concat());
    }
}
