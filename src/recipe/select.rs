//! The choice of a recipe: family, model, GPU, dtype, task, variant, then GPU count.

use std::collections::{BTreeMap, BTreeSet};

use super::{Catalogue, Recipe, RecipeError};
use crate::keys::{nearest, short};

/// What was asked for on the command line.
#[derive(Debug, Clone, PartialEq)]
pub struct Selector {
    /// `-m`; case is ignored.
    pub family: String,
    /// `-mr`; case is ignored.
    pub recipe: String,
    /// `-g`
    pub gpu: String,
    /// `-c`
    pub dtype: String,
    /// `--task`
    pub task: String,
    /// `-cv`; none means a recipe without a variant.
    pub variant: Option<String>,
    /// `-ng`
    pub num_gpus: Option<usize>,
}

/// A level of the choice: the flag, what was asked, and how a recipe answers.
type Level<'a> = (&'static str, &'a str, fn(&Recipe) -> &str);

/// `-c` has no fp8_ds: such a dtype is asked for as a variant.
fn by_variant(recipe: &Recipe) -> bool {
    recipe.issues.iter().any(|i| i == "dtype_not_selectable_on_command_line")
}

impl Catalogue {
    /// The recipe with the asked GPU count, or else the group's default (which then runs at the asked count).
    ///
    /// # Errors
    /// [`RecipeError::NotFound`] naming the first level with no match and what there is at that level.
    pub fn select(&self, ask: &Selector) -> Result<Recipe, RecipeError> {
        let (family, model) = (ask.family.to_lowercase(), ask.recipe.to_lowercase());
        let variant = ask.variant.as_deref().map(str::to_lowercase).unwrap_or_default();
        let (dtype, variant) =
            match self.recipes().iter().any(|r| r.model == model && r.dtype == variant && by_variant(r)) {
                true => (variant.as_str(), ""),
                false => (ask.dtype.as_str(), variant.as_str()),
            };
        let levels: [Level; 6] = [
            ("-m", &family, |r| &r.family),
            ("-mr", &model, |r| &r.model),
            ("-g", &ask.gpu, |r| &r.gpu),
            ("-c", dtype, |r| &r.dtype),
            ("--task", &ask.task, |r| &r.task),
            ("-cv", variant, |r| r.variant.as_deref().unwrap_or("")),
        ];
        let left = self.narrow(&levels)?;
        let exact = |alias: bool| {
            let count = |r: &&&Recipe| Some(r.num_gpus) == ask.num_gpus && r.alias_of.is_some() == alias;
            left.iter().find(count).copied()
        };
        let default = || left.iter().find(|r| r.is_default).or(left.first()).copied();
        exact(false).or_else(|| exact(true)).or_else(default).cloned().ok_or_else(|| {
            // Unreachable: every level kept at least one recipe. Said as an error all the same.
            self.not_found(&levels[..5], levels[5], &left)
        })
    }

    /// Variants (`None`: a recipe without one) of what is asked for, its own `-cv` aside, each with its recipes.
    ///
    /// # Errors
    /// [`RecipeError::NotFound`] as [`Catalogue::select`].
    pub fn variants(&self, ask: &Selector) -> Result<BTreeMap<Option<String>, Vec<String>>, RecipeError> {
        let (family, model) = (ask.family.to_lowercase(), ask.recipe.to_lowercase());
        let left = self.narrow(&[
            ("-m", &family, |r| &r.family),
            ("-mr", &model, |r| &r.model),
            ("-g", &ask.gpu, |r| &r.gpu),
            ("-c", &ask.dtype, |r| &r.dtype),
            ("--task", &ask.task, |r| &r.task),
        ])?;
        let mut variants: BTreeMap<Option<String>, Vec<String>> = BTreeMap::new();
        for r in left {
            variants.entry(r.variant.clone()).or_default().push(r.function.clone());
        }
        // Whatever `-c` says.
        let asked = |r: &&Recipe| {
            r.family == family && r.model == model && r.gpu == ask.gpu && r.task == ask.task && by_variant(r)
        };
        for r in self.recipes().iter().filter(asked) {
            variants.entry(Some(r.dtype.clone())).or_default().push(r.function.clone());
        }
        Ok(variants)
    }

    /// The recipes left after each level.
    fn narrow(&self, levels: &[Level]) -> Result<Vec<&Recipe>, RecipeError> {
        let mut left: Vec<&Recipe> = self.recipes().iter().collect();
        for (depth, (flag, asked, of)) in levels.iter().enumerate() {
            let matching: Vec<&Recipe> = left.iter().copied().filter(|r| of(r) == *asked).collect();
            if matching.is_empty() {
                return Err(self.not_found(&levels[..depth], (flag, asked, *of), &left));
            }
            left = matching;
        }
        Ok(left)
    }

    fn not_found(&self, chosen: &[Level], (flag, asked, of): Level, left: &[&Recipe]) -> RecipeError {
        let shown = |word: &str| match word {
            "" if asked.is_empty() => "(none)".to_owned(),
            "" => format!("one without {flag}"),
            _ => short(word),
        };
        let available: BTreeSet<&str> = left.iter().map(|r| of(r)).collect();
        let mut context = String::new();
        for (i, (flag, word, _)) in chosen.iter().enumerate() {
            context.push_str(if i == 0 { " for " } else { " " });
            context.push_str(&format!("{flag} {}", short(word)));
        }
        // A model asked for under the wrong family is the likeliest slip: look over all families.
        let elsewhere = (flag == "-mr")
            .then(|| self.models().iter().find(|m| m.model == asked))
            .flatten()
            .map(|m| format!("-m {} -mr {}", m.family, m.model));
        RecipeError::NotFound {
            flag,
            asked: shown(asked),
            context,
            suggestion: elsewhere.or_else(|| nearest(asked, available.iter().copied())),
            available: available.into_iter().map(shown).collect(),
        }
    }
}
