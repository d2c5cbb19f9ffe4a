//! A layer's launches with hyper-connections around it, run in f64, against the model written out plainly; the gradients of every
//! weight by finite differences of that.

use crate::config::{LayerKind, RunConfig};
use crate::ops::Access;
use crate::ops::hyper_connection::HYPER_EPS;
use crate::ops::testing::{check_gradient, normals, relative_error, run_f64};
use crate::program::{Lifetime, Program};
use crate::workloads::testing::{deepseek_v4, program};
use std::collections::HashMap;

const BATCH: usize = 2;
const SEQ: usize = 7;

/// One layer of attention alone, gradients given and written once.
fn bare(streams: Option<usize>, compressed: bool) -> RunConfig {
    let mut cfg = deepseek_v4();
    cfg.model.layers = vec![LayerKind::AttnOnly];
    cfg.model.hidden_size = 16;
    cfg.model.moe = None;
    match (&mut cfg.model.hyper_connections, streams) {
        (Some(h), Some(n)) => h.num_residual_streams = n,
        (h, _) => *h = None,
    }
    if let Some(kv) = &mut cfg.model.shared_kv {
        kv.compress_ratios[0] = if compressed { 4 } else { 0 };
        kv.window = 3;
    }
    cfg.stack_only = true;
    (cfg.parallel.ep, cfg.parallel.dp, cfg.identity.num_gpus) = (1, 1, 1);
    (cfg.batch.num_microbatches, cfg.batch.micro_batch_size, cfg.batch.global_batch_size) = (1, BATCH, BATCH);
    cfg.batch.seq_length = SEQ;
    cfg
}

type Values = HashMap<String, Vec<f64>>;

/// Runs every launch by its f64 reference, from random weights and inputs; returns all buffers by name as they are at last.
fn run(program: &Program) -> Values {
    let mut all: Values = HashMap::new();
    for (n, b) in program.buffers.iter().enumerate() {
        let weight = b.lifetime == Lifetime::Weight && b.view_of.is_some();
        if weight || b.lifetime == Lifetime::Constant {
            let scale = b.name.contains("norm") || b.name.contains("scale");
            let (spread, base) = if scale { (0.2, 1.0) } else { (0.4, 0.0) };
            all.insert(
                b.name.clone(),
                normals(b.len(), 100 + n as u32, spread).into_iter().map(|v| v + base).collect(),
            );
        }
    }
    for launch in &program.launches {
        let names: Vec<&String> = launch.args.iter().map(|&id| &program.buffer(id).name).collect();
        let specs = launch.op.args();
        let given = specs.iter().zip(&names);
        let values: Vec<Vec<f64>> =
            given.map(|(s, n)| if s.access == Access::Write { vec![] } else { all[*n].clone() }).collect();
        let after = run_f64(&*launch.op, &values);
        for ((spec, name), values) in specs.iter().zip(&names).zip(after) {
            if spec.access != Access::Read {
                all.insert(name.to_string(), values);
            }
        }
    }
    all
}

/// y = x W^T of one row, W `[n, k]`.
fn product(x: &[f64], w: &[f64]) -> Vec<f64> {
    w.chunks(x.len()).map(|w| x.iter().zip(w).map(|(a, b)| a * b).sum()).collect()
}

fn rms(x: &[f64], eps: f64) -> f64 {
    (x.iter().map(|v| v * v).sum::<f64>() / x.len() as f64 + eps).sqrt()
}

fn normed(x: &[f64], w: &[f64], eps: f64) -> Vec<f64> {
    let rms = rms(x, eps);
    x.iter().zip(w).map(|(v, w)| v / rms * w).collect()
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// (pre, post, res) of a token's streams.
type Maps = (Vec<f64>, Vec<f64>, Vec<Vec<f64>>);

fn maps(x: &[f64], v: &Values, n: usize, eps: f64) -> Maps {
    let w = |what: &str| &v[&format!("layer0.attn.hyper.{what}.weight")];
    let rms = rms(x, eps);
    let logits: Vec<f64> = product(x, w("proj"))
        .iter()
        .enumerate()
        .map(|(k, p)| p / rms * w("scale")[(k / n).min(2)] + w("base")[k])
        .collect();
    let pre = logits[..n].iter().map(|h| sigmoid(*h) + HYPER_EPS).collect();
    let post = logits[n..2 * n].iter().map(|h| 2.0 * sigmoid(*h)).collect();
    let mut m: Vec<Vec<f64>> = logits[2 * n..n * (n + 2)]
        .chunks(n)
        .map(|row| {
            let sum: f64 = row.iter().map(|h| h.exp()).sum();
            row.iter().map(|h| h.exp() / sum + HYPER_EPS).collect()
        })
        .collect();
    for turn in 0..20 {
        if turn > 0 {
            for row in &mut m {
                let sum = row.iter().sum::<f64>() + HYPER_EPS;
                row.iter_mut().for_each(|v| *v /= sum);
            }
        }
        for j in 0..n {
            let sum = m.iter().map(|row| row[j]).sum::<f64>() + HYPER_EPS;
            m.iter_mut().for_each(|row| row[j] /= sum);
        }
    }
    (pre, post, m)
}

/// Attention of one sequence's rows, from the definition.
fn attention(cfg: &RunConfig, v: &Values, rows: &[Vec<f64>]) -> Vec<Vec<f64>> {
    let (m, kv) = (&cfg.model, cfg.model.shared_kv.as_ref().unwrap());
    let w = |what: &str| &v[&format!("layer0.attn.{what}.weight")];
    let (heads, d, eps) = (m.num_attention_heads, m.kv_channels, m.layernorm_epsilon);
    let compressed = kv.compress_ratios[0] > 0;
    let (base, scaling) =
        if compressed { (kv.compress_rotary_base, m.rope_scaling) } else { (m.rotary_base, None) };
    let frequencies = crate::ops::rope::scaling::frequencies(kv.rotary, base, scaling);
    let nope = d - kv.rotary;
    // As complex numbers: pair i of the rotated part times e^(i angle).
    let turned = |x: &[f64], position: f64| -> Vec<f64> {
        let mut out = x.to_vec();
        for (i, f) in frequencies.iter().enumerate() {
            let (s, c) = (position * f).sin_cos();
            let (a, b) = (x[nope + 2 * i], x[nope + 2 * i + 1]);
            (out[nope + 2 * i], out[nope + 2 * i + 1]) = (a * c - b * s, b * c + a * s);
        }
        out
    };
    let of_row = |i: usize| {
        let y = normed(&rows[i], w("norm"), eps);
        let q = product(&normed(&product(&y, w("q_down")), w("q_norm"), eps), w("q_up"));
        let key = turned(&normed(&product(&y, w("kv")), w("kv_norm"), eps), i as f64);
        (q, key)
    };
    let all: Vec<(Vec<f64>, Vec<f64>)> = (0..rows.len()).map(of_row).collect();
    let sinks = &v["layer0.attn.sinks"];
    let out = |i: usize| {
        let first = if compressed { 0 } else { (i + 1).saturating_sub(kv.window) };
        let mut o = Vec::new();
        for (h, sink) in sinks.iter().enumerate() {
            let q = &all[i].0[h * d..][..d];
            let scale = rms(q, eps);
            let q = turned(&q.iter().map(|v| v / scale).collect::<Vec<_>>(), i as f64);
            let weight = |j: usize| {
                let dot: f64 = q.iter().zip(&all[j].1).map(|(a, b)| a * b).sum();
                (dot / (d as f64).sqrt()).exp()
            };
            let sum = sink.exp() + (first..=i).map(weight).sum::<f64>();
            let mixed: Vec<f64> =
                (0..d).map(|c| (first..=i).map(|j| weight(j) / sum * all[j].1[c]).sum()).collect();
            o.extend(turned(&mixed, -(i as f64)));
        }
        let (width, rank) = (heads * d / kv.o_groups, kv.o_lora_rank);
        let groups: Vec<f64> = (0..kv.o_groups)
            .flat_map(|g| {
                product(&o[g * width..][..width], &w("group_proj")[g * rank * width..][..rank * width])
            })
            .collect();
        product(&groups, w("proj"))
    };
    (0..rows.len()).map(out).collect()
}

/// The layer from the definition.
fn explicit(cfg: &RunConfig, v: &Values) -> Vec<f64> {
    let (h, eps) = (cfg.model.hidden_size, cfg.model.layernorm_epsilon);
    let n = cfg.model.hyper_connections.map_or(1, |h| h.num_residual_streams);
    let x = &v["stack.input"];
    let mut out = Vec::new();
    for sequence in x.chunks(SEQ * n * h) {
        let tokens: Vec<&[f64]> = sequence.chunks(n * h).collect();
        if cfg.model.hyper_connections.is_none() {
            let rows: Vec<Vec<f64>> = tokens.iter().map(|t| t.to_vec()).collect();
            for (x, a) in rows.iter().zip(attention(cfg, v, &rows)) {
                out.extend(x.iter().zip(a).map(|(x, a)| x + a));
            }
            continue;
        }
        let of: Vec<_> = tokens.iter().map(|x| maps(x, v, n, eps)).collect();
        let one = |(x, (pre, ..)): (&&[f64], &Maps)| -> Vec<f64> {
            (0..h).map(|c| (0..n).map(|j| pre[j] * x[j * h + c]).sum()).collect()
        };
        let rows: Vec<Vec<f64>> = tokens.iter().zip(&of).map(one).collect();
        for ((x, (_, post, res)), a) in tokens.iter().zip(&of).zip(attention(cfg, v, &rows)) {
            for j in 0..n {
                out.extend(
                    (0..h).map(|c| (0..n).map(|i| res[i][j] * x[i * h + c]).sum::<f64>() + post[j] * a[c]),
                );
            }
        }
    }
    out
}

#[test]
fn a_layer_is_the_model_written_out_and_its_gradients_follow() {
    for (streams, compressed) in [(Some(4), false), (Some(2), true), (None, true)] {
        let cfg = bare(streams, compressed);
        let program = program(&cfg);
        let values = run(&program);
        let out = &program.buffer(program.digest[0]).name;
        let error = relative_error(&values[out], &explicit(&cfg, &values));
        assert!(error < 1e-12, "{streams:?} {compressed}: the output is off by {error:e}");

        let dout = &values["stack.output_grad"];
        let loss = |values: &Values| explicit(&cfg, values).iter().zip(dout).map(|(a, b)| a * b).sum::<f64>();
        let dx = program.buffer(program.digest[1]).name.clone();
        let weights =
            program.buffers.iter().filter(|b| b.lifetime == Lifetime::Weight && b.view_of.is_some());
        let mut checked: Vec<(String, String)> =
            weights.map(|b| (b.name.clone(), format!("{}.grad", b.name))).collect();
        assert_eq!(checked.len(), 9 + if streams.is_some() { 3 } else { 0 });
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

/// DeepSeek-V4-Flash has 283.81 billion parameters beside multi-token prediction, key compressors and hyper-connections.
#[test]
fn the_weights_are_as_many_as_published() {
    use crate::args::{Command, parse};
    use crate::program::{DType, builder::Builder};
    use crate::workloads::{share::RankShare, weights::Weights};
    let line = "mbperf -m deepseek -mr deepseek_v4_flash -g gb200 -c fp8_mx -ng 128 --run_dtype bf16";
    let Ok(Command::Run(args)) = parse(line.split_whitespace()) else { panic!("{line}") };
    let catalogue = crate::recipe::Catalogue::load(None).unwrap();
    let cfg = crate::overrides::resolve(&args, &catalogue, &|_| None).unwrap().config;
    let (share, mut b) = (RankShare::of(&cfg).unwrap(), Builder::default());
    Weights::declare(&mut b, &cfg, &share, DType::Bf16).unwrap();
    let mut total = 0.0;
    for b in b.program.buffers.iter().filter(|b| b.lifetime == Lifetime::Weight && b.view_of.is_some()) {
        let ranks = if b.name.contains(".experts.") { cfg.parallel.ep } else { 1 };
        if !b.name.contains("hyper") {
            total += (b.len() * ranks) as f64 / 1e9;
        }
    }
    assert!((total / 283.81 - 1.0).abs() < 1e-3, "{total} billion");
}
