//! What is timed of a step, and how a line reads.

use super::*;
use crate::args::{Command, parse};
use crate::run::ops_of;

/// The arguments of `mbperf ops LINE`.
fn args(line: &str) -> Args {
    let words = format!("mbperf ops {line}");
    match parse(words.split_whitespace().map(std::ffi::OsString::from)) {
        Ok(Command::Ops(_, Some(args))) => *args,
        other => panic!("{line}: {other:?}"),
    }
}

const LLAMA: &str = "gemm -m llama -mr llama3_8b -g h100 -cp 1 --num_layers 4 -sl 512";

#[test]
fn the_options_of_attention_reach_the_device() {
    use crate::device::cuda::cudnn::{AttentionBackend, AttentionChoice};
    let asked = |more: &str| ops_of(&args(&format!("{LLAMA} {more}"))).unwrap().1;
    assert_eq!(asked("").attention, AttentionChoice::default());
    let own = asked("--attention_backend own --attention_deterministic false --kernel_cache folder");
    assert_eq!(own.attention, AttentionChoice { backend: AttentionBackend::Own, deterministic: false });
    assert_eq!(own.cache_dir.as_deref(), Some(std::path::Path::new("folder")));
}

/// Names of the ops that are timed of a step.
fn names(line: &str) -> Vec<&'static str> {
    let plan = ops_of(&args(line)).unwrap().0;
    chosen(&plan.eager.program, None).unwrap().into_keys().map(|(name, _)| name).collect()
}

#[test]
fn a_full_step_has_loss_optimizer_and_embedding() {
    let (full, stack) = (names(LLAMA), names(&format!("{LLAMA} --stack_only")));
    for op in ["cross_entropy", "adam", "embedding_fwd", "embedding_bwd"] {
        assert!(full.contains(&op), "{op}: {full:?}");
        assert!(!stack.contains(&op), "{op}: {stack:?}");
    }
    for op in ["gemm", "attention_fwd", "attention_bwd", "rmsnorm_bwd", "swiglu_fwd"] {
        assert!(full.contains(&op) && stack.contains(&op), "{op}: {full:?} {stack:?}");
    }
}

#[test]
fn launches_of_one_shape_are_counted_together() {
    let plan = ops_of(&args(&format!("{LLAMA} --stack_only"))).unwrap().0;
    let all = chosen(&plan.eager.program, Some("attention")).unwrap();
    assert_eq!(all.values().map(|(_, count)| *count).collect::<Vec<_>>(), [4, 4], "{all:?}");
}

#[test]
fn a_line_has_a_cell_for_each_column() {
    let ceilings = Ceilings { tflops: 800.0, gb_per_s: 4000.0 };
    let product = Figure {
        name: "gemm",
        what: "Gemm { m: 8, n: 8 }".into(),
        count: 4,
        time_us: 20.0,
        tflops: 400.0,
        gb_per_s: 1000.0,
        bytes: 2e7,
        list_best_us: Some(19.0),
        attention: None,
    };
    assert_eq!(
        product.csv(&ceilings),
        "gemm,4,20.000,400.00,1000.0,0.5000,800.0,4000.0,20000000,19.000,0.9500,,\"Gemm { m: 8, n: 8 }\""
    );
    let plain = Figure { what: "a \"b\"".into(), list_best_us: None, ..product };
    let lines = format!("{}\n{}\n", COLUMNS.join(","), plain.csv(&ceilings));
    let mut reader = csv::Reader::from_reader(lines.as_bytes());
    let row = reader.records().next().unwrap().unwrap();
    assert_eq!((row.len(), &row[9], &row[10], &row[12]), (COLUMNS.len(), "", "", "a \"b\""));
}
