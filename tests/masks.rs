//! What random numbers do from step to step: every launch of a training step that draws one is run alone, by its
//! reference, with equal inputs under other step words.

use crate::common::{Outcome, outcome};
use mbperf::ops::cpu_args::Slot;
use mbperf::ops::rng::{WORD_MICRO_BATCH, WORD_SEED_LO, WORD_STEP, WORDS, normal_of, philox};
use mbperf::ops::{Access, CpuArgs, Op};
use mbperf::workloads::{self, share::RankShare};
use std::collections::{BTreeMap, BTreeSet};

/// The launches of a program that read the step words, one of each op.
fn drawing(line: &str) -> Vec<std::sync::Arc<dyn Op>> {
    let Outcome::Ok(resolved) = outcome(line, &BTreeMap::new()) else { panic!("{line} is refused") };
    let cfg = &resolved.config;
    let program = workloads::build(cfg, &RankShare::of(cfg).unwrap()).unwrap();
    let mut seen = BTreeSet::new();
    program
        .launches
        .iter()
        .filter(|l| l.op.args().iter().any(|a| a.name == "words" && a.access == Access::Read))
        .filter(|l| !DRAW_NOTHING.contains(&l.op.name()) && seen.insert(l.op.name()))
        .map(|l| l.op.clone())
        .collect()
}

/// Bits of everything that the op writes; all inputs but the words are the same each time.
fn run(op: &dyn Op, words: &[i32; WORDS]) -> Vec<u64> {
    let specs = op.args();
    let mut floats: Vec<Vec<f64>> = Vec::new();
    let mut ints: Vec<Vec<i32>> = Vec::new();
    for (i, spec) in specs.iter().enumerate() {
        let n: usize = spec.shape.iter().product();
        let draw = |j: usize| philox([j as u32, i as u32, 0, 0], [7, 0]);
        floats.push((0..n).map(|j| normal_of(draw(j)) as f64).collect());
        ints.push(if spec.name == "words" { words.to_vec() } else { vec![0; n] });
    }
    let slots = specs.iter().zip(floats.iter_mut().zip(&mut ints)).map(|(spec, (f, n))| {
        match (spec.dtype.is_float(), spec.access) {
            (true, Access::Read) => Slot::In(f),
            (true, _) => Slot::Out(f),
            (false, Access::Read) => Slot::IntIn(n),
            (false, _) => Slot::IntOut(n),
        }
    });
    op.cpu_f64(&mut CpuArgs::new(op.name(), slots.collect())).unwrap();
    let written =
        specs.iter().zip(floats.into_iter().zip(ints)).filter(|(spec, _)| spec.access != Access::Read);
    written
        .flat_map(|(_, (f, n))| f.into_iter().map(f64::to_bits).chain(n.into_iter().map(|v| v as u64)))
        .collect()
}

/// Read the words for something else: the learning rate, and which line of a tally is the micro-batch's.
const DRAW_NOTHING: [&str; 2] = ["adam", "moe_sort"];

/// A replayed graph differs from its last replay by these words alone, so this is what makes replay n + 1 draw what replay
/// n did not: masks of hidden and attention dropout (forward and backward), forced routing, tokens.
#[test]
fn another_step_or_micro_batch_draws_other_numbers() {
    let small = "--num_layers 2 --hidden_size 64 -sl 32 --vocab_size 256 --max_microbatches 1 \
                 model.attention_dropout=0.1 model.hidden_dropout=0.1";
    let llama = format!("-m llama -mr llama3_8b -g h100 -cp 1 {small}");
    let qwen = format!("-m qwen -mr qwen3_30b_a3b -g h100 --num_moe_experts 32 {small}");
    let mut names = BTreeSet::new();
    for op in [drawing(&llama), drawing(&qwen)].concat() {
        let mut words = [0; WORDS];
        (words[WORD_SEED_LO], words[WORD_STEP], words[WORD_MICRO_BATCH]) = (1234, 3, 1);
        let first = run(op.as_ref(), &words);
        assert!(first == run(op.as_ref(), &words), "{}: the same words, other numbers", op.name());
        for word in [WORD_STEP, WORD_MICRO_BATCH, WORD_SEED_LO] {
            let mut other = words;
            other[word] += 1;
            assert!(
                first != run(op.as_ref(), &other),
                "{}: another word {word}, the same numbers",
                op.name()
            );
        }
        names.insert(op.name());
    }
    for wanted in
        ["attention_bwd", "attention_fwd", "dropout_add_fwd", "dropout_bwd", "router_fwd", "token_gen"]
    {
        assert!(names.contains(wanted), "{wanted} is not among {names:?}");
    }
}
