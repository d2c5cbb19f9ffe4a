//! The effective configuration as the rules see it: every setting under its dotted name, and what the user
//! asked for. Made by `overrides`, judged before any device is touched.

use crate::args::Args;
use crate::config::{GraphImpl, LayerKind, Scope};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

/// Settings by dotted name. A missing setting reads as null.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Values(pub BTreeMap<String, Value>);

impl Values {
    pub fn get(&self, key: &str) -> &Value {
        self.0.get(key).unwrap_or(&Value::Null)
    }
    pub fn int(&self, key: &str) -> Option<i64> {
        self.get(key).as_i64()
    }
    pub fn float(&self, key: &str) -> Option<f64> {
        self.get(key).as_f64()
    }
    /// Missing reads as false.
    pub fn on(&self, key: &str) -> bool {
        self.get(key).as_bool().unwrap_or(false)
    }
    pub fn text(&self, key: &str) -> Option<&str> {
        self.get(key).as_str()
    }
    /// Missing reads as an empty list.
    pub fn list(&self, key: &str) -> Vec<&str> {
        self.get(key).as_array().map(|a| a.iter().filter_map(Value::as_str).collect()).unwrap_or_default()
    }
    pub fn is_set(&self, key: &str) -> bool {
        !self.get(key).is_null()
    }
    pub fn set(&mut self, key: &str, value: impl Into<Value>) {
        self.0.insert(key.to_owned(), value.into());
    }
}

/// What the rules judge.
#[derive(Debug, Clone)]
pub struct Effective {
    pub values: Values,
    /// Settings that the user named by `key=value`.
    pub explicit: BTreeSet<String>,
    pub args: Args,
    /// `-m`, `-mr` and the GPU of the chosen recipe.
    pub family: String,
    pub recipe: String,
    pub gpu: String,
    /// Dtype of the chosen recipe: `-c` cannot name all, some are variants.
    pub dtype: String,
    pub num_gpus: i64,
    /// Kind of every layer of the whole model.
    pub layers: Vec<LayerKind>,
    pub implementation: GraphImpl,
    /// Sorted, without repeats.
    pub scope: Vec<Scope>,
    pub te_rng_tracker: bool,
    /// Steps of each arm, where the user limits them.
    pub max_steps: Option<i64>,
    /// Sequences are packed, by the recipe or by the user.
    pub packed: bool,
    pub pad_cu_seqlens: bool,
    /// `PYTORCH_CUDA_ALLOC_CONF` asks for expandable segments.
    pub expandable_segments: bool,
    /// `NCCL_GRAPH_REGISTER`.
    pub nccl_graph_register: Option<String>,
    /// The run is one of several processes, by `--nproc_per_node` or by a launcher.
    pub several_processes: bool,
    /// Settings that the user gave and that change nothing, each with the reason. Empty until all else is judged.
    pub idle: Vec<String>,
}

impl Effective {
    pub fn graphs(&self) -> bool {
        self.implementation != GraphImpl::None
    }
    /// The user typed this option, if only with its default value.
    pub fn given(&self, long: &str) -> bool {
        self.args.given.contains(long)
    }
    pub fn te(&self) -> bool {
        self.implementation == GraphImpl::TransformerEngine
    }
    pub fn has(&self, scope: Scope) -> bool {
        self.graphs() && self.scope.contains(&scope)
    }
    /// transformer_engine without a scope: each whole layer.
    pub fn whole_layer(&self) -> bool {
        self.te() && self.scope.is_empty()
    }
    pub fn full_iteration(&self) -> bool {
        self.implementation == GraphImpl::Local && self.scope.contains(&Scope::FullIteration)
    }
    /// This part lies in a graph: by its name, with the whole layer or with the whole iteration.
    pub fn captured(&self, scope: Scope) -> bool {
        self.has(scope) || self.whole_layer() || self.full_iteration()
    }
    pub fn count(&self, kinds: &[LayerKind]) -> usize {
        self.layers.iter().filter(|k| kinds.contains(k)).count()
    }
    /// Layers of the whole model that this scope touches.
    pub fn layers_of(&self, scope: Scope) -> usize {
        use LayerKind::{AttnOnly, DeltaDense, DeltaMoe, Dense, Mamba, MlpOnly, Moe, MoeOnly};
        match scope {
            Scope::FullIteration => self.layers.len(),
            Scope::Attn => self.count(&[Dense, Moe, AttnOnly, DeltaDense, DeltaMoe]),
            Scope::Mlp => self.count(&[Dense, MlpOnly, DeltaDense]),
            Scope::Moe | Scope::MoeRouter | Scope::MoePreprocess => self.count(&[Moe, MoeOnly, DeltaMoe]),
            Scope::Mamba => self.count(&[Mamba]),
        }
    }
    /// The activation multiplies two halves of a product.
    pub fn gated(&self) -> bool {
        !matches!(self.values.text("model.activation"), Some("squared_relu" | "gelu"))
    }
    /// Attention whose query heads have keys of their own: `model.num_query_groups` and `model.kv_channels` mean nothing.
    pub fn own_keys(&self) -> bool {
        let latent = self.values.on("model.multi_latent_attention") && !self.shared_kv();
        latent || self.values.is_set("model.diffusion")
    }
    /// DeepSeek-V4's attention.
    pub fn shared_kv(&self) -> bool {
        self.values.text("model.attention_variant") == Some(crate::recipe::SHARED_KV)
    }
    /// Some layers are gated delta nets.
    pub fn delta_net(&self) -> bool {
        self.count(&[LayerKind::DeltaDense, LayerKind::DeltaMoe]) > 0
    }
    pub fn experts(&self) -> i64 {
        self.values.int("model.num_moe_experts").unwrap_or(0)
    }
    pub fn moe(&self) -> bool {
        self.experts() > 1
    }
    pub fn dispatcher(&self) -> &str {
        self.values.text("model.moe_token_dispatcher_type").unwrap_or("alltoall")
    }
    /// A negative factor means none.
    pub fn capacity_factor(&self) -> Option<f64> {
        self.values.float("model.moe_expert_capacity_factor").filter(|f| *f >= 0.0)
    }
    /// Tokens above the capacity are dropped and every expert is padded to it: static shapes.
    pub fn drop_and_pad(&self) -> bool {
        self.capacity_factor().is_some() && self.values.on("model.moe_pad_expert_input_to_capacity")
    }
    /// Static rows per rank: flex with HybridEP and a rank capacity factor.
    pub fn static_rank_rows(&self) -> bool {
        self.dispatcher() == "flex"
            && self.values.text("model.moe_flex_dispatcher_backend") == Some("hybridep")
            && self.values.is_set("model.moe_expert_rank_capacity_factor")
    }
    pub fn shared_expert(&self) -> bool {
        self.values.int("model.moe_shared_expert_intermediate_size").is_some_and(|n| n > 0)
    }
    pub fn full_recompute(&self) -> bool {
        self.values.text("model.recompute_granularity") == Some("full")
    }
    /// Modules of a selective recompute; unset means core_attn.
    pub fn recomputed(&self) -> Vec<&str> {
        if self.values.text("model.recompute_granularity") != Some("selective") {
            return Vec::new();
        }
        if self.values.is_set("model.recompute_modules") {
            self.values.list("model.recompute_modules")
        } else {
            vec!["core_attn"]
        }
    }
    pub fn recomputes(&self, module: &str) -> bool {
        self.recomputed().contains(&module)
    }
    pub fn ep_overlap(&self) -> bool {
        self.values.on("comm_overlap.overlap_moe_expert_parallel_comm")
    }
    pub fn delay_wgrad(&self) -> bool {
        self.values.on("comm_overlap.delay_wgrad_compute")
    }
    pub fn nonzero(&self, key: &str) -> bool {
        self.values.float(key).is_some_and(|v| v != 0.0)
    }
    /// A size of the parallel layout; unset reads as 1.
    pub fn size(&self, key: &str) -> i64 {
        self.values.int(key).unwrap_or(1)
    }
    pub fn tp(&self) -> i64 {
        self.size("model.tensor_model_parallel_size")
    }
    pub fn pp(&self) -> i64 {
        self.size("model.pipeline_model_parallel_size")
    }
    pub fn cp(&self) -> i64 {
        self.size("model.context_parallel_size")
    }
    pub fn ep(&self) -> i64 {
        self.size("model.expert_model_parallel_size")
    }
    /// Unset: 1 beside expert parallelism or without experts, else tp.
    pub fn etp(&self) -> i64 {
        let unset = if self.ep() > 1 || !self.moe() { 1 } else { self.tp() };
        self.values.int("model.expert_tensor_parallel_size").unwrap_or(unset)
    }
    pub fn vp(&self) -> i64 {
        self.size("model.virtual_pipeline_model_parallel_size")
    }
    /// Data-parallel ranks, rounded down.
    pub fn dp(&self) -> i64 {
        let product = self.tp().saturating_mul(self.pp()).saturating_mul(self.cp()).max(1);
        self.num_gpus / product
    }
}
