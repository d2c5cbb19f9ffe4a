//! The effective configuration of one run: plain structs, made once by `overrides`, read by everyone.
//!
//! Lengths are tokens, batch sizes are sequences. Field names follow Megatron's configuration keys.
//!
//! Over 500 lines: fields with their units and sources, read as one list; there is no behaviour to split off.

use serde::{Deserialize, Serialize};

/// How graphs are made, in the harness's spelling.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GraphImpl {
    None,
    Local,
    TransformerEngine,
}

/// One name of `--cuda_graph_scope`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Scope {
    FullIteration,
    Attn,
    Mlp,
    Moe,
    MoeRouter,
    MoePreprocess,
    Mamba,
}

impl Scope {
    /// The harness's spelling.
    pub const fn name(self) -> &'static str {
        match self {
            Scope::FullIteration => "full_iteration",
            Scope::Attn => "attn",
            Scope::Mlp => "mlp",
            Scope::Moe => "moe",
            Scope::MoeRouter => "moe_router",
            Scope::MoePreprocess => "moe_preprocess",
            Scope::Mamba => "mamba",
        }
    }
}

/// What one layer of the local stack is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LayerKind {
    /// Attention, then a dense MLP.
    Dense,
    /// Attention, then experts.
    Moe,
    /// Hybrid pattern `*`: attention alone.
    AttnOnly,
    /// Hybrid pattern `-`: dense MLP alone.
    MlpOnly,
    /// Hybrid pattern `E`: experts alone.
    MoeOnly,
    /// Hybrid pattern `M`: Mamba-2.
    Mamba,
    /// Gated delta net, then a dense MLP.
    DeltaDense,
    /// Gated delta net, then experts.
    DeltaMoe,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Activation {
    Swiglu,
    SquaredRelu,
    QuickGeglu,
    /// SwiGLU whose gate and up are bounded (`activation_clamp`).
    SwigluClamped,
    Gelu,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ScoreFunction {
    Softmax,
    Sigmoid,
    /// Square root of softplus.
    #[serde(rename = "sqrtsoftplus")]
    SqrtSoftplus,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Dispatcher {
    Alltoall,
    Flex,
    Allgather,
}

/// `--moe_routing`: where each token's experts come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
#[value(rename_all = "snake_case")]
pub enum Routing {
    /// Forced random logits where the recipe forces balance, the router's own otherwise.
    Recipe,
    /// Forced uniform random logits.
    Balanced,
    /// Forced random logits with a fixed per-expert bias, so that some experts are busy and others idle.
    Skewed,
}

/// Which recipe was chosen.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Identity {
    /// `-m`, e.g. `qwen`.
    pub family: String,
    /// `-mr`, e.g. `qwen3_30b_a3b`.
    pub recipe: String,
    /// `-g`, e.g. `h100`.
    pub gpu: String,
    /// `-c`, e.g. `bf16`: the recipe's dtype.
    pub recipe_dtype: String,
    /// The dtype that kernels run in: the recipe's, or `--run_dtype`.
    pub compute_dtype: String,
    /// `pretrain`, `sft` or `peft`.
    pub task: String,
    pub variant: Option<String>,
    /// GPUs of the recipe as written.
    pub num_gpus_recipe: usize,
    /// GPUs of the modelled job (`-ng`, default the recipe's).
    pub num_gpus: usize,
}

/// The architecture, with this run's overrides. `None` where the model has no such part.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Model {
    /// Kind of every layer of the whole model, in order (decoder layers; no MTP).
    pub layers: Vec<LayerKind>,
    pub hidden_size: usize,
    /// Width of the dense MLP.
    pub ffn_hidden_size: usize,
    pub num_attention_heads: usize,
    pub num_query_groups: usize,
    /// Width of one attention head.
    pub kv_channels: usize,
    /// Vocabulary as padded for the run, before the tensor-parallel split.
    pub vocab_size: usize,
    pub activation: Activation,
    /// Bounds of a clamped activation's inputs (`QuickGeglu`).
    #[serde(default)]
    pub activation_clamp: Option<f64>,
    /// Added to the linear half of a gated activation (`QuickGeglu`).
    #[serde(default)]
    pub glu_linear_offset: f64,
    pub layernorm_epsilon: f64,
    /// Norm weights are stored less one.
    pub zero_centered_norms: bool,
    /// Attention's output is multiplied by the sigmoid of a projection as wide as q.
    pub attention_output_gate: bool,
    pub qk_layernorm: bool,
    pub add_qkv_bias: bool,
    pub add_bias_linear: bool,
    /// Sliding attention windows.
    #[serde(default)]
    pub window: Option<Window>,
    /// One learned logit a head in the denominator of attention's softmax.
    #[serde(default)]
    pub attention_sinks: bool,
    pub rotary_base: f64,
    /// Part of each head that is rotated.
    pub rotary_percent: f64,
    /// Scaling of low rotary frequencies.
    pub rope_scaling: Option<crate::ops::rope::RopeScaling>,
    /// Rotated pairs that turn with time, height and width (interleaved M-RoPE); `None`: all turn with the token's place.
    #[serde(default)]
    pub mrope_section: Option<[usize; 3]>,
    /// An image tower before the decoder, and an image in every sequence.
    #[serde(default)]
    pub vision: Option<Vision>,
    /// A diffusion transformer on video latents: no vocabulary, no causal mask.
    #[serde(default)]
    pub diffusion: Option<Diffusion>,
    pub tied_embeddings: bool,
    pub init_method_std: f64,
    pub attention_dropout: f64,
    pub hidden_dropout: f64,
    pub moe: Option<Moe>,
    pub mamba: Option<Mamba>,
    pub delta_net: Option<DeltaNet>,
    /// Multi-latent attention in place of plain one; `num_query_groups` and `kv_channels` then mean nothing.
    pub mla: Option<Mla>,
    /// DeepSeek-V4's attention in place of plain one; heads are `kv_channels` wide.
    #[serde(default)]
    pub shared_kv: Option<SharedKv>,
    #[serde(default)]
    pub hyper_connections: Option<HyperConnections>,
    /// Depths of multi-token prediction.
    pub mtp_num_layers: usize,
    /// Layers of one depth.
    pub mtp_layers: Vec<LayerKind>,
    /// All depths share one depth's weights.
    pub mtp_repeated: bool,
    /// Weight of their mean loss.
    pub mtp_loss_scaling_factor: f64,
}

/// Sliding windows of attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Window {
    /// Keys that a token sees, its own among them.
    pub keys: usize,
    /// Every n-th layer has no window; `None`: all have one.
    pub skip_freq: Option<usize>,
}

impl Model {
    /// The window of layer `index` of the whole model (Megatron-Core `is_layer_window_attention`, which counts from 1).
    pub fn window_of(&self, index: usize) -> Option<usize> {
        if let Some(kv) = &self.shared_kv {
            return (!kv.compresses(index)).then_some(kv.window);
        }
        let window = self.window?;
        let skipped = window.skip_freq.is_some_and(|n| n > 0 && (index + 1).is_multiple_of(n));
        (!skipped).then_some(window.keys)
    }
    /// Whether q, k and v have a bias.
    pub fn qkv_bias(&self) -> bool {
        self.add_qkv_bias || self.add_bias_linear
    }
}

/// Sizes of a diffusion transformer around its blocks.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Diffusion {
    /// Numbers of a patch of latents before and after the blocks: channels x frames x height x width.
    pub in_values: usize,
    pub out_values: usize,
    /// Width of the time step's sines and cosines.
    pub freq_dim: usize,
    /// Tokens of text of a sequence, and their width as given.
    pub text_len: usize,
    pub text_dim: usize,
    /// Width of the embedded text.
    pub context_size: usize,
}

impl Diffusion {
    /// Frames, rows and columns of patches of the video that Megatron-Bridge's mock data makes (24 x 104 x 60 latents in patches
    /// of 1 x 2 x 2, `diffusion/data/wan/wan_mock_datamodule.py`): the length of a sequence unless another is given.
    pub const VIDEO: [usize; 3] = [24, 52, 30];

    /// Frames, rows and columns of a video of `tokens` patches: frames of that size where they fill them, else factors that
    /// are near one another.
    pub fn grid(tokens: usize) -> [usize; 3] {
        let [_, height, width] = Self::VIDEO;
        if tokens > 0 && tokens.is_multiple_of(height * width) {
            return [tokens / (height * width), height, width];
        }
        let factor = |n: usize| (1..=n.isqrt()).rev().find(|f| n.is_multiple_of(*f)).unwrap_or(1);
        let width = factor(tokens);
        let height = factor(tokens / width);
        [tokens / width / height, height, width]
    }
}

/// Sizes of an image tower, and of the square image that every sequence has.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Vision {
    /// Blocks.
    pub depth: usize,
    pub hidden_size: usize,
    pub ffn_hidden_size: usize,
    pub num_heads: usize,
    /// Numbers of a flattened patch: channels x frames x height x width.
    pub patch_values: usize,
    /// Rows and columns of the table of positions.
    pub table_side: usize,
    /// Patches of the image in a row and in a column; 2 x 2 of them are merged to one token.
    pub side: usize,
    /// Position of the image's first token in its sequence.
    pub start: usize,
    /// Blocks whose output is merged too, and added to the hidden state after the first decoder layers, in order.
    pub deepstack: Vec<usize>,
}

impl Vision {
    /// Patches of an image.
    pub fn patches(&self) -> usize {
        self.side * self.side
    }
    /// Image tokens in a row and in a column.
    pub fn token_side(&self) -> usize {
        self.side / crate::ops::rope::axes::MERGE
    }
    /// Tokens of an image.
    pub fn tokens(&self) -> usize {
        self.token_side() * self.token_side()
    }
}

/// Sizes of multi-latent attention.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Mla {
    /// Width of the query latent; `None`: queries straight from the hidden state.
    pub q_lora_rank: Option<usize>,
    /// Width of the latent of keys and values.
    pub kv_lora_rank: usize,
    /// Elements of a query and key head that are not rotated, and that are.
    pub qk_head_dim: usize,
    pub qk_pos_emb_head_dim: usize,
    pub v_head_dim: usize,
}

/// Sizes of DeepSeek-V4's attention: one key that is its value too.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SharedKv {
    /// Width of the query latent.
    pub q_lora_rank: usize,
    /// Rotated elements of a head, the last ones.
    pub rotary: usize,
    /// The output is projected in this many groups of heads, each to `o_lora_rank`, then as a whole.
    pub o_groups: usize,
    pub o_lora_rank: usize,
    /// Keys that a token sees where keys are not compressed, its own among them.
    pub window: usize,
    /// Tokens of a compressed key, by layer, multi-token prediction after the decoder; 0: not compressed.
    pub compress_ratios: Vec<usize>,
    /// Rotary base of the layers that compress.
    pub compress_rotary_base: f64,
}

impl SharedKv {
    /// Whether layer `index` of the whole model compresses its keys.
    pub fn compresses(&self, index: usize) -> bool {
        self.compress_ratios.get(index).is_some_and(|r| *r > 0)
    }
}

/// Several residual streams, mixed by weights that each token computes (mHC).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct HyperConnections {
    pub num_residual_streams: usize,
    pub sinkhorn_iterations: usize,
}

/// Sizes of Mamba-2 layers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Mamba {
    pub num_heads: usize,
    pub head_dim: usize,
    pub state_dim: usize,
    /// Groups of heads that share B and C, and that the gated norm normalises by.
    pub num_groups: usize,
    /// Tokens of a chunk of the scan.
    pub chunk_size: usize,
}

/// Sizes of gated delta net layers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DeltaNet {
    pub key_heads: usize,
    /// A multiple of `key_heads`.
    pub value_heads: usize,
    /// Width of a q and of a k head.
    pub key_dim: usize,
    /// Width of a v head.
    pub value_dim: usize,
}

/// The expert part of the architecture, with the run's routing and capacity settings.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Moe {
    pub num_experts: usize,
    pub router_topk: usize,
    pub ffn_hidden_size: usize,
    /// Width of the shared expert, if there is one.
    pub shared_expert_intermediate_size: Option<usize>,
    /// The shared expert's output is weighed by a sigmoid gate.
    pub shared_expert_gate: bool,
    /// Width that tokens are projected to before the experts, if it is another than hidden.
    pub latent_size: Option<usize>,
    pub score_function: ScoreFunction,
    /// True: scores over all experts, then top-k. False: top-k, then scores over those.
    pub pre_softmax: bool,
    pub topk_scaling_factor: Option<f64>,
    /// Experts lie in this many groups, of which a token's experts come from `group_topk`; 1: no groups.
    pub num_groups: usize,
    pub group_topk: usize,
    pub expert_bias: bool,
    /// Layers, from the first on, whose experts are a fixed function of the token's id.
    #[serde(default)]
    pub hash_layers: usize,
    /// How far the expert bias moves a step.
    pub bias_update_rate: f64,
    pub aux_loss_coeff: f64,
    pub load_balancing_type: String,
    pub force_load_balancing: bool,
    pub routing: Routing,
    pub dispatcher: Dispatcher,
    pub flex_backend: Option<String>,
    /// Capacity factor, when tokens may be dropped.
    pub capacity_factor: Option<f64>,
    pub pad_to_capacity: bool,
    /// Over capacity the first tokens are kept, not those of highest probability.
    pub drop_by_position: bool,
    /// `moe_expert_rank_capacity_factor`.
    pub rank_capacity_factor: Option<f64>,
    pub shared_expert_overlap: bool,
    pub input_jitter_eps: Option<f64>,
    pub grouped_gemm: bool,
    /// `--moe_row_bound`: received rows that buffers are sized for, as a multiple of a balanced share.
    pub row_bound: f64,
    /// `--expert_gemm`.
    pub expert_gemm: ExpertGemm,
}

/// How dropless expert products learn their row counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
#[value(rename_all = "snake_case")]
pub enum ExpertGemm {
    /// One grouped kernel that reads offsets on the device.
    Grouped,
    /// One product per expert, sized by the counts that were copied to the host.
    PerExpert,
}

/// Sizes of the parallel groups, and the rank that is run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Parallel {
    pub tp: usize,
    pub pp: usize,
    pub cp: usize,
    pub ep: usize,
    pub etp: usize,
    /// Virtual pipeline stages, 1 when off.
    pub vp: usize,
    pub dp: usize,
    pub sequence_parallel: bool,
    /// `--pp_rank`.
    pub pp_rank: usize,
    /// `pipeline_model_parallel_layout`, as the recipe writes it.
    pub pipeline_layout: Option<String>,
    pub first_stage_layers: Option<usize>,
    pub last_stage_layers: Option<usize>,
    pub account_for_embedding: bool,
    pub account_for_loss: bool,
    /// Interleaved order: micro-batches that pass a virtual stage before the next one's turn; `None` is pp.
    #[serde(default)]
    pub microbatch_group_size: Option<usize>,
    pub use_distributed_optimizer: bool,
    /// How real data-parallel ranks reduce their gradients.
    #[serde(default, skip_serializing_if = "Ddp::is_default")]
    pub ddp: Ddp,
    /// The processes of this run, and which of them this is.
    #[serde(default, skip_serializing_if = "World::is_one")]
    pub world: World,
}

/// Messages of the data-parallel reduction between processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ddp {
    /// Buckets are reduced beside the rest of the last backward pass, not after it.
    pub overlap_grad_reduce: bool,
    /// Elements of a bucket; `None`: the recipes' common size.
    pub bucket_size: Option<usize>,
}

impl Default for Ddp {
    fn default() -> Self {
        Self { overlap_grad_reduce: true, bucket_size: None }
    }
}

impl Ddp {
    fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

/// Processes that run together, one a GPU: ranks 0.. of the modelled job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct World {
    pub size: usize,
    pub rank: usize,
}

impl Default for World {
    fn default() -> Self {
        Self { size: 1, rank: 0 }
    }
}

impl World {
    pub fn is_one(&self) -> bool {
        self.size == 1
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Batch {
    pub micro_batch_size: usize,
    pub global_batch_size: usize,
    pub seq_length: usize,
    /// Micro-batches a step of the whole job: global / (micro x dp).
    pub num_microbatches_recipe: usize,
    /// Micro-batches that are run: min(the job's, `--max_microbatches`).
    pub num_microbatches: usize,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Graph {
    pub implementation: GraphImpl,
    /// Sorted, without repeats. Empty with `transformer_engine`: each whole layer.
    pub scope: Vec<Scope>,
    pub warmup_steps: usize,
    /// Both tracker keys (`model.use_te_rng_tracker`, `rng.te_rng_tracker`).
    pub te_rng_tracker: bool,
    /// `--graph_staging`: copy a TE graph's inputs and incoming gradients into static buffers.
    pub staging: bool,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Recompute {
    /// `full`, `selective` or none.
    pub granularity: Option<String>,
    pub method: Option<String>,
    pub num_layers: Option<usize>,
    pub modules: Vec<String>,
    /// Layers of a block that `mhc` computes anew from its streams; `None`: all of a chunk.
    #[serde(default)]
    pub mhc_layers: Option<usize>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Optimizer {
    /// `adam`, or `none` (`--optimizer none`).
    pub kind: String,
    pub lr: f64,
    pub min_lr: f64,
    pub warmup_iters: usize,
    /// Steps over which the rate falls to `min_lr`.
    pub decay_iters: usize,
    pub clip_grad: f64,
    pub beta1: f64,
    pub beta2: f64,
    pub eps: f64,
    pub weight_decay: f64,
    /// `bf16` or `fp32`: dtype of the main gradients.
    pub grad_dtype: String,
}

/// Everything that decides what is run. Stored beside the results.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RunConfig {
    pub identity: Identity,
    pub model: Model,
    pub parallel: Parallel,
    pub batch: Batch,
    pub graph: Graph,
    pub recompute: Recompute,
    pub optimizer: Optimizer,
    /// `--stack_only`: the layer stack alone.
    pub stack_only: bool,
    /// `--overlap_wgrad`: weight gradients on a stream of their own.
    #[serde(default)]
    pub overlap_wgrad: bool,
    pub seed: u64,
    /// Recipe features that run in simpler form, named in the row.
    pub approximations: Vec<String>,
    /// Features of the recipe or model for which there is no code: the run is refused with these
    /// reasons, a dry run lists them as the notice `not_built`.
    pub not_built: Vec<String>,
}
