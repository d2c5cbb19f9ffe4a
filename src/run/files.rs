//! Which files a run reads and writes.

use crate::args::Args;
use crate::dump;
use crate::profile::trace::TRACE_START;
use crate::report::writer::{self, beside};
use crate::report::{Paths, Target, xlsx};
use std::path::Path;

/// How the JSON of a configuration begins, and what it is called.
pub(crate) const CONFIG_START: &[u8] = b"{\n  \"identity\"";
pub(crate) const CONFIG_KIND: &str = "configuration of a run";

/// Every file that `args` names or that lies beside one.
pub(super) fn paths(args: &Args, target: &Target) -> Paths {
    let own = &args.mbperf;
    let mut paths = Paths::default();
    for entry in own.recipes_dir.iter().filter_map(|dir| dir.read_dir().ok()).flatten().flatten() {
        if entry.path().extension().is_some_and(|e| e == "json") {
            paths.reads("--recipes_dir", &entry.path());
        }
    }
    if !["bare", "pytorch"].contains(&own.host_model.as_str()) {
        paths.reads("--host_model", Path::new(&own.host_model));
    }
    for path in writer::files(target) {
        paths.appends("-o/--output", &path);
    }
    if let Some(rows) = target.file().filter(|p| own.profile && !writer::is_device(p)) {
        paths.appends("-o/--output", &beside(rows, "profile.csv"));
        let trace = beside(rows, "trace.json");
        // In a folder that is made later nothing can be of another kind.
        match target {
            Target::Default(_) if !trace.exists() => paths.appends("-o/--output", &trace),
            _ => paths.replaces("-o/--output", &trace, TRACE_START.as_bytes(), "trace of --profile"),
        };
    }
    if let Some(path) = &own.xlsx {
        paths.replaces("--xlsx", path, xlsx::MAGIC, "workbook");
    }
    if let Some(path) = &args.logging.save_config_filepath {
        paths.replaces("--save_config_filepath", path, CONFIG_START, CONFIG_KIND);
    }
    if let Some(dir) = &own.dump {
        dump::files(dir, &mut paths);
    }
    paths
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workloads::testing::dense;

    #[test]
    fn a_saved_configuration_is_known_by_its_start() {
        let text = serde_json::to_string_pretty(&dense()).unwrap();
        assert!(text.as_bytes().starts_with(CONFIG_START), "{text}");
    }
}
