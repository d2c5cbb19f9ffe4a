//! The chosen experts' MLPs on dispatched rows.

use super::super::{Stack, WorkloadError};
use super::Dims;
use super::dispatch::ExpertRows;
use crate::config::ExpertGemm;
use crate::device::cuda::matmul::Layout;
use crate::ops::bias::{BiasAdd, BiasGrad, BiasProbGrad};
use crate::ops::gemm::{Accumulate, Gemm, SeparateGemms};
use crate::ops::grouped_gemm::{GroupedGemm, PerExpertGemm};
use crate::program::{BufId, DType};

impl Dims {
    /// Adds the experts' biases to their rows.
    fn bias(&self, cols: usize, weighted: bool) -> BiasAdd {
        BiasAdd { rows: self.rows, cols, experts: self.local, weighted, dtype: DType::Bf16 }
    }
}

impl Stack<'_> {
    fn bias_grad(&self, d: &Dims, cols: usize, weighted: bool) -> BiasGrad {
        let (out, accumulate) = (self.grad_dtype(), self.accumulate == Accumulate::InPlace);
        BiasGrad { rows: d.rows, cols, experts: d.local, weighted, out, accumulate }
    }

    /// `[rows, width]` to `[rows, width]`, weighted by the rows' probabilities.
    pub(super) fn experts_forward(
        &mut self,
        l: usize,
        d: &Dims,
        x: ExpertRows,
    ) -> Result<BufId, WorkloadError> {
        let (fc1, fc2) = (self.moe_weight(l, "experts.fc1")?, self.moe_weight(l, "experts.fc2")?);
        let gate_up = self.act(l, "moe.gate_up", &[d.rows, d.wide]);
        self.expert_product(l, d, x.offsets, x.rows, fc1.value, gate_up, d.wide, d.w, Layout::Nt)?;
        let (fused, apart) = self.fc1_bias(self.bias(l, "moe.experts.fc1"));
        if let Some(bias) = apart {
            self.b.launch(d.bias(d.wide, false), &[gate_up, bias, x.offsets]);
        }
        let act = self.act(l, "moe.act", &[d.rows, d.f]);
        let activation = self.here();
        self.activation(d.rows, d.f, Some(d.local), fused, &[gate_up, x.row_probs, x.offsets, act]);
        self.recomputable("moe_act", activation, &[]);
        let out = self.act(l, "moe.out_rows", &[d.rows, d.w]);
        self.expert_product(l, d, x.offsets, act, fc2.value, out, d.w, d.f, Layout::Nt)?;
        if let Some(bias) = self.bias(l, "moe.experts.fc2") {
            self.b.launch(d.bias(d.w, true), &[out, bias.value, x.offsets, x.row_probs]);
        }
        Ok(out)
    }

    /// Gradients of the rows `[rows, width]` and of their probabilities `[rows]` from that of the experts' output.
    pub(super) fn experts_backward(
        &mut self,
        l: usize,
        d: &Dims,
        drows: BufId,
    ) -> Result<(BufId, BufId), WorkloadError> {
        let ExpertRows { rows, row_probs, offsets } = self.expert_rows(l, d);
        let (fc1, fc2) = (self.moe_weight(l, "experts.fc1")?, self.moe_weight(l, "experts.fc2")?);
        let (act, gate_up) =
            (self.act(l, "moe.act", &[d.rows, d.f]), self.act(l, "moe.gate_up", &[d.rows, d.wide]));
        let dact = self.act(l, "moe.dact", &[d.rows, d.f]);
        self.expert_product(l, d, offsets, drows, fc2.value, dact, d.f, d.w, Layout::Nn)?;
        self.expert_product(l, d, offsets, drows, act, fc2.grad, d.w, d.f, Layout::Tn)?;
        let dgate_up = self.act(l, "moe.dgate_up", &[d.rows, d.wide]);
        let drow_probs = self.act_as(l, "moe.drow_probs", DType::F32, &[d.rows]);
        let bias = self.bias(l, "moe.experts.fc1");
        self.activation_backward(
            d.rows,
            d.f,
            Some(d.local),
            self.fc1_bias(bias).0,
            &[gate_up, dact, row_probs, offsets, dgate_up, drow_probs],
        );
        if let Some(bias) = bias {
            self.b.launch(self.bias_grad(d, d.wide, false), &[dgate_up, offsets, bias.grad]);
        }
        if let Some(bias) = self.bias(l, "moe.experts.fc2") {
            self.b.launch(self.bias_grad(d, d.w, true), &[drows, offsets, row_probs, bias.grad]);
            let op = BiasProbGrad { rows: d.rows, cols: d.w, experts: d.local };
            self.b.launch(op, &[drows, bias.value, offsets, drow_probs]);
        }
        self.expert_product(l, d, offsets, dgate_up, rows, fc1.grad, d.wide, d.w, Layout::Tn)?;
        let dx_rows = self.act(l, "moe.dx_rows", &[d.rows, d.w]);
        self.expert_product(l, d, offsets, dgate_up, fc1.value, dx_rows, d.w, d.wide, Layout::Nn)?;
        Ok((dx_rows, drow_probs))
    }

    /// Products of all local experts. `Nt`: out[rows, n] = a[rows, k] w[e][n, k]^T; `Nn`: out[rows, n] = a[rows, k] w[e][k, n];
    /// `Tn`: out[e][n, k] (+)= a_e[rows, n]^T b_e[rows, k].
    #[allow(clippy::too_many_arguments)]
    fn expert_product(
        &mut self,
        l: usize,
        d: &Dims,
        offsets: BufId,
        a: BufId,
        b: BufId,
        out: BufId,
        n: usize,
        k: usize,
        layout: Layout,
    ) -> Result<(), WorkloadError> {
        let dtype = self.b.program.buffer(out).dtype;
        let accumulate = if layout == Layout::Tn { self.accumulate } else { Accumulate::No };
        let per_expert = self.moe()?.expert_gemm == ExpertGemm::PerExpert;
        if d.padded {
            // Every expert has the same number of rows: one batched product.
            let rows = d.rows / d.local;
            let (m, n, k) = if layout == Layout::Tn { (n, k, rows) } else { (rows, n, k) };
            let all = Gemm { m, n, k, layout, batch: d.local, out: dtype, accumulate };
            if per_expert {
                self.b.launch(SeparateGemms { all }, &[a, b, out]);
            } else {
                self.b.launch(all, &[a, b, out]);
            }
            return Ok(());
        }
        let op = GroupedGemm {
            experts: d.local,
            rows: d.rows,
            filled: d.rows.min(d.t * d.topk),
            n,
            k,
            layout,
            out: dtype,
            accumulate: accumulate == Accumulate::InPlace,
        };
        if !per_expert {
            self.b.launch(op, &[offsets, a, b, out]);
        } else if d.host_counts {
            let host = self.host_counts(l, d);
            self.b.launch(PerExpertGemm { grouped: op, bins: d.bins }, &[host, a, b, out]);
        } else {
            return Err(WorkloadError::Unsupported(
                "--expert_gemm per_expert needs row counts on the host, and this dispatch leaves them on the device; \
                 use --expert_gemm grouped"
                    .into(),
            ));
        }
        Ok(())
    }
}
