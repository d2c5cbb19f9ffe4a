//! Answers without a run: the recipes that a command line fits, and what would be run.

use super::plan;
use crate::args::{Args, Format};
use crate::dryrun;
use crate::overrides::{self, Resolved};
use crate::recipe::Catalogue;
use std::io::Write;

/// `--list_config_variants`: of the recipes that `-m`, `-mr`, `-g`, `-c` and `--task` leave.
pub(super) fn list_variants(catalogue: &Catalogue, args: &Args) -> anyhow::Result<u8> {
    let asked = overrides::selector(args);
    // Names the first of the options that fits nothing; a group may have recipes with a variant only.
    let variants = catalogue.variants(&asked)?;
    let mut text = String::new();
    for (variant, functions) in variants {
        let name = variant.unwrap_or_else(|| "(none: leave -cv out)".to_owned());
        text += &format!("{name:<24}{}\n", functions.join(", "));
    }
    match std::io::stdout().lock().write_all(text.as_bytes()) {
        Err(e) if e.kind() != std::io::ErrorKind::BrokenPipe => Err(e.into()),
        _ => Ok(0),
    }
}

/// `--dryrun`: the effective configuration and its program, as text or as one JSON object.
pub(super) fn dry_run(resolved: &Resolved, args: &Args) -> anyhow::Result<u8> {
    let cfg = &resolved.config;
    let plan = if cfg.not_built.is_empty() { Some(plan(cfg, false, args.mbperf.comm_model)?) } else { None };
    let mut out = std::io::stdout().lock();
    if matches!(args.mbperf.format, Format::Json) {
        let mut head = overrides::dryrun_head(resolved);
        head.insert("config".into(), serde_json::to_value(cfg)?);
        if let Some(plan) = &plan {
            head.insert("program".into(), dryrun::describe(plan, cfg));
        }
        writeln!(out, "{}", serde_json::to_string_pretty(&head)?)?;
        return Ok(0);
    }
    writeln!(out, "{}", dryrun::heading(cfg, &resolved.recipe.function))?;
    match &plan {
        Some(plan) => write!(out, "{}", dryrun::text(plan, &cfg.identity.gpu))?,
        None => writeln!(out, "No program: not built yet: {}", cfg.not_built.join("; "))?,
    }
    Ok(0)
}
