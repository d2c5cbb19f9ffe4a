//! A model's file: two formats, and what is refused in them.

use super::{HostModel, KINDS, Point, Replay};
use serde::Deserialize;
use sha2::{Digest, Sha256};
use std::collections::BTreeSet;
use std::path::Path;

/// The model compiled in.
pub(super) const PYTORCH: &str = include_str!("../../host_models/pytorch.json");
/// Words with meanings of their own, in the option and in rows.
const BUILT_IN: [&str; 2] = ["bare", "pytorch"];
/// A part that takes longer than this on the host is a mistake of units: a second is a thousand times the truth.
const LONGEST_MS: f64 = 1000.0;

/// Why a host model cannot be used: exit 2.
#[derive(Debug, thiserror::Error)]
pub enum HostModelError {
    #[error(
        "--host_model {path}: {reason}; `bare` and `pytorch` are built in, \
         benches/calibrate_host_model.py writes a file for your machine"
    )]
    Read { path: String, reason: String },
    #[error("--host_model {path}: {reason}")]
    Form { path: String, reason: String },
}

/// A host model as its file holds it, of either format.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    format: u64,
    name: String,
    source: String,
    layers: Vec<Point>,
    /// Format 1: one figure for all graphs of a layer's pass.
    module_replay_ms: Option<f64>,
    /// Format 2.
    module_replays: Option<Vec<Replay>>,
    iteration_replay_ms: f64,
    other_launch_ms: f64,
}

impl File {
    fn into_model(self) -> Result<HostModel, String> {
        let replays = match (self.format, self.module_replay_ms, self.module_replays) {
            (1, Some(ms), None) => {
                let any = |kind: &str| Replay {
                    layer: kind.into(),
                    parts: BTreeSet::new(),
                    forward_ms: ms,
                    backward_ms: ms,
                };
                KINDS.map(|(kind, _)| any(kind)).into()
            }
            (2, None, Some(replays)) => match replays.iter().position(|r| r.parts.is_empty()) {
                Some(i) => return Err(format!("module_replays[{i}]: parts is empty, a graph holds some")),
                None => replays,
            },
            (1, ..) => return Err("format 1 needs module_replay_ms and has no module_replays".into()),
            (2, ..) => return Err("format 2 needs module_replays and has no module_replay_ms".into()),
            (other, ..) => {
                return Err(format!("format {other} is neither 1 nor 2, the ones this version reads"));
            }
        };
        let model = HostModel {
            name: self.name,
            source: self.source,
            layers: self.layers,
            replays,
            iteration_replay_ms: self.iteration_replay_ms,
            other_launch_ms: self.other_launch_ms,
        };
        model.check()?;
        Ok(model)
    }
}

/// What is wrong, with the table that holds it, where it is not the file's own.
fn located(error: &serde_path_to_error::Error<serde_json::Error>) -> String {
    match error.path().iter().next() {
        None => error.inner().to_string(),
        Some(_) => format!("{}: {}", error.path(), error.inner()),
    }
}

impl HostModel {
    /// `bare` (none), `pytorch`, or a file, whose name gets a digest of what it holds: `calibrated:1a2b3c4d`.
    ///
    /// # Errors
    /// A file that cannot be read or does not have the form.
    pub fn load(name: &str) -> Result<Option<Self>, HostModelError> {
        match name {
            "bare" => Ok(None),
            "pytorch" => Self::parse("pytorch", PYTORCH).map(Some),
            file => {
                let failed = |reason: String| HostModelError::Read { path: file.into(), reason };
                let found = std::fs::metadata(Path::new(file)).map_err(|e| failed(e.to_string()))?;
                // A pipe that nobody writes to would be waited for, a device read without end.
                if !found.is_file() {
                    return Err(failed("it is no plain file".into()));
                }
                let text = std::fs::read_to_string(Path::new(file)).map_err(|e| failed(e.to_string()))?;
                let model = Self::parse(file, &text)?;
                if BUILT_IN.contains(&model.name.as_str()) {
                    let reason = format!(
                        "name {:?} is that of a built-in model, which the file is not: give it another",
                        model.name
                    );
                    return Err(HostModelError::Form { path: file.into(), reason });
                }
                // Calibrations are all called alike: rows are told apart by what is in them.
                let digest = Sha256::digest(text.as_bytes());
                let digest: String = digest.iter().take(4).map(|byte| format!("{byte:02x}")).collect();
                Ok(Some(Self { name: format!("{}:{digest}", model.name), ..model }))
            }
        }
    }

    pub(super) fn parse(path: &str, text: &str) -> Result<Self, HostModelError> {
        let form = |reason: String| HostModelError::Form { path: path.into(), reason };
        // A list would be taken for the fields in their order.
        if !text.trim_start().starts_with('{') {
            return Err(form("the file is no JSON object; docs/host_model.md describes its form".into()));
        }
        let mut reader = serde_json::Deserializer::from_str(text);
        let file: File = serde_path_to_error::deserialize(&mut reader).map_err(|e| form(located(&e)))?;
        reader.end().map_err(|e| form(e.to_string()))?;
        file.into_model().map_err(form)
    }

    fn check(&self) -> Result<(), String> {
        let time = |what: &str, ms: f64| {
            if ms.is_finite() && (0.0..=LONGEST_MS).contains(&ms) {
                return Ok(());
            }
            Err(format!("{what} is {ms} ms: a time between 0 and {LONGEST_MS} ms is needed"))
        };
        // The parts of a kind of layer.
        let parts_of = |place: &str, kind: &str| match KINDS.iter().find(|(name, _)| *name == kind) {
            Some((_, parts)) => Ok(*parts),
            None => {
                let names = KINDS.map(|(name, _)| name).join(", ");
                Err(format!("{place}: layer {kind:?} is not one of {names}"))
            }
        };
        let part = |place: &str, kind: &str, part: &str| {
            let parts = parts_of(place, kind)?;
            if parts.contains(&part) {
                return Ok(());
            }
            Err(format!("{place}: part {part:?} is none of layer {kind:?}, which has {}", parts.join(", ")))
        };
        // It stands in rows and tables.
        if self.name.trim() != self.name || self.name.is_empty() || self.name.chars().any(char::is_control) {
            return Err(format!(
                "name {:?} is empty, or has blanks around it or control characters",
                self.name
            ));
        }
        time("iteration_replay_ms", self.iteration_replay_ms)?;
        time("other_launch_ms", self.other_launch_ms)?;
        if self.layers.is_empty() {
            return Err("layers is empty: there is nothing to model".into());
        }
        for (i, point) in self.layers.iter().enumerate() {
            let place = format!("layers[{i}]");
            parts_of(&place, &point.layer)?;
            if point.tokens == 0 {
                return Err(format!("{place}: tokens is 0"));
            }
            let same = |p: &&Point| (&p.layer, p.tokens) == (&point.layer, point.tokens);
            if let Some(first) = self.layers[..i].iter().position(|p| same(&p)) {
                return Err(format!("{place}: layer and tokens are those of layers[{first}]"));
            }
            for (table, of_pass) in [("forward_ms", &point.forward_ms), ("backward_ms", &point.backward_ms)] {
                let place = format!("{place}.{table}");
                // The entry of another size would be taken for it, or no figure at all.
                if of_pass.is_empty() {
                    let parts = parts_of(&place, &point.layer)?.join(", ");
                    return Err(format!("{place} is empty: layer {:?} has {parts}", point.layer));
                }
                for (name, ms) in of_pass {
                    part(&place, &point.layer, name)?;
                    time(&format!("{place}: {name}"), *ms)?;
                }
            }
        }
        if self.replays.is_empty() {
            return Err("module_replays is empty: a scoped graph would cost nothing".into());
        }
        for (i, replay) in self.replays.iter().enumerate() {
            let place = format!("module_replays[{i}]");
            parts_of(&place, &replay.layer)?;
            for name in &replay.parts {
                part(&place, &replay.layer, name)?;
            }
            time(&format!("{place}: forward_ms"), replay.forward_ms)?;
            time(&format!("{place}: backward_ms"), replay.backward_ms)?;
            let same = |r: &&Replay| (&r.layer, &r.parts) == (&replay.layer, &replay.parts);
            if let Some(first) = self.replays[..i].iter().position(|r| same(&r)) {
                return Err(format!("{place}: layer and parts are those of module_replays[{first}]"));
            }
        }
        Ok(())
    }
}
