//! What every option of a run means to `compare` and `--resume`: one row an option.

use crate::args::{Args, OptimizerChoice, Staging, defaults};
use crate::config::{ExpertGemm, Routing};
use crate::ops::collective::held::CommModel;

/// What two runs are to each other that differ in an option.
#[derive(Clone, Copy)]
pub enum Role {
    /// Other configurations: what the option asks for stands in these columns of [`super::keys::KEY`], whoever asked.
    Key(&'static [&'static str]),
    /// Unlike: it stands in this column of [`super::keys::ALIKE`].
    Alike(&'static str),
    /// Other configurations: it has no column, and goes into the text of [`super::keys::WORKLOAD`] as this gives it. `None`: left
    /// out, or given with what leaving it out means.
    Workload(fn(&Args) -> Option<String>),
    /// The same: it says where output goes, how long is measured, how is judged, or where is looked for files. No launch
    /// of a timed step is another one.
    Same,
}

use Role::{Alike, Key, Same, Workload};

/// The option that holds the `key=value` settings: each goes into the text under its own name.
pub const SETTINGS: &str = "overrides";
/// The setting that `--warmup_iters` stands for.
const WARMUP_KEY: &str = "scheduler.lr_warmup_iters";

fn text<T: std::fmt::Debug>(value: &Option<T>) -> Option<String> {
    value.as_ref().map(|v| format!("{v:?}"))
}

/// The name of a choice that is not the default.
fn other<T: clap::ValueEnum + PartialEq>(value: T, default: T) -> Option<String> {
    let name = |v: T| v.to_possible_value().map(|v| v.get_name().to_owned());
    if value == default { None } else { name(value) }
}

fn on(flag: bool) -> Option<String> {
    flag.then(|| "true".to_owned())
}

/// By the option's long name, in the order of `--help`. A test walks the command line's own list: an option that is
/// not here fails it.
#[rustfmt::skip]
pub const ROLES: &[(&str, Role)] = &[
    // General
    ("domain", Same),
    ("model_family_name", Key(&["model_family"])),
    ("model_recipe_name", Key(&["model_recipe"])),
    ("num_gpus", Key(&["num_gpus"])),
    ("hidden_size", Workload(|a| text(&a.general.hidden_size))),
    // The column counts the layers of a rank.
    ("num_layers", Workload(|a| text(&a.general.num_layers))),
    ("num_moe_experts", Workload(|a| text(&a.general.num_moe_experts))),
    ("pipeline_model_parallel_layout", Workload(|a| text(&a.general.pipeline_model_parallel_layout))),
    ("first_k_dense_replace", Workload(|a| text(&a.general.first_k_dense_replace))),
    ("dryrun", Same),
    // Training
    ("task", Key(&["task"])),
    ("max_steps", Same),
    ("distributed_timeout_minutes", Same),
    ("global_batch_size", Key(&["num_microbatches_recipe"])),
    ("micro_batch_size", Key(&["micro_batch_size"])),
    ("seq_length", Key(&["seq_length"])),
    // Optimizer
    ("lr", Workload(|a| text(&a.optimizer.lr))),
    ("min_lr", Workload(|a| text(&a.optimizer.min_lr))),
    ("warmup_iters", Workload(warmup_iters)),
    // Data
    ("data", Workload(|a| (a.data.data != "mock").then(|| a.data.data.clone()))),
    ("packed_sequence", Workload(|a| on(a.data.packed_sequence))),
    ("vocab_size", Workload(|a| text(&a.data.vocab_size))),
    // Parallelism
    ("tensor_model_parallel_size", Key(&["tp"])),
    ("pipeline_model_parallel_size", Key(&["pp"])),
    ("context_parallel_size", Key(&["cp"])),
    ("virtual_pipeline_model_parallel_size",
        Workload(|a| text(&a.parallelism.virtual_pipeline_model_parallel_size))),
    ("expert_model_parallel_size", Key(&["ep"])),
    ("expert_tensor_parallel_size", Workload(|a| text(&a.parallelism.expert_tensor_parallel_size))),
    // Performance
    ("gpu", Key(&["gpu_target"])),
    ("compute_dtype", Key(&["recipe_dtype"])),
    ("optimizer_type", Workload(|a| text(&a.performance.optimizer_type))),
    ("use_tokendrop", Workload(|a| text(&a.performance.use_tokendrop))),
    ("use_megatron_fsdp", Workload(|a| text(&a.performance.use_megatron_fsdp))),
    ("nccl_ub", Workload(|a| text(&a.performance.nccl_ub))),
    ("cuda_graph_impl", Key(&["cuda_graph_impl"])),
    ("cuda_graph_scope", Key(&["cuda_graph_scope"])),
    ("moe_a2a_overlap", Workload(|a| text(&a.performance.moe_a2a_overlap))),
    ("recompute_num_layers", Workload(|a| text(&a.performance.recompute_num_layers))),
    ("activation_offload_layers", Workload(|a| text(&a.performance.activation_offload_layers))),
    ("recompute_modules", Workload(|a| text(&a.performance.recompute_modules))),
    ("moe_flex_dispatcher_backend", Workload(|a| text(&a.performance.moe_flex_dispatcher_backend))),
    // Always so here.
    ("deterministic", Same),
    // Logging
    ("save_config_filepath", Same),
    ("dump_env", Same),
    // Variants
    ("config_variant", Key(&["variant"])),
    ("list_config_variants", Same),
    // mbperf
    ("device", Alike("device")),
    ("format", Same),
    ("output", Same),
    ("csv_dialect", Same),
    ("xlsx", Same),
    // Each scope is a run of its own, whose row names it.
    ("sweep", Same),
    // One step more, after timing.
    ("profile", Same),
    ("resume", Same),
    // A recipe there may have the name of a built-in one.
    ("recipes_dir", Workload(|a| a.mbperf.recipes_dir.as_ref().map(|p| p.display().to_string()))),
    ("stack_only", Key(&["stack_only"])),
    ("overlap_wgrad", Key(&["overlap_wgrad"])),
    ("max_microbatches", Key(&["num_microbatches"])),
    ("max_time", Same),
    ("margin", Same),
    ("moe_routing", Workload(|a| other(a.mbperf.moe_routing, Routing::Recipe))),
    ("moe_row_bound", Workload(|a| {
        (a.mbperf.moe_row_bound != defaults::MOE_ROW_BOUND).then(|| a.mbperf.moe_row_bound.to_string())
    })),
    ("expert_gemm", Workload(|a| other(a.mbperf.expert_gemm, ExpertGemm::Grouped))),
    // The column says which kernels were found in the end; a library's new version is no other workload.
    ("attention_backend", Workload(|a| other(a.mbperf.attention_backend, crate::args::AttentionKernels::Auto))),
    ("attention_deterministic", Workload(|a| {
        (!a.mbperf.attention_deterministic).then(|| "false".to_owned())
    })),
    ("graph_staging", Workload(|a| other(a.mbperf.graph_staging, Staging::Auto))),
    ("grad_dtype", Workload(|a| text(&a.mbperf.grad_dtype))),
    ("optimizer", Workload(|a| other(a.mbperf.optimizer, OptimizerChoice::Adam))),
    ("run_dtype", Key(&["compute_dtype"])),
    ("pp_rank", Key(&["pp_rank"])),
    ("nproc_per_node", Key(&["world_size"])),
    ("comm_model", Workload(|a| {
        (a.mbperf.comm_model != CommModel::Copy).then(|| a.mbperf.comm_model.to_string())
    })),
    ("rendezvous_timeout", Same),
    ("seed", Alike("seed")),
    ("aa", Key(&["arm", "aa"])),
    ("host_model", Key(&["host_model"])),
    ("extrapolate", Alike("microbatches_extrapolated")),
    ("repeat", Same),
    ("watchdog", Same),
    // Reading costs host time, and what is not read is in no column.
    ("no_samplers", Workload(|a| on(a.mbperf.no_samplers))),
    ("alternate_samplers", Workload(|a| on(a.mbperf.alternate_samplers))),
    ("spin_percent", Workload(|a| a.mbperf.spin_percent.filter(|x| *x != 0.0).map(|x| x.to_string()))),
    ("block_steps", Same),
    ("full_size", Workload(|a| on(a.mbperf.full_size))),
    ("strict", Same),
    // Routing is kept for it: more memory, and writes. The folder does not matter.
    ("dump", Workload(|a| on(a.mbperf.dump.is_some()))),
    ("equality_steps", Same),
    // The last one is in force.
    ("inject", Workload(|a| a.mbperf.inject.last().cloned())),
    // Other libraries may be found there: `gemm_plan_digest` and `attention_backend` tell, and are a warning.
    ("kernel_cache", Same),
    ("cuda_path", Same),
    ("quiet", Same),
    (SETTINGS, Workload(|_| None)),
];

/// Given, it wins over its setting, with its default too; else the setting stands for itself.
fn warmup_iters(args: &Args) -> Option<String> {
    let set =
        args.overrides.iter().any(|o| super::workload::setting(o).is_some_and(|(key, _)| key == WARMUP_KEY));
    let told =
        args.given.contains("warmup_iters") && (set || args.optimizer.warmup_iters != defaults::WARMUP_ITERS);
    told.then(|| args.optimizer.warmup_iters.to_string())
}

#[cfg(test)]
mod tests {
    use super::super::keys::{ALIKE, KEY, WORKLOAD};
    use super::super::workload::settings;
    use super::*;
    use clap::CommandFactory;

    const RUN: &str = "mbperf -m qwen -mr qwen3_30b_a3b -g h100";

    /// Every option that the command line knows, hidden ones too, has one row, and no row is of an option that is gone.
    #[test]
    fn every_option_has_a_role() {
        let command = Args::command();
        let options: Vec<&str> = command.get_arguments().map(|a| a.get_id().as_str()).collect();
        assert!(options.len() > 80 && options.contains(&SETTINGS), "{options:?}");
        for option in &options {
            let rows = ROLES.iter().filter(|(name, _)| name == option).count();
            assert_eq!(
                rows, 1,
                "--{option}: give it one row in ROLES, so that rows which differ in it do not pair"
            );
        }
        for (name, _) in ROLES {
            assert!(options.contains(name), "{name} is no option");
        }
    }

    #[test]
    fn the_columns_of_a_role_are_compared() {
        for (option, role) in ROLES {
            match role {
                Key(columns) => columns.iter().for_each(|column| {
                    assert!(
                        *column != WORKLOAD && KEY.iter().any(|f| f.name == *column),
                        "{option}: {column}"
                    );
                }),
                Alike(column) => assert!(ALIKE.iter().any(|f| f.name == *column), "{option}: {column}"),
                Workload(_) | Same => {}
            }
        }
    }

    /// A line for each option without a column, that asks for something else than the default.
    const OTHER: &[(&str, &str)] = &[
        ("hidden_size", "--hidden_size 512"),
        ("num_layers", "--num_layers 2"),
        ("num_moe_experts", "--num_moe_experts 16"),
        ("pipeline_model_parallel_layout", "--pipeline_model_parallel_layout Et*48L"),
        ("first_k_dense_replace", "--first_k_dense_replace 1"),
        ("lr", "--lr 0.1"),
        ("min_lr", "--min_lr 0.1"),
        ("warmup_iters", "--warmup_iters 11"),
        ("data", "--data squad"),
        ("packed_sequence", "--packed_sequence"),
        ("vocab_size", "--vocab_size 512"),
        ("virtual_pipeline_model_parallel_size", "-vp 2"),
        ("expert_tensor_parallel_size", "-et 2"),
        ("optimizer_type", "--optimizer_type muon"),
        ("use_tokendrop", "--use_tokendrop true"),
        ("use_megatron_fsdp", "--use_megatron_fsdp true"),
        ("nccl_ub", "--nccl_ub true"),
        ("moe_a2a_overlap", "--moe_a2a_overlap false"),
        ("recompute_num_layers", "--recompute_num_layers 1"),
        ("activation_offload_layers", "--activation_offload_layers 1"),
        ("recompute_modules", "--recompute_modules mlp"),
        ("moe_flex_dispatcher_backend", "--moe_flex_dispatcher_backend None"),
        ("recipes_dir", "--recipes_dir mine"),
        ("moe_routing", "--moe_routing skewed"),
        ("moe_row_bound", "--moe_row_bound 3"),
        ("expert_gemm", "--expert_gemm per_expert"),
        ("attention_backend", "--attention_backend own"),
        ("attention_deterministic", "--attention_deterministic false"),
        ("graph_staging", "--graph_staging none"),
        ("grad_dtype", "--grad_dtype bf16"),
        ("optimizer", "--optimizer none"),
        ("comm_model", "--comm_model nvlink"),
        ("no_samplers", "--no_samplers"),
        ("alternate_samplers", "--alternate_samplers"),
        ("spin_percent", "--spin_percent 2"),
        ("full_size", "--full_size"),
        ("dump", "--dump folder"),
        ("inject", "--inject steady:slow_step"),
        (SETTINGS, "model.ffn_hidden_size=64"),
    ];

    #[test]
    fn every_setting_without_a_column_is_another_workload() {
        let plain = settings(RUN).unwrap();
        let mut texts = vec![plain];
        for (option, _) in ROLES.iter().filter(|(_, role)| matches!(role, Workload(_))) {
            let (_, line) = OTHER
                .iter()
                .find(|(name, _)| name == option)
                .unwrap_or_else(|| panic!("a line for {option}"));
            let text = settings(&format!("{RUN} {line}")).unwrap_or_else(|| panic!("{line} is no command"));
            assert!(!texts.contains(&text), "{line}: {text:?}");
            texts.push(text);
        }
        assert_eq!(texts.len(), OTHER.len() + 1, "a line is of no setting");
    }

    #[test]
    fn a_default_is_the_same_given_or_left_out() {
        let plain = settings(RUN).unwrap();
        for same in [
            "--warmup_iters 10",
            "--data mock",
            "--moe_routing recipe",
            "--moe_row_bound 2",
            "--expert_gemm grouped",
            "--attention_backend auto",
            "--attention_deterministic true",
            "--graph_staging auto",
            "--optimizer adam",
            "--comm_model copy",
            "--spin_percent 0",
        ] {
            assert_eq!(settings(&format!("{RUN} {same}")).unwrap(), plain, "{same}");
        }
        // It wins over the setting then.
        let set = settings(&format!("{RUN} scheduler.lr_warmup_iters=5")).unwrap();
        let won = settings(&format!("{RUN} scheduler.lr_warmup_iters=5 --warmup_iters 10")).unwrap();
        assert_ne!(set, won);
        // Injected twice, the last one counts.
        let of = |line: &str| settings(&format!("{RUN} {line}")).unwrap();
        assert_eq!(of("--inject steady:hang --inject steady:slow_step"), of("--inject steady:slow_step"));
    }
}
