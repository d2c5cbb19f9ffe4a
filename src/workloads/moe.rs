//! Mixture of experts: norm, shared expert, router, permutation, experts, combination with the residual.
//!
//! One process stands for one rank of the expert-parallel group: it routes its own tokens over all experts and
//! receives as many rows as it sends, expert `e` taken as local expert `e mod local`.
//!
//! - *alltoall*: rows are sorted by expert in `moe_preprocess`, sent (a copy), sorted by local expert, computed,
//!   and brought back the same way.
//! - *flex*: the dispatch sorts straight to local experts and sits in `moe_experts`; only the routing map is
//!   made in `moe_preprocess`.
//!
//! Over 500 lines: forward and backward of one layer kind name the same buffers and are read side by side.

use super::attention::output_std;
use super::mlp::{fc1_rows, gated};
use super::share::RankShare;
use super::weights::{Spec, Weight};
use super::{Stack, WorkloadError};
use crate::config::{Dispatcher, ExpertGemm, Moe, Routing, RunConfig};
use crate::device::cuda::matmul::Layout;
use crate::ops::collective::{Collective, CountsToHost, StandIn};
use crate::ops::gemm::{Accumulate, Gemm, SeparateGemms};
use crate::ops::grouped_gemm::{GroupedGemm, PerExpertGemm};
use crate::ops::moe_permute::{ChunkMap, CombineRows, GatherRows, MoeSort};
use crate::ops::rng::Rng;
use crate::ops::router::{RouterBwd, RouterFwd};
use crate::program::{BufId, DType, Init, Lifetime, Part, Pass};

pub(super) fn weights(cfg: &RunConfig, share: &RankShare, index: usize) -> Result<Vec<Spec>, WorkloadError> {
    let m = &cfg.model;
    let moe =
        m.moe.as_ref().ok_or_else(|| WorkloadError::Internal("an expert layer without experts".into()))?;
    let (local, f) = (share.experts, share.expert_ffn);
    let name = |what: &str| format!("layer{index}.moe.{what}.weight");
    let mut out = vec![
        Spec::ones(name("norm"), m.hidden_size),
        Spec::normal(name("router"), moe.num_experts, m.hidden_size, m.init_method_std),
    ];
    if let Some(width) = moe.shared_expert_intermediate_size {
        out.extend(gated(
            cfg,
            &format!("layer{index}.moe.shared"),
            share.shared_expert_ffn.unwrap_or(0),
            width,
        ));
    }
    // Experts lie one after another; expert-parallel rank 0 holds the first ones.
    out.push(
        Spec::normal(name("experts.fc1"), local * fc1_rows(cfg) * f, m.hidden_size, m.init_method_std)
            .expert(),
    );
    out.push(Spec::normal(name("experts.fc2"), local * m.hidden_size, f, output_std(cfg)).expert());
    Ok(out)
}

/// Sizes and switches of one rank's expert layer.
struct Dims {
    /// Rows that enter the router.
    t: usize,
    h: usize,
    /// Width of an expert, and of its first product.
    f: usize,
    wide: usize,
    experts: usize,
    local: usize,
    topk: usize,
    /// Rows that buffers of dispatched rows are sized for.
    rows: usize,
    /// Rows an expert may get, if tokens may be dropped.
    capacity: Option<usize>,
    /// Rows of every bin are static (drop and pad).
    padded: bool,
    /// Bins of the first sort: all experts (alltoall over several ranks) or the local ones.
    bins: usize,
    /// A transfer and a second sort follow the first (alltoall over several ranks).
    two_sorts: bool,
    flex: bool,
    host_counts: bool,
}

fn dims(s: &Stack, moe: &Moe) -> Dims {
    let alltoall = moe.dispatcher == Dispatcher::Alltoall;
    let two_sorts = alltoall && s.cfg.parallel.ep > 1 && !s.cfg.stack_only;
    let (t, local, topk) = (s.split_tokens, s.share.experts, moe.router_topk);
    let bins = if two_sorts { moe.num_experts } else { local };
    // Megatron-Core `get_capacity`: ceil(tokens * topk / experts * factor), here of the bins that are sorted into.
    let capacity =
        moe.capacity_factor.map(|factor| ((t * topk) as f64 / bins as f64 * factor).ceil() as usize);
    let padded = capacity.is_some() && moe.pad_to_capacity;
    let rank_rows = moe.rank_capacity_factor.map(|factor| ((t * topk) as f64 * factor).ceil() as usize);
    // One process receives exactly the rows it sends, so a bound above 1 reserves nothing more here.
    let bound = (((t * topk) as f64 * moe.row_bound).ceil() as usize).min(t * topk);
    let rows = match (padded, capacity) {
        (true, Some(c)) => c * bins,
        _ => rank_rows.unwrap_or(bound),
    };
    let static_rows = padded || rank_rows.is_some();
    Dims {
        t,
        h: s.cfg.model.hidden_size,
        f: s.share.expert_ffn,
        wide: fc1_rows(s.cfg) * s.share.expert_ffn,
        experts: moe.num_experts,
        local,
        topk,
        rows,
        capacity,
        padded,
        bins,
        two_sorts,
        flex: moe.dispatcher == Dispatcher::Flex,
        host_counts: !static_rows,
    }
}

impl Stack<'_> {
    fn moe(&self) -> Result<&'_ Moe, WorkloadError> {
        self.cfg
            .model
            .moe
            .as_ref()
            .ok_or_else(|| WorkloadError::Internal("an expert layer without experts".into()))
    }

    fn moe_weight(&self, l: usize, what: &str) -> Result<Weight, WorkloadError> {
        self.weights.get(&format!("layer{}.moe.{what}.weight", self.share.layers[l].index))
    }

    fn router(&mut self, l: usize) -> Result<RouterFwd, WorkloadError> {
        let moe = self.moe()?.clone();
        let forced = match moe.routing {
            Routing::Recipe => moe.force_load_balancing,
            Routing::Balanced | Routing::Skewed => true,
        };
        let seed = super::PIPELINE_SEED * self.cfg.parallel.pp_rank as u32;
        let rng: Option<Rng> =
            forced.then(|| self.b.rng(&format!("layer{}.router", self.share.layers[l].index), seed));
        Ok(RouterFwd {
            tokens: self.split_tokens,
            experts: moe.num_experts,
            topk: moe.router_topk,
            score: moe.score_function,
            pre_softmax: moe.pre_softmax,
            scaling: moe.topk_scaling_factor,
            forced: rng,
            skew: moe.routing == Routing::Skewed,
            expert_bias: moe.expert_bias,
        })
    }

    fn expert_bias(&mut self, l: usize, experts: usize) -> BufId {
        let name = format!("layer{}.moe.expert_bias", self.share.layers[l].index);
        self.b.buffer(&name, DType::F32, &[experts], Lifetime::Constant, Init::Const { value: 0.0 })
    }

    /// `x -> x + experts(norm(x))`, `[split_tokens, hidden]`.
    pub(super) fn moe_forward(&mut self, l: usize, x: BufId) -> Result<BufId, WorkloadError> {
        let moe = self.moe()?.clone();
        let d = dims(self, &moe);
        self.b.at(Some(l), Part::MoeRouter, Pass::Forward);
        let norm_w = self.moe_weight(l, "norm")?;
        let norm = self.here();
        let (y, _) = self.norm(l, "moe.norm", x, norm_w);
        if self.norm_before_experts_recomputes() {
            self.recomputable("layernorm", norm, &[]);
        }
        let start = self.here();
        let shared = self.shared_forward(l, &moe, y)?;
        let router_w = self.moe_weight(l, "router")?;
        let logits = self.act_as(l, "moe.logits", DType::F32, &[d.t, d.experts]);
        self.forward_product(logits, y, router_w.value, d.t, d.experts, d.h, None);
        let scores = self.act_as(l, "moe.scores", DType::F32, &[d.t, d.experts]);
        let probs = self.act_as(l, "moe.probs", DType::F32, &[d.t, d.topk]);
        let index = self.act_as(l, "moe.index", DType::I32, &[d.t, d.topk]);
        let counts = self.act_as(l, "moe.counts", DType::I32, &[d.experts]);
        let router = self.router(l)?;
        let mut args = vec![logits];
        args.extend(router.forced.map(|_| self.words));
        if router.expert_bias {
            args.push(self.expert_bias(l, d.experts));
        }
        args.extend([scores, probs, index, counts]);
        self.b.launch(router, &args);

        self.b.at(Some(l), Part::MoePreprocess, Pass::Forward);
        let offsets = self.act_as(l, "moe.offsets", DType::I32, &[d.bins + 1]);
        let dest = self.act_as(l, "moe.dest", DType::I32, &[d.t * d.topk]);
        let src = self.act_as(l, "moe.src", DType::I32, &[d.rows]);
        let fault = self.overflow_word(l);
        let sort = MoeSort {
            tokens: d.t,
            topk: d.topk,
            experts: d.bins,
            modulo: !d.two_sorts,
            capacity: d.capacity,
            rows: d.rows,
        };
        self.b.launch(sort, &[index, probs, offsets, dest, src, fault]);
        if d.flex {
            self.b.at(Some(l), Part::MoeExperts, Pass::Forward);
            self.counts_to_host(l, &d, offsets);
        }
        let (mut rows, mut row_probs) =
            (self.act(l, "moe.rows", &[d.rows, d.h]), self.act_as(l, "moe.row_probs", DType::F32, &[d.rows]));
        self.b.launch(
            GatherRows { rows: d.rows, in_rows: d.t, hidden: d.h, div: d.topk, probs: true },
            &[y, src, probs, rows, row_probs],
        );

        self.b.at(Some(l), Part::MoeExperts, Pass::Forward);
        let mut local_offsets = offsets;
        if !d.flex {
            self.counts_to_host(l, &d, offsets);
        }
        if d.two_sorts {
            let (sent, sent_probs) = (
                self.all_to_all(l, "moe.rows", rows, DType::Bf16, d.rows, d.h),
                self.all_to_all(l, "moe.row_probs", row_probs, DType::F32, d.rows, 1),
            );
            let [map, inverse] =
                ["moe.chunk_src", "moe.chunk_dest"].map(|n| self.act_as(l, n, DType::I32, &[d.rows]));
            local_offsets = self.act_as(l, "moe.local_offsets", DType::I32, &[d.local + 1]);
            self.b.launch(
                ChunkMap { experts: d.experts, local: d.local, rows: d.rows },
                &[offsets, local_offsets, map, inverse],
            );
            rows = self.act(l, "moe.sorted", &[d.rows, d.h]);
            row_probs = self.act_as(l, "moe.sorted_probs", DType::F32, &[d.rows]);
            self.b.launch(
                GatherRows { rows: d.rows, in_rows: d.rows, hidden: d.h, div: 1, probs: true },
                &[sent, map, sent_probs, rows, row_probs],
            );
        }
        let (fc1, fc2) = (self.moe_weight(l, "experts.fc1")?, self.moe_weight(l, "experts.fc2")?);
        let gate_up = self.act(l, "moe.gate_up", &[d.rows, d.wide]);
        self.expert_product(l, &d, local_offsets, rows, fc1.value, gate_up, d.wide, d.h, Layout::Nt)?;
        let act = self.act(l, "moe.act", &[d.rows, d.f]);
        let activation = self.here();
        self.activation(d.rows, d.f, Some(d.local), &[gate_up, row_probs, local_offsets, act]);
        self.recomputable("moe_act", activation, &[]);
        let mut out_rows = self.act(l, "moe.out_rows", &[d.rows, d.h]);
        self.expert_product(l, &d, local_offsets, act, fc2.value, out_rows, d.h, d.f, Layout::Nt)?;
        if d.two_sorts {
            out_rows = self.unsort_and_return(l, &d, "moe.out", out_rows, None).0;
        }
        let out = self.combine(l, &d, out_rows, dest, x, shared)?;
        self.recomputable("moe", start, &[out]);
        Ok(out)
    }

    /// Sum over the chosen experts, the shared expert and the residual.
    fn combine(
        &mut self,
        l: usize,
        d: &Dims,
        rows: BufId,
        dest: BufId,
        x: BufId,
        shared: Option<BufId>,
    ) -> Result<BufId, WorkloadError> {
        let dropped = self.cfg.model.hidden_dropout > 0.0;
        let sum = self.act(l, if dropped { "moe.sum" } else { "moe.residual_out" }, &[d.t, d.h]);
        let op = CombineRows {
            tokens: d.t,
            topk: d.topk,
            rows: d.rows,
            hidden: d.h,
            residual: !dropped,
            shared: shared.is_some(),
            dprobs: false,
        };
        let mut args = vec![rows, dest];
        args.extend((!dropped).then_some(x));
        args.extend(shared);
        args.push(sum);
        self.b.launch(op, &args);
        if !dropped {
            return Ok(sum);
        }
        let out = self.act(l, "moe.residual_out", &[d.t, d.h]);
        self.add_residual(l, "moe", sum, x, out);
        Ok(out)
    }

    pub(super) fn moe_backward(&mut self, l: usize, x: BufId, dout: BufId) -> Result<BufId, WorkloadError> {
        let moe = self.moe()?.clone();
        let d = dims(self, &moe);
        self.b.at(Some(l), Part::MoeExperts, Pass::Backward);
        let dsum = self.dropout_gradient(l, "moe", dout);
        let [dest, src] = [("moe.dest", d.t * d.topk), ("moe.src", d.rows)]
            .map(|(n, len)| self.act_as(l, n, DType::I32, &[len]));
        let offsets = self.act_as(l, "moe.offsets", DType::I32, &[d.bins + 1]);
        let mut drows = self.act(l, "moe.drows", &[d.rows, d.h]);
        self.b.launch(
            GatherRows { rows: d.rows, in_rows: d.t, hidden: d.h, div: d.topk, probs: false },
            &[dsum, src, drows],
        );
        let mut local_offsets = offsets;
        let (mut rows, mut row_probs) =
            (self.act(l, "moe.rows", &[d.rows, d.h]), self.act_as(l, "moe.row_probs", DType::F32, &[d.rows]));
        if d.two_sorts {
            local_offsets = self.act_as(l, "moe.local_offsets", DType::I32, &[d.local + 1]);
            rows = self.act(l, "moe.sorted", &[d.rows, d.h]);
            row_probs = self.act_as(l, "moe.sorted_probs", DType::F32, &[d.rows]);
            let sent = self.all_to_all(l, "moe.drows", drows, DType::Bf16, d.rows, d.h);
            let map = self.act_as(l, "moe.chunk_src", DType::I32, &[d.rows]);
            drows = self.act(l, "moe.dsorted", &[d.rows, d.h]);
            self.b.launch(
                GatherRows { rows: d.rows, in_rows: d.rows, hidden: d.h, div: 1, probs: false },
                &[sent, map, drows],
            );
        }
        let (fc1, fc2) = (self.moe_weight(l, "experts.fc1")?, self.moe_weight(l, "experts.fc2")?);
        let (act, gate_up) =
            (self.act(l, "moe.act", &[d.rows, d.f]), self.act(l, "moe.gate_up", &[d.rows, d.wide]));
        let dact = self.act(l, "moe.dact", &[d.rows, d.f]);
        self.expert_product(l, &d, local_offsets, drows, fc2.value, dact, d.f, d.h, Layout::Nn)?;
        self.expert_product(l, &d, local_offsets, drows, act, fc2.grad, d.h, d.f, Layout::Tn)?;
        let dgate_up = self.act(l, "moe.dgate_up", &[d.rows, d.wide]);
        let mut drow_probs = self.act_as(l, "moe.drow_probs", DType::F32, &[d.rows]);
        self.activation_backward(
            d.rows,
            d.f,
            Some(d.local),
            &[gate_up, dact, row_probs, local_offsets, dgate_up, drow_probs],
        );
        self.expert_product(l, &d, local_offsets, dgate_up, rows, fc1.grad, d.wide, d.h, Layout::Tn)?;
        let mut dx_rows = self.act(l, "moe.dx_rows", &[d.rows, d.h]);
        self.expert_product(l, &d, local_offsets, dgate_up, fc1.value, dx_rows, d.h, d.wide, Layout::Nn)?;
        if d.two_sorts {
            let (rows, probs) = self.unsort_and_return(l, &d, "moe.dx", dx_rows, Some(drow_probs));
            dx_rows = rows;
            drow_probs = probs.unwrap_or(drow_probs);
        }
        if !d.flex {
            self.b.at(Some(l), Part::MoePreprocess, Pass::Backward);
        }
        let dy_experts = self.act(l, "moe.dy_experts", &[d.t, d.h]);
        let dprobs = self.act_as(l, "moe.dprobs", DType::F32, &[d.t, d.topk]);
        let op = CombineRows {
            tokens: d.t,
            topk: d.topk,
            rows: d.rows,
            hidden: d.h,
            residual: false,
            shared: false,
            dprobs: true,
        };
        self.b.launch(op, &[dx_rows, dest, drow_probs, dy_experts, dprobs]);

        self.b.at(Some(l), Part::MoeRouter, Pass::Backward);
        let scores = self.act_as(l, "moe.scores", DType::F32, &[d.t, d.experts]);
        let probs = self.act_as(l, "moe.probs", DType::F32, &[d.t, d.topk]);
        let index = self.act_as(l, "moe.index", DType::I32, &[d.t, d.topk]);
        let counts = self.act_as(l, "moe.counts", DType::I32, &[d.experts]);
        let dlogits = self.act(l, "moe.dlogits", &[d.t, d.experts]);
        let router = self.router(l)?;
        let aux = matches!(moe.load_balancing_type.as_str(), "aux_loss" | "seq_aux_loss" | "global_aux_loss");
        // The auxiliary loss is scaled like the main one: by the micro-batches of a step.
        let aux_scale = 1.0 / self.cfg.batch.num_microbatches as f32;
        let op = RouterBwd {
            tokens: d.t,
            experts: d.experts,
            topk: d.topk,
            score: router.score,
            pre_softmax: router.pre_softmax,
            scaling: router.scaling,
            aux_coeff: if aux && !self.cfg.stack_only { moe.aux_loss_coeff } else { 0.0 },
            aux_scale,
        };
        self.b.launch(op, &[scores, probs, index, dprobs, counts, dlogits]);
        let y = self.act(l, "moe.norm.out", &[d.t, d.h]);
        let router_w = self.moe_weight(l, "router")?;
        self.weight_gradient(router_w.grad, dlogits, y, d.t, d.experts, d.h);
        let dy_router = self.act(l, "moe.dy_router", &[d.t, d.h]);
        self.data_gradient(dy_router, dlogits, router_w.value, d.t, d.experts, d.h, Some(dy_experts));
        let dy = self.shared_backward(l, &moe, y, dsum, dy_router)?;
        let norm_w = self.moe_weight(l, "norm")?;
        let rstd = self.act_as(l, "moe.norm.rstd", DType::F32, &[d.t]);
        Ok(self.norm_backward(l, "moe.norm", x, rstd, norm_w, dy, Some(dout)))
    }

    /// The shared expert, in the router's part: it runs before routing unless it is overlapped.
    fn shared_forward(&mut self, l: usize, moe: &Moe, y: BufId) -> Result<Option<BufId>, WorkloadError> {
        if moe.shared_expert_intermediate_size.is_none() {
            return Ok(None);
        }
        let (h, f) = (self.cfg.model.hidden_size, self.share.shared_expert_ffn.unwrap_or(0));
        let start = self.here();
        let y = self.gather_tokens(l, "moe.norm", y, h);
        let act = self.gated_forward(l, "moe.shared", y, f)?;
        let fc2 = self.moe_weight(l, "shared.fc2")?;
        let out = self.act(l, "moe.shared.out", &[self.tokens, h]);
        self.forward_product(out, act, fc2.value, self.tokens, h, f, None);
        let out = self.reduce_tokens(l, "moe.shared.out", out, h);
        self.recomputable("shared_experts", start, &[out]);
        Ok(Some(out))
    }

    fn shared_backward(
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

    /// Where the offsets of the sorted rows lie on the host.
    fn host_counts(&mut self, l: usize, d: &Dims) -> BufId {
        let name = format!("l{l}.moe.host_counts");
        self.b.buffer(&name, DType::I32, &[d.bins + 1], Lifetime::Host, Init::Const { value: 0.0 })
    }

    /// Dropless dispatch sizes its messages on the host: counts are copied and waited for, as upstream.
    fn counts_to_host(&mut self, l: usize, d: &Dims, offsets: BufId) {
        // A bare stack has no messages, but products an expert are sized on the host all the same.
        let per_expert = self.moe().is_ok_and(|m| m.expert_gemm == ExpertGemm::PerExpert);
        if !d.host_counts || (self.cfg.stack_only && !per_expert) {
            return;
        }
        let host = self.host_counts(l, d);
        self.b.launch(CountsToHost { len: d.bins + 1 }, &[offsets, host]);
    }

    fn all_to_all(
        &mut self,
        l: usize,
        name: &str,
        x: BufId,
        dtype: DType,
        rows: usize,
        cols: usize,
    ) -> BufId {
        let shape: &[usize] = if cols == 1 { &[rows] } else { &[rows, cols] };
        let out = self.act_as(l, &format!("{name}.received"), dtype, shape);
        self.b.launch(
            StandIn { kind: Collective::AllToAll, rows, cols, ranks: self.cfg.parallel.ep, dtype },
            &[x, out],
        );
        out
    }

    /// Sorted rows, and one number a row, back into the order they came in, and back to their senders.
    fn unsort_and_return(
        &mut self,
        l: usize,
        d: &Dims,
        name: &str,
        rows: BufId,
        scalars: Option<BufId>,
    ) -> (BufId, Option<BufId>) {
        let inverse = self.act_as(l, "moe.chunk_dest", DType::I32, &[d.rows]);
        let unsorted = self.act(l, &format!("{name}.unsorted"), &[d.rows, d.h]);
        let op = GatherRows { rows: d.rows, in_rows: d.rows, hidden: d.h, div: 1, probs: scalars.is_some() };
        let Some(scalars) = scalars else {
            self.b.launch(op, &[rows, inverse, unsorted]);
            return (self.all_to_all(l, name, unsorted, DType::Bf16, d.rows, d.h), None);
        };
        let name_of_scalars = format!("{name}.scalars");
        let unsorted_scalars = self.act_as(l, &format!("{name_of_scalars}.unsorted"), DType::F32, &[d.rows]);
        self.b.launch(op, &[rows, inverse, scalars, unsorted, unsorted_scalars]);
        let returned = self.all_to_all(l, name, unsorted, DType::Bf16, d.rows, d.h);
        (returned, Some(self.all_to_all(l, &name_of_scalars, unsorted_scalars, DType::F32, d.rows, 1)))
    }

    /// Set when more rows arrive than the buffers hold: one word a layer, in one buffer.
    fn overflow_word(&mut self, l: usize) -> BufId {
        let layers = self.share.layers.len();
        let all = self.b.buffer(
            "moe.overflow",
            DType::I32,
            &[layers],
            Lifetime::StepState,
            Init::Const { value: 0.0 },
        );
        let name = format!("l{l}.moe.overflow");
        if let Some(id) = self.b.find(&name) {
            return id;
        }
        let id = self.b.view(&name, all, l, &[1], Init::Inherit, Default::default());
        let meaning = format!(
            "layer {} received more expert rows than its buffers hold; raise --moe_row_bound or the rank capacity factor",
            self.share.layers[l].index
        );
        self.b.program.faults.push((id, meaning));
        id
    }
}
