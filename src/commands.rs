//! Subcommands that only print.

use crate::args::{Format, RecipesCommand};
use crate::recipe::{Catalogue, print_list, print_show};
use crate::rules;
use std::io::Write;

/// `mbperf recipes list|show`, written to `out`.
///
/// # Errors
/// Recipes that do not load, no recipe of that name, or an output that cannot be written.
pub fn recipes(command: &RecipesCommand, out: &mut dyn Write) -> anyhow::Result<()> {
    match command {
        RecipesCommand::List { filter, recipes_dir, format } => {
            let catalogue = Catalogue::load(recipes_dir.as_deref())?;
            print_list(&catalogue, filter.as_deref(), *format == Format::Json, out)?;
        }
        RecipesCommand::Show { name, recipes_dir } => {
            let catalogue = Catalogue::load(recipes_dir.as_deref())?;
            print_show(&catalogue, name, out)?;
        }
    }
    Ok(())
}

/// `mbperf rules`: the table in the code, written to `out`.
///
/// # Errors
/// An output that cannot be written.
pub fn rules(out: &mut dyn Write) -> anyhow::Result<()> {
    Ok(out.write_all(rules::print().as_bytes())?)
}
