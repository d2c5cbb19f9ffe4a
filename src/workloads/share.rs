//! One rank's share of the job: its layers, heads, experts, vocabulary rows and tokens.
//!
//! One process is tensor, context and expert rank 0 of the asked pipeline stage; of several each has its [`Place`]. What does not divide is an error
//! with the numbers; nothing is rounded.

mod layout;

use thiserror::Error;

pub use layout::{Stage, layout_stages, pipeline_stages};

use crate::config::{Graph, GraphImpl, LayerKind, RunConfig, Scope};
use crate::ranks::groups::Place;
use crate::recipe::{DELTA_NET, LayerError, Values, graphable, layer_kinds, padded_vocab};

/// What a share is computed from; [`RankShare::of`] fills it from a run's configuration.
#[derive(Debug, Clone, PartialEq)]
pub struct ShareInput {
    /// Kind of every decoder layer of the model, in order.
    pub layers: Vec<LayerKind>,
    /// Multi-token-prediction layers, which stand before the loss.
    pub mtp_layers: usize,
    pub num_gpus: usize,
    pub tp: usize,
    pub pp: usize,
    pub cp: usize,
    pub ep: usize,
    pub etp: usize,
    /// Virtual stages per pipeline stage, 1 when off.
    pub vp: usize,
    pub pp_rank: usize,
    pub sequence_parallel: bool,
    pub pipeline_layout: Option<String>,
    pub first_stage_layers: Option<usize>,
    pub last_stage_layers: Option<usize>,
    pub account_for_embedding: bool,
    pub account_for_loss: bool,
    pub heads: usize,
    pub kv_heads: usize,
    pub ffn: usize,
    /// Padded vocabulary.
    pub vocab: usize,
    pub experts: Option<ExpertInput>,
    pub mamba: Option<MambaInput>,
    pub delta_net: Option<DeltaInput>,
    pub micro_batch: usize,
    pub global_batch: usize,
    /// Tokens of a sequence.
    pub seq: usize,
}

/// The expert part of [`ShareInput`].
#[derive(Debug, Clone, PartialEq)]
pub struct ExpertInput {
    pub count: usize,
    pub ffn: usize,
    pub shared_ffn: Option<usize>,
}

/// The Mamba part of [`ShareInput`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MambaInput {
    pub heads: usize,
    pub groups: usize,
}

/// The gated delta net part of [`ShareInput`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DeltaInput {
    pub key_heads: usize,
    pub value_heads: usize,
}

/// What one rank holds and runs.
#[derive(Debug, Clone, PartialEq)]
pub struct RankShare {
    /// Local decoder layers in the order in which they run, virtual stages one after another.
    pub layers: Vec<LocalLayer>,
    /// Decoder layers of each virtual stage, as ranges of `layers`.
    pub chunks: Vec<std::ops::Range<usize>>,
    pub has_embedding: bool,
    pub has_loss: bool,
    /// Multi-token-prediction layers on this rank.
    pub mtp_layers: usize,
    pub heads: usize,
    /// Key and value heads; at least 1: with fewer heads than tp, ranks share one.
    pub kv_heads: usize,
    /// Columns of the dense MLP.
    pub ffn: usize,
    /// Rows of the embedding and the head.
    pub vocab: usize,
    /// 0 without experts.
    pub experts: usize,
    pub expert_ffn: usize,
    pub shared_expert_ffn: Option<usize>,
    /// 0 without Mamba layers.
    pub mamba_heads: usize,
    pub mamba_groups: usize,
    /// 0 without gated delta net layers.
    pub delta_key_heads: usize,
    pub delta_value_heads: usize,
    /// The rank's two pieces of each sequence as (start, length) in tokens; cp 1: the whole and nothing.
    pub seq_chunks: [(usize, usize); 2],
    /// Tokens of a sequence on this rank: sequence / cp.
    pub seq: usize,
    /// Tokens of a micro-batch on this rank, between parts: micro-batch x sequence / cp.
    pub tokens: usize,
    /// The same where sequence parallelism splits them further: / tp.
    pub tokens_sequence_parallel: usize,
    pub dp: usize,
    /// Micro-batches a step.
    pub num_microbatches: usize,
    /// Which rank this is where several processes run.
    pub place: Place,
}

/// One layer of the local stack.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LocalLayer {
    /// Index in the whole model, from 0.
    pub index: usize,
    pub kind: LayerKind,
}

/// What does not divide or fit.
#[derive(Debug, Clone, PartialEq, Error)]
pub enum ShareError {
    #[error("{name} is 0: it must be at least 1")]
    Zero { name: &'static str },
    #[error("{what} {total} cannot be split over {by} {parts}: {total} / {parts} leaves {}; {remedy}", .total % .parts)]
    Indivisible { what: &'static str, total: usize, by: &'static str, parts: usize, remedy: &'static str },
    #[error("--pp_rank {pp_rank} is not one of the {pp} pipeline stages (0 to {})", .pp - 1)]
    NoSuchStage { pp_rank: usize, pp: usize },
    #[error("a configuration of {num_gpus} GPUs cannot hold {what} = {needed}; {remedy}")]
    Grid { num_gpus: usize, what: String, needed: usize, remedy: &'static str },
    #[error("the global batch of {global} is not a multiple of micro-batch {micro} x dp {dp} = {}; change -gb, -mb or -ng", .micro * .dp)]
    Batch { global: usize, micro: usize, dp: usize },
    #[error("pipeline layout `{}`: {reason}", crate::keys::short(.layout))]
    Layout { layout: String, reason: String },
    #[error("{layers} layers do not fill the pipeline: {reason}")]
    Split { layers: usize, reason: String },
}

impl RankShare {
    /// What graphs will hold of these layers, in words: layers by scope (`attn 48, moe_router 48`), `whole_layer` or
    /// `full_iteration` with all of them, or `none`.
    pub fn captured_layers(&self, graph: &Graph) -> String {
        if graph.implementation == GraphImpl::None {
            return "none".into();
        }
        if graph.scope.is_empty() {
            return format!("whole_layer {}", self.layers.len());
        }
        let kinds: Vec<LayerKind> = self.layers.iter().map(|l| l.kind).collect();
        let can = graphable(&kinds);
        let layers = |scope: &Scope| {
            let name = scope.name();
            let count = can.iter().find(|(of, _)| *of == name).map_or(0, |(_, layers)| *layers);
            format!("{name} {}", if *scope == Scope::FullIteration { self.layers.len() } else { count })
        };
        graph.scope.iter().map(layers).collect::<Vec<_>>().join(", ")
    }

    /// The share of `--pp_rank`.
    ///
    /// # Errors
    /// What [`RankShare::from_input`] reports.
    pub fn of(config: &RunConfig) -> Result<RankShare, ShareError> {
        let share = RankShare::from_input(&ShareInput::of(config))?;
        Ok(RankShare { place: Place::of(&config.parallel), ..share })
    }

    /// # Errors
    /// A layout that does not fit the GPUs, a size that does not divide, a pipeline that the layers do not fill.
    pub fn from_input(input: &ShareInput) -> Result<RankShare, ShareError> {
        let ShareInput { tp, pp, cp, ep, etp, vp, micro_batch, seq, .. } = *input;
        for (name, size) in [
            ("tp", tp),
            ("pp", pp),
            ("cp", cp),
            ("ep", ep),
            ("etp", etp),
            ("vp", vp),
            ("the number of GPUs", input.num_gpus),
            ("the number of layers", input.layers.len()),
            ("the micro-batch size", micro_batch),
            ("the global batch size", input.global_batch),
            ("the sequence length", seq),
            ("the number of heads", input.heads),
        ] {
            if size == 0 {
                return Err(ShareError::Zero { name });
            }
        }
        let dp = data_parallel(input)?;
        if !input.global_batch.is_multiple_of(product(&[micro_batch, dp])) {
            return Err(ShareError::Batch { global: input.global_batch, micro: micro_batch, dp });
        }
        let stage = own_stages(input)?;
        let seq_local = split("the sequence of", seq, "cp", cp, "change -sl or -cp")?;
        if cp > 1 {
            split("the sequence of", seq, "2 x cp", product(&[2, cp]), "change -sl or -cp")?;
        }
        let tokens = product(&[micro_batch, seq_local]);
        let tokens_sequence_parallel = if input.sequence_parallel {
            split(
                "the local tokens",
                seq_local,
                "tp",
                tp,
                "change -sl or -tp, or switch sequence parallelism off",
            )?
            .saturating_mul(micro_batch)
        } else {
            tokens
        };
        let (experts, expert_ffn, shared_expert_ffn) = match &input.experts {
            None => (0, 0, None),
            Some(e) => (
                split("the experts", e.count, "ep", ep, "change -ep or --num_moe_experts")?,
                split("the expert width", e.ffn, "etp", etp, "change -et")?,
                e.shared_ffn
                    .map(|f| split("the shared expert's width", f, "tp", tp, "change -tp"))
                    .transpose()?,
            ),
        };
        let (mamba_heads, mamba_groups) = match input.mamba {
            None => (0, 0),
            Some(m) => (
                split("the Mamba heads", m.heads, "tp", tp, "change -tp")?,
                split("the Mamba groups", m.groups, "tp", tp, "change -tp")?,
            ),
        };
        if mamba_groups > 0 {
            split("the Mamba heads of a rank", mamba_heads, "groups", mamba_groups, "change the groups")?;
        }
        let (delta_key_heads, delta_value_heads) = match input.delta_net {
            None => (0, 0),
            Some(d) => (
                split("the delta net's key heads", d.key_heads, "tp", tp, "change -tp")?,
                split("the delta net's value heads", d.value_heads, "tp", tp, "change -tp")?,
            ),
        };
        if delta_key_heads > 0 {
            let remedy = "change model.linear_num_value_heads or model.linear_num_key_heads";
            split(
                "the delta net's value heads of a rank",
                delta_value_heads,
                "key heads",
                delta_key_heads,
                remedy,
            )?;
        }
        Ok(RankShare {
            has_embedding: stage.iter().any(|s| s.embedding),
            has_loss: stage.iter().any(|s| s.loss),
            mtp_layers: stage.iter().map(|s| s.mtp).sum(),
            chunks: chunks(&stage),
            layers: stage
                .iter()
                .flat_map(|s| s.layers.clone())
                .filter_map(|index| Some(LocalLayer { index, kind: *input.layers.get(index)? }))
                .collect(),
            heads: split("the attention heads", input.heads, "tp", tp, "change -tp")?,
            kv_heads: kv_heads(input.kv_heads, tp)?,
            ffn: split("the MLP width", input.ffn, "tp", tp, "change -tp")?,
            vocab: split("the padded vocabulary", input.vocab, "tp", tp, "change -tp or --vocab_size")?,
            experts,
            expert_ffn,
            shared_expert_ffn,
            mamba_heads,
            mamba_groups,
            delta_key_heads,
            delta_value_heads,
            seq_chunks: sequence_chunks(seq, cp),
            seq: seq_local,
            tokens,
            tokens_sequence_parallel,
            dp,
            num_microbatches: input.global_batch / product(&[micro_batch, dp]),
            place: Place::default(),
        })
    }
}

impl ShareInput {
    /// The part of a run's configuration that decides the share.
    pub fn of(config: &RunConfig) -> ShareInput {
        let RunConfig { model, parallel, batch, .. } = config;
        ShareInput {
            layers: model.layers.clone(),
            mtp_layers: model.mtp_num_layers,
            num_gpus: config.identity.num_gpus,
            tp: parallel.tp,
            pp: parallel.pp,
            cp: parallel.cp,
            ep: parallel.ep,
            etp: parallel.etp,
            vp: parallel.vp,
            pp_rank: parallel.pp_rank,
            sequence_parallel: parallel.sequence_parallel,
            pipeline_layout: parallel.pipeline_layout.clone(),
            first_stage_layers: parallel.first_stage_layers,
            last_stage_layers: parallel.last_stage_layers,
            account_for_embedding: parallel.account_for_embedding,
            account_for_loss: parallel.account_for_loss,
            heads: model.num_attention_heads,
            kv_heads: model.num_query_groups,
            ffn: model.ffn_hidden_size,
            vocab: model.vocab_size,
            experts: model.moe.as_ref().map(|m| ExpertInput {
                count: m.num_experts,
                ffn: m.ffn_hidden_size,
                shared_ffn: m.shared_expert_intermediate_size,
            }),
            mamba: model.mamba.as_ref().map(|m| MambaInput { heads: m.num_heads, groups: m.num_groups }),
            delta_net: model
                .delta_net
                .as_ref()
                .map(|d| DeltaInput { key_heads: d.key_heads, value_heads: d.value_heads }),
            micro_batch: batch.micro_batch_size,
            global_batch: batch.global_batch_size,
            seq: batch.seq_length,
        }
    }
}

impl ShareInput {
    /// The same from a recipe's values, for `recipes show`; rank 0 of the pipeline.
    /// MLA models have a key and value head per query head; a missing size is 1, a missing width 0.
    ///
    /// # Errors
    /// What [`layer_kinds`] reports.
    pub fn of_values(values: &Values, num_gpus: usize) -> Result<ShareInput, LayerError> {
        let model = |key: &str| values.get(&format!("model.{key}"));
        let number = |key: &str| model(key).and_then(serde_json::Value::as_u64).map(|n| n as usize);
        let flag = |key: &str| model(key).and_then(serde_json::Value::as_bool).unwrap_or(false);
        let train = |key: &str| values.get(&format!("train.{key}")).and_then(serde_json::Value::as_u64);
        let size = |key: &str| number(key).unwrap_or(1);
        let heads = number("num_attention_heads").unwrap_or(0);
        let kv_heads = if flag("multi_latent_attention") { None } else { number("num_query_groups") };
        Ok(ShareInput {
            layers: layer_kinds(values)?,
            mtp_layers: number("mtp_num_layers").unwrap_or(0),
            num_gpus,
            tp: size("tensor_model_parallel_size"),
            pp: size("pipeline_model_parallel_size"),
            cp: size("context_parallel_size"),
            ep: size("expert_model_parallel_size"),
            etp: size("expert_tensor_parallel_size"),
            vp: size("virtual_pipeline_model_parallel_size"),
            pp_rank: 0,
            sequence_parallel: flag("sequence_parallel"),
            pipeline_layout: model("pipeline_model_parallel_layout")
                .and_then(|l| l.as_str())
                .map(str::to_owned),
            first_stage_layers: number("num_layers_in_first_pipeline_stage"),
            last_stage_layers: number("num_layers_in_last_pipeline_stage"),
            account_for_embedding: flag("account_for_embedding_in_pipeline_split"),
            account_for_loss: flag("account_for_loss_in_pipeline_split"),
            heads,
            kv_heads: kv_heads.unwrap_or(heads),
            ffn: number("ffn_hidden_size").unwrap_or(0),
            vocab: padded_vocab(values, size("tensor_model_parallel_size")),
            experts: number("num_moe_experts").map(|count| ExpertInput {
                count,
                ffn: number("moe_ffn_hidden_size").unwrap_or(0),
                shared_ffn: number("moe_shared_expert_intermediate_size"),
            }),
            mamba: number("mamba_num_heads")
                .map(|heads| MambaInput { heads, groups: number("mamba_num_groups").unwrap_or(1) }),
            delta_net: (model("attention_variant").and_then(|v| v.as_str()) == Some(DELTA_NET)).then(|| {
                DeltaInput {
                    key_heads: number("linear_num_key_heads").unwrap_or(0),
                    value_heads: number("linear_num_value_heads").unwrap_or(0),
                }
            }),
            micro_batch: train("micro_batch_size").map_or(1, |n| n as usize),
            global_batch: train("global_batch_size").map_or(1, |n| n as usize),
            seq: number("seq_length").unwrap_or(0),
        })
    }
}

/// Sizes from a command line multiply without overflow; a saturated product divides nothing.
fn product(factors: &[usize]) -> usize {
    factors.iter().fold(1, |p, f| p.saturating_mul(*f))
}

fn split(
    what: &'static str,
    total: usize,
    by: &'static str,
    parts: usize,
    remedy: &'static str,
) -> Result<usize, ShareError> {
    if total.is_multiple_of(parts) {
        Ok(total / parts)
    } else {
        Err(ShareError::Indivisible { what, total, by, parts, remedy })
    }
}

/// Data-parallel size: GPUs / (tp pp cp). Checks that the experts' grid fits too.
fn data_parallel(input: &ShareInput) -> Result<usize, ShareError> {
    let ShareInput { num_gpus, tp, pp, cp, ep, etp, .. } = *input;
    let grid = |what: String, needed: usize, remedy| ShareError::Grid { num_gpus, what, needed, remedy };
    let dense = product(&[tp, pp, cp]);
    if !num_gpus.is_multiple_of(dense) {
        let what = format!("tp {tp} x pp {pp} x cp {cp}");
        return Err(grid(what, dense, "the GPU count must be a multiple: change -ng, -tp, -pp or -cp"));
    }
    let expert = product(&[etp, ep, pp]);
    if input.experts.is_some() && !num_gpus.is_multiple_of(expert) {
        let what = format!("etp {etp} x ep {ep} x pp {pp}");
        return Err(grid(what, expert, "the GPU count must be a multiple: change -ng, -ep, -pp or -et"));
    }
    Ok(num_gpus / dense)
}

/// The virtual stages of the asked rank: stages `pp_rank`, `pp_rank + pp`, ...
fn own_stages(input: &ShareInput) -> Result<Vec<Stage>, ShareError> {
    if input.pp_rank >= input.pp {
        return Err(ShareError::NoSuchStage { pp_rank: input.pp_rank, pp: input.pp });
    }
    Ok(pipeline_stages(input)?.into_iter().skip(input.pp_rank).step_by(input.pp).collect())
}

fn chunks(stages: &[Stage]) -> Vec<std::ops::Range<usize>> {
    let mut start = 0;
    let next = |s: &Stage| {
        let range = start..start + s.layers.len();
        start = range.end;
        range
    };
    stages.iter().map(next).collect()
}

/// Local key and value heads. Fewer heads than ranks: each rank holds a copy of one.
fn kv_heads(kv_heads: usize, tp: usize) -> Result<usize, ShareError> {
    if kv_heads == 0 {
        return Err(ShareError::Zero { name: "the number of key and value heads" });
    }
    if kv_heads >= tp {
        return split("the key and value heads", kv_heads, "tp", tp, "change -tp");
    }
    split("tp", tp, "the key and value heads", kv_heads, "change -tp").map(|_| 1)
}

/// Pieces 0 and 2cp-1 of the 2cp pieces of a sequence: an early and a late one, so that causal attention is
/// equal work on every rank. `seq` divides by 2cp.
fn sequence_chunks(seq: usize, cp: usize) -> [(usize, usize); 2] {
    if cp == 1 {
        return [(0, seq), (seq, 0)];
    }
    let piece = seq / product(&[2, cp]);
    [(0, piece), (seq - piece, piece)]
}

#[cfg(test)]
mod tests;
