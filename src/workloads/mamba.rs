//! Mamba-2 layer: norm, in-projection to [z, x, B, C, dt], causal convolution of x, B and C, state space scan, gated group
//! norm, out-projection, residual. Tensor parallelism splits heads and groups; the scan runs over whole sequences.

use super::attention::output_std;
use super::share::RankShare;
use super::weights::{Spec, Weight};
use super::{Stack, WorkloadError};
use crate::config::{Mamba, RunConfig};
use crate::ops::gated_norm::{self, GatedNormBwd, GatedNormFwd};
use crate::ops::mamba_conv::{ConvShape, MambaConvBwd, MambaConvFwd, TAPS};
use crate::ops::rng::{philox, unit};
use crate::ops::ssd::{SsdBwd, SsdFwd, SsdShape};
use crate::program::{BufId, DType, Init, Part, Pass};

/// A starts in -1 .. -16 and dt, at a raw value of 0, in 0.001 .. 0.1 by a uniform logarithm (the initialisation of
/// Mamba-2: Dao and Gu, 2024).
const A_RANGE: (f64, f64) = (1.0, 16.0);
const DT_RANGE: (f64, f64) = (1e-3, 0.1);
/// A convolution's weights and biases are uniform in +-1/sqrt(taps), PyTorch's default; here normal with its variance 1/(3 taps).
const CONV_VARIANCE: f64 = 1.0 / (3.0 * TAPS as f64);

fn config(cfg: &RunConfig) -> Result<&Mamba, WorkloadError> {
    let missing = || WorkloadError::Internal("a Mamba layer without Mamba sizes".into());
    cfg.model.mamba.as_ref().ok_or_else(missing)
}

/// Uniform in [0, 1) of (seed, layer, parameter, global head), the same for every layout of ranks.
fn draw(cfg: &RunConfig, layer: usize, parameter: u32, head: usize) -> f64 {
    let counter = [head as u32, layer as u32, parameter, 0];
    f64::from(unit(philox(counter, [cfg.seed as u32, (cfg.seed >> 32) as u32])[0]))
}

pub(super) fn weights(cfg: &RunConfig, share: &RankShare, index: usize) -> Result<Vec<Spec>, WorkloadError> {
    let m = config(cfg)?;
    let (hidden, std) = (cfg.model.hidden_size, cfg.model.init_method_std);
    let (heads, groups) = (share.mamba_heads, share.mamba_groups);
    let (inner, mats) = (heads * m.head_dim, groups * m.state_dim);
    let (all_inner, all_mats) = (m.num_heads * m.head_dim, m.num_groups * m.state_dim);
    let name = |what: &str| format!("layer{index}.mamba.{what}");
    let conv = [(0, inner), (all_inner, mats), (all_inner + all_mats, mats)];
    let projected = [
        (0, inner),
        (all_inner, inner),
        (2 * all_inner, mats),
        (2 * all_inner + all_mats, mats),
        (2 * all_inner + 2 * all_mats, heads),
    ];
    let width = 2 * inner + 2 * mats + heads;
    let first = share.place.tp * heads;
    let per_head = |what: &str, parameter: u32, value: &dyn Fn(f64) -> f64| {
        let values = (first..first + heads).map(|h| value(draw(cfg, index, parameter, h))).collect();
        Spec { init: Init::Values { values }, ..Spec::constant(name(what), heads, 0.0) }
    };
    let a_log = |u: f64| (A_RANGE.0 + (A_RANGE.1 - A_RANGE.0) * u).ln();
    let dt_bias = |u: f64| {
        let dt = (DT_RANGE.0.ln() + (DT_RANGE.1.ln() - DT_RANGE.0.ln()) * u).exp();
        // Inverse of softplus.
        dt + (-(-dt).exp_m1()).ln()
    };
    Ok(vec![
        Spec::ones(name("norm.weight"), hidden),
        Spec::normal(name("in_proj.weight"), width, hidden, std).row_blocks(&projected),
        Spec::normal(name("conv.weight"), inner + 2 * mats, TAPS, CONV_VARIANCE.sqrt()).row_blocks(&conv),
        Spec::normal(name("conv.bias"), inner + 2 * mats, 1, CONV_VARIANCE.sqrt()).row_blocks(&conv),
        per_head("a_log", 0, &a_log),
        Spec::constant(name("d"), heads, 1.0),
        per_head("dt_bias", 1, &dt_bias),
        Spec::constant(name("gated_norm.weight"), inner, 1.0),
        Spec::normal(name("out_proj.weight"), hidden, inner, output_std(cfg)).col_block(0, all_inner),
    ])
}

/// Sizes of one rank's layer.
struct Dims {
    /// Rows of whole sequences.
    t: usize,
    h: usize,
    scan: SsdShape,
    conv: ConvShape,
}

impl Stack<'_> {
    fn mamba_dims(&self) -> Result<Dims, WorkloadError> {
        let m = config(self.cfg)?;
        let scan = SsdShape {
            batch: self.positions.batch,
            seq: self.positions.seq,
            heads: self.share.mamba_heads,
            head_dim: m.head_dim,
            groups: self.share.mamba_groups,
            state: m.state_dim,
            chunk: m.chunk_size,
        };
        let conv = ConvShape {
            batch: scan.batch,
            seq: scan.seq,
            channels: scan.conv_width(),
            first: scan.inner(),
            tail: scan.heads,
            bias: true,
        };
        Ok(Dims { t: self.tokens, h: self.cfg.model.hidden_size, scan, conv })
    }

    fn mamba_weight(&self, l: usize, what: &str) -> Result<Weight, WorkloadError> {
        self.weights.get(&format!("layer{}.mamba.{what}", self.share.layers[l].index))
    }

    fn gated_norm(&self, d: &Dims) -> GatedNormFwd {
        GatedNormFwd {
            rows: d.t,
            groups: d.scan.groups,
            group: d.scan.inner() / d.scan.groups,
            z_stride: d.scan.projected_width(),
            eps: self.cfg.model.layernorm_epsilon,
        }
    }

    /// What the scan reads: xbc, zxbcdt, a_log, d, dt_bias.
    fn scan_inputs(&mut self, l: usize, d: &Dims) -> Result<[BufId; 5], WorkloadError> {
        let xbc = self.act(l, "mamba.xbc", &[d.t, d.scan.conv_width()]);
        let zxbcdt = self.act(l, "mamba.zxbcdt", &[d.t, d.scan.projected_width()]);
        let w = |what: &str| self.mamba_weight(l, what).map(|w| w.value);
        Ok([xbc, zxbcdt, w("a_log")?, w("d")?, w("dt_bias")?])
    }

    /// `x -> x + mamba(norm(x))`, `[split_tokens, hidden]`.
    pub(super) fn mamba_forward(&mut self, l: usize, x: BufId) -> Result<BufId, WorkloadError> {
        self.b.at(Some(l), Part::Mamba, Pass::Forward);
        let d = self.mamba_dims()?;
        let (inner, width) = (d.scan.inner(), d.scan.projected_width());
        let norm_w = self.mamba_weight(l, "norm.weight")?;
        let (y, _) = self.norm(l, "mamba.norm", x, norm_w);
        let y = self.gather_tokens(l, "mamba.norm", y, d.h);
        let inputs @ [xbc, zxbcdt, ..] = self.scan_inputs(l, &d)?;
        let in_w = self.mamba_weight(l, "in_proj.weight")?.value;
        self.forward_product(zxbcdt, y, in_w, d.t, width, d.h, None);
        let [conv_w, conv_b] = [self.mamba_weight(l, "conv.weight")?, self.mamba_weight(l, "conv.bias")?];
        self.b.launch(MambaConvFwd { shape: d.conv }, &[zxbcdt, conv_w.value, conv_b.value, xbc]);
        let scanned = self.act(l, "mamba.scanned", &[d.t, inner]);
        let states = self.act(l, "mamba.states", &d.scan.states_shape());
        self.b.launch(SsdFwd { shape: d.scan }, &[&inputs[..], &[scanned, states]].concat());
        let gate_w = self.mamba_weight(l, "gated_norm.weight")?.value;
        let gated = self.act(l, "mamba.gated", &[d.t, inner]);
        let rstd = self.act_as(l, "mamba.gated.rstd", DType::F32, &[d.t, d.scan.groups]);
        self.b.launch(self.gated_norm(&d), &[scanned, zxbcdt, gate_w, gated, rstd]);
        let out_w = self.mamba_weight(l, "out_proj.weight")?.value;
        Ok(self.closing_product(l, "mamba", gated, out_w, d.h, inner, x))
    }

    /// Gradient of the layer's input from that of its output.
    pub(super) fn mamba_backward(&mut self, l: usize, x: BufId, dout: BufId) -> Result<BufId, WorkloadError> {
        self.b.at(Some(l), Part::Mamba, Pass::Backward);
        let d = self.mamba_dims()?;
        let (inner, width, conv) = (d.scan.inner(), d.scan.projected_width(), d.scan.conv_width());
        let inputs @ [_, zxbcdt, ..] = self.scan_inputs(l, &d)?;
        let dout_rows = self.closing_gradient(l, "mamba", dout);
        let out_w = self.mamba_weight(l, "out_proj.weight")?;
        let gated = self.act(l, "mamba.gated", &[d.t, inner]);
        let dgated = self.act(l, "mamba.dgated", &[d.t, inner]);
        self.data_gradient(dgated, dout_rows, out_w.value, d.t, d.h, inner, None);
        self.weight_gradient(out_w.grad, dout_rows, gated, d.t, d.h, inner);

        let GatedNormFwd { rows, groups, group, z_stride, .. } = self.gated_norm(&d);
        let gate_w = self.mamba_weight(l, "gated_norm.weight")?;
        let scanned = self.act(l, "mamba.scanned", &[d.t, inner]);
        let rstd = self.act_as(l, "mamba.gated.rstd", DType::F32, &[d.t, groups]);
        let [dscanned, dz] = ["dscanned", "dz"].map(|n| self.act(l, &format!("mamba.{n}"), &[d.t, inner]));
        let parts = gated_norm::partials(rows, groups, group);
        let gate_partial = self.act_as(l, "mamba.gated.dw_partial", DType::F32, &[parts, inner]);
        self.b.launch(
            GatedNormBwd { rows, groups, group, z_stride },
            &[scanned, zxbcdt, gate_w.value, rstd, dgated, dscanned, dz, gate_partial],
        );

        let states = self.act(l, "mamba.states", &d.scan.states_shape());
        let dxbc = self.act(l, "mamba.dxbc", &[d.t, conv]);
        let ddt = self.act(l, "mamba.ddt", &[d.t, d.scan.heads]);
        let (scan_rows, heads) = (d.scan.partial_rows(), d.scan.heads);
        let scan_partial = self.act_as(l, "mamba.scan.dw_partial", DType::F32, &[scan_rows, 3 * heads]);
        let outputs = [states, dscanned, dxbc, ddt, scan_partial];
        self.b.launch(SsdBwd { shape: d.scan }, &[&inputs[..], &outputs].concat());
        let grad = |s: &Self, what: &str| s.mamba_weight(l, what).map(|w| (heads, w.grad));
        let scan_grads = [grad(self, "a_log")?, grad(self, "d")?, grad(self, "dt_bias")?];

        let [conv_w, conv_b] = [self.mamba_weight(l, "conv.weight")?, self.mamba_weight(l, "conv.bias")?];
        let dzxbcdt = self.act(l, "mamba.dzxbcdt", &[d.t, width]);
        let rows = d.conv.partial_rows();
        let columns = (TAPS + 1) * conv;
        let partial = self.act_as(l, "mamba.conv.dw_partial", DType::F32, &[rows, columns]);
        self.b.launch(
            MambaConvBwd { shape: d.conv },
            &[zxbcdt, conv_w.value, conv_b.value, dxbc, dz, ddt, dzxbcdt, partial],
        );
        // Three launches of 2 to 3 us each where there are few tokens.
        self.column_sums(&[
            (parts, gate_partial, &[(inner, gate_w.grad)]),
            (scan_rows, scan_partial, &scan_grads),
            (rows, partial, &[(TAPS * conv, conv_w.grad), (conv, conv_b.grad)]),
        ]);

        let in_w = self.mamba_weight(l, "in_proj.weight")?;
        let y = self.act(l, "mamba.norm.out", &[self.split_tokens, d.h]);
        let y = self.gather_tokens(l, "mamba.norm", y, d.h);
        self.weight_gradient(in_w.grad, dzxbcdt, y, d.t, width, d.h);
        let dy = self.act(l, "mamba.dy", &[d.t, d.h]);
        self.data_gradient(dy, dzxbcdt, in_w.value, d.t, width, d.h, None);
        let dy = self.reduce_tokens(l, "mamba.dy", dy, d.h);
        let norm_w = self.mamba_weight(l, "norm.weight")?;
        let rstd = self.act_as(l, "mamba.norm.rstd", DType::F32, &[self.split_tokens]);
        Ok(self.norm_backward(l, "mamba.norm", x, rstd, norm_w, dy, Some(dout)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workloads::testing::hybrid;

    fn specs(tp: usize) -> Vec<Spec> {
        let mut cfg = hybrid();
        (cfg.parallel.tp, cfg.identity.num_gpus) = (tp, 2 * tp);
        weights(&cfg, &RankShare::of(&cfg).unwrap(), 0).unwrap()
    }

    #[test]
    fn tensor_parallelism_splits_heads_and_groups() {
        let of = |specs: &[Spec], what: &str| {
            let spec = specs.iter().find(|s| s.name == format!("layer0.mamba.{what}")).unwrap();
            (spec.rows, spec.cols, spec.shard.clone())
        };
        let (whole, half) = (specs(1), specs(2));
        // 16 heads of 16 and 2 groups of 16: z and x 256, B and C 32, dt 16.
        assert_eq!(of(&whole, "in_proj.weight").0, 256 + 256 + 32 + 32 + 16);
        let (rows, _, shard) = of(&half, "in_proj.weight");
        assert_eq!(rows, 128 + 128 + 16 + 16 + 8);
        assert_eq!(shard.row_blocks, [(0, 128), (256, 128), (512, 16), (544, 16), (576, 8)]);
        let (rows, cols, shard) = of(&half, "conv.weight");
        assert_eq!((rows, cols), (128 + 16 + 16, TAPS));
        assert_eq!(shard.row_blocks, [(0, 128), (256, 16), (288, 16)]);
        assert_eq!(of(&half, "out_proj.weight").2.cols, Some((0, 256)));
        // The heads of rank 0 hold what they hold in the whole model.
        let values = |specs: &[Spec], what: &str| {
            let spec = specs.iter().find(|s| s.name.ends_with(what)).unwrap();
            let Init::Values { values } = spec.init.clone() else { panic!("{what} has no values") };
            values
        };
        for what in ["a_log", "dt_bias"] {
            assert_eq!(values(&whole, what)[..8], values(&half, what)[..]);
        }
    }

    #[test]
    fn decay_and_step_start_in_their_ranges() {
        let specs = specs(1);
        for (what, low, high) in [("a_log", 0.0, 16f64.ln()), ("dt_bias", -6.91, -2.25)] {
            let spec = specs.iter().find(|s| s.name.ends_with(what)).unwrap();
            let Init::Values { values } = &spec.init else { panic!("{what} has no values") };
            assert!(values.iter().all(|v| (low..high).contains(v)), "{what}: {values:?}");
            assert!(values.iter().any(|v| (v - values[0]).abs() > 0.1), "{what} is the same for all heads");
        }
    }
}
