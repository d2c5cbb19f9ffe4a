//! Rows to their experts and back: permutation, transfer, second permutation, combination.

use super::super::{Stack, WorkloadError};
use super::Dims;
use super::router::Routes;
use crate::config::ExpertGemm;
use crate::ops::collective::{Collective, CountsToHost, Exchange, ExchangeRows, Kind, RowPlan, StandIn};
use crate::ops::moe_permute::{ChunkMap, CombineRows, GatherRows, MoeSort, Tally};
use crate::program::{BufId, DType, Init, Lifetime, Part, Pass};

/// Choices of a step that were routed, dropped and padded, I32 `[layers, micro-batches, 3]` ([`Tally`]).
pub const TALLY: &str = "moe.tally";

/// Rows as the experts see them.
#[derive(Clone, Copy)]
pub(super) struct ExpertRows {
    /// bf16 `[rows, width]`, sorted by local expert.
    pub rows: BufId,
    /// f32 `[rows]`.
    pub row_probs: BufId,
    /// First row of each local expert, i32 `[local + 1]`.
    pub offsets: BufId,
}

impl Dims {
    /// Sum over the chosen experts, nothing added.
    fn combine(&self) -> CombineRows {
        CombineRows {
            tokens: self.t,
            topk: self.topk,
            rows: self.rows,
            hidden: self.w,
            residual: false,
            shared: false,
            dprobs: false,
        }
    }
}

impl Stack<'_> {
    /// The buffers that [`Self::dispatch`] fills.
    pub(super) fn expert_rows(&mut self, l: usize, d: &Dims) -> ExpertRows {
        let [rows, row_probs, offsets] = if d.two_sorts {
            ["moe.sorted", "moe.sorted_probs", "moe.local_offsets"]
        } else {
            ["moe.rows", "moe.row_probs", "moe.offsets"]
        };
        ExpertRows {
            rows: self.act(l, rows, &[d.rows, d.w]),
            row_probs: self.act_as(l, row_probs, DType::F32, &[d.rows]),
            offsets: self.act_as(l, offsets, DType::I32, &[d.local + 1]),
        }
    }

    /// Row of every choice (-1 none), and choice of every row (-1 none).
    fn dispatch_map(&mut self, l: usize, d: &Dims) -> (BufId, BufId) {
        (
            self.act_as(l, "moe.dest", DType::I32, &[d.t * d.topk]),
            self.act_as(l, "moe.src", DType::I32, &[d.rows]),
        )
    }

    /// Sends the rows of `y [split_tokens, hidden]` to their experts. Begins in `moe_preprocess`, ends in `moe_experts`.
    pub(super) fn dispatch(
        &mut self,
        l: usize,
        d: &Dims,
        y: BufId,
        routes: Routes,
    ) -> Result<ExpertRows, WorkloadError> {
        self.b.at(Some(l), Part::MoePreprocess, Pass::Forward);
        let y = self.latent_down(l, d, y)?;
        let offsets = self.act_as(l, "moe.offsets", DType::I32, &[d.bins + 1]);
        let (dest, src) = self.dispatch_map(l, d);
        let (fault, (tally, lines)) = (self.overflow_word(l), self.tally(l));
        let sort = MoeSort {
            tokens: d.t,
            topk: d.topk,
            experts: d.bins,
            modulo: !d.two_sorts,
            capacity: d.capacity,
            rows: d.rows,
            tally,
        };
        self.b.launch(sort, &[routes.index, routes.probs, self.words, offsets, dest, src, fault, lines]);
        if d.flex {
            self.b.at(Some(l), Part::MoeExperts, Pass::Forward);
        }
        let received = self.plan_rows(l, d, offsets, fault);
        if d.flex {
            self.counts_to_host(l, d, offsets);
        }
        let rows = self.act(l, "moe.rows", &[d.rows, d.w]);
        let row_probs = self.act_as(l, "moe.row_probs", DType::F32, &[d.rows]);
        self.b.launch(
            GatherRows { rows: d.rows, in_rows: d.t, hidden: d.w, div: d.topk, probs: true },
            &[y, src, routes.probs, rows, row_probs],
        );
        self.b.at(Some(l), Part::MoeExperts, Pass::Forward);
        if !d.flex {
            self.counts_to_host(l, d, offsets);
        }
        if !d.two_sorts {
            return Ok(ExpertRows { rows, row_probs, offsets });
        }
        let sent = self.all_to_all(l, d, "moe.rows", rows, DType::Bf16, d.w, false);
        let sent_probs = self.all_to_all(l, d, "moe.row_probs", row_probs, DType::F32, 1, false);
        let [map, inverse] =
            ["moe.chunk_src", "moe.chunk_dest"].map(|n| self.act_as(l, n, DType::I32, &[d.rows]));
        let sorted = self.expert_rows(l, d);
        self.b.launch(
            ChunkMap { experts: d.experts, local: d.local, rows: d.rows },
            &[received, sorted.offsets, map, inverse],
        );
        self.b.launch(
            GatherRows { rows: d.rows, in_rows: d.rows, hidden: d.w, div: 1, probs: true },
            &[sent, map, sent_probs, sorted.rows, sorted.row_probs],
        );
        Ok(sorted)
    }

    /// Brings the experts' rows back and sums them over the chosen experts, with the shared expert and the residual.
    pub(super) fn combine(
        &mut self,
        l: usize,
        d: &Dims,
        rows: BufId,
        x: BufId,
        shared: Option<BufId>,
    ) -> Result<BufId, WorkloadError> {
        let rows = if d.two_sorts { self.unsort_and_return(l, d, "moe.out", rows, None).0 } else { rows };
        let (dest, _) = self.dispatch_map(l, d);
        if d.latent {
            let sum = self.act(l, "moe.latent_sum", &[d.t, d.w]);
            self.b.launch(d.combine(), &[rows, dest, sum]);
            return self.latent_up(l, d, sum, x, shared);
        }
        let dropped = self.cfg.model.hidden_dropout > 0.0;
        // Hyper-connections spread the sum over the residual streams themselves.
        let rides = !dropped && !self.hyper();
        let sum = self.act(l, if rides { "moe.residual_out" } else { "moe.sum" }, &[d.t, d.h]);
        let op = CombineRows { residual: rides, shared: shared.is_some(), ..d.combine() };
        let mut args = vec![rows, dest];
        args.extend(rides.then_some(x));
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

    /// Sends the gradient of the sum, `[split_tokens, width]`, to the experts: `[rows, width]`.
    pub(super) fn combine_backward(&mut self, l: usize, d: &Dims, dsum: BufId) -> BufId {
        let (_, src) = self.dispatch_map(l, d);
        let drows = self.act(l, "moe.drows", &[d.rows, d.w]);
        self.b.launch(
            GatherRows { rows: d.rows, in_rows: d.t, hidden: d.w, div: d.topk, probs: false },
            &[dsum, src, drows],
        );
        if !d.two_sorts {
            return drows;
        }
        let sent = self.all_to_all(l, d, "moe.drows", drows, DType::Bf16, d.w, false);
        let map = self.act_as(l, "moe.chunk_src", DType::I32, &[d.rows]);
        let sorted = self.act(l, "moe.dsorted", &[d.rows, d.w]);
        self.b.launch(
            GatherRows { rows: d.rows, in_rows: d.rows, hidden: d.w, div: 1, probs: false },
            &[sent, map, sorted],
        );
        sorted
    }

    /// Brings the gradients of the experts' rows and probabilities back: `[split_tokens, width]`, `[split_tokens, topk]`.
    pub(super) fn dispatch_backward(
        &mut self,
        l: usize,
        d: &Dims,
        mut dx_rows: BufId,
        mut drow_probs: BufId,
    ) -> (BufId, BufId) {
        if d.two_sorts {
            let (rows, probs) = self.unsort_and_return(l, d, "moe.dx", dx_rows, Some(drow_probs));
            dx_rows = rows;
            drow_probs = probs.unwrap_or(drow_probs);
        }
        if !d.flex {
            self.b.at(Some(l), Part::MoePreprocess, Pass::Backward);
        }
        let (dest, _) = self.dispatch_map(l, d);
        let dy_experts = self.act(l, "moe.dy_experts", &[d.t, d.w]);
        let dprobs = self.act_as(l, "moe.dprobs", DType::F32, &[d.t, d.topk]);
        let op = CombineRows { dprobs: true, ..d.combine() };
        self.b.launch(op, &[dx_rows, dest, drow_probs, dy_experts, dprobs]);
        (dy_experts, dprobs)
    }

    /// Offsets of what this rank receives: its own by one process, those of the plan of all ranks otherwise; padded bins are
    /// the same everywhere.
    fn plan_rows(&mut self, l: usize, d: &Dims, offsets: BufId, fault: BufId) -> BufId {
        let group = self.share.place.expert.clone().filter(|_| !d.padded);
        let Some(group) = group else { return offsets };
        let (ranks, own, n) = (group.len(), group.own, d.experts + 1);
        let all = self.act_as(l, "moe.offsets_of_ranks", DType::I32, &[ranks * n]);
        let kind = Kind::AllGather;
        self.b.launch(Exchange { kind, group, rows: 1, cols: n, dtype: DType::I32 }, &[offsets, all]);
        let plan = self.act_as(l, "moe.row_plan", DType::I32, &[2 * n]);
        self.b.launch(RowPlan { ranks, own, local: d.local, rows: d.rows }, &[all, plan, fault]);
        let name = self.b.program.buffer(plan).name.clone() + ".received";
        let found = self.b.find(&name);
        found.unwrap_or_else(|| self.b.view(&name, plan, n, &[n], Init::Inherit, Default::default()))
    }

    /// The plan of the rows between processes on the host.
    fn host_plan(&mut self, l: usize, d: &Dims) -> BufId {
        let name = self.b.in_slot(&format!("l{l}.moe.host_plan"));
        let shape = [2 * (d.experts + 1)];
        self.b.buffer(&name, DType::I32, &shape, Lifetime::Host, Init::Const { value: 0.0 })
    }

    /// Where the offsets of the sorted rows lie on the host.
    pub(super) fn host_counts(&mut self, l: usize, d: &Dims) -> BufId {
        if self.share.place.expert.is_some() && !d.padded {
            let plan = self.host_plan(l, d);
            let name = self.b.program.buffer(plan).name.clone() + ".received";
            let n = d.experts + 1;
            let found = self.b.find(&name);
            return found
                .unwrap_or_else(|| self.b.view(&name, plan, n, &[n], Init::Inherit, Default::default()));
        }
        // One a slot: the backward's products read it after later micro-batches' forward passes.
        let name = self.b.in_slot(&format!("l{l}.moe.host_counts"));
        self.b.buffer(&name, DType::I32, &[d.bins + 1], Lifetime::Host, Init::Const { value: 0.0 })
    }

    /// Dropless dispatch sizes its messages on the host: counts are copied and waited for, as upstream.
    fn counts_to_host(&mut self, l: usize, d: &Dims, offsets: BufId) {
        // A bare stack has no messages, but products an expert are sized on the host all the same.
        let per_expert = self.moe().is_ok_and(|m| m.expert_gemm == ExpertGemm::PerExpert);
        if !d.host_counts || (self.cfg.stack_only && !per_expert) {
            return;
        }
        if self.share.place.expert.is_some() && !d.padded {
            let (plan, host) =
                (self.act_as(l, "moe.row_plan", DType::I32, &[2 * (d.experts + 1)]), self.host_plan(l, d));
            self.b.launch(CountsToHost { len: 2 * (d.experts + 1) }, &[plan, host]);
            return;
        }
        let host = self.host_counts(l, d);
        self.b.launch(CountsToHost { len: d.bins + 1 }, &[offsets, host]);
    }

    /// Rows to their experts' ranks, or back.
    #[allow(clippy::too_many_arguments)]
    fn all_to_all(
        &mut self,
        l: usize,
        d: &Dims,
        name: &str,
        x: BufId,
        dtype: DType,
        cols: usize,
        back: bool,
    ) -> BufId {
        let rows = d.rows;
        let shape: &[usize] = if cols == 1 { &[rows] } else { &[rows, cols] };
        let out = self.act_as(l, &format!("{name}.received"), dtype, shape);
        if let Some(group) = self.share.place.expert.clone() {
            if d.padded {
                let rows = rows / group.len();
                self.b.launch(Exchange { kind: Kind::AllToAll, group, rows, cols, dtype }, &[x, out]);
            } else {
                let plan = self.host_plan(l, d);
                self.b
                    .launch(ExchangeRows { group, local: d.local, rows, cols, dtype, back }, &[x, plan, out]);
            }
            return out;
        }
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
        let unsorted = self.act(l, &format!("{name}.unsorted"), &[d.rows, d.w]);
        let op = GatherRows { rows: d.rows, in_rows: d.rows, hidden: d.w, div: 1, probs: scalars.is_some() };
        let Some(scalars) = scalars else {
            self.b.launch(op, &[rows, inverse, unsorted]);
            return (self.all_to_all(l, d, name, unsorted, DType::Bf16, d.w, true), None);
        };
        let name_of_scalars = format!("{name}.scalars");
        let unsorted_scalars = self.act_as(l, &format!("{name_of_scalars}.unsorted"), DType::F32, &[d.rows]);
        self.b.launch(op, &[rows, inverse, scalars, unsorted, unsorted_scalars]);
        let returned = self.all_to_all(l, d, name, unsorted, DType::Bf16, d.w, true);
        (returned, Some(self.all_to_all(l, d, &name_of_scalars, unsorted_scalars, DType::F32, 1, true)))
    }

    /// What becomes of the choices of each micro-batch, of all layers in one buffer; the arms are compared on it.
    fn tally(&mut self, l: usize) -> (Tally, BufId) {
        let micro_batches = if self.cfg.stack_only { 1 } else { self.cfg.batch.num_microbatches };
        let stride = self.share.place.micro_batch(1) - self.share.place.micro_batch(0);
        let tally = Tally { micro_batches, stride };
        let name = format!("l{l}.{TALLY}");
        if let Some(id) = self.b.find(&name) {
            return (tally, id);
        }
        let shape = [self.share.layers.len(), micro_batches, Tally::COLUMNS];
        let all = self.b.buffer(TALLY, DType::I32, &shape, Lifetime::StepState, Init::Const { value: 0.0 });
        if !self.b.program.digest.contains(&all) {
            self.b.program.digest.push(all);
        }
        let offset = l * shape[1] * shape[2];
        (tally, self.b.view(&name, all, offset, &shape[1..], Init::Inherit, Default::default()))
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
