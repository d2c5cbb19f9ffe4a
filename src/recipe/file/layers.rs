//! Layers of settings, put on one after the other: the last one to state a key wins.

use super::strict::Settings;
use super::{Entry, ModelFile, Source, When, malformed};
use crate::keys;
use crate::recipe::{RecipeError, Values};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;

/// Environment variables stand among the settings as `env.NAME`.
const ENV: &str = "env.";

/// Values and environment while layers are put on.
#[derive(Debug, Default)]
pub(super) struct Layers {
    pub values: Values,
    pub env: BTreeMap<String, String>,
}

impl Layers {
    /// Puts one layer on: `prefix` + each key. `at` is the layer's place in the file, for errors.
    pub fn put(&mut self, file: &Path, at: &str, prefix: &str, set: &Settings) -> Result<(), RecipeError> {
        let mut names = BTreeMap::new();
        for (key, value) in &set.0 {
            let wrong = |reason: &str| malformed(file, &format!("{at}.{key}"), reason);
            if let (Some(variable), "") = (key.strip_prefix(ENV), prefix) {
                match value {
                    Value::Null => self.env.remove(variable),
                    Value::String(s) => self.env.insert(variable.to_owned(), s.clone()),
                    Value::Number(n) => self.env.insert(variable.to_owned(), n.to_string()),
                    _ => return Err(wrong("an environment variable is text, a number, or null to unset it")),
                };
                continue;
            }
            let row = keys::find(&format!("{prefix}{key}")).map_err(|e| wrong(&e.to_string()))?;
            if let Some(other) = names.insert(row.name, key) {
                return Err(wrong(&format!("it is another spelling of `{other}`, which is stated too")));
            }
            let value = keys::canonical_value(row, value).map_err(|e| wrong(&e.to_string()))?;
            if let Some(what) = keys::out_of_range(row.name, &value) {
                return Err(wrong(&what));
            }
            self.values.insert(row.name.to_owned(), value);
        }
        Ok(())
    }

    pub fn put_when(&mut self, file: &Path, whens: &[When], entry: &Entry) -> Result<(), RecipeError> {
        for (i, when) in whens.iter().enumerate() {
            if entry.meets(when) {
                self.put(file, &format!("when[{i}].set"), "", &when.set)?;
            }
        }
        Ok(())
    }

    /// A user's file that names one of the two sequence lengths means both, as on the command line. Built-in recipes keep
    /// theirs as upstream has them, unlike ones too.
    pub fn one_length(&mut self, file: &ModelFile, entry: &Entry) {
        let architecture = file.architecture.as_ref().is_some_and(|a| a.0.contains_key("seq_length"));
        let whens = file.when.iter().filter(|w| entry.meets(w)).map(|w| &w.set);
        let sets: Vec<&Settings> = [&file.settings, &entry.set].into_iter().chain(whens).collect();
        let states = |key: &str| sets.iter().any(|s| s.0.contains_key(key));
        let (model, data) = ("model.seq_length", "dataset.seq_length");
        let (from, to) = match (architecture || states(model), states(data)) {
            (true, false) => (model, data),
            (false, true) => (data, model),
            _ => return,
        };
        if let Some(length) = self.values.get(from).cloned() {
            self.values.insert(to.to_owned(), length);
        }
    }

    pub fn put_file(&mut self, source: &Source, entry: &Entry) -> Result<(), RecipeError> {
        if let Some(base) = &source.base {
            self.put_file(base, entry)?;
        }
        self.put(&source.path, "settings", "", &source.file.settings)?;
        self.put_when(&source.path, &source.file.when, entry)
    }
}
