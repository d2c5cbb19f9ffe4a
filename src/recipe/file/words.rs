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

/// Characters of a name: some of them make a file's name, which has 255 bytes at most.
const LONGEST_NAME: usize = 64;

/// Words that choose a recipe must be such as can be asked for.
pub(super) fn check(path: &Path, file: &ModelFile) -> Result<(), RecipeError> {
    let one_of = |at: String, word: &str, known: &[&str]| match known.contains(&word) {
        true => Ok(()),
        false => {
            let hint = suggest(&keys::nearest(word, known.iter().copied()));
            let what = format!("`{}` is none of {}{hint}", keys::short(word), known.join(", "));
            Err(malformed(path, &at, &what))
        }
    };
    // Names are asked for in lower case, name the files of results and are printed as they are.
    let named = |at: String, word: &str| {
        let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "_.-".contains(c);
        match (1..=LONGEST_NAME).contains(&word.len()) && word.chars().all(plain) && !word.starts_with('.') {
            true => Ok(()),
            false => {
                let what = format!(
                    "`{}` must be a name in lower case: up to {LONGEST_NAME} of a-z, 0-9, `_`, `.` and `-`, the first no `.`",
                    keys::short(word)
                );
                Err(malformed(path, &at, &what))
            }
        }
    };
    named("family".into(), &file.family)?;
    named("model".into(), &file.model)?;
    // Both are printed in tables.
    for (at, word) in file
        .about
        .kind
        .iter()
        .map(|k| ("about.kind", k))
        .chain(file.about.traits.iter().map(|t| ("about.traits", t)))
    {
        named(at.into(), word)?;
    }
    for text in file.about.hf_model_id.iter().chain(&file.about.uncertain) {
        if text.chars().any(char::is_control) {
            let what = format!("`{}` has characters that cannot be printed", keys::short(text));
            return Err(malformed(path, "about", &what));
        }
    }
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
            named(format!("recipes[{i}].variant"), variant)?;
        }
    }
    Ok(())
}
