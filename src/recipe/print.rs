//! `mbperf recipes list` and `mbperf recipes show`.

use std::io::{self, Write};

use serde_json::{Value, json};

use super::{
    Catalogue, Parameters, Recipe, RecipeError, Values, graphable, issue_meaning, layer_kinds, parameters,
    uncounted,
};
use crate::keys::nearest;
use crate::workloads::share::{RankShare, ShareInput};

/// Writes one line per recipe whose name, family, GPU, dtype, task or variant contains `filter`.
/// With `as_json`, a JSON array of objects. Where no recipe does, nothing is written and the answer is `false`.
///
/// # Errors
/// Only what the writer reports.
pub fn print_list(
    catalogue: &Catalogue,
    filter: Option<&str>,
    as_json: bool,
    out: &mut dyn Write,
) -> io::Result<bool> {
    let filter = filter.unwrap_or("").to_lowercase();
    let matches = |r: &&Recipe| {
        let dotless = [&r.family, &r.function, &r.gpu, &r.dtype, &r.task];
        dotless.iter().any(|word| word.contains(&filter))
            || r.variant.as_ref().is_some_and(|v| v.contains(&filter))
    };
    let recipes: Vec<&Recipe> = catalogue.recipes().iter().filter(matches).collect();
    if recipes.is_empty() {
        return Ok(false);
    }
    if as_json {
        let rows: Vec<Value> = recipes.iter().map(|r| as_object(r)).collect();
        writeln!(out, "{}", Value::Array(rows))?;
        return Ok(true);
    }
    let header = ["FAMILY", "MODEL", "GPU", "DTYPE", "TASK", "GPUS", "VARIANT", "GRAPH"].map(str::to_owned);
    let mut rows = vec![header];
    rows.extend(recipes.iter().map(|r| {
        let default = if r.is_default { "" } else { "  (by -ng)" };
        let variant = r.variant.clone().unwrap_or_else(|| "-".to_owned());
        let [family, model, gpu, dtype, task] =
            [&r.family, &r.model, &r.gpu, &r.dtype, &r.task].map(String::clone);
        [family, model, gpu, dtype, task, r.num_gpus.to_string(), variant, graph(r) + default]
    }));
    write_table(&rows, out)?;
    if recipes.iter().any(|r| !r.is_default) {
        writeln!(out, "(by -ng): taken only where -ng gives this number of GPUs")?;
    }
    writeln!(out, "{} of {} recipes", recipes.len(), catalogue.recipes().len())?;
    Ok(true)
}

/// Columns padded to their widest cell, two spaces between.
fn write_table<const N: usize>(rows: &[[String; N]], out: &mut dyn Write) -> io::Result<()> {
    let width = |c: usize| rows.iter().map(|r| r[c].len()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..N).map(width).collect();
    for row in rows {
        let line: Vec<String> = row.iter().zip(&widths).map(|(cell, w)| format!("{cell:<w$}")).collect();
        writeln!(out, "{}", line.join("  ").trim_end())?;
    }
    Ok(())
}

/// `transformer_engine attn+mlp`, `none`.
fn graph(recipe: &Recipe) -> String {
    let word = |key: &str| recipe.values.get(key).and_then(Value::as_str).unwrap_or("none").to_owned();
    let scope: Vec<&str> = match recipe.values.get("model.cuda_graph_scope") {
        Some(Value::Array(names)) => names.iter().filter_map(Value::as_str).collect(),
        _ => Vec::new(),
    };
    let implementation = word("model.cuda_graph_impl");
    if scope.is_empty() { implementation } else { format!("{implementation} {}", scope.join("+")) }
}

fn as_object(r: &Recipe) -> Value {
    json!({
        "family": r.family, "model": r.model, "gpu": r.gpu, "dtype": r.dtype, "task": r.task,
        "variant": r.variant, "num_gpus": r.num_gpus, "default": r.is_default, "function": r.function,
        "alias_of": r.alias_of, "kind": r.kind, "traits": r.traits, "issues": r.issues,
        "values": r.values, "env": r.env,
    })
}

/// Writes a model (architecture and its recipes) or, by upstream's function name, one recipe (settings).
///
/// # Errors
/// [`ShowError::Unknown`] with the nearest name; what the writer reports.
pub fn print_show(catalogue: &Catalogue, name: &str, out: &mut dyn Write) -> Result<(), ShowError> {
    let name = name.to_lowercase();
    if let Some(model) = catalogue.models().iter().find(|m| m.model == name) {
        writeln!(out, "{} {}: {}", model.family, model.model, model.kind)?;
        if !model.traits.is_empty() {
            writeln!(out, "  has {}", model.traits.join(", "))?;
        }
        if let Some([total, active]) = model.params_b {
            writeln!(out, "  {total} billion parameters, {active} active")?;
        }
        write_counts(&model.architecture, out)?;
        writeln!(out, "  from {}", model.source.display())?;
        for doubt in &model.uncertain {
            writeln!(out, "  uncertain: {doubt}")?;
        }
        writeln!(out, "\narchitecture")?;
        write_values(model.architecture.iter(), out)?;
        writeln!(out, "\nrecipes")?;
        let header = ["  NAME", "GRAPH", "SHARE OF ONE GPU (first pipeline stage)"].map(str::to_owned);
        let mut rows = vec![header];
        let of_model = |r: &&Recipe| r.family == model.family && r.model == model.model;
        for r in catalogue.recipes().iter().filter(of_model) {
            let default = if r.is_default { "" } else { "  (by -ng)" };
            rows.push([format!("  {}", r.function), graph(r) + default, share_in_short(r)]);
        }
        write_table(&rows, out)?;
        return Ok(());
    }
    let Some(recipe) = catalogue.recipes().iter().find(|r| r.function == name) else {
        let models = catalogue.models().iter().map(|m| m.model.as_str());
        let functions = catalogue.recipes().iter().map(|r| r.function.as_str());
        return Err(ShowError::Unknown { nearest: nearest(&name, models.chain(functions)), name });
    };
    show_recipe(catalogue, recipe, out)
}

fn show_recipe(catalogue: &Catalogue, recipe: &Recipe, out: &mut dyn Write) -> Result<(), ShowError> {
    writeln!(out, "{}", recipe.function)?;
    if let Some(target) = &recipe.alias_of {
        writeln!(out, "  another name for {target}")?;
    }
    for code in &recipe.issues {
        writeln!(out, "  note: {}", issue_meaning(code).unwrap_or(code))?;
    }
    let model = catalogue.models().iter().find(|m| m.family == recipe.family && m.model == recipe.model);
    let inherited =
        |key: &String, value: &Value| model.is_some_and(|m| m.architecture.get(key) == Some(value));
    writeln!(out, "\narchitecture")?;
    write_values(recipe.values.iter().filter(|(k, v)| inherited(k, v)), out)?;
    writeln!(out, "\nsettings")?;
    write_values(recipe.values.iter().filter(|(k, v)| !inherited(k, v)), out)?;
    writeln!(out, "\nsize")?;
    write_counts(&recipe.values, out)?;
    show_share(recipe, out)?;
    writeln!(out, "\nenvironment (upstream's)")?;
    for (name, value) in &recipe.env {
        writeln!(out, "  {name}={value}")?;
    }
    Ok(())
}

/// Parameters as counted from the architecture, and how many layers each scope can capture.
fn write_counts(values: &Values, out: &mut dyn Write) -> io::Result<()> {
    match parameters(values) {
        Some(Parameters { total, active }) => {
            let billions = |n: u64| n as f64 / 1e9;
            writeln!(
                out,
                "  counted: {:.2} billion parameters, {:.2} active",
                billions(total),
                billions(active)
            )?;
        }
        None => writeln!(out, "  parameters are not counted: the layers cannot be told")?,
    }
    let left_out = uncounted(values);
    if !left_out.is_empty() {
        writeln!(out, "  not counted: {}", left_out.join("; "))?;
    }
    if let Ok(kinds) = layer_kinds(values) {
        let scopes = graphable(&kinds).into_iter().map(|(scope, layers)| format!("{scope} {layers}"));
        writeln!(out, "  graphable layers by scope: {}", scopes.collect::<Vec<_>>().join(", "))?;
    }
    Ok(())
}

/// What rank 0 of the first pipeline stage holds, or why the layout is impossible.
fn share_of(recipe: &Recipe) -> Result<RankShare, String> {
    let input = ShareInput::of_values(&recipe.values, recipe.num_gpus).map_err(|e| e.to_string())?;
    RankShare::from_input(&input).map_err(|e| e.to_string())
}

/// `14 layers, 24 x 8192 tokens`: micro-batches of a step.
fn share_in_short(recipe: &Recipe) -> String {
    match share_of(recipe) {
        Ok(share) => {
            let experts =
                if share.experts > 0 { format!(", {} experts", share.experts) } else { String::new() };
            format!(
                "{} layers{experts}, {} x {} tokens",
                share.layers.len(),
                share.num_microbatches,
                share.tokens
            )
        }
        // Why: its own `recipes show`.
        Err(_) => "impossible as it stands".to_owned(),
    }
}

fn show_share(recipe: &Recipe, out: &mut dyn Write) -> io::Result<()> {
    writeln!(out, "\nshare of one GPU (first pipeline stage)")?;
    let share = match share_of(recipe) {
        Ok(share) => share,
        Err(reason) => return writeln!(out, "  impossible: {reason}"),
    };
    let mut ends = Vec::new();
    if share.has_embedding {
        ends.push("embedding");
    }
    if share.has_loss {
        ends.push("loss");
    }
    writeln!(out, "  layers {}, {}", share.layers.len(), ends.join(" and "))?;
    writeln!(out, "  heads {}, key-value heads {}, MLP width {}", share.heads, share.kv_heads, share.ffn)?;
    writeln!(out, "  vocabulary rows {}", share.vocab)?;
    if share.experts > 0 {
        writeln!(out, "  experts {} of width {}", share.experts, share.expert_ffn)?;
    }
    if share.mamba_heads > 0 {
        writeln!(out, "  Mamba heads {} in {} groups", share.mamba_heads, share.mamba_groups)?;
    }
    if share.delta_key_heads > 0 {
        let (keys, values) = (share.delta_key_heads, share.delta_value_heads);
        writeln!(out, "  delta net: key heads {keys}, value heads {values}")?;
    }
    let batches = share.num_microbatches;
    writeln!(out, "  {} tokens a micro-batch, {batches} micro-batches a step, dp {}", share.tokens, share.dp)
}

/// One `key = value` a line; keys that are null are left out.
fn write_values<'a>(
    values: impl Iterator<Item = (&'a String, &'a Value)>,
    out: &mut dyn Write,
) -> io::Result<()> {
    for (key, value) in values.filter(|(_, v)| !v.is_null()) {
        writeln!(out, "  {key} = {value}")?;
    }
    Ok(())
}

/// Why nothing was shown.
#[derive(Debug, thiserror::Error)]
pub enum ShowError {
    #[error(
        "no model or recipe is called `{}`{}; `mbperf recipes list` names them",
        crate::keys::short(.name),
        super::suggest(.nearest)
    )]
    Unknown { name: String, nearest: Option<String> },
    #[error("cannot write: {0}")]
    Write(#[from] io::Error),
    #[error(transparent)]
    Recipe(#[from] RecipeError),
}
