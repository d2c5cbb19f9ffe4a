//! Gated delta net layer (Qwen3-Next's linear attention): norm, in-projection to [z, q, k, v, b, alpha], causal convolution
//! of q, k and v, gated delta rule, norm of each head's output with the gate z, out-projection, residual. It stands where
//! self-attention stands, so its part is `attn`. Tensor parallelism splits heads; the rule runs over whole sequences.

use super::attention::output_std;
use super::share::RankShare;
use super::weights::{Spec, Weight};
use super::{Stack, WorkloadError};
use crate::config::{DeltaNet, RunConfig};
use crate::ops::delta_net::{DeltaBwd, DeltaFwd, DeltaShape};
use crate::ops::gated_norm::after::{NormGateBwd, NormGateFwd, partials};
use crate::ops::mamba_conv::{ConvShape, MambaConvBwd, MambaConvFwd, TAPS};
use crate::ops::rng::{philox, unit};
use crate::program::{BufId, DType, Init, Part, Pass};

/// A starts in -1 .. -16, the bias of the step at 1 (Megatron-Core `ssm/gated_delta_net.py`, `reset_parameters`).
const A_RANGE: (f64, f64) = (1.0, 16.0);
const DT_BIAS: f64 = 1.0;
/// A convolution's weights are uniform in +-1/sqrt(taps), PyTorch's default; here normal with its variance 1/(3 taps).
const CONV_VARIANCE: f64 = 1.0 / (3.0 * TAPS as f64);

fn config(cfg: &RunConfig) -> Result<&DeltaNet, WorkloadError> {
    let missing = || WorkloadError::Internal("a gated delta net layer without its sizes".into());
    cfg.model.delta_net.as_ref().ok_or_else(missing)
}

pub(super) fn weights(cfg: &RunConfig, share: &RankShare, index: usize) -> Result<Vec<Spec>, WorkloadError> {
    let m = config(cfg)?;
    let (hidden, std) = (cfg.model.hidden_size, cfg.model.init_method_std);
    let heads = share.delta_value_heads;
    let (keys, values) = (share.delta_key_heads * m.key_dim, heads * m.value_dim);
    let (all_keys, all_values) = (m.key_heads * m.key_dim, m.value_heads * m.value_dim);
    let name = |what: &str| format!("layer{index}.delta.{what}");
    let projected = [
        (0, values),
        (all_values, keys),
        (all_values + all_keys, keys),
        (all_values + 2 * all_keys, values),
        (2 * all_values + 2 * all_keys, heads),
        (2 * all_values + 2 * all_keys + m.value_heads, heads),
    ];
    let width = 2 * values + 2 * keys + 2 * heads;
    let conv = [(0, keys), (all_keys, keys), (2 * all_keys, values)];
    let a_log = |h: usize| {
        // (seed, layer, parameter, global head), as the Mamba layers draw theirs.
        let drawn = philox([h as u32, index as u32, 0, 0], [cfg.seed as u32, (cfg.seed >> 32) as u32]);
        (A_RANGE.0 + (A_RANGE.1 - A_RANGE.0) * f64::from(unit(drawn[0]))).ln()
    };
    let values_of_a = Init::Values { values: (0..heads).map(a_log).collect() };
    Ok(vec![
        Spec::ones(name("norm.weight"), hidden),
        Spec::normal(name("in_proj.weight"), width, hidden, std).row_blocks(&projected),
        Spec::normal(name("conv.weight"), 2 * keys + values, TAPS, CONV_VARIANCE.sqrt()).row_blocks(&conv),
        Spec { init: values_of_a, ..Spec::constant(name("a_log"), heads, 0.0) },
        Spec::constant(name("dt_bias"), heads, DT_BIAS),
        Spec::ones(name("out_norm.weight"), m.value_dim),
        Spec::normal(name("out_proj.weight"), hidden, values, output_std(cfg)).col_block(0, all_values),
    ])
}

/// Sizes of one rank's layer.
struct Dims {
    /// Rows of whole sequences.
    t: usize,
    h: usize,
    rule: DeltaShape,
    conv: ConvShape,
}

impl Stack<'_> {
    fn delta_dims(&self) -> Result<Dims, WorkloadError> {
        let m = config(self.cfg)?;
        let rule = DeltaShape {
            batch: self.positions.batch,
            seq: self.positions.seq,
            key_heads: self.share.delta_key_heads,
            value_heads: self.share.delta_value_heads,
            key_dim: m.key_dim,
            value_dim: m.value_dim,
        };
        let conv = ConvShape {
            batch: rule.batch,
            seq: rule.seq,
            channels: rule.qkv_width(),
            first: rule.value_width(),
            tail: 2 * rule.value_heads,
            bias: false,
        };
        Ok(Dims { t: self.tokens, h: self.cfg.model.hidden_size, rule, conv })
    }

    fn delta_weight(&self, l: usize, what: &str) -> Result<Weight, WorkloadError> {
        self.weights.get(&format!("layer{}.delta.{what}", self.share.layers[l].index))
    }

    fn norm_gate(&self, d: &Dims) -> NormGateFwd {
        NormGateFwd {
            rows: d.t,
            groups: d.rule.value_heads,
            group: d.rule.value_dim,
            z_stride: d.rule.projected_width(),
            eps: self.cfg.model.layernorm_epsilon,
            zero_centered: self.cfg.model.zero_centered_norms,
        }
    }

    /// What the rule reads: qkv, proj, a_log, dt_bias.
    fn rule_inputs(&mut self, l: usize, d: &Dims) -> Result<[BufId; 4], WorkloadError> {
        let qkv = self.act(l, "delta.qkv", &[d.t, d.rule.qkv_width()]);
        let proj = self.act(l, "delta.proj", &[d.t, d.rule.projected_width()]);
        let w = |what: &str| self.delta_weight(l, what).map(|w| w.value);
        Ok([qkv, proj, w("a_log")?, w("dt_bias")?])
    }

    /// `x -> x + delta_net(norm(x))`, `[split_tokens, hidden]`.
    pub(super) fn delta_net_forward(&mut self, l: usize, x: BufId) -> Result<BufId, WorkloadError> {
        self.b.at(Some(l), Part::Attn, Pass::Forward);
        let d = self.delta_dims()?;
        let (values, width) = (d.rule.value_width(), d.rule.projected_width());
        let norm_w = self.delta_weight(l, "norm.weight")?;
        let (y, _) = self.norm(l, "delta.norm", x, norm_w);
        let y = self.gather_tokens(l, "delta.norm", y, d.h);
        let inputs @ [qkv, proj, ..] = self.rule_inputs(l, &d)?;
        let in_w = self.delta_weight(l, "in_proj.weight")?.value;
        self.forward_product(proj, y, in_w, d.t, width, d.h, None);
        let conv_w = self.delta_weight(l, "conv.weight")?.value;
        self.b.launch(MambaConvFwd { shape: d.conv }, &[proj, conv_w, qkv]);
        let o = self.act(l, "delta.o", &[d.t, values]);
        let states = self.act(l, "delta.states", &d.rule.states_shape());
        self.b.launch(DeltaFwd { shape: d.rule }, &[&inputs[..], &[o, states]].concat());
        let gate_w = self.delta_weight(l, "out_norm.weight")?.value;
        let gated = self.act(l, "delta.gated", &[d.t, values]);
        let rstd = self.act_as(l, "delta.gated.rstd", DType::F32, &[d.t, d.rule.value_heads]);
        let norm = self.here();
        self.b.launch(self.norm_gate(&d), &[o, proj, gate_w, gated, rstd]);
        self.recomputable("gdn_norm_out", norm, &[]);
        let out_w = self.delta_weight(l, "out_proj.weight")?.value;
        Ok(self.closing_product(l, "delta", gated, out_w, d.h, values, x))
    }

    /// Gradient of the layer's input from that of its output.
    pub(super) fn delta_net_backward(
        &mut self,
        l: usize,
        x: BufId,
        dout: BufId,
    ) -> Result<BufId, WorkloadError> {
        self.b.at(Some(l), Part::Attn, Pass::Backward);
        let d = self.delta_dims()?;
        let (values, width, heads) = (d.rule.value_width(), d.rule.projected_width(), d.rule.value_heads);
        let inputs @ [_, proj, ..] = self.rule_inputs(l, &d)?;
        let dout_rows = self.closing_gradient(l, "delta", dout);
        let out_w = self.delta_weight(l, "out_proj.weight")?;
        let gated = self.act(l, "delta.gated", &[d.t, values]);
        let dgated = self.act(l, "delta.dgated", &[d.t, values]);
        self.data_gradient(dgated, dout_rows, out_w.value, d.t, d.h, values, None);
        self.weight_gradient(out_w.grad, dout_rows, gated, d.t, d.h, values);

        let NormGateFwd { rows, groups, group, z_stride, zero_centered, .. } = self.norm_gate(&d);
        let gate_w = self.delta_weight(l, "out_norm.weight")?;
        let o = self.act(l, "delta.o", &[d.t, values]);
        let rstd = self.act_as(l, "delta.gated.rstd", DType::F32, &[d.t, groups]);
        let [d_o, dz] = ["do", "dz"].map(|n| self.act(l, &format!("delta.{n}"), &[d.t, values]));
        let parts = partials(rows * groups);
        let gate_partial = self.act_as(l, "delta.gated.dw_partial", DType::F32, &[parts, group]);
        self.b.launch(
            NormGateBwd { rows, groups, group, z_stride, zero_centered },
            &[o, proj, gate_w.value, rstd, dgated, d_o, dz, gate_partial],
        );

        let states = self.act(l, "delta.states", &d.rule.states_shape());
        let dqkv = self.act(l, "delta.dqkv", &[d.t, d.rule.qkv_width()]);
        let dba = self.act(l, "delta.dba", &[d.t, 2 * heads]);
        let rule_rows = d.rule.partial_rows();
        let rule_partial = self.act_as(l, "delta.rule.dw_partial", DType::F32, &[rule_rows, 2 * heads]);
        let outputs = [states, d_o, dqkv, dba, rule_partial];
        self.b.launch(DeltaBwd { shape: d.rule }, &[&inputs[..], &outputs].concat());
        let [a_log, dt_bias] = [self.delta_weight(l, "a_log")?.grad, self.delta_weight(l, "dt_bias")?.grad];

        let conv_w = self.delta_weight(l, "conv.weight")?;
        let dproj = self.act(l, "delta.dproj", &[d.t, width]);
        let (rows, columns) = (d.conv.partial_rows(), d.conv.partial_cols());
        let partial = self.act_as(l, "delta.conv.dw_partial", DType::F32, &[rows, columns]);
        self.b.launch(MambaConvBwd { shape: d.conv }, &[proj, conv_w.value, dqkv, dz, dba, dproj, partial]);
        // One launch in place of three.
        self.column_sums(&[
            (parts, gate_partial, &[(group, gate_w.grad)]),
            (rule_rows, rule_partial, &[(heads, a_log), (heads, dt_bias)]),
            (rows, partial, &[(columns, conv_w.grad)]),
        ]);

        let in_w = self.delta_weight(l, "in_proj.weight")?;
        let y = self.act(l, "delta.norm.out", &[self.split_tokens, d.h]);
        let y = self.gather_tokens(l, "delta.norm", y, d.h);
        self.weight_gradient(in_w.grad, dproj, y, d.t, width, d.h);
        let dy = self.act(l, "delta.dy", &[d.t, d.h]);
        self.data_gradient(dy, dproj, in_w.value, d.t, width, d.h, None);
        let dy = self.reduce_tokens(l, "delta.dy", dy, d.h);
        let norm_w = self.delta_weight(l, "norm.weight")?;
        let rstd = self.act_as(l, "delta.norm.rstd", DType::F32, &[self.split_tokens]);
        Ok(self.norm_backward(l, "delta.norm", x, rstd, norm_w, dy, Some(dout)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workloads::testing::delta_net;

    fn specs(tp: usize) -> Vec<Spec> {
        let mut cfg = delta_net();
        (cfg.parallel.tp, cfg.identity.num_gpus) = (tp, 2 * tp);
        weights(&cfg, &RankShare::of(&cfg).unwrap(), 0).unwrap()
    }

    #[test]
    fn tensor_parallelism_splits_heads() {
        let of = |specs: &[Spec], what: &str| {
            let spec = specs.iter().find(|s| s.name == format!("layer0.delta.{what}")).unwrap();
            (spec.rows, spec.cols, spec.shard.clone())
        };
        let (whole, half) = (specs(1), specs(2));
        // 2 key heads and 4 value heads of 32: q and k 64, v and z 128, b and alpha 4.
        assert_eq!(of(&whole, "in_proj.weight").0, 2 * 128 + 2 * 64 + 2 * 4);
        let (rows, _, shard) = of(&half, "in_proj.weight");
        assert_eq!(rows, 2 * 64 + 2 * 32 + 2 * 2);
        assert_eq!(shard.row_blocks, [(0, 64), (128, 32), (192, 32), (256, 64), (384, 2), (388, 2)]);
        let (rows, cols, shard) = of(&half, "conv.weight");
        assert_eq!((rows, cols), (64 + 2 * 32, TAPS));
        assert_eq!(shard.row_blocks, [(0, 32), (64, 32), (128, 64)]);
        assert_eq!(of(&half, "out_proj.weight").2.cols, Some((0, 128)));
        // The heads of rank 0 hold what they hold in the whole model, and A differs between heads.
        let a_log = |specs: &[Spec]| {
            let spec = specs.iter().find(|s| s.name.ends_with("a_log")).unwrap();
            let Init::Values { values } = spec.init.clone() else { panic!("a_log has no values") };
            values
        };
        assert_eq!(a_log(&whole)[..2], a_log(&half)[..]);
        assert!(a_log(&whole).iter().all(|a| (0.0..16f64.ln()).contains(a)), "{:?}", a_log(&whole));
        assert!(a_log(&whole).iter().any(|a| (a - a_log(&whole)[0]).abs() > 0.1));
    }
}
