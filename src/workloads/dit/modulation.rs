//! Norms and gated residuals that follow the time step.

use super::super::weights::Weight;
use super::super::{Stack, WorkloadError};
use super::Sizes;
use crate::ops::gemm::Accumulate;
use crate::ops::layer_norm::gate::{GatedResidualBwd, GatedResidualFwd, ModulationGrad};
use crate::ops::layer_norm::{LayerNormBwd, LayerNormFwd, Modulation};
use crate::program::BufId;

/// A gated residual in the backward pass: its partial sums, their number a sequence, and the bias that it added.
pub(super) struct Gate {
    partial: BufId,
    parts: usize,
    bias: Weight,
}

impl Stack<'_> {
    /// LayerNorm `[split, h]` modulated by `<name>.mod.weight` and the time embedding.
    pub(super) fn modulated_norm(
        &mut self,
        name: &str,
        x: BufId,
        time: BufId,
        s: &Sizes,
        m: Modulation,
    ) -> Result<BufId, WorkloadError> {
        let table = self.weights.get(&format!("{name}.mod.weight"))?;
        let y = self.named(&format!("{name}.norm.out"), &[s.split, s.h]);
        let stats = self.f32_named(&format!("{name}.norm.stats"), &[s.split, 2]);
        let eps = self.cfg.model.layernorm_epsilon;
        let op = LayerNormFwd { rows: s.split, hidden: s.h, eps, modulation: Some(m) };
        self.b.launch(op, &[x, table.value, time, y, stats]);
        Ok(y)
    }

    /// Its gradient (`+ dres`), and those of the table, the time embedding, and the bias of a gated residual.
    #[allow(clippy::too_many_arguments)]
    pub(super) fn modulated_norm_backward(
        &mut self,
        name: &str,
        x: BufId,
        [time, dtime]: [BufId; 2],
        s: &Sizes,
        m: Modulation,
        dy: BufId,
        dres: Option<BufId>,
        gate: Option<Gate>,
    ) -> Result<BufId, WorkloadError> {
        let table = self.weights.get(&format!("{name}.mod.weight"))?;
        let stats = self.f32_named(&format!("{name}.norm.stats"), &[s.split, 2]);
        let dx = self.named(&format!("{name}.norm.dx"), &[s.split, s.h]);
        let op = LayerNormBwd { rows: s.split, hidden: s.h, modulation: Some(m), residual: dres.is_some() };
        let parts = op.parts();
        let partial = self.f32_named(&format!("{name}.norm.partial"), &[m.sequences * parts, 2 * s.h]);
        let mut args = vec![x, stats, dy, table.value, time];
        args.extend(dres);
        args.extend([dx, partial]);
        self.b.launch(op, &args);
        let op = ModulationGrad {
            hidden: s.h,
            modulation: m,
            norm_parts: parts,
            gate_parts: gate.as_ref().map(|g| g.parts),
            out: self.grad_dtype(),
            accumulate: self.accumulate == Accumulate::InPlace,
        };
        let mut args = vec![partial];
        args.extend(gate.as_ref().map(|g| g.partial));
        args.extend([table.grad, dtime]);
        args.extend(gate.map(|g| g.bias.grad));
        self.b.launch(op, &args);
        Ok(dx)
    }

    /// `x + (y + bias) * gate`: `<name>.gated`.
    pub(super) fn gated(
        &mut self,
        name: &str,
        [x, y, time]: [BufId; 3],
        bias: Weight,
        s: &Sizes,
        modulation: Modulation,
    ) -> Result<BufId, WorkloadError> {
        let table = self.weights.get(&format!("{name}.mod.weight"))?;
        let out = self.named(&format!("{name}.gated"), &[s.split, s.h]);
        let op = GatedResidualFwd { rows: s.split, hidden: s.h, modulation };
        self.b.launch(op, &[x, y, bias.value, table.value, time, out]);
        Ok(out)
    }

    /// Gradient of `y`, and what the gate's, the table's and the bias' gradients are summed from.
    pub(super) fn gated_residual_backward(
        &mut self,
        name: &str,
        [dout, y, time]: [BufId; 3],
        bias: Weight,
        s: &Sizes,
        modulation: Modulation,
    ) -> Result<(BufId, Gate), WorkloadError> {
        let table = self.weights.get(&format!("{name}.mod.weight"))?;
        let dy = self.named(&format!("{name}.dgated"), &[s.split, s.h]);
        let op = GatedResidualBwd { rows: s.split, hidden: s.h, modulation };
        let parts = op.parts();
        let partial = self.f32_named(&format!("{name}.gate.partial"), &[s.sequences * parts, 2 * s.h]);
        self.b.launch(op, &[dout, y, bias.value, table.value, time, dy, partial]);
        Ok((dy, Gate { partial, parts, bias }))
    }
}
