//! Small configurations for tests.

use super::share::RankShare;
use crate::config::*;
use crate::ops::rope::RopeScaling;
use crate::ops::rope::scaling::Yarn;
use crate::program::Program;

/// Two dense layers on one GPU: hidden 64, 4 heads of 16 in 2 groups, 16 tokens.
pub fn dense() -> RunConfig {
    RunConfig {
        identity: Identity {
            family: "llama".into(),
            recipe: "tiny".into(),
            gpu: "h100".into(),
            recipe_dtype: "bf16".into(),
            compute_dtype: "bf16".into(),
            task: "pretrain".into(),
            variant: None,
            num_gpus_recipe: 1,
            num_gpus: 1,
        },
        model: Model {
            layers: vec![LayerKind::Dense; 2],
            hidden_size: 64,
            ffn_hidden_size: 96,
            num_attention_heads: 4,
            num_query_groups: 2,
            kv_channels: 16,
            vocab_size: 256,
            activation: Activation::Swiglu,
            activation_clamp: None,
            glu_linear_offset: 0.0,
            layernorm_epsilon: 1e-5,
            zero_centered_norms: false,
            attention_output_gate: false,
            qk_layernorm: false,
            add_qkv_bias: false,
            add_bias_linear: false,
            window: None,
            attention_sinks: false,
            rotary_base: 1e4,
            rotary_percent: 1.0,
            rope_scaling: None,
            mrope_section: None,
            vision: None,
            diffusion: None,
            tied_embeddings: false,
            init_method_std: 0.02,
            attention_dropout: 0.0,
            hidden_dropout: 0.0,
            moe: None,
            mamba: None,
            delta_net: None,
            mla: None,
            shared_kv: None,
            hyper_connections: None,
            mtp_num_layers: 0,
            mtp_layers: vec![LayerKind::Dense],
            mtp_repeated: false,
            mtp_loss_scaling_factor: 0.1,
        },
        parallel: Parallel {
            tp: 1,
            pp: 1,
            cp: 1,
            ep: 1,
            etp: 1,
            vp: 1,
            dp: 1,
            sequence_parallel: false,
            pp_rank: 0,
            pipeline_layout: None,
            first_stage_layers: None,
            last_stage_layers: None,
            account_for_embedding: false,
            account_for_loss: false,
            microbatch_group_size: None,
            use_distributed_optimizer: true,
            ddp: Ddp::default(),
            world: World::default(),
        },
        batch: Batch {
            micro_batch_size: 1,
            global_batch_size: 2,
            seq_length: 16,
            num_microbatches_recipe: 2,
            num_microbatches: 2,
        },
        graph: Graph {
            implementation: GraphImpl::None,
            scope: vec![],
            warmup_steps: 3,
            te_rng_tracker: false,
            staging: true,
        },
        recompute: Recompute {
            granularity: None,
            method: None,
            num_layers: None,
            modules: vec![],
            mhc_layers: None,
        },
        optimizer: Optimizer {
            kind: "adam".into(),
            lr: 3e-4,
            min_lr: 3e-5,
            warmup_iters: 2,
            decay_iters: 50,
            clip_grad: 1.0,
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-8,
            weight_decay: 0.1,
            grad_dtype: "bf16".into(),
        },
        stack_only: false,
        overlap_wgrad: false,
        seed: 1234,
        approximations: vec![],
        not_built: vec![],
    }
}

/// Two expert layers: 8 experts, top 2, q/k norm; four of the experts local (ep 2), `dispatcher` as given.
pub fn moe(dispatcher: Dispatcher) -> RunConfig {
    let mut cfg = dense();
    cfg.model.layers = vec![LayerKind::Moe; 2];
    cfg.model.qk_layernorm = true;
    cfg.parallel.ep = 2;
    cfg.parallel.dp = 2;
    cfg.identity.num_gpus = 2;
    cfg.batch.global_batch_size = 4;
    cfg.model.moe = Some(Moe {
        num_experts: 8,
        router_topk: 2,
        ffn_hidden_size: 32,
        shared_expert_intermediate_size: None,
        shared_expert_gate: false,
        latent_size: None,
        score_function: ScoreFunction::Softmax,
        pre_softmax: false,
        topk_scaling_factor: None,
        num_groups: 1,
        group_topk: 1,
        expert_bias: false,
        hash_layers: 0,
        bias_update_rate: 0.0,
        aux_loss_coeff: 1e-3,
        load_balancing_type: "aux_loss".into(),
        force_load_balancing: true,
        routing: Routing::Recipe,
        dispatcher,
        flex_backend: None,
        capacity_factor: None,
        pad_to_capacity: false,
        drop_by_position: false,
        rank_capacity_factor: None,
        shared_expert_overlap: false,
        input_jitter_eps: None,
        grouped_gemm: true,
        row_bound: 2.0,
        expert_gemm: ExpertGemm::Grouped,
    });
    cfg
}

/// Drop and pad, as `--use_tokendrop true` with the alltoall dispatcher.
pub fn padded() -> RunConfig {
    let mut cfg = moe(Dispatcher::Alltoall);
    if let Some(moe) = &mut cfg.model.moe {
        moe.capacity_factor = Some(1.0);
        moe.pad_to_capacity = true;
        moe.force_load_balancing = false;
    }
    cfg
}

/// A vision-language model in small: two blocks on an image of 4 x 4 patches at position 2, DeepStack after the first,
/// M-RoPE.
pub fn vision() -> RunConfig {
    let mut cfg = dense();
    cfg.model.qk_layernorm = true;
    cfg.model.mrope_section = Some([4, 2, 2]);
    cfg.model.vision = Some(Vision {
        depth: 2,
        hidden_size: 16,
        ffn_hidden_size: 24,
        num_heads: 2,
        patch_values: 24,
        table_side: 6,
        side: 4,
        start: 2,
        deepstack: vec![0],
    });
    cfg
}

/// A diffusion transformer in small: two blocks on a video of 4 x 2 x 2 patches, 6 tokens of text.
pub fn diffusion() -> RunConfig {
    let mut cfg = dense();
    cfg.model.num_query_groups = 4;
    cfg.model.activation = Activation::Gelu;
    cfg.model.qk_layernorm = true;
    (cfg.model.add_bias_linear, cfg.model.add_qkv_bias) = (true, true);
    cfg.model.diffusion = Some(Diffusion {
        in_values: 8,
        out_values: 8,
        freq_dim: 16,
        text_len: 6,
        text_dim: 24,
        context_size: 40,
    });
    cfg
}

/// A hybrid of every symbol: Mamba, attention, squared-ReLU MLP and experts; chunks of 32 in 2 groups of 8 heads.
pub fn hybrid() -> RunConfig {
    let mut cfg = moe(Dispatcher::Alltoall);
    cfg.model.layers = vec![LayerKind::Mamba, LayerKind::AttnOnly, LayerKind::MlpOnly, LayerKind::MoeOnly];
    cfg.model.activation = Activation::SquaredRelu;
    cfg.model.qk_layernorm = false;
    cfg.model.rotary_percent = 0.0;
    cfg.model.mamba =
        Some(Mamba { num_heads: 16, head_dim: 16, state_dim: 16, num_groups: 2, chunk_size: 32 });
    cfg
}

/// Qwen3-Next in small: a gated delta net and full attention with an output gate, each before experts; zero-centred norms.
pub fn delta_net() -> RunConfig {
    let mut cfg = moe(Dispatcher::Alltoall);
    cfg.model.layers = vec![LayerKind::DeltaMoe, LayerKind::Moe];
    cfg.model.rotary_percent = 0.5;
    cfg.model.zero_centered_norms = true;
    cfg.model.attention_output_gate = true;
    cfg.model.delta_net = Some(DeltaNet { key_heads: 2, value_heads: 4, key_dim: 32, value_dim: 32 });
    cfg
}

/// A small gpt-oss: a layer with a window of 5 keys and one without, learned sinks, biases, the clamped unit, YaRN.
pub fn gpt_oss() -> RunConfig {
    let mut cfg = moe(Dispatcher::Alltoall);
    let m = &mut cfg.model;
    m.qk_layernorm = false;
    (m.add_bias_linear, m.add_qkv_bias) = (true, true);
    m.activation = Activation::QuickGeglu;
    (m.activation_clamp, m.glu_linear_offset) = (Some(7.0), 1.0);
    m.window = Some(Window { keys: 5, skip_freq: Some(2) });
    m.attention_sinks = true;
    m.rope_scaling = Some(RopeScaling::Yarn(Yarn {
        factor: 32.0,
        original_max_position: 4096.0,
        beta_fast: 32.0,
        beta_slow: 1.0,
        mscale: 1.0,
        mscale_all_dim: 0.0,
        rounded: false,
    }));
    cfg
}

/// A small DeepSeek-V3: a dense and an expert layer with multi-latent attention, YaRN, a shared expert, sigmoid
/// scores with a bias, 8 experts in 4 groups.
pub fn deepseek() -> RunConfig {
    let mut cfg = moe(Dispatcher::Alltoall);
    cfg.model.layers = vec![LayerKind::Dense, LayerKind::Moe];
    cfg.model.mtp_layers = vec![LayerKind::Moe];
    cfg.model.num_query_groups = cfg.model.num_attention_heads;
    cfg.model.mla = Some(Mla {
        q_lora_rank: Some(40),
        kv_lora_rank: 24,
        qk_head_dim: 16,
        qk_pos_emb_head_dim: 8,
        v_head_dim: 8,
    });
    cfg.model.rope_scaling = Some(RopeScaling::Yarn(Yarn {
        factor: 40.0,
        original_max_position: 4096.0,
        beta_fast: 32.0,
        beta_slow: 1.0,
        mscale: 1.0,
        mscale_all_dim: 1.0,
        rounded: true,
    }));
    if let Some(moe) = &mut cfg.model.moe {
        moe.score_function = ScoreFunction::Sigmoid;
        moe.pre_softmax = true;
        moe.topk_scaling_factor = Some(2.5);
        moe.shared_expert_intermediate_size = Some(32);
        (moe.num_groups, moe.group_topk) = (4, 2);
        (moe.expert_bias, moe.bias_update_rate) = (true, 1e-3);
        moe.force_load_balancing = false;
    }
    cfg
}

/// A small DeepSeek-V4: two expert layers of four residual streams, the first routed by token ids and with a window of 5
/// keys, shared keys and values, sinks, output in two groups, clamped SwiGLU, square roots of softplus.
pub fn deepseek_v4() -> RunConfig {
    let mut cfg = moe(Dispatcher::Flex);
    let yarn = deepseek().model.rope_scaling;
    let m = &mut cfg.model;
    (m.num_query_groups, m.attention_sinks) = (1, true);
    m.mtp_layers = vec![LayerKind::Moe];
    m.activation = Activation::SwigluClamped;
    m.activation_clamp = Some(0.5);
    m.rope_scaling = yarn;
    m.shared_kv = Some(SharedKv {
        q_lora_rank: 40,
        rotary: 8,
        o_groups: 2,
        o_lora_rank: 24,
        window: 5,
        compress_ratios: vec![0, 4, 0],
        compress_rotary_base: 4e4,
    });
    m.hyper_connections = Some(HyperConnections { num_residual_streams: 4, sinkhorn_iterations: 20 });
    if let Some(moe) = &mut m.moe {
        moe.score_function = ScoreFunction::SqrtSoftplus;
        moe.topk_scaling_factor = Some(1.5);
        moe.shared_expert_intermediate_size = Some(32);
        (moe.expert_bias, moe.bias_update_rate) = (true, 1e-3);
        moe.force_load_balancing = false;
        moe.hash_layers = 1;
        moe.rank_capacity_factor = Some(1.5);
    }
    cfg
}

pub fn with_graphs(mut cfg: RunConfig, implementation: GraphImpl, scope: &[Scope]) -> RunConfig {
    cfg.graph.implementation = implementation;
    cfg.graph.scope = scope.to_vec();
    cfg.graph.te_rng_tracker = true;
    cfg
}

/// `cfg` as rank `pp_rank` of `pp` stages with `vp` chunks each, `micro_batches` a step; its layers once for every chunk.
pub fn staged(mut cfg: RunConfig, pp: usize, vp: usize, pp_rank: usize, micro_batches: usize) -> RunConfig {
    cfg.model.layers = cfg.model.layers.repeat(pp * vp);
    (cfg.parallel.pp, cfg.parallel.vp, cfg.parallel.pp_rank) = (pp, vp, pp_rank);
    cfg.identity.num_gpus *= pp;
    cfg.batch.global_batch_size = cfg.batch.micro_batch_size * cfg.parallel.dp * micro_batches;
    (cfg.batch.num_microbatches, cfg.batch.num_microbatches_recipe) = (micro_batches, micro_batches);
    cfg
}

/// [`program`] with the passes in an order of the caller's.
pub fn program_in_order(cfg: &RunConfig, turns: &[super::schedule::Turn]) -> Program {
    let share = RankShare::of(cfg).expect("the share");
    super::step::build_in_order(cfg, &share, turns).expect("the program")
}

pub fn program(cfg: &RunConfig) -> Program {
    let share = RankShare::of(cfg).expect("the share");
    super::build(cfg, &share).expect("the program")
}
