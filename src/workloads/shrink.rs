//! The CPU device runs the same model in small: same layer kinds, same parts, same launches, fewer of each.

use crate::config::{LayerKind, RunConfig};

/// Limits of the small model. Heads, widths and groups follow from the same budget: a step in
/// well under a second on two cores.
const HIDDEN: usize = 256;
const SEQUENCE: usize = 128;
const VOCABULARY: usize = 1024;
const EXPERTS: usize = 8;
const HEAD_WIDTH: usize = 64;
const HEADS: usize = 4;
const FFN: usize = 512;
const EXPERT_FFN: usize = 128;
/// Latent experts: narrower than hidden, as it is in the models that have them.
const EXPERT_LATENT: usize = 64;
const TOPK: usize = 2;
/// Latents of multi-latent attention, and the wider parts of its heads.
const LATENT: usize = 64;
const LATENT_HEAD: usize = 32;
/// Mamba heads a rank, and the width of head, state and chunk: several chunks a sequence.
const MAMBA_HEADS: usize = 8;
const MAMBA_WIDTH: usize = 32;
/// Key heads of a gated delta net on a rank, value heads to each of them, and the width of both.
const DELTA_KEY_HEADS: usize = 2;
const DELTA_GROUP: usize = 2;
const DELTA_WIDTH: usize = 32;
/// Keys of a sliding window: some tiles of a sequence lie outside.
const WINDOW: usize = 24;
/// The image tower: blocks, width of its heads, patches of the image in a row (16 tokens of it), and rows of its table.
const TOWER_DEPTH: usize = 2;
const TOWER_HEAD: usize = 24;
const TOWER_HEADS: usize = 2;
const TOWER_FFN: usize = 96;
const TOWER_SIDE: usize = 8;
const TOWER_TABLE: usize = 12;
/// Text of a diffusion transformer, its width, and that of the time step's sines.
const TEXT: usize = 16;
const TEXT_WIDTH: usize = 64;
const TIME_WIDTH: usize = 32;
/// Largest size of each parallel group: enough that its stand-in collectives are there.
const GROUP: usize = 2;
/// Most pipeline stages: a first, a last and stages between; and most model chunks of one.
const STAGES: usize = 4;
const CHUNKS: usize = 2;

/// Sizes that the user gave and that shrinking leaves alone.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Given {
    pub layers: bool,
    pub hidden: bool,
    pub sequence: bool,
    pub vocabulary: bool,
    pub experts: bool,
}

/// Makes `cfg` small; returns what was changed, for the notice.
pub fn shrink(cfg: &mut RunConfig, given: Given) -> String {
    let before = summary(cfg);
    let p = &mut cfg.parallel;
    p.tp = p.tp.min(GROUP);
    p.cp = p.cp.min(GROUP);
    p.dp = p.dp.min(GROUP);
    // Expert groups are made of tensor, context and data ranks.
    p.ep = p.ep.min(p.tp * p.cp * p.dp);
    p.etp = 1;
    p.sequence_parallel &= p.tp > 1;
    if !given.layers {
        // A first stage stays the first, a last one the last; every stage and chunk has every kind of layer. Layers
        // that the user gave are split as asked: the rules have found that they fit.
        let last = p.pp_rank + 1 == p.pp;
        (p.pp, p.vp) = (p.pp.min(STAGES), p.vp.min(CHUNKS));
        p.pp_rank = if last { p.pp - 1 } else { p.pp_rank.min(p.pp.saturating_sub(2)) };
        (p.pipeline_layout, p.microbatch_group_size) = (None, None);
        (p.first_stage_layers, p.last_stage_layers) = (None, None);
        (p.account_for_embedding, p.account_for_loss) = (false, false);
    }
    let chunks = p.pp * p.vp;
    let groups = p.tp.max(p.ep);
    let tp = p.tp;

    let m = &mut cfg.model;
    if !given.layers {
        let mut kinds: Vec<LayerKind> = Vec::new();
        for kind in &m.layers {
            if !kinds.contains(kind) {
                kinds.push(*kind);
            }
        }
        // Of each kind one with and one without a window, or routed by token ids and by scores, where both are.
        let hashed = m.moe.as_ref().is_some_and(|moe| moe.hash_layers > 0);
        let windows = m.window.is_some_and(|w| w.skip_freq.is_some());
        let turns = if windows || hashed || m.shared_kv.is_some() { 2 } else { 1 };
        if let Some(moe) = &mut m.moe {
            moe.hash_layers = moe.hash_layers.min(kinds.len());
        }
        if let Some(kv) = &mut m.shared_kv {
            // The first layer's, a compressed one, then those of multi-token prediction.
            let (first, ahead) = (kv.compress_ratios.first().copied(), m.mtp_layers.len() * m.mtp_num_layers);
            let of_mtp = kv.compress_ratios.split_off(m.layers.len().min(kv.compress_ratios.len()));
            let compressed = kv.compress_ratios.iter().copied().max();
            kv.compress_ratios = vec![compressed.unwrap_or(0); turns * chunks * kinds.len()];
            if let (Some(r), Some(first)) = (kv.compress_ratios.first_mut(), first) {
                *r = first;
            }
            kv.compress_ratios.extend(of_mtp.into_iter().take(ahead));
        }
        m.layers = kinds.repeat(turns * chunks);
        if let Some(skip) = m.window.as_mut().and_then(|w| w.skip_freq.as_mut()) {
            *skip = (*skip).min(turns * kinds.len());
        }
    }
    if !given.hidden {
        m.hidden_size = m.hidden_size.min(HIDDEN);
    }
    let ratio = (m.num_attention_heads / m.num_query_groups.max(1)).max(1);
    let pairs = m.kv_channels;
    m.kv_channels = m.kv_channels.min(HEAD_WIDTH);
    if let Some(section) = &mut m.mrope_section {
        *section = section.map(|n| n * m.kv_channels / pairs.max(1));
    }
    if let Some(d) = &mut m.diffusion {
        d.text_len = d.text_len.min(TEXT);
        d.text_dim = d.text_dim.min(TEXT_WIDTH);
        d.freq_dim = d.freq_dim.min(TIME_WIDTH);
        d.context_size = d.context_size.min(m.hidden_size);
    }
    if let Some(tower) = &mut m.vision {
        // The last block's output is merged anyway; DeepStack takes from those before it.
        let depth = tower.depth.min(TOWER_DEPTH.max(tower.deepstack.len().min(1) + 1));
        tower.deepstack = (0..tower.deepstack.len().min(depth.saturating_sub(1))).collect();
        tower.depth = depth;
        tower.num_heads = tower.num_heads.min(TOWER_HEADS);
        tower.hidden_size = tower.hidden_size.min(tower.num_heads * TOWER_HEAD);
        tower.ffn_hidden_size = tower.ffn_hidden_size.min(TOWER_FFN);
        tower.side = tower.side.min(TOWER_SIDE);
        tower.table_side = tower.table_side.min(TOWER_TABLE);
    }
    m.num_query_groups = m.num_query_groups.min((HEADS / ratio.min(HEADS)).max(tp));
    m.num_attention_heads = m.num_query_groups * ratio.min(HEADS);
    m.ffn_hidden_size = m.ffn_hidden_size.min(FFN);
    if !given.vocabulary {
        m.vocab_size = m.vocab_size.min(VOCABULARY);
    }
    if let Some(mla) = &mut m.mla {
        mla.q_lora_rank = mla.q_lora_rank.map(|r| r.min(LATENT));
        mla.kv_lora_rank = mla.kv_lora_rank.min(LATENT);
        mla.qk_head_dim = mla.qk_head_dim.min(LATENT_HEAD);
        mla.qk_pos_emb_head_dim = mla.qk_pos_emb_head_dim.min(LATENT_HEAD / 2);
        mla.v_head_dim = mla.v_head_dim.min(LATENT_HEAD);
    }
    if let Some(kv) = &mut m.shared_kv {
        kv.q_lora_rank = kv.q_lora_rank.min(LATENT);
        kv.rotary = kv.rotary.min(LATENT_HEAD / 2);
        kv.o_groups = kv.o_groups.min(GROUP);
        kv.o_lora_rank = kv.o_lora_rank.min(LATENT_HEAD);
    }
    if let Some(mamba) = &mut m.mamba {
        mamba.num_heads = mamba.num_heads.min(MAMBA_HEADS * tp);
        mamba.num_groups = mamba.num_groups.min(tp);
        mamba.head_dim = mamba.head_dim.min(MAMBA_WIDTH);
        mamba.state_dim = mamba.state_dim.min(MAMBA_WIDTH);
        mamba.chunk_size = mamba.chunk_size.min(MAMBA_WIDTH);
    }
    if let Some(delta) = &mut m.delta_net {
        let group = (delta.value_heads / delta.key_heads.max(1)).clamp(1, DELTA_GROUP);
        delta.key_heads = delta.key_heads.min(DELTA_KEY_HEADS * tp);
        delta.value_heads = delta.key_heads * group;
        delta.key_dim = delta.key_dim.min(DELTA_WIDTH);
        delta.value_dim = delta.value_dim.min(DELTA_WIDTH);
    }
    if let Some(moe) = &mut m.moe {
        if !given.experts {
            moe.num_experts = moe.num_experts.min(EXPERTS.max(groups));
        }
        moe.router_topk = moe.router_topk.min(TOPK);
        moe.ffn_hidden_size = moe.ffn_hidden_size.min(EXPERT_FFN);
        moe.latent_size = moe.latent_size.map(|w| w.min(EXPERT_LATENT));
        // Two experts a group, half of the groups chosen.
        moe.num_groups = if moe.num_groups > 1 { (moe.num_experts / 2).max(1) } else { 1 };
        moe.group_topk = moe.group_topk.min(moe.num_groups / 2).min(moe.router_topk).max(1);
        moe.shared_expert_intermediate_size = moe.shared_expert_intermediate_size.map(|w| w.min(EXPERT_FFN));
    }
    let b = &mut cfg.batch;
    if !given.sequence {
        b.seq_length = b.seq_length.min(SEQUENCE);
        if let Some(window) = &mut m.window {
            window.keys = window.keys.min(WINDOW);
        }
        if let Some(kv) = &mut m.shared_kv {
            kv.window = kv.window.min(WINDOW);
        }
    }
    b.micro_batch_size = b.micro_batch_size.min(2);
    // The small job is whole: its GPUs and its batch fit the groups and the micro-batches that are run.
    let p = &cfg.parallel;
    cfg.identity.num_gpus = p.tp * p.pp * p.cp * p.dp;
    b.global_batch_size = b.micro_batch_size * p.dp * b.num_microbatches;
    format!("{before} -> {}", summary(cfg))
}

fn summary(cfg: &RunConfig) -> String {
    let m = &cfg.model;
    let p = &cfg.parallel;
    let experts = m.moe.as_ref().map_or(String::new(), |e| format!(", {} experts", e.num_experts));
    format!(
        "{} layers, hidden {}, {} heads, sequence {}, vocabulary {}{experts}, tp {} pp {} (rank {}) vp {} cp {} ep {} dp {}",
        m.layers.len(),
        m.hidden_size,
        m.num_attention_heads,
        cfg.batch.seq_length,
        m.vocab_size,
        p.tp,
        p.pp,
        p.pp_rank,
        p.vp,
        p.cp,
        p.ep,
        p.dp
    )
}
