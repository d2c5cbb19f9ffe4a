//! Types of option values, in the harness's spelling.

use crate::config::{GraphImpl, Scope};
use crate::keys::{LONGEST_MISSPELT, short};
use std::fmt;
use std::str::FromStr;

/// Every implementation name, as `--cuda_graph_impl` takes it.
pub const GRAPH_IMPLS: [(&str, GraphImpl); 3] = [
    ("none", GraphImpl::None),
    ("local", GraphImpl::Local),
    ("transformer_engine", GraphImpl::TransformerEngine),
];

/// Every scope name, as `--cuda_graph_scope` takes it.
pub const SCOPES: [(&str, Scope); 7] = {
    use Scope::{Attn, FullIteration, Mamba, Mlp, Moe, MoePreprocess, MoeRouter};
    [
        (FullIteration.name(), FullIteration),
        (Attn.name(), Attn),
        (Mlp.name(), Mlp),
        (Moe.name(), Moe),
        (MoeRouter.name(), MoeRouter),
        (MoePreprocess.name(), MoePreprocess),
        (Mamba.name(), Mamba),
    ]
};

/// The harness's spelling of an implementation.
pub fn impl_name(value: GraphImpl) -> &'static str {
    GRAPH_IMPLS.iter().find(|(_, v)| *v == value).map_or("none", |(name, _)| name)
}

/// The name among `names` that a misspelt one was probably meant to be.
pub fn nearest<'a>(wrong: &str, names: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    /// Below this similarity a guess confuses more than it helps (clap uses 0.7 for its own).
    const SIMILAR: f64 = 0.7;
    if wrong.len() > LONGEST_MISSPELT {
        return None;
    }
    let score = |name: &str| strsim::jaro_winkler(&wrong.to_lowercase(), name);
    names
        .into_iter()
        .map(|n| (score(n), n))
        .filter(|(s, _)| *s > SIMILAR)
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .map(|(_, n)| n)
}

fn one_of(wrong: &str, names: &[&str]) -> String {
    let hint =
        nearest(wrong, names.iter().copied()).map_or(String::new(), |n| format!(" Did you mean `{n}`?"));
    format!("`{}` is not one of {}.{hint}", short(wrong), names.join(", "))
}

impl FromStr for GraphImpl {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let names: Vec<&str> = GRAPH_IMPLS.iter().map(|(n, _)| *n).collect();
        GRAPH_IMPLS.iter().find(|(n, _)| *n == text).map(|(_, v)| *v).ok_or_else(|| one_of(text, &names))
    }
}

/// `--cuda_graph_scope`: names in the order given, repeats kept (they are dropped with a notice later).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ScopeList(pub Vec<Scope>);

impl FromStr for ScopeList {
    type Err = String;
    /// Names joined by commas, nothing trimmed: the harness refuses blanks and empty pieces (R02).
    fn from_str(text: &str) -> Result<Self, String> {
        let names: Vec<&str> = SCOPES.iter().map(|(n, _)| *n).collect();
        if text.is_empty() {
            return Err(format!(
                "the list is empty. Name at least one of {}, or leave the option out to keep the recipe's scope; \
                 --cuda_graph_impl none switches graphs off.",
                names.join(", ")
            ));
        }
        let piece = |name: &str| {
            if let Some((_, scope)) = SCOPES.iter().find(|(n, _)| *n == name) {
                return Ok(*scope);
            }
            let words: Vec<&str> = text.split([',', ' ', '\t']).filter(|w| !w.is_empty()).collect();
            if words.iter().all(|w| names.contains(w)) {
                return Err(format!("names are joined by single commas without blanks: {}", words.join(",")));
            }
            if name.eq_ignore_ascii_case("none") {
                return Err(format!(
                    "`{name}` is no scope: --cuda_graph_impl none switches graphs off, and without --cuda_graph_scope \
                     the recipe's scope is taken."
                ));
            }
            Err(one_of(name, &names))
        };
        text.split(',').map(piece).collect::<Result<_, _>>().map(ScopeList)
    }
}

/// A list joined by commas, e.g. `--recompute_modules core_attn,mlp`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NameList(pub Vec<String>);

impl FromStr for NameList {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let names: Vec<String> = text.split(',').map(|s| s.trim().to_owned()).collect();
        if names.iter().any(String::is_empty) {
            return Err("a list is names joined by single commas, none of them empty".to_owned());
        }
        Ok(NameList(names))
    }
}

/// A value, or `None` in so many letters to switch the recipe's value off.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OrNone<T> {
    /// Written `None`.
    Off,
    Value(T),
}

impl<T> OrNone<T> {
    pub fn value(&self) -> Option<&T> {
        match self {
            OrNone::Off => None,
            OrNone::Value(v) => Some(v),
        }
    }
}

impl<T: FromStr> FromStr for OrNone<T>
where
    T::Err: fmt::Display,
{
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "None" => Ok(OrNone::Off),
            _ => text.parse().map(OrNone::Value).map_err(|e: T::Err| format!("{e} (`None` switches it off)")),
        }
    }
}

/// `--moe_flex_dispatcher_backend`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FlexBackend {
    Deepep,
    Hybridep,
}

impl FromStr for FlexBackend {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "deepep" => Ok(FlexBackend::Deepep),
            "hybridep" => Ok(FlexBackend::Hybridep),
            _ => Err(one_of(text, &["deepep", "hybridep", "None"])),
        }
    }
}

/// Booleans as the harness reads them: true/1/t/yes/y, false/0/f/no/n.
pub fn parse_bool(text: &str) -> Result<bool, String> {
    match text.to_lowercase().as_str() {
        "true" | "1" | "t" | "yes" | "y" => Ok(true),
        "false" | "0" | "f" | "no" | "n" => Ok(false),
        _ => Err("a boolean is one of true, 1, t, yes, y, false, 0, f, no, n".to_owned()),
    }
}

/// Family and recipe names are lower-cased (R04); an empty one is refused.
pub fn parse_name(text: &str) -> Result<String, String> {
    match text.trim() {
        "" => Err("the name is empty; `mbperf recipes list` prints all".to_owned()),
        name => Ok(name.to_lowercase()),
    }
}

/// A number that is neither NaN nor infinite.
pub fn parse_finite(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(v) if v.is_finite() => Ok(v),
        _ => Err("a finite number is needed, such as 0.01 or 3e-4".to_owned()),
    }
}

/// `--seed`.
pub fn parse_seed(text: &str) -> Result<u64, String> {
    text.parse().map_err(|_| format!("a seed is a whole number from 0 to {}", u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scope_lists() {
        let ok = |t: &str| t.parse::<ScopeList>().unwrap().0;
        let err = |t: &str| t.parse::<ScopeList>().unwrap_err();
        assert_eq!(ok("attn,moe_router"), [Scope::Attn, Scope::MoeRouter]);
        assert_eq!(ok("attn,attn"), [Scope::Attn, Scope::Attn]);
        assert!(err("").contains("empty"));
        assert!(err("attn, mlp").contains("attn,mlp"));
        assert!(err("attn mlp").contains("attn,mlp"));
        assert!(err("attn,,mlp").contains("attn,mlp"));
        assert!(err("attn,moe_ruter").contains("Did you mean `moe_router`?"));
        assert!(err("Attn").contains("Did you mean `attn`?"));
    }

    #[test]
    fn none_and_booleans() {
        assert_eq!("None".parse::<OrNone<i64>>(), Ok(OrNone::Off));
        assert_eq!("4".parse::<OrNone<i64>>(), Ok(OrNone::Value(4)));
        assert!("none".parse::<OrNone<i64>>().is_err());
        assert_eq!(parse_bool("Y"), Ok(true));
        assert!(parse_bool("on").is_err());
        assert!(parse_finite("nan").is_err() && parse_finite("inf").is_err());
    }
}
