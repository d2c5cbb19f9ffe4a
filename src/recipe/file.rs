//! Recipe files: the schema, layering, and what is wrong with a file.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::{Path, PathBuf};

use include_dir::{Dir, include_dir};
use serde::Deserialize;

use super::{Catalogue, ISSUES, ModelInfo, Recipe, RecipeError, Values};
use crate::keys;

mod layers;
mod strict;
pub(super) mod words;

use layers::Layers;
use strict::Settings;

static EMBEDDED: Dir = include_dir!("$CARGO_MANIFEST_DIR/recipes");
/// Settings of all models, in the embedded directory.
const DEFAULTS: &str = "defaults.json";

/// `defaults.json`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Defaults {
    architecture: Settings,
    settings: Settings,
    /// Settings that only models with experts have.
    experts: Settings,
    #[serde(default)]
    when: Vec<When>,
}

/// `<family>/<model>.json`.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct ModelFile {
    family: String,
    model: String,
    #[serde(default)]
    about: About,
    /// `model.*` keys without the prefix. Absent: the file extends a built-in model.
    architecture: Option<Settings>,
    #[serde(default)]
    settings: Settings,
    #[serde(default)]
    when: Vec<When>,
    recipes: Vec<Entry>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct About {
    kind: Option<String>,
    traits: Vec<String>,
    hf_model_id: Option<String>,
    params_b: Option<[f64; 2]>,
    uncertain: Vec<String>,
}

/// Settings of all recipes with one of these GPUs, dtypes, tasks and variants; an absent condition holds always.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct When {
    gpu: Option<OneOrMany>,
    dtype: Option<OneOrMany>,
    task: Option<OneOrMany>,
    variant: Option<OneOrMany>,
    gpus: Option<Vec<usize>>,
    set: Settings,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(untagged)]
enum OneOrMany {
    One(String),
    Many(Vec<String>),
}

impl OneOrMany {
    fn words(&self) -> &[String] {
        match self {
            OneOrMany::One(w) => std::slice::from_ref(w),
            OneOrMany::Many(ws) => ws,
        }
    }

    fn holds(&self, word: &str) -> bool {
        match self {
            OneOrMany::One(w) => w == word,
            OneOrMany::Many(ws) => ws.iter().any(|w| w == word),
        }
    }
}

/// One recipe of a file.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    gpu: String,
    dtype: String,
    #[serde(default = "pretrain")]
    task: String,
    gpus: usize,
    variant: Option<String>,
    /// Needed only where recipes differ in nothing but the GPU count.
    #[serde(default)]
    default: bool,
    /// Function whose settings these are; then nothing else is set.
    alias: Option<String>,
    #[serde(default)]
    issues: Vec<String>,
    #[serde(default)]
    set: Settings,
}

fn pretrain() -> String {
    "pretrain".to_owned()
}

impl Entry {
    /// Upstream's name: `<model>_<task>_<gpus>gpu_<gpu>_<dtype>[_<variant>]_config`.
    fn function(&self, model: &str) -> String {
        let dtype = self.dtype.replace('_', "");
        let variant = self.variant.as_ref().map(|v| format!("_{v}")).unwrap_or_default();
        format!("{model}_{}_{}gpu_{}_{dtype}{variant}_config", self.task, self.gpus, self.gpu)
    }

    fn meets(&self, when: &When) -> bool {
        let holds =
            |condition: &Option<OneOrMany>, word: &str| condition.as_ref().is_none_or(|c| c.holds(word));
        holds(&when.gpu, &self.gpu)
            && holds(&when.dtype, &self.dtype)
            && holds(&when.task, &self.task)
            && holds(&when.variant, self.variant.as_deref().unwrap_or(""))
            && when.gpus.as_ref().is_none_or(|g| g.contains(&self.gpus))
    }
}

/// A file with its path, and the file it extends.
#[derive(Debug, Clone)]
struct Source {
    path: PathBuf,
    file: ModelFile,
    base: Option<Box<Source>>,
    /// From `--recipes_dir`.
    own: bool,
}

pub(super) fn load(recipes_dir: Option<&Path>) -> Result<Catalogue, RecipeError> {
    let mut defaults = None;
    let mut sources = BTreeMap::new();
    for (path, text) in embedded(&EMBEDDED) {
        if path == Path::new(DEFAULTS) {
            defaults = Some((path.to_owned(), parse::<Defaults>(path, text)?));
        } else {
            let file: ModelFile = parse(path, text)?;
            words::check(path, &file)?;
            sources.insert(name(&file), Source { path: path.to_owned(), file, base: None, own: false });
        }
    }
    let defaults = defaults.ok_or_else(|| malformed(Path::new(DEFAULTS), ".", "is not in the binary"))?;
    if let Some(dir) = recipes_dir {
        for path in json_files(dir)? {
            let text =
                read(&path).map_err(|reason| RecipeError::Unreadable { path: path.clone(), reason })?;
            let file: ModelFile = parse(&path, &text)?;
            words::check(&path, &file)?;
            let key = name(&file);
            let before = sources.remove(&key);
            if let Some(other) = before.as_ref().and_then(|b| stated_before(b, &file)) {
                return Err(malformed(&path, other.0, &other.1));
            }
            let base = if file.architecture.is_some() { None } else { before.map(Box::new) };
            sources.insert(key, Source { path, file, base, own: true });
        }
    }
    let mut catalogue = Catalogue { models: Vec::new(), recipes: Vec::new() };
    for source in sources.values() {
        let recipes = resolve(&defaults, source)?;
        catalogue.models.push(model_info(&defaults, source, recipes.len())?);
        catalogue.recipes.extend(recipes);
    }
    Ok(catalogue)
}

/// Largest file of recipes, in bytes: the largest built-in one has some 30 KB.
const MAX_FILE: u64 = 16 << 20;

/// The text of a user's file. A sparse file of gigabytes is none.
fn read(path: &Path) -> std::io::Result<String> {
    let mut text = String::new();
    let file = std::fs::File::open(path)?;
    let size = file.metadata()?.len();
    // One byte more than may be: a file can grow after it was looked at.
    file.take(MAX_FILE + 1).read_to_string(&mut text)?;
    match size.max(text.len() as u64) {
        0..=MAX_FILE => Ok(text),
        size => {
            Err(std::io::Error::other(format!("it has {size} bytes, a file of recipes {MAX_FILE} at most")))
        }
    }
}

/// Where a user's other files state what `file` states: neither is meant to win. `before` is what is known of the model.
fn stated_before(before: &Source, file: &ModelFile) -> Option<(&'static str, String)> {
    if !before.own {
        return None;
    }
    let there = before.path.display();
    if file.architecture.is_some() {
        let what = format!(
            "{there} is of {} {} too, and would be left out: make it one file",
            file.family, file.model
        );
        return Some(("architecture", what));
    }
    let functions: Vec<String> = before.file.recipes.iter().map(|e| e.function(&file.model)).collect();
    let twice = file.recipes.iter().map(|e| e.function(&file.model)).find(|f| functions.contains(f));
    match twice {
        Some(function) => Some(("recipes", format!("{function} is stated in {there} too"))),
        None => before.base.as_ref().and_then(|base| stated_before(base, file)),
    }
}

fn name(file: &ModelFile) -> (String, String) {
    (file.family.clone(), file.model.clone())
}

/// The `.json` files of the embedded directory.
fn embedded<'a>(dir: &'a Dir<'a>) -> Vec<(&'a Path, &'a str)> {
    let here = dir.files().filter(|f| f.path().extension().is_some_and(|e| e == "json"));
    let mut files: Vec<_> = here.filter_map(|f| Some((f.path(), f.contents_utf8()?))).collect();
    files.extend(dir.dirs().flat_map(embedded));
    files
}

/// The `.json` files under a user's directory, sorted; its subdirectories one level deep.
fn json_files(dir: &Path) -> Result<Vec<PathBuf>, RecipeError> {
    let list = |dir: &Path| -> Result<Vec<PathBuf>, RecipeError> {
        let unreadable = |reason| RecipeError::Unreadable { path: dir.to_owned(), reason };
        let entries = std::fs::read_dir(dir).map_err(unreadable)?;
        entries.map(|e| e.map(|e| e.path()).map_err(unreadable)).collect()
    };
    let mut files = Vec::new();
    for path in list(dir)? {
        if path.is_dir() {
            files.extend(list(&path)?);
        } else {
            files.push(path);
        }
    }
    files.retain(|p| p.extension().is_some_and(|e| e == "json") && !p.is_dir());
    for path in &files {
        // A link to nothing or to itself; a pipe would be waited for, a device read without end.
        let reason = match path.metadata() {
            Ok(found) if found.is_file() => continue,
            Ok(_) => "it is no plain file".to_owned(),
            Err(e) => format!("{e}: it is a link that leads to no file"),
        };
        return Err(RecipeError::Unreadable { path: path.clone(), reason: std::io::Error::other(reason) });
    }
    if files.is_empty() {
        let reason = std::io::Error::other("there is no .json file, directly or one folder down");
        return Err(RecipeError::Unreadable { path: dir.to_owned(), reason });
    }
    files.sort();
    Ok(files)
}

fn parse<T: for<'de> Deserialize<'de>>(path: &Path, text: &str) -> Result<T, RecipeError> {
    let mut json = serde_json::Deserializer::from_str(text);
    let parsed = serde_path_to_error::deserialize(&mut json)
        .map_err(|e| malformed(path, &e.path().to_string(), &e.inner().to_string()))?;
    json.end().map_err(|e| malformed(path, ".", &e.to_string()))?;
    Ok(parsed)
}

fn malformed(file: &Path, path: &str, reason: &str) -> RecipeError {
    RecipeError::Malformed {
        file: file.to_owned(),
        path: keys::printable(path),
        reason: keys::printable(reason),
    }
}

/// The architecture of a file, or of the one that it extends.
fn architecture(defaults: &(PathBuf, Defaults), source: &Source) -> Result<Values, RecipeError> {
    let Some(own) = &source.file.architecture else {
        return match &source.base {
            Some(base) => architecture(defaults, base),
            None => {
                let what = format!("{} {}", source.file.family, source.file.model);
                Err(malformed(
                    &source.path,
                    "architecture",
                    &format!("{what} is not built in, so it must be stated"),
                ))
            }
        };
    };
    let mut layers = Layers::default();
    layers.put(&defaults.0, "architecture", "model.", &defaults.1.architecture)?;
    layers.put(&source.path, "architecture", "model.", own)?;
    for needed in ["num_layers", "hidden_size", "num_attention_heads", "vocab_size", "seq_length"] {
        if !layers.values.contains_key(&format!("model.{needed}")) {
            return Err(malformed(&source.path, "architecture", &format!("`{needed}` is missing")));
        }
    }
    Ok(layers.values)
}

/// All recipes of a model, sorted by name.
fn resolve(defaults: &(PathBuf, Defaults), source: &Source) -> Result<Vec<Recipe>, RecipeError> {
    let mut recipes: BTreeMap<String, Recipe> = BTreeMap::new();
    if let Some(base) = &source.base {
        recipes.extend(resolve(defaults, base)?.into_iter().map(|r| (r.function.clone(), r)));
    }
    let architecture = architecture(defaults, source)?;
    let about = about(source);
    let mut own = std::collections::BTreeSet::new();
    for (i, entry) in source.file.recipes.iter().enumerate() {
        let at = format!("recipes[{i}]");
        if let Some(code) = entry.issues.iter().find(|c| super::issue_meaning(c).is_none()) {
            let known = keys::nearest(code, ISSUES.iter().map(|(c, _)| *c));
            let reason = format!("unknown issue `{}`{}", keys::short(code), super::suggest(&known));
            return Err(malformed(&source.path, &format!("{at}.issues"), &reason));
        }
        if entry.gpus == 0 {
            return Err(malformed(&source.path, &format!("{at}.gpus"), "must be at least 1"));
        }
        let function = entry.function(&source.file.model);
        if !own.insert(function.clone()) {
            return Err(malformed(&source.path, &at, &format!("{function} is stated twice")));
        }
        let mut layers = Layers { values: architecture.clone(), env: BTreeMap::new() };
        let experts = architecture.get("model.num_moe_experts").is_some_and(|n| !n.is_null());
        layers.put(&defaults.0, "settings", "", &defaults.1.settings)?;
        if experts {
            layers.put(&defaults.0, "experts", "", &defaults.1.experts)?;
        }
        layers.put_when(&defaults.0, &defaults.1.when, entry)?;
        layers.put_file(source, entry)?;
        layers.put(&source.path, &format!("{at}.set"), "", &entry.set)?;
        if source.own {
            layers.one_length(&source.file, entry);
        }
        let recipe = Recipe {
            family: source.file.family.clone(),
            model: source.file.model.clone(),
            gpu: entry.gpu.clone(),
            dtype: entry.dtype.clone(),
            task: entry.task.clone(),
            variant: entry.variant.clone(),
            num_gpus: entry.gpus,
            function: function.clone(),
            alias_of: entry.alias.clone(),
            is_default: entry.default,
            kind: about.kind.clone().unwrap_or_else(|| if experts { "moe" } else { "dense" }.to_owned()),
            traits: about.traits.clone(),
            values: layers.values,
            env: layers.env,
            issues: entry.issues.clone(),
        };
        recipes.insert(function, recipe);
    }
    point_aliases(source, &mut recipes)?;
    mark_defaults(source, &mut recipes)?;
    Ok(recipes.into_values().collect())
}

fn about(source: &Source) -> &About {
    match &source.base {
        Some(base) if source.file.about.kind.is_none() => about(base),
        _ => &source.file.about,
    }
}

/// Gives each alias its target's settings.
fn point_aliases(source: &Source, recipes: &mut BTreeMap<String, Recipe>) -> Result<(), RecipeError> {
    let aliases: Vec<(String, String)> =
        recipes.values().filter_map(|r| Some((r.function.clone(), r.alias_of.clone()?))).collect();
    for (function, target) in aliases {
        let Some(to) = recipes.get(&target).filter(|r| r.alias_of.is_none()).cloned() else {
            return Err(malformed(
                &source.path,
                "recipes",
                &format!("{function}: there is no recipe {}", keys::short(&target)),
            ));
        };
        if let Some(alias) = recipes.get_mut(&function) {
            (alias.values, alias.env) = (to.values, to.env);
        }
    }
    Ok(())
}

/// A recipe alone in its group is the default; among several one must say so.
fn mark_defaults(source: &Source, recipes: &mut BTreeMap<String, Recipe>) -> Result<(), RecipeError> {
    let mut groups: BTreeMap<_, Vec<String>> = BTreeMap::new();
    for r in recipes.values().filter(|r| r.alias_of.is_none()) {
        let group = (r.gpu.clone(), r.dtype.clone(), r.task.clone(), r.variant.clone());
        groups.entry(group).or_default().push(r.function.clone());
    }
    for functions in groups.values() {
        if let [only] = functions.as_slice() {
            if let Some(r) = recipes.get_mut(only) {
                r.is_default = true;
            }
            continue;
        }
        let marked = functions.iter().filter(|f| recipes.get(*f).is_some_and(|r| r.is_default)).count();
        if marked != 1 {
            let reason =
                format!("exactly one of {} must have \"default\": true, {marked} have", functions.join(", "));
            return Err(malformed(&source.path, "recipes", &reason));
        }
    }
    Ok(())
}

fn model_info(
    defaults: &(PathBuf, Defaults),
    source: &Source,
    num_recipes: usize,
) -> Result<ModelInfo, RecipeError> {
    let architecture = architecture(defaults, source)?;
    let about = about(source).clone();
    let experts = architecture.get("model.num_moe_experts").is_some_and(|n| !n.is_null());
    Ok(ModelInfo {
        family: source.file.family.clone(),
        model: source.file.model.clone(),
        kind: about.kind.unwrap_or_else(|| if experts { "moe" } else { "dense" }.to_owned()),
        traits: about.traits,
        hf_model_id: about.hf_model_id,
        params_b: about.params_b,
        uncertain: about.uncertain,
        architecture,
        source: source.path.clone(),
        num_recipes,
    })
}
