//! Latent experts (Nemotron 3 super and ultra; Megatron-Core `transformer/moe/moe_layer.py`, `moe_latent_size`): tokens
//! are projected to a narrower space before they are dispatched (`moe_preprocess`), and the sum over the chosen experts
//! back after they are combined (`moe_experts`). Both projections are whole on every tensor rank.

use super::super::{Stack, WorkloadError};
use super::Dims;
use crate::program::{BufId, Part, Pass};

impl Stack<'_> {
    /// What is dispatched of `y [split_tokens, hidden]`: `y` itself or its projection, `[split_tokens, width]`.
    pub(super) fn latent_down(&mut self, l: usize, d: &Dims, y: BufId) -> Result<BufId, WorkloadError> {
        if !d.latent {
            return Ok(y);
        }
        let weight = self.moe_weight(l, "latent_down")?;
        let out = self.act(l, "moe.latent", &[d.t, d.w]);
        self.forward_product(out, y, weight.value, d.t, d.w, d.h, None);
        Ok(out)
    }

    /// From the gradient of what was dispatched to that of `y`.
    pub(super) fn latent_down_backward(
        &mut self,
        l: usize,
        d: &Dims,
        y: BufId,
        dlatent: BufId,
    ) -> Result<BufId, WorkloadError> {
        if !d.latent {
            return Ok(dlatent);
        }
        self.b.at(Some(l), Part::MoePreprocess, Pass::Backward);
        let weight = self.moe_weight(l, "latent_down")?;
        self.weight_gradient(weight.grad, dlatent, y, d.t, d.w, d.h);
        let dy = self.act(l, "moe.dy_latent", &[d.t, d.h]);
        self.data_gradient(dy, dlatent, weight.value, d.t, d.w, d.h, None);
        Ok(dy)
    }

    /// `x + shared + sum up^T`, `[split_tokens, hidden]`, of the experts' `sum [split_tokens, width]`.
    pub(super) fn latent_up(
        &mut self,
        l: usize,
        d: &Dims,
        sum: BufId,
        x: BufId,
        shared: Option<BufId>,
    ) -> Result<BufId, WorkloadError> {
        let weight = self.moe_weight(l, "latent_up")?;
        let out = self.act(l, "moe.residual_out", &[d.t, d.h]);
        if shared.is_none() && self.cfg.model.hidden_dropout == 0.0 {
            self.forward_product(out, sum, weight.value, d.t, d.h, d.w, Some(x));
            return Ok(out);
        }
        let wide = self.act(l, "moe.sum", &[d.t, d.h]);
        self.forward_product(wide, sum, weight.value, d.t, d.h, d.w, shared);
        self.add_residual(l, "moe", wide, x, out);
        Ok(out)
    }

    /// From the gradient of the layer's sum to that of the experts' sum.
    pub(super) fn latent_up_backward(
        &mut self,
        l: usize,
        d: &Dims,
        dsum: BufId,
    ) -> Result<BufId, WorkloadError> {
        if !d.latent {
            return Ok(dsum);
        }
        let weight = self.moe_weight(l, "latent_up")?;
        let sum = self.act(l, "moe.latent_sum", &[d.t, d.w]);
        self.weight_gradient(weight.grad, dsum, sum, d.t, d.h, d.w);
        let dlatent = self.act(l, "moe.dlatent_sum", &[d.t, d.w]);
        self.data_gradient(dlatent, dsum, weight.value, d.t, d.h, d.w, None);
        Ok(dlatent)
    }
}
