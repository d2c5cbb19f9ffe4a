//! Every option of the main command, grouped as the harness groups them. Field docs are the manual:
//! `--help` prints them. An option without a default keeps the recipe's value.

use super::values::{
    FlexBackend, NameList, OrNone, ScopeList, parse_bool, parse_finite, parse_name, parse_seed,
};
use crate::config::{ExpertGemm, GraphImpl, Routing};
use crate::ops::collective::held::CommModel;
use crate::report::Dialect;
use clap::ValueEnum;
use clap::builder::NonEmptyStringValueParser;
use std::collections::BTreeSet;
use std::path::PathBuf;

/// The defaults that are mbperf's own, in one place.
pub mod defaults {
    /// More steps than any block has: a pair of them is not ended by `--max_time`.
    pub const MOST_BLOCK_STEPS: i64 = 10_000;
    /// Two show accumulation into the same gradients; more only repeat it.
    pub const MAX_MICROBATCHES: i64 = 2;
    // What measuring costs and how it judges is said where it measures.
    pub use crate::measure::options::{
        DEFAULT_MARGIN as MARGIN, DEFAULT_MAX_TIME_CPU_S as MAX_TIME_CPU_S,
        DEFAULT_MAX_TIME_S as MAX_TIME_CUDA_S, LONGEST_MAX_TIME_S,
    };
    /// Received rows that buffers hold, as a multiple of a balanced share.
    pub const MOE_ROW_BOUND: f64 = 2.0;
    /// Seed of weights, tokens, routing and dropout; the harness's.
    pub const SEED: u64 = 1234;
    /// Longest device call, in seconds, before a run counts as hung: kernels of a first run compile for a minute, a
    /// full-size step on a CPU takes minutes.
    pub const WATCHDOG_S: f64 = 600.0;
    /// Longest wait of ranks for each other's start, in seconds: containers of a large job start within a minute.
    pub const RENDEZVOUS_TIMEOUT_S: f64 = 120.0;
    /// Warm-up iterations of the learning rate; the harness's.
    pub const WARMUP_ITERS: i64 = 10;
}

/// The main command: one model recipe, eager against graph.
#[derive(Debug, Clone, clap::Parser)]
#[command(
    name = "mbperf",
    version,
    about = "Is a CUDA graph faster than eager for this model recipe, by how much, and is the answer to be trusted?",
    args_override_self = true,
    disable_help_subcommand = true
)]
pub struct Args {
    #[command(flatten)]
    pub general: General,
    #[command(flatten)]
    pub training: Training,
    #[command(flatten)]
    pub optimizer: OptimizerArgs,
    #[command(flatten)]
    pub data: Data,
    #[command(flatten)]
    pub parallelism: Parallelism,
    #[command(flatten)]
    pub performance: Performance,
    #[command(flatten)]
    pub logging: Logging,
    #[command(flatten)]
    pub variant: Variant,
    #[command(flatten)]
    pub mbperf: Mbperf,
    /// Settings of the recipe to replace, e.g. `model.moe_token_dispatcher_type=alltoall`. They may stand
    /// anywhere; flags win over them
    #[arg(value_name = "KEY=VALUE")]
    pub overrides: Vec<String>,
    /// The command line as typed, without the program's name. Stored in the row.
    #[arg(skip)]
    pub argv: Vec<String>,
    /// `--cuda_graph_scope` was given more than once; the last one is in force.
    #[arg(skip)]
    pub scope_repeated: bool,
    /// Long names of the options that were typed, whatever their value.
    #[arg(skip)]
    pub given: BTreeSet<String>,
}

#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "General", rename_all = "snake_case")]
pub struct General {
    /// Domain; must agree with the recipe
    #[arg(long, value_name = "NAME", ignore_case = true, value_parser = ["llm", "vlm", "qwen3vl", "diffusion"])]
    pub domain: Option<String>,
    /// Model family, e.g. qwen
    #[arg(short = 'm', long, value_name = "NAME", value_parser = parse_name)]
    pub model_family_name: String,
    /// Model recipe, e.g. qwen3_30b_a3b (`mbperf recipes list` prints all)
    #[arg(long, visible_alias = "mr", value_name = "NAME", value_parser = parse_name)]
    pub model_recipe_name: String,
    /// GPUs of the modelled job; the global batch scales with it unless -gb is given
    #[arg(long, visible_alias = "ng", value_name = "N", allow_negative_numbers = true)]
    pub num_gpus: Option<i64>,
    /// Width of the model
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub hidden_size: Option<i64>,
    /// Layers of the whole model
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub num_layers: Option<i64>,
    /// Experts of each MoE layer
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub num_moe_experts: Option<i64>,
    /// Layers by stage: E embedding, t layer, m MTP, L loss, | between stages
    #[arg(long, value_name = "LAYOUT")]
    pub pipeline_model_parallel_layout: Option<String>,
    /// Dense layers ahead of the MoE layers
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub first_k_dense_replace: Option<i64>,
    /// Validate and explain; needs no GPU and runs nothing
    #[arg(short = 'd', long)]
    pub dryrun: bool,
}

#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Training arguments", rename_all = "snake_case")]
pub struct Training {
    /// Training task
    #[arg(long, value_name = "TASK", default_value = "pretrain", value_parser = ["pretrain", "sft", "peft"])]
    pub task: String,
    /// Steps of each arm, warm-up and capture counted. Left out: until the interval is narrow or --max_time is over
    #[arg(long, visible_alias = "ms", value_name = "N", allow_negative_numbers = true)]
    pub max_steps: Option<i64>,
    /// Of several processes: how long ranks wait for each other to start, and the watchdog's limit
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub distributed_timeout_minutes: Option<i64>,
    /// Sequences a step of the whole job
    #[arg(long, visible_alias = "gb", value_name = "N", allow_negative_numbers = true)]
    pub global_batch_size: Option<i64>,
    /// Sequences a micro-batch
    #[arg(long, visible_alias = "mb", value_name = "N", allow_negative_numbers = true)]
    pub micro_batch_size: Option<i64>,
    /// Tokens a sequence
    #[arg(long, visible_alias = "sl", value_name = "N", allow_negative_numbers = true)]
    pub seq_length: Option<i64>,
}

#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Optimizer arguments", rename_all = "snake_case")]
pub struct OptimizerArgs {
    /// Learning rate at its highest
    #[arg(long, value_name = "X", allow_negative_numbers = true, value_parser = parse_finite)]
    pub lr: Option<f64>,
    /// Learning rate at the end
    #[arg(long, value_name = "X", allow_negative_numbers = true, value_parser = parse_finite)]
    pub min_lr: Option<f64>,
    /// Steps over which the learning rate rises
    #[arg(long, value_name = "N", allow_negative_numbers = true, default_value_t = defaults::WARMUP_ITERS)]
    pub warmup_iters: i64,
}

#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Data and tokenizer arguments", rename_all = "snake_case")]
pub struct Data {
    /// Data set; only mock can be run
    #[arg(long, value_name = "NAME", default_value = "mock", value_parser = ["mock", "rp2", "squad", "squad_packed", "c4"])]
    pub data: String,
    /// Packed sequences; judged by the rules, cannot be run
    #[arg(long)]
    pub packed_sequence: bool,
    /// Vocabulary size
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub vocab_size: Option<i64>,
}

#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Parallelism arguments", rename_all = "snake_case")]
pub struct Parallelism {
    #[arg(
        long,
        visible_alias = "tp",
        value_name = "N",
        allow_negative_numbers = true,
        help = "Tensor parallel ranks"
    )]
    pub tensor_model_parallel_size: Option<i64>,
    /// Pipeline stages
    #[arg(long, visible_alias = "pp", value_name = "N", allow_negative_numbers = true)]
    pub pipeline_model_parallel_size: Option<i64>,
    /// Context parallel ranks
    #[arg(long, visible_alias = "cp", value_name = "N", allow_negative_numbers = true)]
    pub context_parallel_size: Option<i64>,
    /// Virtual pipeline stages; `None` switches them off
    #[arg(long, visible_alias = "vp", value_name = "N", allow_negative_numbers = true)]
    pub virtual_pipeline_model_parallel_size: Option<OrNone<i64>>,
    /// Expert parallel ranks
    #[arg(long, visible_alias = "ep", value_name = "N", allow_negative_numbers = true)]
    pub expert_model_parallel_size: Option<i64>,
    /// Tensor parallel ranks of the experts; `None` or no value switches it off
    #[arg(long, visible_alias = "et", value_name = "N", allow_negative_numbers = true, num_args = 0..=1,
          default_missing_value = "None")]
    pub expert_tensor_parallel_size: Option<OrNone<i64>>,
}

#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Performance arguments", rename_all = "snake_case")]
pub struct Performance {
    /// GPU that the recipe was written for
    #[arg(short = 'g', long, value_name = "GPU", value_parser = ["h100", "b200", "b300", "gb200", "gb300", "vr200", "r100"])]
    pub gpu: String,
    /// Precision of the recipe
    #[arg(short = 'c', long, value_name = "DTYPE", default_value = "bf16",
          value_parser = ["bf16", "fp8_cs", "fp8_mx", "fp8_sc", "nvfp4"])]
    pub compute_dtype: String,
    /// Optimizer of the recipe; muon is not built yet
    #[arg(long, value_name = "NAME", value_parser = ["adam", "muon"])]
    pub optimizer_type: Option<String>,
    /// Drop tokens above the expert capacity and pad to it (MoE)
    #[arg(long, value_name = "BOOL", value_parser = parse_bool)]
    pub use_tokendrop: Option<bool>,
    /// Megatron FSDP; true is not built yet
    #[arg(long, value_name = "BOOL", value_parser = parse_bool)]
    pub use_megatron_fsdp: Option<bool>,
    /// NCCL user buffers; true is not built yet
    #[arg(long, value_name = "BOOL", value_parser = parse_bool)]
    pub nccl_ub: Option<bool>,
    /// How graphs are made: none, local (the full iteration) or transformer_engine (by layer)
    #[arg(long, value_name = "IMPL")]
    pub cuda_graph_impl: Option<GraphImpl>,
    /// What is captured, joined by commas: full_iteration (local), attn, mlp, moe, moe_router, moe_preprocess,
    /// mamba (transformer_engine)
    #[arg(long, value_name = "NAMES")]
    pub cuda_graph_scope: Option<ScopeList>,
    /// Overlap of the expert all-to-all with computation
    #[arg(long, value_name = "BOOL", value_parser = parse_bool)]
    pub moe_a2a_overlap: Option<bool>,
    /// Full recompute of so many layers
    #[arg(long, visible_alias = "rl", value_name = "N", allow_negative_numbers = true)]
    pub recompute_num_layers: Option<i64>,
    /// Activations of so many layers go to the CPU
    #[arg(long, visible_alias = "ol", value_name = "N", allow_negative_numbers = true)]
    pub activation_offload_layers: Option<i64>,
    /// Selective recompute of these modules, joined by commas; replaces the recipe's recompute
    #[arg(long, value_name = "NAMES")]
    pub recompute_modules: Option<NameList>,
    /// Backend of the flex dispatcher: deepep or hybridep; `None` means the alltoall dispatcher
    #[arg(long, value_name = "NAME")]
    pub moe_flex_dispatcher_backend: Option<OrNone<FlexBackend>>,
    /// Same bits in every run; always so here
    #[arg(long)]
    pub deterministic: bool,
}

#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Logging arguments", rename_all = "snake_case")]
pub struct Logging {
    /// Write the effective configuration to this file as JSON
    #[arg(long, value_name = "FILE")]
    pub save_config_filepath: Option<PathBuf>,
    /// Store the environment; the run file holds it anyway
    #[arg(long)]
    pub dump_env: bool,
}

#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Config variant arguments", rename_all = "snake_case")]
pub struct Variant {
    /// Variant of the recipe
    #[arg(long, visible_alias = "cv", value_name = "NAME", value_parser = NonEmptyStringValueParser::new())]
    pub config_variant: Option<String>,
    /// Print the recipe's variants and stop
    #[arg(long)]
    pub list_config_variants: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum DeviceChoice {
    /// CUDA where there is a driver and a GPU, the CPU otherwise.
    Auto,
    Cpu,
    Cuda,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Format {
    Text,
    Json,
    Csv,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Staging {
    Auto,
    None,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum GradDtype {
    Bf16,
    Fp32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum OptimizerChoice {
    Adam,
    None,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum RunDtype {
    Bf16,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum AttentionKernels {
    Auto,
    Cudnn,
    Own,
}

/// `--aa`: an arm against itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Arm {
    Eager,
    Graph,
}

#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "mbperf", rename_all = "snake_case")]
pub struct Mbperf {
    /// Where to run: cuda, cpu, or auto (cuda, and cpu where there is no driver or no GPU)
    #[arg(long, value_name = "NAME", default_value = "auto")]
    pub device: DeviceChoice,
    /// Form of the result: text is a table on standard error, json an object a run on standard output, after those of a sweep one with its recommendation
    #[arg(long, value_name = "FORM", default_value = "text")]
    pub format: Format,
    /// CSV file that rows are appended to, `-` for standard output. Left out: results/RECIPE_GPU_DTYPE.csv
    #[arg(short = 'o', long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// Dialect of the CSV files; a file in the other one is refused
    #[arg(long, value_name = "NAME", default_value = "rfc4180")]
    pub csv_dialect: Dialect,
    /// Also write the rows and steps of this command as a workbook, replacing one that is there
    #[arg(long, value_name = "FILE")]
    pub xlsx: Option<PathBuf>,
    /// Run every legal scope worth trying, narrowest first, and recommend one
    #[arg(long)]
    pub sweep: bool,
    /// Also record one step of each arm: device time by part and kernel, as a table, `<name>.profile.csv` and
    /// `<name>.trace.json` (for Perfetto)
    #[arg(long)]
    pub profile: bool,
    /// No profiler in this run: others follow it in the process.
    #[arg(skip)]
    pub no_profile: bool,
    /// Arms that do not fit in memory together are timed one after the other: of a sweep.
    #[arg(skip)]
    pub in_turn: bool,
    /// Do not run again what is in the output file already: the same configuration, every row ok. One process at a time
    /// resumes a file
    #[arg(long)]
    pub resume: bool,
    /// Folder of your own recipes, looked at before the built-in ones
    #[arg(long, value_name = "DIR")]
    pub recipes_dir: Option<PathBuf>,
    /// The layer stack alone: no embedding, head, optimizer or collectives; one micro-batch
    #[arg(long)]
    pub stack_only: bool,
    /// Weight gradients on a stream of their own, beside the rest of the backward (both arms; frameworks use one stream)
    #[arg(long)]
    pub overlap_wgrad: bool,
    /// Micro-batches that are run, at most; 0 = all of the job's
    #[arg(long, value_name = "N", allow_negative_numbers = true, default_value_t = defaults::MAX_MICROBATCHES)]
    pub max_microbatches: i64,
    #[arg(long, value_name = "SECONDS", allow_negative_numbers = true, value_parser = parse_finite, help = format!(
        "Time for measuring [default: {}, up to {} where steps are long; cpu {}]",
        defaults::MAX_TIME_CUDA_S, defaults::LONGEST_MAX_TIME_S, defaults::MAX_TIME_CPU_S))]
    pub max_time: Option<f64>,
    /// Relative difference below which the arms count as equivalent
    #[arg(long, value_name = "X", allow_negative_numbers = true, value_parser = parse_finite,
          default_value_t = defaults::MARGIN)]
    pub margin: f64,
    /// Where each token's experts come from: the recipe's way, balanced or skewed
    #[arg(long, value_name = "NAME", default_value = "recipe")]
    pub moe_routing: Routing,
    /// Received rows that buffers hold, as a multiple of a balanced share (dropless MoE)
    #[arg(long, value_name = "X", allow_negative_numbers = true, value_parser = parse_finite,
          default_value_t = defaults::MOE_ROW_BOUND)]
    pub moe_row_bound: f64,
    /// Expert products: grouped (one kernel, counts read on the device) or per_expert (sized by host counts)
    #[arg(long, value_name = "NAME", default_value = "grouped")]
    pub expert_gemm: ExpertGemm,
    /// Attention kernels: auto (cuDNN where it is there and takes the shape, but own where faster), cudnn or own
    #[arg(long, value_name = "NAME", default_value = "auto")]
    pub attention_backend: AttentionKernels,
    /// false: cuDNN's attention may sum gradients in any order; faster, and the arms may differ in bits
    #[arg(long, value_name = "BOOL", default_value_t = true, action = clap::ArgAction::Set, hide = true)]
    pub attention_deterministic: bool,
    /// Copies into static buffers at the boundary of transformer_engine graphs: auto (as upstream) or none
    #[arg(long, value_name = "NAME", default_value = "auto")]
    pub graph_staging: Staging,
    /// Precision of the main gradients
    #[arg(long, value_name = "DTYPE")]
    pub grad_dtype: Option<GradDtype>,
    /// adam (as the recipe), or none to leave the optimizer out of the step
    #[arg(long, value_name = "NAME", default_value = "adam")]
    pub optimizer: OptimizerChoice,
    /// Run the recipe's layout in this precision
    #[arg(long, value_name = "DTYPE")]
    pub run_dtype: Option<RunDtype>,
    /// Pipeline stage whose share is run
    #[arg(long, value_name = "N", allow_negative_numbers = true, default_value_t = 0)]
    pub pp_rank: i64,
    /// Processes that mbperf starts on this machine, one a GPU: ranks 0.. of the job. Left out: one, or what torchrun, srun
    /// or mpirun has started
    #[arg(long, value_name = "N", allow_negative_numbers = true,
          value_parser = clap::value_parser!(u32).range(1..=i64::from(crate::ranks::launch::MOST_LOCAL)))]
    pub nproc_per_node: Option<u32>,
    /// Time of stood-in collectives: copy (device copies alone), nvlink, nvlink:GBPS or ib:GBPS (held for their bytes at that
    /// bandwidth, 10^9 bytes a second, on 16 multiprocessors)
    #[arg(long, value_name = "MODEL", default_value = "copy")]
    pub comm_model: CommModel,
    #[arg(long, value_name = "SECONDS", allow_negative_numbers = true, value_parser = parse_finite, help = format!(
        "How long ranks wait for each other to start [default: {}]", defaults::RENDEZVOUS_TIMEOUT_S))]
    pub rendezvous_timeout: Option<f64>,
    /// Seed of weights, tokens, routing and dropout
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = parse_seed,
          default_value_t = defaults::SEED)]
    pub seed: u64,
    /// Time an arm against itself
    #[arg(long, value_name = "ARM")]
    pub aa: Option<Arm>,
    /// Host time of a framework, for blocks of their own after the bare ones: bare (none), pytorch, or a file
    #[arg(long, value_name = "NAME|FILE", default_value = "bare", value_parser = NonEmptyStringValueParser::new())]
    pub host_model: String,
    /// Time 1, 2 and 3 micro-batches and extrapolate to the recipe's own number
    #[arg(long)]
    pub extrapolate: bool,
    /// Measure so many times in one process; each has its own rows and run_id
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    pub repeat: u32,
    /// End the run (exit 1, rows status=failed, the phase named) when a device call takes longer; 0 = never
    #[arg(long, value_name = "SECONDS", allow_negative_numbers = true, value_parser = parse_finite,
          default_value_t = defaults::WATCHDOG_S)]
    pub watchdog: f64,
    /// Read no clocks, no power, no neighbours, no profiler: to see what reading costs
    #[arg(long, hide = true)]
    pub no_samplers: bool,
    /// Read the card at the end of every second pair of blocks alone: to see what reading costs, side by side
    #[arg(long, hide = true, conflicts_with = "no_samplers")]
    pub alternate_samplers: bool,
    /// Make the graph arm's steps (side b with --aa) so much longer by a kernel that spins: to see that it is found
    #[arg(long, value_name = "PERCENT", hide = true, value_parser = parse_finite)]
    pub spin_percent: Option<f64>,
    /// Timed steps of a block: to see that their number does not matter
    #[arg(long, value_name = "N", hide = true, value_parser = clap::value_parser!(u32).range(1..=defaults::MOST_BLOCK_STEPS))]
    pub block_steps: Option<u32>,
    /// Do not shrink the recipe on the CPU
    #[arg(long)]
    pub full_size: bool,
    /// A run that is not fully trustworthy (undecided, unsteady or too short to tell, disturbed, fallen back to the CPU) exits 1
    #[arg(long)]
    pub strict: bool,
    /// Write weights, tokens, loss and gradients here as safetensors
    #[arg(long, value_name = "DIR")]
    pub dump: Option<PathBuf>,
    /// Steps of each arm that are compared bit for bit before timing [default: the warm-up and 4 replays, 2 where
    /// steps are long]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub equality_steps: Option<i64>,
    /// Provoke a fault, at the Nth time that a phase does something: to try what a CI job makes of it (docs/ci.md). An
    /// unknown name lists the phases and kinds
    #[arg(long, value_name = "PHASE:KIND[:N]", hide = true)]
    pub inject: Vec<String>,
    /// Folder of compiled kernels
    #[arg(long, value_name = "DIR")]
    pub kernel_cache: Option<PathBuf>,
    /// Folder to look for the CUDA libraries in first
    #[arg(long, value_name = "DIR")]
    pub cuda_path: Option<PathBuf>,
    /// No progress and no summary
    #[arg(short = 'q', long)]
    pub quiet: bool,
}
