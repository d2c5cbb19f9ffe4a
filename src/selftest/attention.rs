//! Attention by cuDNN: the same checks that our own kernels pass, and both against each other at a real size.

use super::ops::{inputs, norm_error, on_device};
use super::{Log, family, large};
use crate::device::cuda::cudnn::{AttentionBackend, AttentionChoice};
use crate::device::cuda::executor::CudaOptions;
use crate::device::cuda::libraries::{Library, find};
use crate::ops::Op;
use crate::ops::attention::{AttnBwd, AttnFwd, AttnShape};
use crate::ops::rope::Positions;
use std::sync::Arc;

/// Batch, query heads, key heads, tokens, head width: whole tiles, tails, one group, all heads their own.
const SHAPES: [(usize, usize, usize, usize, usize); 10] = [
    (1, 4, 1, 128, 128),
    (2, 4, 2, 256, 64),
    (1, 2, 2, 384, 128),
    (2, 8, 2, 128, 128),
    (1, 4, 4, 64, 64),
    (1, 4, 2, 2, 128),
    (2, 4, 1, 65, 64),
    (1, 4, 2, 77, 128),
    (2, 2, 2, 130, 128),
    (1, 8, 4, 257, 64),
];

/// Without a mask: batch, query heads, key heads, queries, keys, head width. An image tower, cross-attention to a text, a
/// rank's part of a video, groups, tails of both.
const BOTH_WAYS: [(usize, usize, usize, usize, usize, usize); 6] = [
    (2, 4, 4, 256, 256, 72),
    (1, 4, 4, 384, 512, 128),
    (1, 2, 2, 130, 520, 128),
    (2, 4, 2, 128, 64, 64),
    (1, 4, 1, 77, 130, 64),
    (2, 2, 2, 64, 64, 72),
];

/// The options with another attention backend.
pub fn with(options: &CudaOptions, backend: AttentionBackend) -> CudaOptions {
    CudaOptions { attention: AttentionChoice { backend, ..options.attention }, ..options.clone() }
}

pub fn run(log: &mut Log, options: &CudaOptions) {
    let names = ["attention_fwd by cudnn", "attention_bwd by cudnn"];
    let large_fwd = "attn_fwd by cudnn, 32 heads, 8 groups, sequence 8192";
    let large_bwd = "attn_bwd by cudnn against own kernels, 32 heads, 4 groups, sequence 2048";
    if ![names[0], names[1], large_fwd, large_bwd].iter().any(|n| log.wants(n)) {
        return;
    }
    if let Err(reason) = find(Library::Cudnn) {
        return log.record("attention by cudnn", Ok(format!("left out, cuDNN is not installed: {reason}")));
    }
    let cudnn = with(options, AttentionBackend::Cudnn);
    let shapes = SHAPES.iter().map(|&(batch, q_heads, kv_heads, seq, head_dim)| AttnShape {
        positions: Positions::whole(batch, seq),
        kv_len: seq,
        q_heads,
        kv_heads,
        head_dim,
        dropout: None,
        ..AttnShape::default()
    });
    let both_ways = BOTH_WAYS.iter().map(|&(batch, q_heads, kv_heads, seq, kv_len, head_dim)| AttnShape {
        positions: Positions::whole(batch, seq),
        kv_len,
        q_heads,
        kv_heads,
        head_dim,
        bidirectional: true,
        ..AttnShape::default()
    });
    let shapes: Vec<AttnShape> = shapes.chain(both_ways).collect();
    let forward = shapes.iter().map(|s| Arc::new(AttnFwd { shape: s.clone() }) as Arc<dyn Op>);
    let backward = shapes.iter().map(|s| Arc::new(AttnBwd { shape: s.clone() }) as Arc<dyn Op>);
    for (name, ops) in names.into_iter().zip([forward.collect(), backward.collect::<Vec<_>>()]) {
        if log.wants(name) {
            log.record_all(family(name, &ops, &cudnn));
        }
    }
    if log.wants(large_fwd) {
        log.record(large_fwd, large::attention(32, 8, 8192, &cudnn));
    }
    if log.wants(large_bwd) {
        log.record(large_bwd, against_own(32, 4, 2048, options));
    }
}

/// Gradients of both backends at a size whose f64 reference would take minutes. Each may be off by the op's
/// tolerance, so the two may differ by twice that.
fn against_own(q_heads: usize, kv_heads: usize, seq: usize, options: &CudaOptions) -> Result<String, String> {
    let shape = AttnShape {
        positions: Positions::whole(1, seq),
        kv_len: seq,
        q_heads,
        kv_heads,
        head_dim: 128,
        dropout: None,
        ..AttnShape::default()
    };
    let text = |e: crate::device::DeviceError| e.to_string();
    let own = with(options, AttentionBackend::Own);
    let cudnn = with(options, AttentionBackend::Cudnn);
    let forward = AttnFwd { shape: shape.clone() };
    let specs = forward.args();
    let v = inputs(&forward, &specs, 5);
    let saved = on_device(Arc::new(forward), &specs, &v, &own).map_err(text)?;
    let backward = AttnBwd { shape };
    let specs = backward.args();
    // The upstream gradient is another draw of the same kind as q.
    let d_o = inputs(&AttnFwd { shape: backward.shape.clone() }, &specs[..3], 6).swap_remove(0);
    let mut values = vec![v[0].clone(), v[1].clone(), v[2].clone(), saved[3].clone(), saved[4].clone(), d_o];
    values.extend(specs[6..].iter().map(|s| vec![f64::NAN; s.len()]));
    let allowed = 2.0 * backward.tolerance(6);
    let op = Arc::new(backward);
    let mine = on_device(op.clone(), &specs, &values, &own).map_err(text)?;
    let theirs = on_device(op, &specs, &values, &cudnn).map_err(text)?;
    let errors = (6..9).map(|i| norm_error(&theirs[i], &mine[i]));
    let errors: Vec<f64> = errors.collect();
    let report = format!(
        "dq {:.1e}, dk {:.1e}, dv {:.1e} apart, {allowed:.1e} allowed",
        errors[0], errors[1], errors[2]
    );
    if errors.iter().all(|e| *e <= allowed) { Ok(report) } else { Err(report) }
}
