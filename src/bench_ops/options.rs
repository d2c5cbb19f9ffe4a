//! Which of a run's options say something about its ops alone.

use crate::args::{Args, Format};
use crate::commands::Usage;

/// Options of measuring, of files and of processes.
const IDLE: [&str; 27] = [
    "dryrun",
    "max_steps",
    "distributed_timeout_minutes",
    "output",
    "csv_dialect",
    "xlsx",
    "sweep",
    "profile",
    "resume",
    "max_time",
    "margin",
    "aa",
    "host_model",
    "extrapolate",
    "repeat",
    "nproc_per_node",
    "rendezvous_timeout",
    "watchdog",
    "no_samplers",
    "alternate_samplers",
    "spin_percent",
    "block_steps",
    "strict",
    "dump",
    "equality_steps",
    "inject",
    "save_config_filepath",
];

/// Those of them that were given.
fn idle(args: &Args) -> Vec<String> {
    let json = (args.mbperf.format == Format::Json).then(|| "--format json".to_owned());
    IDLE.iter()
        .filter(|name| args.given.contains(**name))
        .map(|name| format!("--{name}"))
        .chain(json)
        .collect()
}

/// # Errors
/// An option that ops have no use for (exit 2).
pub fn check(args: &Args) -> Result<(), Usage> {
    match &idle(args)[..] {
        [] => Ok(()),
        names => Err(Usage(format!(
            "ops: {} is not for it: ops are timed on a GPU one by one and listed on standard output (--format text or csv). Leave {} \
             out (`mbperf -m ...` without `ops` runs or plans the step)",
            names.join(", "),
            if names.len() == 1 { "it" } else { "them" }
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::{Command, parse};

    #[test]
    fn options_of_measuring_and_files_are_refused_and_those_of_the_step_taken() {
        let check = |more: &str| {
            let words = format!("mbperf ops gemm -m llama -mr llama3_8b -g h100 {more}");
            let Ok(Command::Ops(_, Some(args))) = parse(words.split_whitespace()) else { panic!("{words}") };
            check(&args).map_err(|e| e.to_string())
        };
        for more in [
            "",
            "-sl 512 --num_layers 2 --stack_only --format csv --seed 3 -q",
            "--attention_backend own --attention_deterministic false --kernel_cache x --cuda_path y --device cuda",
            "--max_microbatches 1 --expert_gemm per_expert --grad_dtype fp32 --optimizer none --run_dtype bf16",
        ] {
            check(more).unwrap();
        }
        for (more, name) in [
            ("-d", "--dryrun"),
            ("-o x.csv", "--output"),
            ("--resume -o x.csv", "--output, --resume"),
            ("--format json", "--format json"),
            ("-ms 3", "--max_steps"),
            ("--host_model pytorch", "--host_model"),
            ("--aa eager --repeat 2 --strict", "--aa, --repeat, --strict"),
        ] {
            let said = check(more).unwrap_err();
            assert!(said.starts_with(&format!("ops: {name} is not for it")), "{more}: {said}");
        }
    }
}
