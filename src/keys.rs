//! Every configuration key that a recipe may set or that `key=value` may override: one table.
//!
//! Spellings are those of Megatron-Bridge's configuration (`model.hidden_size`), so that overrides move over
//! unchanged. A key is in this table only if something here reads it or a recipe states it; anything else is
//! an error with a suggestion. Lengths are tokens, batch sizes are sequences, bucket sizes are elements.

mod ranges;
mod table;
mod value;

pub use ranges::{MAX_CAPACITY_FACTOR, MAX_LENGTH, MAX_SIZE, figure, out_of_range};
pub use table::KEYS;
pub use value::{canonical_value, expand_layer_pattern, parse_value};

use thiserror::Error;

/// What a key's value may be.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Kind {
    /// Whole number, negative ones included (a rule judges the range).
    Int,
    Float,
    Bool,
    Str,
    /// Exactly one of these words.
    Enum(&'static [&'static str]),
    StrList,
    IntList,
    /// One number per layer: `1`, `[0, 1, 1]` or `([0]*1+[1]*2)*20`. Resolved to a number or a list.
    LayerPattern,
    /// A group of numbers that only a recipe file can state, with these fields.
    Object(&'static [&'static str]),
}

/// One row of the table.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Key {
    /// Dotted name.
    pub name: &'static str,
    pub kind: Kind,
    /// `null` is a value.
    pub nullable: bool,
    /// One line.
    pub meaning: &'static str,
}

/// Why a key or its value is refused.
#[derive(Debug, Clone, PartialEq, Error)]
pub enum KeyError {
    #[error("unknown configuration key `{key}`{}", suggestion(.nearest))]
    Unknown { key: String, nearest: Option<String> },
    #[error("`{key}` cannot be `{text}`: it takes {expected}{hint}")]
    Value { key: String, text: String, expected: String, hint: String },
    #[error(
        "`{key}={text}` is a sweep over several runs in Hydra and not supported; write a list as `{key}=[{text}]`"
    )]
    Sweep { key: String, text: String },
    #[error(
        "`{key}` is a group of numbers ({fields}) that only a recipe file can set; copy the recipe and use --recipes_dir"
    )]
    Group { key: String, fields: String },
}

fn suggestion(nearest: &Option<String>) -> String {
    nearest.as_ref().map_or_else(
        || "; `mbperf recipes show NAME` lists a recipe's keys".to_owned(),
        |n| format!("; did you mean `{n}`?"),
    )
}

/// Other spellings of the same key in use upstream: (spelling, name in the table).
const ALIASES: &[(&str, &str)] = &[
    ("model.overlap_moe_expert_parallel_comm", "comm_overlap.overlap_moe_expert_parallel_comm"),
    ("model.delay_wgrad_compute", "comm_overlap.delay_wgrad_compute"),
    ("model.tp_comm_overlap", "comm_overlap.tp_comm_overlap"),
    ("model.defer_embedding_wgrad_compute", "comm_overlap.defer_embedding_wgrad_compute"),
    ("comm_overlap.overlap_grad_reduce", "ddp.overlap_grad_reduce"),
    ("comm_overlap.overlap_param_gather", "ddp.overlap_param_gather"),
    ("optimizer.use_distributed_optimizer", "ddp.use_distributed_optimizer"),
    (
        "optimizer.overlap_param_gather_with_optimizer_step",
        "comm_overlap.overlap_param_gather_with_optimizer_step",
    ),
    ("dataset.sequence_length", "dataset.seq_length"),
    ("model.hybrid_layer_pattern", "model.hybrid_override_pattern"),
    ("model.cuda_graph_modules", "model.cuda_graph_scope"),
];

/// The row of a key, or of the key that this spelling stands for.
///
/// # Errors
/// [`KeyError::Unknown`] with the nearest known name, if one is near.
pub fn find(name: &str) -> Result<&'static Key, KeyError> {
    let target = ALIASES.iter().find(|(alias, _)| *alias == name).map_or(name, |(_, target)| target);
    KEYS.iter()
        .find(|k| k.name == target)
        .ok_or_else(|| KeyError::Unknown { key: short(name), nearest: nearest_key(name) })
}

/// What upstream called the implementation of graphs before (R22).
const OLDER: [&str; 2] = ["enable_cuda_graph", "external_cuda_graph"];

/// The nearest known name: by the last part first (`hidden_size` for `model.hidden_size`), then by spelling.
fn nearest_key(name: &str) -> Option<String> {
    if OLDER.contains(&name.rsplit('.').next().unwrap_or(name)) {
        return Some("model.cuda_graph_impl".to_owned());
    }
    if let Some(k) = KEYS.iter().find(|k| k.name.rsplit('.').next() == Some(name)) {
        return Some(k.name.to_owned());
    }
    let last = |name: &str| name.rsplit('.').next().unwrap_or(name).to_lowercase();
    let near = |found: &String| {
        let (a, b) = (last(name), last(found));
        let length = a.chars().count().max(b.chars().count());
        strsim::damerau_levenshtein(&a, &b) * LEAST_ALIKE <= length
    };
    nearest(name, KEYS.iter().map(|k| k.name)).filter(near)
}

/// Of so many letters of a key's last part one may be another: keys of one section begin alike and mean other things.
const LEAST_ALIKE: usize = 3;

/// No name is half as long: a longer word is none that was misspelt, and to compare it takes time.
pub const LONGEST_MISSPELT: usize = 128;
/// Characters of a user's text that a message repeats.
const REPEATED: usize = 100;

/// A user's text as a message repeats it: the beginning of one that is too long, and [`printable`].
pub fn short(text: &str) -> String {
    match text.char_indices().nth(REPEATED) {
        Some((end, _)) => format!("{}... ({} characters)", printable(&text[..end]), text.chars().count()),
        None => printable(text),
    }
}

/// Control characters as they are written in source: a terminal would obey them.
pub fn printable(text: &str) -> String {
    let escape = |c: char| if c.is_control() { c.escape_default().to_string() } else { c.to_string() };
    text.chars().map(escape).collect()
}

/// A message with every word in it that is far too long to be repeated cut short.
pub fn short_words(text: &str) -> String {
    // What `short` left is not cut again.
    let long = |word: &str| word.len() > 2 * REPEATED;
    let cut = |word: &str| {
        let bare = word.trim_end();
        if long(bare) { short(bare) + &word[bare.len()..] } else { word.to_owned() }
    };
    text.split_inclusive(char::is_whitespace).map(cut).collect()
}

/// The candidate whose spelling is nearest to `word`, if any is near enough to be a likely misspelling.
pub fn nearest<'a>(word: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<String> {
    /// Jaro-Winkler similarity under which two names have little in common; strsim's scale is 0 to 1.
    const NEAR: f64 = 0.8;
    if word.len() > LONGEST_MISSPELT {
        return None;
    }
    let word = word.to_lowercase();
    let word = word.as_str();
    candidates
        .into_iter()
        .map(|c| (strsim::jaro_winkler(word, c) + strsim::normalized_damerau_levenshtein(word, c), c))
        .filter(|(_, c)| strsim::jaro_winkler(word, c) >= NEAR)
        // Of equals the first: lists begin with what is most in use.
        .reduce(|best, next| if next.0 > best.0 { next } else { best })
        .map(|(_, c)| c.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_described() {
        let mut seen = std::collections::BTreeSet::new();
        for key in KEYS {
            assert!(seen.insert(key.name), "{} is listed twice", key.name);
            assert!(!key.meaning.is_empty() && !key.meaning.contains('\n'), "{}", key.name);
        }
        for (alias, target) in ALIASES {
            assert!(!seen.contains(alias), "{alias} is an alias and a key");
            assert!(seen.contains(target), "{target} is not in the table");
        }
    }

    #[test]
    fn a_misspelt_key_gets_a_suggestion() {
        let suggested = |name: &str| match find(name) {
            Err(KeyError::Unknown { nearest, .. }) => nearest,
            other => unreachable!("{other:?}"),
        };
        assert_eq!(suggested("model.hiden_size").as_deref(), Some("model.hidden_size"));
        assert_eq!(suggested("hidden_size").as_deref(), Some("model.hidden_size"));
        for far in ["zzz", "model.foo", "model.bf16", "model.params_dtype"] {
            assert_eq!(suggested(far), None, "{far}");
        }
        assert_eq!(suggested("model.enable_cuda_graph").as_deref(), Some("model.cuda_graph_impl"));
        assert_eq!(suggested(&"model.hiden_size".repeat(10_000)), None);
        assert!(find(&"x".repeat(100_000)).unwrap_err().to_string().len() < 300);
        assert_eq!(short("a\u{1b}[31m"), "a\\u{1b}[31m");
        let word = "x".repeat(3000);
        assert_eq!(short_words("a  word\nmore"), "a  word\nmore");
        assert!(short_words(&format!("`{word}` is\nnone; {}", short(&word))).len() < 400);
        assert_eq!(short_words(&short(&word)), short(&word));
        assert_eq!(nearest("H100", ["b200", "h100", "r100"]).as_deref(), Some("h100"));
        assert_eq!(nearest("x100", ["h100", "r100"]).as_deref(), Some("h100"));
        assert_eq!(find("model.delay_wgrad_compute").map(|k| k.name), Ok("comm_overlap.delay_wgrad_compute"));
    }
}
