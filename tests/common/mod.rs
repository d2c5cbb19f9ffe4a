//! Helpers of the command-line tests.

pub mod binary;
pub mod model_flops;
pub mod pages;
pub mod results;

use mbperf::args::{self, Command};
use mbperf::overrides::{Resolved, resolve};
use mbperf::recipe::Catalogue;
use std::collections::BTreeMap;
use std::sync::OnceLock;

/// What a command line comes to.
pub enum Outcome {
    Ok(Box<Resolved>),
    Error { rule: Option<&'static str>, message: String },
}

impl Outcome {
    pub fn rule(&self) -> Option<&'static str> {
        match self {
            Outcome::Ok(_) => None,
            Outcome::Error { rule, .. } => *rule,
        }
    }
}

/// The recipes in the binary, loaded once.
pub fn catalogue() -> &'static Catalogue {
    static CATALOGUE: OnceLock<Catalogue> = OnceLock::new();
    CATALOGUE.get_or_init(|| Catalogue::load(None).unwrap())
}

/// Words of a line as a shell splits them: blanks, and quotes that keep blanks and empty words.
pub fn shell_words(line: &str) -> Vec<String> {
    let (mut words, mut word, mut quote) = (Vec::new(), None::<String>, None);
    for c in line.chars() {
        match quote {
            Some(q) if c == q => quote = None,
            Some(_) => word.get_or_insert_default().push(c),
            None if c == '"' || c == '\'' => {
                quote = Some(c);
                word.get_or_insert_default();
            }
            None if c.is_whitespace() => words.extend(word.take()),
            None => word.get_or_insert_default().push(c),
        }
    }
    words.extend(word);
    words
}

/// Parses and resolves everything after `mbperf`, as a dry run does.
pub fn outcome(line: &str, env: &BTreeMap<String, String>) -> Outcome {
    outcome_of(&shell_words(line), env)
}

pub fn outcome_of(words: &[String], env: &BTreeMap<String, String>) -> Outcome {
    let argv = std::iter::once("mbperf".to_owned()).chain(words.iter().cloned());
    let args = match args::parse(argv) {
        Ok(Command::Run(args)) => args,
        Ok(other) => return Outcome::Error { rule: None, message: format!("parsed as {other:?}") },
        Err(e) => return Outcome::Error { rule: None, message: e.to_string() },
    };
    match resolve(&args, catalogue(), &|name| env.get(name).cloned()) {
        Ok(resolved) => Outcome::Ok(Box::new(resolved)),
        Err(e) => Outcome::Error { rule: e.rule(), message: e.to_string() },
    }
}
