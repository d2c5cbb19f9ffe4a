//! Linear layers with a bias and LayerNorms under names of their own: what the image tower and what a diffusion transformer
//! are made of beside attention. None of them is split over tensor ranks.

use super::weights::Spec;
use super::{Stack, WorkloadError};
use crate::ops::gelu::{Curve, CurveBwd, CurveFwd};
use crate::ops::layer_norm::{LayerNormBwd, LayerNormFwd};
use crate::program::{BufId, DType};

/// A product `[rows, k] -> [rows, n]` by the weight `<name>.weight` `[n, k]` and the bias `<name>.bias`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Product<'a> {
    pub name: &'a str,
    pub rows: usize,
    pub k: usize,
    pub n: usize,
}

/// Weight and bias of a linear layer.
pub(super) fn linear(name: &str, n: usize, k: usize, std: f64) -> [Spec; 2] {
    [Spec::normal(format!("{name}.weight"), n, k, std), Spec::bias(format!("{name}.bias"), n, std)]
}

/// Weight and bias of a LayerNorm.
pub(super) fn layer_norm(name: &str, width: usize, std: f64) -> [Spec; 2] {
    [Spec::constant(format!("{name}.weight"), width, 1.0), Spec::bias(format!("{name}.bias"), width, std)]
}

impl Stack<'_> {
    /// bf16 activation of this slot.
    pub(super) fn named(&mut self, name: &str, shape: &[usize]) -> BufId {
        self.b.activation(name, DType::Bf16, shape)
    }

    /// `x w^T (+ residual)`, without the bias: `<name>.out`.
    pub(super) fn product(
        &mut self,
        p: Product,
        x: BufId,
        residual: Option<BufId>,
    ) -> Result<BufId, WorkloadError> {
        let out = self.named(&format!("{}.out", p.name), &[p.rows, p.n]);
        let w = self.weights.get(&format!("{}.weight", p.name))?;
        self.forward_product(out, x, w.value, p.rows, p.n, p.k, residual);
        Ok(out)
    }

    /// `x w^T + bias (+ residual)`: `<name>.out`.
    pub(super) fn biased_product(
        &mut self,
        p: Product,
        x: BufId,
        residual: Option<BufId>,
    ) -> Result<BufId, WorkloadError> {
        let out = self.product(p, x, residual)?;
        let bias = self.weights.get(&format!("{}.bias", p.name))?;
        self.add_bias(out, Some(bias), p.rows, p.n);
        Ok(out)
    }

    /// Gradients of weight and bias from that of the output.
    pub(super) fn product_gradients(&mut self, p: Product, x: BufId, dy: BufId) -> Result<(), WorkloadError> {
        let weight = self.weights.get(&format!("{}.weight", p.name))?;
        let bias = self.weights.get(&format!("{}.bias", p.name))?;
        self.weight_gradient(weight.grad, dy, x, p.rows, p.n, p.k);
        self.bias_gradient(dy, Some(bias), p.rows, p.n);
        Ok(())
    }

    /// The same, and the gradient of the input (`+ add`): `<name>.dx`.
    pub(super) fn product_backward(
        &mut self,
        p: Product,
        x: BufId,
        dy: BufId,
        add: Option<BufId>,
    ) -> Result<BufId, WorkloadError> {
        self.product_gradients(p, x, dy)?;
        let weight = self.weights.get(&format!("{}.weight", p.name))?;
        let dx = self.named(&format!("{}.dx", p.name), &[p.rows, p.k]);
        self.data_gradient(dx, dy, weight.value, p.rows, p.n, p.k, add);
        Ok(dx)
    }

    /// `f(x w^T + bias)`: `<name>.act`.
    pub(super) fn curved_product(
        &mut self,
        p: Product,
        curve: Curve,
        x: BufId,
    ) -> Result<BufId, WorkloadError> {
        let out = self.product(p, x, None)?;
        let bias = self.weights.get(&format!("{}.bias", p.name))?;
        let act = self.named(&format!("{}.act", p.name), &[p.rows, p.n]);
        let op = CurveFwd { rows: p.rows, cols: p.n, curve, bias: true };
        self.b.launch(op, &[out, bias.value, act]);
        Ok(act)
    }

    /// Through `f` alone, from the gradient of `<name>.act` to that of the product: `<name>.dout`.
    pub(super) fn curve_backward(
        &mut self,
        p: Product,
        curve: Curve,
        dact: BufId,
    ) -> Result<BufId, WorkloadError> {
        let out = self.named(&format!("{}.out", p.name), &[p.rows, p.n]);
        let bias = self.weights.get(&format!("{}.bias", p.name))?;
        let dout = self.named(&format!("{}.dout", p.name), &[p.rows, p.n]);
        let op = CurveBwd { rows: p.rows, cols: p.n, curve, bias: true };
        self.b.launch(op, &[out, bias.value, dact, dout]);
        Ok(dout)
    }

    /// LayerNorm of `[rows, width]` by `<name>.weight` and `<name>.bias`: `<name>.out`.
    pub(super) fn layer_norm(
        &mut self,
        name: &str,
        x: BufId,
        [rows, hidden]: [usize; 2],
        eps: f64,
    ) -> Result<BufId, WorkloadError> {
        let weight = self.weights.get(&format!("{name}.weight"))?;
        let bias = self.weights.get(&format!("{name}.bias"))?;
        let y = self.named(&format!("{name}.out"), &[rows, hidden]);
        let stats = self.b.activation(&format!("{name}.stats"), DType::F32, &[rows, 2]);
        let op = LayerNormFwd { rows, hidden, eps, modulation: None };
        self.b.launch(op, &[x, weight.value, bias.value, y, stats]);
        Ok(y)
    }

    /// Its gradient `<name>.dx (= norm gradient + dres)`, and those of weight and bias.
    pub(super) fn layer_norm_backward(
        &mut self,
        name: &str,
        x: BufId,
        [rows, hidden]: [usize; 2],
        dy: BufId,
        dres: Option<BufId>,
    ) -> Result<BufId, WorkloadError> {
        let weight = self.weights.get(&format!("{name}.weight"))?;
        let bias = self.weights.get(&format!("{name}.bias"))?;
        let stats = self.b.activation(&format!("{name}.stats"), DType::F32, &[rows, 2]);
        let dx = self.named(&format!("{name}.dx"), &[rows, hidden]);
        let op = LayerNormBwd { rows, hidden, modulation: None, residual: dres.is_some() };
        let parts = op.parts();
        let partial = self.b.activation(&format!("{name}.partial"), DType::F32, &[parts, 2 * hidden]);
        let mut args = vec![x, stats, dy, weight.value];
        args.extend(dres);
        args.extend([dx, partial]);
        self.b.launch(op, &args);
        self.column_sum(parts, partial, &[(hidden, weight.grad), (hidden, bias.grad)]);
        Ok(dx)
    }
}
