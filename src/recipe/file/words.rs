//! Words that choose a recipe.

use super::{ModelFile, malformed};
use crate::keys;
use crate::recipe::{RecipeError, suggest};
use std::path::Path;

/// What `-g`, `-c` and `--task` take, and the dtype that is asked for as a variant (`fp8_ds`): nothing else could ever
/// be chosen.
pub(in crate::recipe) const GPUS: [&str; 7] = ["h100", "b200", "b300", "gb200", "gb300", "vr200", "r100"];
pub(in crate::recipe) const DTYPES: [&str; 6] = ["bf16", "fp8_cs", "fp8_mx", "fp8_sc", "nvfp4", "fp8_ds"];
const TASKS: [&str; 3] = ["pretrain", "sft", "peft"];

/// Words that choose a recipe must be such as can be asked for.
pub(super) fn check(path: &Path, file: &ModelFile) -> Result<(), RecipeError> {
    let one_of = |at: String, word: &str, known: &[&str]| match known.contains(&word) {
        true => Ok(()),
        false => {
            let hint = suggest(&keys::nearest(word, known.iter().copied()));
            Err(malformed(path, &at, &format!("`{word}` is none of {}{hint}", known.join(", "))))
        }
    };
    let lower = |at: String, word: &str| match word.is_empty() || word.to_lowercase() != word {
        true => {
            Err(malformed(path, &at, &format!("`{word}` must be a name in lower case: it is asked for so")))
        }
        false => Ok(()),
    };
    lower("family".into(), &file.family)?;
    lower("model".into(), &file.model)?;
    for (i, when) in file.when.iter().enumerate() {
        let conditions = [
            ("gpu", &when.gpu, &GPUS[..]),
            ("dtype", &when.dtype, &DTYPES[..]),
            ("task", &when.task, &TASKS[..]),
        ];
        for (name, words, known) in conditions {
            for word in words.iter().flat_map(|w| w.words()) {
                one_of(format!("when[{i}].{name}"), word, known)?;
            }
        }
    }
    for (i, entry) in file.recipes.iter().enumerate() {
        one_of(format!("recipes[{i}].gpu"), &entry.gpu, &GPUS)?;
        one_of(format!("recipes[{i}].dtype"), &entry.dtype, &DTYPES)?;
        one_of(format!("recipes[{i}].task"), &entry.task, &TASKS)?;
        if let Some(variant) = &entry.variant {
            lower(format!("recipes[{i}].variant"), variant)?;
        }
    }
    Ok(())
}
