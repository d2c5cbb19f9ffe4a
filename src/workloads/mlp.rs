//! Dense MLP: norm, gate and up in one product, SwiGLU or the clamped unit, down product with the residual; or, without a
//! gate, up, squared ReLU and down. Biases where the model has them.

use super::attention::output_std;
use super::share::RankShare;
use super::weights::{Spec, Weight};
use super::{Stack, WorkloadError};
use crate::config::Activation;
use crate::config::RunConfig;
use crate::ops::clamped_glu::{ClampedGluBwd, ClampedGluFwd, GluShape, QUICK_GELU, SILU};
use crate::ops::squared_relu::{SquaredReluBwd, SquaredReluFwd};
use crate::ops::swiglu::{SwigluBwd, SwigluFwd};
use crate::program::{BufId, DType, Part, Pass};

pub(super) fn weights(cfg: &RunConfig, share: &RankShare, index: usize) -> Vec<Spec> {
    if cfg.model.diffusion.is_some() {
        return super::dit::mlp_weights(cfg, share, index);
    }
    let (m, f) = (&cfg.model, share.ffn);
    let name = |what: &str| format!("layer{index}.mlp.{what}.weight");
    let mut out = vec![Spec::ones(name("norm"), m.hidden_size)];
    out.extend(gated(cfg, &format!("layer{index}.mlp"), f, m.ffn_hidden_size));
    out
}

/// Rows of the first product for each of the activation: gate and up, or up alone.
pub(super) fn fc1_rows(cfg: &RunConfig) -> usize {
    if cfg.model.activation == Activation::SquaredRelu { 1 } else { 2 }
}

/// Weights of an MLP of local width `f` out of `whole`.
pub(super) fn gated(cfg: &RunConfig, prefix: &str, f: usize, whole: usize) -> Vec<Spec> {
    let m = &cfg.model;
    let rows = fc1_rows(cfg);
    let blocks = &[(0, f), (whole, f)][..rows];
    let mut out = vec![
        Spec::normal(format!("{prefix}.fc1.weight"), rows * f, m.hidden_size, m.init_method_std)
            .row_blocks(blocks),
        Spec::normal(format!("{prefix}.fc2.weight"), m.hidden_size, f, output_std(cfg)).col_block(0, whole),
    ];
    if m.add_bias_linear {
        let std = m.init_method_std;
        out.push(Spec::bias(format!("{prefix}.fc1.bias"), rows * f, std).row_blocks(blocks));
        out.push(Spec::bias(format!("{prefix}.fc2.bias"), m.hidden_size, std));
    }
    out
}

/// The arguments with the bias after the first.
fn with_bias(args: &[BufId], bias: Option<BufId>) -> Vec<BufId> {
    let mut all = args.to_vec();
    if let Some(bias) = bias {
        all.insert(1, bias);
    }
    all
}

impl Stack<'_> {
    /// `x -> x + mlp(norm(x))`, `[split_tokens, hidden]`.
    pub(super) fn mlp_forward(&mut self, l: usize, x: BufId) -> Result<BufId, WorkloadError> {
        if let Some(d) = &self.cfg.model.diffusion {
            return self.dit_mlp_forward(l, d, x);
        }
        self.b.at(Some(l), Part::Mlp, Pass::Forward);
        let index = self.share.layers[l].index;
        let (h, f) = (self.cfg.model.hidden_size, self.share.ffn);
        let norm_w = self.weights.get(&format!("layer{index}.mlp.norm.weight"))?;
        // With the norm, which upstream fuses with the first product of a dense MLP.
        let start = self.here();
        let (y, _) = self.norm(l, "mlp.norm", x, norm_w);
        let y = self.gather_tokens(l, "mlp.norm", y, h);
        let act = self.gated_forward(l, "mlp", y, f)?;
        let fc2 = self.weights.get(&format!("layer{index}.mlp.fc2.weight"))?;
        let out = self.closing_product(l, "mlp", act, fc2.value, h, f, x);
        self.recomputable("mlp", start, &[out]);
        Ok(out)
    }

    pub(super) fn mlp_backward(&mut self, l: usize, x: BufId, dout: BufId) -> Result<BufId, WorkloadError> {
        if let Some(d) = &self.cfg.model.diffusion {
            return self.dit_mlp_backward(l, d, x, dout);
        }
        self.b.at(Some(l), Part::Mlp, Pass::Backward);
        let index = self.share.layers[l].index;
        let (h, f) = (self.cfg.model.hidden_size, self.share.ffn);
        let norm_w = self.weights.get(&format!("layer{index}.mlp.norm.weight"))?;
        let dout_rows = self.closing_gradient(l, "mlp", dout);
        let y = self.act(l, "mlp.norm.out", &[self.split_tokens, h]);
        let y = self.gather_tokens(l, "mlp.norm", y, h);
        let dy = self.gated_backward(l, "mlp", y, dout_rows, f, None)?;
        let dy = self.reduce_tokens(l, "mlp.dy", dy, h);
        let rstd = self.act_as(l, "mlp.norm.rstd", DType::F32, &[self.split_tokens]);
        Ok(self.norm_backward(l, "mlp.norm", x, rstd, norm_w, dy, Some(dout)))
    }

    /// The clamped unit adds the bias of the product before it itself: to the activation goes what this returns, and to
    /// a launch of its own the other.
    pub(super) fn fc1_bias(&self, bias: Option<Weight>) -> (Option<BufId>, Option<BufId>) {
        let bias = bias.map(|b| b.value);
        if self.clamped() { (bias, None) } else { (None, bias) }
    }

    fn clamped(&self) -> bool {
        matches!(self.cfg.model.activation, Activation::QuickGeglu | Activation::SwigluClamped)
    }

    fn clamped_glu(&self, rows: usize, ffn: usize, experts: usize, bias: bool) -> GluShape {
        let m = &self.cfg.model;
        let alpha = if m.activation == Activation::QuickGeglu { QUICK_GELU } else { SILU };
        GluShape { rows, ffn, experts, bias, limit: m.activation_clamp, shift: m.glu_linear_offset, alpha }
    }

    /// The activation of `rows` rows of `f` columns: `args` are those of [`SwigluFwd`], routed or not; `bias` is one that
    /// [`Self::fc1_bias`] gave.
    pub(super) fn activation(
        &mut self,
        rows: usize,
        f: usize,
        experts: Option<usize>,
        bias: Option<BufId>,
        args: &[BufId],
    ) {
        let (routed, experts) = (experts.is_some(), experts.unwrap_or(0));
        if self.clamped() {
            let shape = self.clamped_glu(rows, f, experts, bias.is_some());
            self.b.launch(ClampedGluFwd { shape }, &with_bias(args, bias));
        } else if self.cfg.model.activation == Activation::SquaredRelu {
            self.b.launch(SquaredReluFwd { rows, ffn: f, routed, experts }, args);
        } else {
            self.b.launch(SwigluFwd { rows, ffn: f, routed, experts }, args);
        }
    }

    pub(super) fn activation_backward(
        &mut self,
        rows: usize,
        f: usize,
        experts: Option<usize>,
        bias: Option<BufId>,
        args: &[BufId],
    ) {
        let (routed, experts) = (experts.is_some(), experts.unwrap_or(0));
        if self.clamped() {
            let shape = self.clamped_glu(rows, f, experts, bias.is_some());
            self.b.launch(ClampedGluBwd { shape }, &with_bias(args, bias));
        } else if self.cfg.model.activation == Activation::SquaredRelu {
            self.b.launch(SquaredReluBwd { rows, ffn: f, routed, experts }, args);
        } else {
            self.b.launch(SwigluBwd { rows, ffn: f, routed, experts }, args);
        }
    }

    /// The activation of `y fc1^T`: `[tokens, ffn]`.
    pub(super) fn gated_forward(
        &mut self,
        l: usize,
        prefix: &str,
        y: BufId,
        f: usize,
    ) -> Result<BufId, WorkloadError> {
        let (t, h, index) = (self.tokens, self.cfg.model.hidden_size, self.share.layers[l].index);
        let fc1 = self.weights.get(&format!("layer{index}.{prefix}.fc1.weight"))?;
        let wide = fc1_rows(self.cfg) * f;
        let gate_up = self.act(l, &format!("{prefix}.gate_up"), &[t, wide]);
        self.forward_product(gate_up, y, fc1.value, t, wide, h, None);
        let act = self.act(l, &format!("{prefix}.act"), &[t, f]);
        let bias = self.bias(l, &format!("{prefix}.fc1"));
        let (fused, apart) = self.fc1_bias(bias);
        self.add_bias(gate_up, bias.filter(|_| apart.is_some()), t, wide);
        self.activation(t, f, None, fused, &[gate_up, act]);
        Ok(act)
    }

    /// Gradients of a gated MLP from that of its output; returns `dy (+ add)`, `[tokens, hidden]`.
    #[allow(clippy::too_many_arguments)]
    pub(super) fn gated_backward(
        &mut self,
        l: usize,
        prefix: &str,
        y: BufId,
        dout: BufId,
        f: usize,
        add: Option<BufId>,
    ) -> Result<BufId, WorkloadError> {
        let (t, h, index) = (self.tokens, self.cfg.model.hidden_size, self.share.layers[l].index);
        let weight = |s: &Self, what: &str| s.weights.get(&format!("layer{index}.{prefix}.{what}.weight"));
        let (fc1, fc2) = (weight(self, "fc1")?, weight(self, "fc2")?);
        let wide = fc1_rows(self.cfg) * f;
        let act = self.act(l, &format!("{prefix}.act"), &[t, f]);
        let gate_up = self.act(l, &format!("{prefix}.gate_up"), &[t, wide]);
        let dact = self.act(l, &format!("{prefix}.dact"), &[t, f]);
        self.data_gradient(dact, dout, fc2.value, t, h, f, None);
        self.weight_gradient(fc2.grad, dout, act, t, h, f);
        let dgate_up = self.act(l, &format!("{prefix}.dgate_up"), &[t, wide]);
        let bias = self.bias(l, &format!("{prefix}.fc1"));
        self.activation_backward(t, f, None, self.fc1_bias(bias).0, &[gate_up, dact, dgate_up]);
        self.weight_gradient(fc1.grad, dgate_up, y, t, wide, h);
        self.bias_gradient(dgate_up, bias, t, wide);
        let dy = self.act(l, &format!("{prefix}.dy"), &[t, h]);
        self.data_gradient(dy, dgate_up, fc1.value, t, wide, h, add);
        Ok(dy)
    }
}
