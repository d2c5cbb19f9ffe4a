//! The shared expert: a dense MLP that every token passes, beside the chosen experts; some models weigh its output by a
//! sigmoid gate.

use super::super::{Stack, WorkloadError};
use crate::config::Moe;
use crate::ops::dropout::DropoutAddFwd;
use crate::ops::rmsnorm::partials;
use crate::ops::token_gate::{TokenGateBwd, TokenGateFwd};
use crate::program::{BufId, DType};

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
        let start = self.here();
        let all = self.gather_tokens(l, "moe.norm", y, h);
        let act = self.gated_forward(l, "moe.shared", all, f)?;
        let fc2 = self.moe_weight(l, "shared.fc2")?;
        let out = self.act(l, "moe.shared.out", &[self.tokens, h]);
        self.forward_product(out, act, fc2.value, self.tokens, h, f, None);
        let out = self.reduce_tokens(l, "moe.shared.out", out, h);
        if !moe.shared_expert_gate {
            self.recomputable("shared_experts", start, &[out]);
            return Ok(Some(out));
        }
        let weight = self.moe_weight(l, "shared.gate")?;
        let (gated, gate) = self.shared_gate(l);
        let op = TokenGateFwd { tokens: self.split_tokens, hidden: h };
        self.b.launch(op, &[y, weight.value, out, gated, gate]);
        self.recomputable("shared_experts", start, &[gated]);
        Ok(Some(gated))
    }

    /// The gated output, bf16 `[split_tokens, hidden]`, and the gates, f32 `[split_tokens]`.
    fn shared_gate(&mut self, l: usize) -> (BufId, BufId) {
        (
            self.act(l, "moe.shared.gated", &[self.split_tokens, self.cfg.model.hidden_size]),
            self.act_as(l, "moe.shared.gate", DType::F32, &[self.split_tokens]),
        )
    }

    /// Gradient of `y` through the shared expert, plus `dy`; `dout` is that of the layer's sum. `[split_tokens, hidden]`.
    pub(super) fn shared_backward(
        &mut self,
        l: usize,
        moe: &Moe,
        y: BufId,
        mut dout: BufId,
        mut dy: BufId,
    ) -> Result<BufId, WorkloadError> {
        if moe.shared_expert_intermediate_size.is_none() {
            return Ok(dy);
        }
        let (h, f) = (self.cfg.model.hidden_size, self.share.shared_expert_ffn.unwrap_or(0));
        if moe.shared_expert_gate {
            (dout, dy) = self.shared_gate_backward(l, y, dout, dy)?;
        }
        let y = self.gather_tokens(l, "moe.norm", y, h);
        let dout = self.gather_tokens(l, "moe.shared.dout", dout, h);
        if !self.split() && self.cfg.parallel.tp == 1 {
            return self.gated_backward(l, "moe.shared", y, dout, f, Some(dy));
        }
        let dy_shared = self.gated_backward(l, "moe.shared", y, dout, f, None)?;
        let dy_shared = self.reduce_tokens(l, "moe.shared.dy", dy_shared, h);
        let sum = self.act(l, "moe.dy_sum", &[self.split_tokens, h]);
        let none = self.no_dropout();
        self.b.launch(
            DropoutAddFwd { len: self.split_tokens * h, dropout: none },
            &[dy_shared, dy, self.words, sum],
        );
        Ok(sum)
    }

    /// From the gradient of the gated output to those of the expert's output and of `y`, the latter plus `dy`.
    fn shared_gate_backward(
        &mut self,
        l: usize,
        y: BufId,
        dout: BufId,
        dy: BufId,
    ) -> Result<(BufId, BufId), WorkloadError> {
        let (t, h) = (self.split_tokens, self.cfg.model.hidden_size);
        let weight = self.moe_weight(l, "shared.gate")?;
        // As `reduce_tokens` named it in the forward.
        let name = if self.split() { "moe.shared.out.reduced" } else { "moe.shared.out" };
        let out = self.act(l, name, &[t, h]);
        let (_, gate) = self.shared_gate(l);
        let [dx, dy_sum] = ["moe.shared.dgated", "moe.shared.dy_gate"].map(|n| self.act(l, n, &[t, h]));
        let rows = partials(t);
        let partial = self.act_as(l, "moe.shared.dgate_partial", DType::F32, &[rows, h]);
        self.b.launch(
            TokenGateBwd { tokens: t, hidden: h },
            &[y, weight.value, out, gate, dout, dy, dx, dy_sum, partial],
        );
        self.column_sum(rows, partial, &[(h, weight.grad)]);
        Ok((dx, dy_sum))
    }
}
