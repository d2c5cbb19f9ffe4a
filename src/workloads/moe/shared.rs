//! The shared expert: a dense MLP that every token passes, beside the chosen experts.

use super::super::{Stack, WorkloadError};
use crate::config::Moe;
use crate::program::BufId;

impl Stack<'_> {
    /// The shared expert, in the router's part: it runs before routing unless it is overlapped.
    pub(super) fn shared_forward(
        &mut self,
        l: usize,
        moe: &Moe,
        y: BufId,
    ) -> Result<Option<BufId>, WorkloadError> {
        if moe.shared_expert_intermediate_size.is_none() {
            return Ok(None);
        }
        let (h, f) = (self.cfg.model.hidden_size, self.share.shared_expert_ffn.unwrap_or(0));
        let y = self.gather_tokens(l, "moe.norm", y, h);
        let act = self.gated_forward(l, "moe.shared", y, f)?;
        let fc2 = self.moe_weight(l, "shared.fc2")?;
        let out = self.act(l, "moe.shared.out", &[self.tokens, h]);
        self.forward_product(out, act, fc2.value, self.tokens, h, f, None);
        Ok(Some(self.reduce_tokens(l, "moe.shared.out", out, h)))
    }

    pub(super) fn shared_backward(
        &mut self,
        l: usize,
        moe: &Moe,
        y: BufId,
        dout: BufId,
        dy: BufId,
    ) -> Result<BufId, WorkloadError> {
        if moe.shared_expert_intermediate_size.is_none() {
            return Ok(dy);
        }
        let (h, f) = (self.cfg.model.hidden_size, self.share.shared_expert_ffn.unwrap_or(0));
        let y = self.gather_tokens(l, "moe.norm", y, h);
        let dout = self.gather_tokens(l, "moe.shared.dout", dout, h);
        if !self.split() && self.cfg.parallel.tp == 1 {
            return self.gated_backward(l, "moe.shared", y, dout, f, Some(dy));
        }
        let dy_shared = self.gated_backward(l, "moe.shared", y, dout, f, None)?;
        let dy_shared = self.reduce_tokens(l, "moe.shared.dy", dy_shared, h);
        let sum = self.act(l, "moe.dy_sum", &[self.split_tokens, h]);
        let none = crate::ops::dropout::Dropout { p: 0.0, rng: self.b.rng("none", 0) };
        self.b.launch(
            crate::ops::dropout::DropoutAddFwd { len: self.split_tokens * h, dropout: none },
            &[dy_shared, dy, self.words, sum],
        );
        Ok(sum)
    }
}
