//! What attention, MLP and experts have in common: norms, products with their gradients, and the
//! tensor-parallel collectives around them.

use super::Stack;
use super::rng::State;
use super::weights::Weight;
use crate::device::cuda::matmul::Layout;
use crate::ops::bias::{BiasAdd, BiasGrad};
use crate::ops::collective::{Collective, Exchange, Kind, StandIn};
use crate::ops::dropout::{Dropout, DropoutAddFwd, DropoutBwd};
use crate::ops::gemm::{Accumulate, Gemm};
use crate::ops::rmsnorm::{
    ColumnSum, Partial, RmsNormBwd, RmsNormFwd, WeightGrad, gradient_is_whole, partials,
};
use crate::ops::rng::Rng;
use crate::program::{BufId, DType};

/// Rows and buffer of partial sums, and the main gradients that lie side by side in it, each with its number of columns.
pub(super) type PartialSums<'a> = (usize, BufId, &'a [(usize, BufId)]);

impl Stack<'_> {
    /// `y = rmsnorm(x) * weight`, with 1/rms kept for the backward. `[split_tokens, hidden]`.
    pub(super) fn norm(&mut self, l: usize, name: &str, x: BufId, weight: Weight) -> (BufId, BufId) {
        let (tokens, hidden) = (self.split_tokens, self.cfg.model.hidden_size);
        let y = self.act(l, &format!("{name}.out"), &[tokens, hidden]);
        let rstd = self.act_as(l, &format!("{name}.rstd"), DType::F32, &[tokens]);
        self.b.launch(
            RmsNormFwd {
                tokens,
                hidden,
                eps: self.cfg.model.layernorm_epsilon,
                zero_centered: self.cfg.model.zero_centered_norms,
            },
            &[x, weight.value, y, rstd],
        );
        (y, rstd)
    }

    /// `dx = d(norm)/dx * dy + dres`, and the gradient of the scale.
    #[allow(clippy::too_many_arguments)]
    pub(super) fn norm_backward(
        &mut self,
        l: usize,
        name: &str,
        x: BufId,
        rstd: BufId,
        weight: Weight,
        dy: BufId,
        dres: Option<BufId>,
    ) -> BufId {
        let (tokens, hidden) = (self.split_tokens, self.cfg.model.hidden_size);
        let mut args = vec![x, weight.value, rstd, dy];
        args.extend(dres);
        self.rows_norm_backward(l, name, args, [tokens, hidden], dres.is_some(), weight.grad)
    }

    /// A norm's backward on `[tokens, hidden]`, from its inputs in order: dx; and the gradient of the scale, by the same
    /// launch where that is faster.
    pub(super) fn rows_norm_backward(
        &mut self,
        l: usize,
        name: &str,
        inputs: Vec<BufId>,
        [tokens, hidden]: [usize; 2],
        residual: bool,
        grad: BufId,
    ) -> BufId {
        let dx = self.act(l, &format!("{name}.dx"), &[tokens, hidden]);
        let zero_centered = self.cfg.model.zero_centered_norms;
        let mut op = RmsNormBwd { tokens, hidden, residual, zero_centered, grad: WeightGrad::Partial };
        if gradient_is_whole(tokens, hidden) {
            let accumulate = self.accumulate == Accumulate::InPlace;
            op.grad = WeightGrad::Whole { out: self.grad_dtype(), accumulate };
            self.b.launch(op, &[&inputs[..], &[dx, grad]].concat());
            return dx;
        }
        let rows = partials(tokens);
        let partial = self.act_as(l, &format!("{name}.dw_partial"), DType::F32, &[rows, hidden]);
        self.b.launch(op, &[&inputs[..], &[dx, partial]].concat());
        self.column_sum(rows, partial, &[(hidden, grad)]);
        dx
    }

    /// Sums the columns of `partial [rows, all columns]` into main gradients that lie side by side in it, each with its
    /// number of columns.
    pub(super) fn column_sum(&mut self, rows: usize, partial: BufId, grads: &[(usize, BufId)]) {
        self.column_sums(&[(rows, partial, grads)]);
    }

    /// The same of several partial sums, by one launch.
    pub(super) fn column_sums(&mut self, all: &[PartialSums]) {
        let accumulate = self.accumulate == Accumulate::InPlace;
        let (mut partials, mut args) = (Vec::new(), Vec::new());
        for (rows, partial, grads) in all {
            partials.push(Partial { rows: *rows, cols: grads.iter().map(|(cols, _)| *cols).collect() });
            args.push(*partial);
            args.extend(grads.iter().map(|(_, grad)| *grad));
        }
        self.b.launch(ColumnSum { partials, out: self.grad_dtype(), accumulate }, &args);
    }

    /// `out[tokens, n] = x[tokens, k] w[n, k]^T (+ residual)`.
    #[allow(clippy::too_many_arguments)]
    pub(super) fn forward_product(
        &mut self,
        out: BufId,
        x: BufId,
        w: BufId,
        tokens: usize,
        n: usize,
        k: usize,
        residual: Option<BufId>,
    ) {
        let accumulate = if residual.is_some() { Accumulate::Residual } else { Accumulate::No };
        let op = Gemm {
            m: tokens,
            n,
            k,
            layout: Layout::Nt,
            batch: 1,
            out: self.b.program.buffer(out).dtype,
            accumulate,
        };
        let mut args = vec![x, w];
        args.extend(residual);
        args.push(out);
        self.b.launch(op, &args);
    }

    /// `dx[tokens, k] = dy[tokens, n] w[n, k] (+ add)`.
    #[allow(clippy::too_many_arguments)]
    pub(super) fn data_gradient(
        &mut self,
        dx: BufId,
        dy: BufId,
        w: BufId,
        tokens: usize,
        n: usize,
        k: usize,
        add: Option<BufId>,
    ) {
        let accumulate = if add.is_some() { Accumulate::Residual } else { Accumulate::No };
        let op = Gemm { m: tokens, n: k, k: n, layout: Layout::Nn, batch: 1, out: DType::Bf16, accumulate };
        let mut args = vec![dy, w];
        args.extend(add);
        args.push(dx);
        self.b.launch(op, &args);
    }

    /// `grad[n, k] (+)= dy[tokens, n]^T x[tokens, k]`, into the main gradient.
    pub(super) fn weight_gradient(
        &mut self,
        grad: BufId,
        dy: BufId,
        x: BufId,
        tokens: usize,
        n: usize,
        k: usize,
    ) {
        let op = Gemm {
            m: n,
            n: k,
            k: tokens,
            layout: Layout::Tn,
            batch: 1,
            out: self.grad_dtype(),
            accumulate: self.accumulate,
        };
        self.b.launch(op, &[dy, x, grad]);
    }

    /// The bias of a linear layer of layer `l`, if the model has it.
    pub(super) fn bias(&self, l: usize, what: &str) -> Option<Weight> {
        self.weights.find(&format!("layer{}.{what}.bias", self.share.layers[l].index))
    }

    /// `x[rows, cols] += bias`, where there is one.
    pub(super) fn add_bias(&mut self, x: BufId, bias: Option<Weight>, rows: usize, cols: usize) {
        let dtype = self.b.program.buffer(x).dtype;
        if let Some(bias) = bias {
            self.b.launch(BiasAdd { rows, cols, experts: 0, weighted: false, dtype }, &[x, bias.value]);
        }
    }

    /// Column sums of `dy[rows, cols]` into the bias' main gradient.
    pub(super) fn bias_gradient(&mut self, dy: BufId, bias: Option<Weight>, rows: usize, cols: usize) {
        let accumulate = self.accumulate == Accumulate::InPlace;
        let out = self.grad_dtype();
        if let Some(bias) = bias {
            let op = BiasGrad { rows, cols, experts: 0, weighted: false, out, accumulate };
            self.b.launch(op, &[dy, bias.grad]);
        }
    }

    /// The bias of the product that ends the part `name`.
    fn closing_bias(&self, l: usize, name: &str) -> Option<Weight> {
        self.bias(l, &format!("{name}.{}", if name == "attn" { "proj" } else { "fc2" }))
    }

    /// True where sequence parallelism splits rows over tensor ranks.
    pub(super) fn split(&self) -> bool {
        self.split_tokens != self.tokens
    }

    /// Rows of all tensor ranks: `[split_tokens, cols] -> [tokens, cols]`.
    pub(super) fn gather_tokens(&mut self, l: usize, name: &str, x: BufId, cols: usize) -> BufId {
        if !self.split() {
            return x;
        }
        let out = self.act(l, &format!("{name}.gathered"), &[self.tokens, cols]);
        if let Some(group) = self.share.place.tensor.clone() {
            let (kind, rows) = (Kind::AllGather, self.split_tokens);
            self.b.launch(Exchange { kind, group, rows, cols, dtype: DType::Bf16 }, &[x, out]);
            return out;
        }
        self.b.launch(
            StandIn {
                kind: Collective::AllGather,
                rows: self.split_tokens,
                cols,
                ranks: self.cfg.parallel.tp,
                dtype: DType::Bf16,
            },
            &[x, out],
        );
        out
    }

    /// Sum over tensor ranks of a partial product, each rank keeping its rows:
    /// `[tokens, cols] -> [split_tokens, cols]`.
    pub(super) fn reduce_tokens(&mut self, l: usize, name: &str, x: BufId, cols: usize) -> BufId {
        let ranks = self.cfg.parallel.tp;
        if self.split() {
            let out = self.act(l, &format!("{name}.reduced"), &[self.split_tokens, cols]);
            if let Some(group) = self.share.place.tensor.clone() {
                let (kind, rows) = (Kind::ReduceScatter, self.split_tokens);
                self.b.launch(Exchange { kind, group, rows, cols, dtype: DType::Bf16 }, &[x, out]);
                return out;
            }
            self.b.launch(
                StandIn {
                    kind: Collective::ReduceScatter,
                    rows: self.split_tokens,
                    cols,
                    ranks,
                    dtype: DType::Bf16,
                },
                &[x, out],
            );
            return out;
        }
        if let Some(group) = self.share.place.tensor.clone() {
            let (kind, rows) = (Kind::AllReduce, self.tokens);
            self.b.launch(Exchange { kind, group, rows, cols, dtype: DType::Bf16 }, &[x]);
        } else if ranks > 1 && !self.cfg.stack_only {
            self.b.launch(
                StandIn { kind: Collective::AllReduce, rows: self.tokens, cols, ranks, dtype: DType::Bf16 },
                &[x],
            );
        }
        x
    }

    /// True if the residual add can ride in the product that ends a part.
    fn residual_rides(&self) -> bool {
        self.cfg.model.hidden_dropout == 0.0 && (self.cfg.parallel.tp == 1 || self.cfg.stack_only)
    }

    fn hidden_dropout(&mut self, l: usize, name: &str) -> Dropout {
        // Rows that every tensor rank has are dropped alike.
        let state = if self.split() { State::ModelParallel } else { State::DataParallel };
        let (index, p) = (self.share.layers[l].index, self.cfg.model.hidden_dropout);
        if p == 0.0 && self.share.place.world.is_some() {
            // Nothing is drawn, and no number taken: routing must not depend on how many tensor ranks there are.
            return Dropout { p, rng: Rng { seed_offset: 0, draw: 0 } };
        }
        Dropout { p, rng: self.rng(&format!("layer{index}.{name}.dropout"), state) }
    }

    /// The product that ends a part, with bias and residual: `residual + dropout(reduce(x w^T) + bias)`.
    #[allow(clippy::too_many_arguments)]
    pub(super) fn closing_product(
        &mut self,
        l: usize,
        name: &str,
        x: BufId,
        w: BufId,
        n: usize,
        k: usize,
        residual: BufId,
    ) -> BufId {
        let out = self.act(l, &format!("{name}.residual_out"), &[self.split_tokens, n]);
        let bias = self.closing_bias(l, name);
        if self.residual_rides() {
            self.forward_product(out, x, w, self.tokens, n, k, Some(residual));
            self.add_bias(out, bias, self.tokens, n);
            return out;
        }
        let partial = self.act(l, &format!("{name}.product"), &[self.tokens, n]);
        self.forward_product(partial, x, w, self.tokens, n, k, None);
        let sum = self.reduce_tokens(l, name, partial, n);
        self.add_bias(sum, bias, self.split_tokens, n);
        self.add_residual(l, name, sum, residual, out);
        out
    }

    /// `out = residual + dropout(x)`, `[split_tokens, hidden]`.
    pub(super) fn add_residual(&mut self, l: usize, name: &str, x: BufId, residual: BufId, out: BufId) {
        let dropout = self.hidden_dropout(l, name);
        let len = self.split_tokens * self.cfg.model.hidden_size;
        self.b.launch(DropoutAddFwd { len, dropout }, &[x, residual, self.words, out]);
    }

    /// Gradient at the output of a part's last product, on all rows, `[tokens, hidden]`; and that of its bias.
    pub(super) fn closing_gradient(&mut self, l: usize, name: &str, dout: BufId) -> BufId {
        let (dropped, hidden) = (self.dropout_gradient(l, name, dout), self.cfg.model.hidden_size);
        self.bias_gradient(dropped, self.closing_bias(l, name), self.split_tokens, hidden);
        self.gather_tokens(l, &format!("{name}.dout"), dropped, hidden)
    }

    /// Through the hidden dropout, if there is one.
    pub(super) fn dropout_gradient(&mut self, l: usize, name: &str, dout: BufId) -> BufId {
        if self.cfg.model.hidden_dropout == 0.0 {
            return dout;
        }
        let dropout = self.hidden_dropout(l, name);
        let hidden = self.cfg.model.hidden_size;
        let dx = self.act(l, &format!("{name}.ddropout"), &[self.split_tokens, hidden]);
        self.b.launch(DropoutBwd { len: self.split_tokens * hidden, dropout }, &[dout, self.words, dx]);
        dx
    }
}
