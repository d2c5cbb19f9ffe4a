//! Real sizes. The ops of real steps are checked whole where the reference takes seconds; products and attention, whose
//! references would take hours, by sampled rows.

use super::ops::{inputs, norm_error, on_device};
use super::{Log, family, steps};
use crate::device::cuda::executor::CudaOptions;
use crate::device::cuda::matmul::Layout;
use crate::ops::attention::{AttnFwd, AttnShape};
use crate::ops::gemm::{Accumulate, Gemm};
use crate::ops::grouped_gemm::GroupedGemm;
use crate::ops::rope::Positions;
use crate::ops::{Op, tolerance};
use crate::program::DType;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Rows compared of each product.
const SAMPLED_ROWS: usize = 8;

/// Steps whose ops are checked: one layer of each kind, in full width.
const STEPS: [&str; 4] = [
    "-m llama -mr llama3_8b -g h100 -cp 1 -sl 512 --num_layers 1 --max_microbatches 1",
    "-m qwen -mr qwen3_30b_a3b -g h100 --num_layers 1 --max_microbatches 1",
    "-m qwen -mr qwen3_30b_a3b -g h100 --num_layers 1 --max_microbatches 1 --use_tokendrop true \
     model.moe_token_dispatcher_type=alltoall",
    "-m nemotronh -mr nemotron_3_nano -g h100 --num_layers 1 model.hybrid_override_pattern=M -sl 1024",
];
/// What a reference does in about a second on one core.
const MOST_BYTES: f64 = 2.8e8;
const MOST_FLOPS: f64 = 5e8;

pub fn run(log: &mut Log, options: &CudaOptions) {
    of_real_steps(log, options);
    for (layout, m, n, k) in [
        (Layout::Nt, 4096, 5120, 2048),
        (Layout::Nn, 4096, 2048, 5120),
        (Layout::Tn, 5120, 2048, 4096),
        (Layout::Nt, 8192, 28672, 4096),
    ] {
        let name = format!("gemm {layout:?} {m}x{n}x{k}");
        if log.wants(&name) {
            let op = Gemm { m, n, k, layout, batch: 1, out: DType::Bf16, accumulate: Accumulate::No };
            log.record(&name, gemm(op, options));
        }
    }
    for layout in [Layout::Nt, Layout::Nn, Layout::Tn] {
        let name = format!("grouped_gemm {layout:?} 8 experts, 32768 rows");
        if log.wants(&name) {
            log.record(&name, grouped(layout, options));
        }
    }
    for (q_heads, kv_heads, seq) in [(32, 4, 4096), (32, 8, 8192)] {
        let name = format!("attn_fwd {q_heads} heads, {kv_heads} groups, sequence {seq}");
        if log.wants(&name) {
            log.record(&name, attention(q_heads, kv_heads, seq, options));
        }
    }
}

/// Every op of [`STEPS`] that is small enough, against its whole reference; one line an op family.
fn of_real_steps(log: &mut Log, options: &CudaOptions) {
    let mut by_name: BTreeMap<&'static str, BTreeMap<String, Arc<dyn Op>>> = BTreeMap::new();
    for line in STEPS {
        match steps::whole(line) {
            Ok(program) => {
                // All arguments are held and converted, also those that the op touches a few rows of.
                let held = |op: &Arc<dyn Op>| op.args().iter().map(|a| a.bytes() as f64).sum::<f64>();
                let fits = |op: &Arc<dyn Op>| held(op) <= MOST_BYTES && op.flops() <= MOST_FLOPS;
                for op in program.launches.into_iter().map(|l| l.op).filter(fits) {
                    by_name.entry(op.name()).or_default().insert(format!("{op:?}"), op);
                }
            }
            Err(e) => log.record("ops of real steps", Err(e)),
        }
    }
    for (op, list) in by_name {
        let name = format!("{op} in real sizes");
        if log.wants(&name) {
            log.record_all(family(&name, &list.into_values().collect::<Vec<_>>(), options));
        }
    }
}

fn judge(error: f64, allowed: f64) -> Result<String, String> {
    let text = format!("sampled rows off by {error:.1e}, {allowed:.1e} allowed");
    if error <= allowed { Ok(text) } else { Err(text) }
}

fn sampled(rows: usize) -> Vec<usize> {
    (0..SAMPLED_ROWS).map(|i| i * (rows - 1) / (SAMPLED_ROWS - 1)).collect()
}

fn gemm(op: Gemm, options: &CudaOptions) -> Result<String, String> {
    let specs = op.args();
    let v = inputs(&op, &specs, 3);
    let got = on_device(Arc::new(op.clone()), &specs, &v, options).map_err(|e| e.to_string())?;
    let (m, n, k) = (op.m, op.n, op.k);
    let a = |i: usize, p: usize| if op.layout == Layout::Tn { v[0][p * m + i] } else { v[0][i * k + p] };
    let b = |p: usize, j: usize| if op.layout == Layout::Nt { v[1][j * k + p] } else { v[1][p * n + j] };
    let (mut mine, mut theirs) = (Vec::new(), Vec::new());
    for i in sampled(m) {
        for j in (0..n).step_by(37) {
            mine.push(got[2][i * n + j]);
            theirs.push((0..k).map(|p| a(i, p) * b(p, j)).sum());
        }
    }
    judge(norm_error(&mine, &theirs), tolerance(DType::Bf16, k, 0))
}

fn grouped(layout: Layout, options: &CudaOptions) -> Result<String, String> {
    let (experts, rows, n, k) = (8, 32768, 1536, 2048);
    let op = GroupedGemm { experts, rows, filled: rows, n, k, layout, out: DType::Bf16, accumulate: false };
    let specs = op.args();
    let v = inputs(&op, &specs, 4);
    let got = on_device(Arc::new(op), &specs, &v, options).map_err(|e| e.to_string())?;
    let offsets: Vec<usize> = v[0].iter().map(|x| *x as usize).collect();
    if layout == Layout::Tn {
        return grouped_weights(&offsets, &v, &got[3], [n, k]);
    }
    let (mut mine, mut theirs) = (Vec::new(), Vec::new());
    for i in sampled(rows) {
        let expert = (0..experts).find(|&e| (offsets[e]..offsets[e + 1]).contains(&i));
        for j in (0..n).step_by(29) {
            mine.push(got[3][i * n + j]);
            let b = |e: usize, p: usize| {
                v[2][e * n * k + if layout == Layout::Nt { j * k + p } else { p * n + j }]
            };
            theirs.push(expert.map_or(0.0, |e| (0..k).map(|p| v[1][i * k + p] * b(e, p)).sum()));
        }
    }
    judge(norm_error(&mine, &theirs), tolerance(DType::Bf16, k, 0))
}

/// Rows of each expert's weight gradient: sums over that expert's rows.
fn grouped_weights(
    offsets: &[usize],
    v: &[Vec<f64>],
    got: &[f64],
    [n, k]: [usize; 2],
) -> Result<String, String> {
    let (mut mine, mut theirs, mut terms) = (Vec::new(), Vec::new(), 0);
    for (e, ends) in offsets.windows(2).enumerate() {
        terms = terms.max(ends[1] - ends[0]);
        for i in sampled(n) {
            for j in (0..k).step_by(211) {
                mine.push(got[(e * n + i) * k + j]);
                theirs.push((ends[0]..ends[1]).map(|row| v[1][row * n + i] * v[2][row * k + j]).sum());
            }
        }
    }
    judge(norm_error(&mine, &theirs), tolerance(DType::Bf16, terms, 0))
}

pub(super) fn attention(
    q_heads: usize,
    kv_heads: usize,
    seq: usize,
    options: &CudaOptions,
) -> Result<String, String> {
    let d = 128;
    let shape = AttnShape {
        positions: Positions::whole(1, seq),
        kv_len: seq,
        q_heads,
        kv_heads,
        head_dim: d,
        dropout: None,
        ..AttnShape::default()
    };
    let op = AttnFwd { shape };
    let specs = op.args();
    let v = inputs(&op, &specs, 5);
    let allowed = op.tolerance(3);
    let got = on_device(Arc::new(op), &specs, &v, options).map_err(|e| e.to_string())?;
    let (mut mine, mut theirs) = (Vec::new(), Vec::new());
    for (s, i) in sampled(seq).into_iter().enumerate() {
        let h = (s * 5) % q_heads;
        let g = h / (q_heads / kv_heads);
        let q = &v[0][(i * q_heads + h) * d..][..d];
        let row = |of: usize, j: usize| &v[of][(j * kv_heads + g) * d..][..d];
        let scores: Vec<f64> = (0..=i)
            .map(|j| q.iter().zip(row(1, j)).map(|(a, b)| a * b).sum::<f64>() / (d as f64).sqrt())
            .collect();
        let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let e: Vec<f64> = scores.iter().map(|x| (x - top).exp()).collect();
        let sum: f64 = e.iter().sum();
        for c in 0..d {
            mine.push(got[3][(i * q_heads + h) * d + c]);
            theirs.push((0..=i).map(|j| e[j] * row(2, j)[c]).sum::<f64>() / sum);
        }
    }
    judge(norm_error(&mine, &theirs), allowed)
}
