//! The launches of a layer, run in f64, against attention written out from the paper; the gradients of every weight by
//! finite differences of that; and the number of parameters of the models that have it.

use super::*;
use crate::config::{LayerKind, RunConfig, ScoreFunction};
use crate::ops::Access;
use crate::ops::testing::{check_gradient, normals, relative_error, run_f64};
use crate::program::builder::Builder;
use crate::program::{Lifetime, Program};
use crate::workloads::testing::{deepseek, program};
use crate::workloads::weights::Weights;
use std::collections::HashMap;

const BATCH: usize = 2;
const SEQ: usize = 5;

/// One layer of attention alone, two sequences of five tokens, gradients given and written once.
fn bare(q_lora_rank: Option<usize>, norms: bool) -> RunConfig {
    let mut cfg = deepseek();
    cfg.model.layers = vec![LayerKind::AttnOnly];
    cfg.model.hidden_size = 16;
    cfg.model.num_attention_heads = 3;
    cfg.model.num_query_groups = 3;
    cfg.model.qk_layernorm = norms;
    cfg.model.moe = None;
    cfg.model.mla.as_mut().unwrap().q_lora_rank = q_lora_rank;
    cfg.stack_only = true;
    (cfg.parallel.ep, cfg.parallel.dp, cfg.identity.num_gpus) = (1, 1, 1);
    (cfg.batch.num_microbatches, cfg.batch.micro_batch_size, cfg.batch.global_batch_size) = (1, BATCH, BATCH);
    cfg.batch.seq_length = SEQ;
    cfg
}

type Values = HashMap<String, Vec<f64>>;

/// Runs every launch by its f64 reference, from random weights and inputs; returns all buffers by name.
fn run(program: &Program) -> Values {
    let mut all: Values = HashMap::new();
    for (n, b) in program.buffers.iter().enumerate() {
        let given =
            b.lifetime == Lifetime::Constant || (b.lifetime == Lifetime::Weight && b.view_of.is_some());
        if given {
            let spread = if b.name.contains("norm") { 0.2 } else { 0.4 };
            let base = if b.name.contains("norm") { 1.0 } else { 0.0 };
            let values = normals(b.len(), 100 + n as u32, spread);
            all.insert(b.name.clone(), values.into_iter().map(|v| v + base).collect());
        }
    }
    for launch in &program.launches {
        let names: Vec<&String> = launch.args.iter().map(|&id| &program.buffer(id).name).collect();
        let specs = launch.op.args();
        let values: Vec<Vec<f64>> = specs
            .iter()
            .zip(&names)
            .map(|(s, n)| if s.access == Access::Write { vec![] } else { all[*n].clone() })
            .collect();
        let after = run_f64(&*launch.op, &values);
        for ((spec, name), values) in specs.iter().zip(&names).zip(after) {
            if spec.access != Access::Read {
                all.insert(name.to_string(), values);
            }
        }
    }
    all
}

/// y = x W^T, W `[n, k]`.
fn product(x: &[f64], w: &[f64], k: usize) -> Vec<f64> {
    let row =
        |x: &[f64]| w.chunks(k).map(|w| x.iter().zip(w).map(|(a, b)| a * b).sum()).collect::<Vec<f64>>();
    x.chunks(k).flat_map(row).collect()
}

fn normed(x: &[f64], weight: Option<&Vec<f64>>, eps: f64) -> Vec<f64> {
    let Some(w) = weight else { return x.to_vec() };
    let row = |x: &[f64]| {
        let rms = (x.iter().map(|v| v * v).sum::<f64>() / x.len() as f64 + eps).sqrt();
        x.iter().zip(w).map(|(v, w)| v / rms * w).collect::<Vec<f64>>()
    };
    x.chunks(w.len()).flat_map(row).collect()
}

/// Multi-latent attention from the definition: every head on its own, full score rows, a masked softmax.
fn explicit(cfg: &RunConfig, v: &Values) -> Vec<f64> {
    let (m, mla) = (&cfg.model, cfg.model.mla.as_ref().unwrap());
    let w = |what: &str| v.get(&format!("layer0.attn.{what}.weight"));
    let (h, heads, eps) = (m.hidden_size, m.num_attention_heads, m.layernorm_epsilon);
    let (nope, rotary, value) = (mla.qk_head_dim, mla.qk_pos_emb_head_dim, mla.v_head_dim);
    let x = &v["stack.input"];
    let y = normed(x, w("norm"), eps);
    let q = match mla.q_lora_rank {
        Some(rank) => product(
            &normed(&product(&y, w("q_down").unwrap(), h), w("q_norm"), eps),
            w("q_up").unwrap(),
            rank,
        ),
        None => product(&y, w("q").unwrap(), h),
    };
    let down = product(&y, w("kv_down").unwrap(), h);
    let wide = mla.kv_lora_rank + rotary;
    let latent: Vec<f64> = down.chunks(wide).flat_map(|r| r[..mla.kv_lora_rank].to_vec()).collect();
    let kv = product(&normed(&latent, w("kv_norm"), eps), w("kv_up").unwrap(), mla.kv_lora_rank);
    // YaRN with equal weights: the rotation alone, and a temperature on the scores.
    let frequencies = crate::ops::rope::scaling::frequencies(rotary, m.rotary_base, m.rope_scaling);
    let turned = |x: &[f64], position: usize| -> Vec<(f64, f64)> {
        let pair = |(i, f): (usize, &f64)| {
            let (s, c) = (position as f64 * f).sin_cos();
            (x[2 * i] * c - x[2 * i + 1] * s, x[2 * i + 1] * c + x[2 * i] * s)
        };
        frequencies.iter().enumerate().map(pair).collect()
    };
    let scale = (0.1 * 40f64.ln() + 1.0).powi(2) / ((nope + rotary) as f64).sqrt();
    let mut o = Vec::new();
    for row in 0..BATCH * SEQ {
        let (first, i) = (row / SEQ * SEQ, row % SEQ);
        for head in 0..heads {
            let mine = &q[(row * heads + head) * (nope + rotary)..][..nope + rotary];
            let rotated = turned(&mine[nope..], i);
            let score = |j: usize| {
                let at = first + j;
                let k = &kv[(at * heads + head) * (nope + value)..][..nope];
                let shared = turned(&down[at * wide + mla.kv_lora_rank..][..rotary], j);
                let plain: f64 = mine[..nope].iter().zip(k).map(|(a, b)| a * b).sum();
                let turned: f64 = rotated.iter().zip(&shared).map(|(a, b)| a.0 * b.0 + a.1 * b.1).sum();
                (scale * (plain + turned)).exp()
            };
            let weights: Vec<f64> = (0..=i).map(score).collect();
            let sum: f64 = weights.iter().sum();
            for c in 0..value {
                let of = |j: usize| kv[((first + j) * heads + head) * (nope + value) + nope + c];
                o.push(weights.iter().enumerate().map(|(j, p)| p / sum * of(j)).sum::<f64>());
            }
        }
    }
    let out = product(&o, w("proj").unwrap(), heads * value);
    x.iter().zip(out).map(|(a, b)| a + b).collect()
}

#[test]
fn a_layer_is_explicit_attention_and_its_gradients_follow() {
    for (q_lora_rank, norms) in [(Some(12), true), (None, true), (Some(12), false)] {
        let cfg = bare(q_lora_rank, norms);
        let program = program(&cfg);
        let values = run(&program);
        let out = &program.buffer(program.digest[0]).name;
        let error = relative_error(&values[out], &explicit(&cfg, &values));
        assert!(error < 1e-12, "{q_lora_rank:?}: the output is off by {error:e}");

        let dout = &values["stack.output_grad"];
        let loss = |values: &Values| explicit(&cfg, values).iter().zip(dout).map(|(a, b)| a * b).sum::<f64>();
        let dx = program.buffer(program.digest[1]).name.clone();
        let weights =
            program.buffers.iter().filter(|b| b.lifetime == Lifetime::Weight && b.view_of.is_some());
        let mut checked: Vec<(String, String)> =
            weights.map(|b| (b.name.clone(), format!("{}.grad", b.name))).collect();
        assert_eq!(checked.len(), 6 + 2 * usize::from(norms) - usize::from(q_lora_rank.is_none()) * 2);
        checked.push(("stack.input".into(), dx));
        for (name, gradient) in checked {
            let at = |x: &[f64]| {
                let mut moved = values.clone();
                moved.insert(name.clone(), x.to_vec());
                loss(&moved)
            };
            check_gradient(&name, at, &values[&name], &values[&gradient]);
        }
    }
}

#[test]
fn tensor_parallelism_splits_heads_and_keeps_latents() {
    let of = |tp: usize| {
        let mut cfg = deepseek();
        (cfg.parallel.tp, cfg.identity.num_gpus) = (tp, 2 * tp);
        let share = RankShare::of(&cfg).unwrap();
        let specs = weights(&cfg, cfg.model.mla.as_ref().unwrap(), &share, 0);
        let size = |what: &str| {
            let s = specs.iter().find(|s| s.name == format!("layer0.attn.{what}.weight")).unwrap();
            (s.rows, s.cols)
        };
        ["q_down", "q_up", "kv_down", "kv_up", "proj"].map(size)
    };
    assert_eq!(of(1), [(40, 64), (4 * 24, 40), (24 + 8, 64), (4 * 24, 24), (64, 4 * 8)]);
    assert_eq!(of(2), [(40, 64), (2 * 24, 40), (24 + 8, 64), (2 * 24, 24), (64, 2 * 8)]);
}

/// Sizes that decide the number of parameters.
struct Published {
    dense: usize,
    layers: usize,
    hidden: usize,
    ffn: usize,
    heads: usize,
    vocabulary: usize,
    experts: usize,
    mla: Mla,
    /// Billions, without multi-token prediction.
    total: f64,
}

fn parameters(p: &Published) -> f64 {
    let mut cfg = deepseek();
    let m = &mut cfg.model;
    m.layers = [vec![LayerKind::Dense; p.dense], vec![LayerKind::Moe; p.layers - p.dense]].concat();
    (m.hidden_size, m.ffn_hidden_size, m.vocab_size) = (p.hidden, p.ffn, p.vocabulary);
    (m.num_attention_heads, m.num_query_groups) = (p.heads, p.heads);
    m.mla = Some(p.mla.clone());
    let moe = m.moe.as_mut().unwrap();
    assert_eq!(moe.score_function, ScoreFunction::Sigmoid);
    (moe.num_experts, moe.ffn_hidden_size, moe.shared_expert_intermediate_size) =
        (p.experts, 2048, Some(2048));
    (cfg.parallel.ep, cfg.parallel.dp, cfg.identity.num_gpus) = (1, 1, 1);
    let mut b = Builder::default();
    let share = RankShare::of(&cfg).unwrap();
    Weights::declare(&mut b, &cfg, &share, DType::Bf16).unwrap();
    let mine = |b: &&crate::program::Buffer| b.lifetime == Lifetime::Weight && b.view_of.is_some();
    b.program.buffers.iter().filter(mine).map(|b| b.len() as f64).sum::<f64>() / 1e9
}

/// DeepSeek-V3 has 671.03 billion parameters and Kimi K2 1026.41, beside multi-token prediction.
#[test]
fn parameter_counts_are_the_published_ones() {
    let mla = Mla {
        q_lora_rank: Some(1536),
        kv_lora_rank: 512,
        qk_head_dim: 128,
        qk_pos_emb_head_dim: 64,
        v_head_dim: 128,
    };
    let deepseek = Published {
        dense: 3,
        layers: 61,
        hidden: 7168,
        ffn: 18432,
        heads: 128,
        vocabulary: 129_280,
        experts: 256,
        mla,
        total: 671.03,
    };
    let kimi = Published {
        dense: 1,
        heads: 64,
        vocabulary: 163_840,
        experts: 384,
        mla: deepseek.mla.clone(),
        total: 1026.41,
        ..deepseek
    };
    for p in [&deepseek, &kimi] {
        let total = parameters(p);
        assert!((total - p.total).abs() < 0.01, "{total} billion, published {}", p.total);
    }
}
