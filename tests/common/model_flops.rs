//! FLOPs of a step that a model asks for, by the formulas of the field, without a look at any launch.

use mbperf::config::{Activation, Diffusion, LayerKind, Mla, RunConfig, SharedKv};
use mbperf::workloads::share::RankShare;

/// Forward and backward of one multiplication by a weight: 2 and 4 FLOPs.
const PER_WEIGHT: f64 = 6.0;
/// A backward is twice its forward.
const BOTH_PASSES: f64 = 3.0;

fn product(factors: &[usize]) -> f64 {
    factors.iter().map(|f| *f as f64).product()
}

/// Of one rank: 6 x active parameters x tokens, attention and scans beside it. Norms, activations, routing and the
/// optimizer are below the 2 % that this is compared with.
pub fn model_flops(cfg: &RunConfig, share: &RankShare) -> f64 {
    if let Some(d) = &cfg.model.diffusion {
        return diffusion(cfg, d, share) * cfg.batch.num_microbatches as f64;
    }
    let layers: f64 =
        share.layers.iter().map(|l| layer(l.kind, cfg, share, cfg.model.window_of(l.index))).sum();
    let head =
        if share.has_loss { product(&[cfg.model.hidden_size, share.vocab, share.tokens]) } else { 0.0 };
    let tower = if share.has_embedding { tower(cfg) } else { 0.0 };
    let one_stream = if share.has_loss { streams(cfg, share, 1) } else { 0.0 };
    (layers + PER_WEIGHT * (head + one_stream) + ahead(cfg, share, head) + tower)
        * cfg.batch.num_microbatches as f64
}

/// Blocks of self-attention, cross-attention and an MLP; patches, text and head beside them. Patches and text are given, so
/// their first products have no gradient of their input; the time step is of one row a sequence.
fn diffusion(cfg: &RunConfig, d: &Diffusion, share: &RankShare) -> f64 {
    let (h, q, t) = (cfg.model.hidden_size, share.heads * cfg.model.kv_channels, share.tokens);
    let (batch, cp) = (cfg.batch.micro_batch_size, cfg.parallel.cp);
    let (text, ce) = (batch * d.text_len / cp, d.context_size);
    let video = product(&[t, h, 4 * q + 2 * q + 2 * share.ffn]);
    let keys = product(&[text, ce, 2 * q]);
    let scores = 4.0 * product(&[t, q, cfg.batch.seq_length + d.text_len]);
    let blocks = PER_WEIGHT * (video + keys) + BOTH_PASSES * scores;
    let given = product(&[t, d.in_values, h]) + product(&[text, d.text_dim, ce]);
    let head = product(&[share.tokens_sequence_parallel, h, d.out_values]);
    let time = product(&[batch, h, h, 7]);
    share.layers.len() as f64 * blocks + 4.0 * given + PER_WEIGHT * (head + product(&[text, ce, ce]) + time)
}

/// The image tower on one image a sequence: patch product, blocks in which every patch sees every patch, mergers of four
/// patches' rows to a token. Nothing comes before the patches, so their product has no gradient of its input.
fn tower(cfg: &RunConfig) -> f64 {
    let Some(v) = &cfg.model.vision else { return 0.0 };
    let (patches, h) = (cfg.batch.micro_batch_size * v.side * v.side, v.hidden_size);
    let first = 4.0 * product(&[patches, v.patch_values, h]);
    let weights = product(&[v.depth, 4 * h + 2 * v.ffn_hidden_size, h, patches]);
    let scores = 4.0 * product(&[v.depth, patches, v.side * v.side, h]);
    let mergers = product(&[1 + v.deepstack.len(), patches / 4, 4 * h, 4 * h + cfg.model.hidden_size]);
    first + PER_WEIGHT * (weights + mergers) + BOTH_PASSES * scores
}

/// Multi-token prediction, where the rank has it: for each depth its layers, a projection from 2h to h, and the head.
fn ahead(cfg: &RunConfig, share: &RankShare, head: f64) -> f64 {
    if share.mtp_layers == 0 {
        return 0.0;
    }
    let h = cfg.model.hidden_size;
    let first = cfg.model.layers.len();
    let window = |i: usize| cfg.model.shared_kv.as_ref().and_then(|_| cfg.model.window_of(first + i));
    let of = cfg.model.mtp_layers.iter().enumerate();
    let layers: f64 = of.map(|(i, kind)| layer(*kind, cfg, share, window(i))).sum();
    // The embedding's projection, and the hidden state's or that of each of its streams.
    let states = cfg.model.hyper_connections.map_or(1, |h| h.num_residual_streams);
    let projection = product(&[1 + states, h, h / cfg.parallel.tp, share.tokens]) + streams(cfg, share, 1);
    cfg.model.mtp_num_layers as f64 * (layers + PER_WEIGHT * (projection + head))
}

/// Weights of hyper-connections that a token passes: of `pre` maps, and of post and res where there is more than one kind.
fn streams(cfg: &RunConfig, share: &RankShare, kinds: usize) -> f64 {
    let Some(hyper) = cfg.model.hyper_connections else { return 0.0 };
    let n = hyper.num_residual_streams;
    // Products have a multiple of eight rows.
    let maps = (if kinds == 1 { n } else { n * (n + 2) }).next_multiple_of(8);
    product(&[maps, n * cfg.model.hidden_size, share.tokens])
}

/// DeepSeek-V4: queries through a latent, one key head, the output through the groups' ranks; hyper-connections around.
fn shared_kv(cfg: &RunConfig, kv: &SharedKv, share: &RankShare, window: Option<usize>) -> f64 {
    let (h, d, heads) = (cfg.model.hidden_size, cfg.model.kv_channels, share.heads);
    let weights = h * kv.q_lora_rank
        + kv.q_lora_rank * heads * d
        + h * d
        + heads * d * kv.o_lora_rank
        + kv.o_groups * kv.o_lora_rank * h;
    let scores = 4.0 * pairs(share, window) * product(&[cfg.batch.micro_batch_size, heads, d]);
    PER_WEIGHT * product(&[weights, share.tokens]) + BOTH_PASSES * scores
}

/// Of one micro-batch.
fn layer(kind: LayerKind, cfg: &RunConfig, share: &RankShare, window: Option<usize>) -> f64 {
    match kind {
        LayerKind::Dense => attention(cfg, share, window) + mlp(cfg, share),
        LayerKind::Moe => attention(cfg, share, window) + experts(cfg, share),
        LayerKind::AttnOnly => attention(cfg, share, window),
        LayerKind::MlpOnly => mlp(cfg, share),
        LayerKind::MoeOnly => experts(cfg, share),
        LayerKind::Mamba => mamba(cfg, share),
        LayerKind::DeltaDense => delta_net(cfg, share) + mlp(cfg, share),
        LayerKind::DeltaMoe => delta_net(cfg, share) + experts(cfg, share),
    }
}

/// Matrices of an MLP.
fn matrices(cfg: &RunConfig) -> usize {
    if matches!(cfg.model.activation, Activation::SquaredRelu | Activation::Gelu) { 2 } else { 3 }
}

/// Pairs of a query and a key up to its own position, of one sequence and head; at most `window` keys a query.
fn pairs(share: &RankShare, window: Option<usize>) -> f64 {
    let positions = share.seq_chunks.iter().flat_map(|(first, len)| *first..first + len);
    positions.map(|p| window.map_or(p + 1, |w| w.min(p + 1)) as f64).sum()
}

/// Down-projections on the rows of the tensor rank, up-projections and the output on all rows of its heads.
fn latent_attention(cfg: &RunConfig, mla: &Mla, share: &RankShare) -> f64 {
    let (h, heads) = (cfg.model.hidden_size, share.heads);
    let (qk, v) = (mla.qk_head_dim + mla.qk_pos_emb_head_dim, mla.v_head_dim);
    let down = h * (mla.q_lora_rank.unwrap_or(0) + mla.kv_lora_rank + mla.qk_pos_emb_head_dim);
    let up = mla.q_lora_rank.unwrap_or(h) * heads * qk
        + mla.kv_lora_rank * heads * (mla.qk_head_dim + v)
        + heads * v * h;
    let weights = product(&[down, share.tokens_sequence_parallel]) + product(&[up, share.tokens]);
    // One product as wide as a key, one as wide as a value.
    let scores = 2.0 * pairs(share, None) * product(&[cfg.batch.micro_batch_size, heads, qk + v]);
    PER_WEIGHT * weights + BOTH_PASSES * scores
}

fn attention(cfg: &RunConfig, share: &RankShare, window: Option<usize>) -> f64 {
    if let Some(kv) = &cfg.model.shared_kv {
        return shared_kv(cfg, kv, share, window) + PER_WEIGHT * streams(cfg, share, 3);
    }
    if let Some(mla) = &cfg.model.mla {
        return latent_attention(cfg, mla, share);
    }
    let (h, d) = (cfg.model.hidden_size, cfg.model.kv_channels);
    let gates = if cfg.model.attention_output_gate { share.heads } else { 0 };
    let weights = product(&[h, d, 2 * share.heads + gates + 2 * share.kv_heads]);
    // Two products of a query with every key up to its own position.
    let scores = 4.0 * pairs(share, window) * product(&[cfg.batch.micro_batch_size, share.heads, d]);
    PER_WEIGHT * weights * share.tokens as f64 + BOTH_PASSES * scores
}

fn mlp(cfg: &RunConfig, share: &RankShare) -> f64 {
    PER_WEIGHT * product(&[matrices(cfg), cfg.model.hidden_size, share.ffn, share.tokens])
}

fn experts(cfg: &RunConfig, share: &RankShare) -> f64 {
    let (h, moe) = (cfg.model.hidden_size, cfg.model.moe.as_ref().unwrap());
    let tokens = share.tokens_sequence_parallel;
    let width = moe.latent_size.unwrap_or(h);
    let router = product(&[h, moe.num_experts, tokens]);
    let latent = moe.latent_size.map_or(0.0, |w| product(&[2, h, w, tokens]));
    let routed = product(&[matrices(cfg), width, share.expert_ffn, tokens, moe.router_topk]);
    // Drop and pad: the experts compute their capacity, whatever they get.
    let filled = moe.capacity_factor.filter(|_| moe.pad_to_capacity).unwrap_or(1.0);
    let shared = product(&[matrices(cfg), h, share.shared_expert_ffn.unwrap_or(0), share.tokens]);
    PER_WEIGHT * (router + latent + routed * filled + shared + streams(cfg, share, 3))
}

fn mamba(cfg: &RunConfig, share: &RankShare) -> f64 {
    let (h, m) = (cfg.model.hidden_size, cfg.model.mamba.as_ref().unwrap());
    let inner = share.mamba_heads * m.head_dim;
    let bc = share.mamba_groups * m.state_dim;
    let weights = product(&[h, 3 * inner + 2 * bc + share.mamba_heads]);
    // Inside a chunk two products with every earlier token, and a state written and read.
    let before = (m.chunk_size + 1) as f64 / 2.0;
    let scan = before * 2.0 * (bc + inner) as f64 + product(&[4, inner, m.state_dim]);
    (PER_WEIGHT * weights + BOTH_PASSES * scan) * share.tokens as f64
}

/// The gated delta rule by chunks of 64 tokens: two products a key head and two a value head with every earlier token
/// of the chunk, and a state of `[value, key]` multiplied three times a token.
fn delta_net(cfg: &RunConfig, share: &RankShare) -> f64 {
    const CHUNK: usize = 64;
    let (h, d) = (cfg.model.hidden_size, cfg.model.delta_net.as_ref().unwrap());
    let (keys, values) = (share.delta_key_heads * d.key_dim, share.delta_value_heads * d.value_dim);
    let weights = product(&[h, 2 * keys + 3 * values + 2 * share.delta_value_heads]);
    let before = (CHUNK + 1) as f64 / 2.0;
    let rule = before * 4.0 * (keys + values) as f64 + product(&[6, values, d.key_dim]);
    (PER_WEIGHT * weights + BOTH_PASSES * rule) * share.tokens as f64
}
