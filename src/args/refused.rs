//! Options of the harness that mbperf knows and refuses, each with the reason: a command moved over
//! from the harness fails with one clear line instead of "unknown option".

/// Options that are refused for the same reason.
pub struct Refused {
    /// The harness's group, as in `--help`.
    pub group: &'static str,
    pub reason: &'static str,
    /// Short form (empty: none) and long form.
    pub options: &'static [(&'static str, &'static str)],
}

/// All of them, in the harness's order.
pub const REFUSED: &[Refused] = &[
    Refused {
        group: "General",
        reason: "library recipes are not performance recipes",
        options: &[("", "--use_recipes")],
    },
    Refused {
        group: "General",
        reason: "no meaning for a local run: mbperf runs here and now",
        options: &[("-nh", "--nemo_home"), ("", "--detach"), ("", "--max_retries")],
    },
    Refused {
        group: "Checkpointing arguments",
        reason: "weights are synthetic; there is nothing to load or save",
        options: &[
            ("", "--pretrained_checkpoint"),
            ("", "--save_dir"),
            ("", "--load_dir"),
            ("", "--save_interval"),
            ("", "--most_recent_k"),
        ],
    },
    Refused {
        group: "Data arguments",
        reason: "tokens are synthetic; there is no data set and no tokenizer",
        options: &[
            ("", "--c4_root"),
            ("", "--c4_train_shards"),
            ("", "--dataset_paths"),
            ("", "--dataset_root"),
            ("", "--index_mapping_dir"),
            ("", "--dataset_name"),
            ("", "--head_only"),
            ("", "--diffusion_dataset_path"),
        ],
    },
    Refused {
        group: "Tokenizer arguments",
        reason: "tokens are synthetic; there is no data set and no tokenizer",
        options: &[
            ("", "--tokenizer_type"),
            ("", "--tokenizer_model"),
            ("-hf", "--hf_token"),
            ("", "--offline"),
        ],
    },
    Refused {
        group: "Slurm arguments",
        reason: "mbperf is started by srun, it does not submit jobs",
        options: &[
            ("-a", "--account"),
            ("-p", "--partition"),
            ("-t", "--time_limit"),
            ("", "--preempt_time"),
            ("-gn", "--gpus_per_node"),
            ("-i", "--container_image"),
            ("-cm", "--custom_mounts"),
            ("-ce", "--custom_env_vars"),
            ("-E", "--env"),
            ("-cs", "--custom_srun_args"),
            ("-cb", "--custom_bash_cmds"),
            ("", "--gres"),
            ("", "--additional_slurm_params"),
            ("", "--packager"),
            ("", "--enable_pct_binding"),
        ],
    },
    Refused {
        group: "Kubeflow arguments",
        reason: "mbperf runs inside a pod, it does not submit jobs",
        options: &[
            ("", "--kubeflow_namespace"),
            ("", "--csp"),
            ("", "--kubeflow_workdir_pvc"),
            ("", "--kubeflow_workdir_pvc_path"),
            ("", "--kubeflow_workdir_local_path"),
            ("", "--kubeflow_image_pull_secrets"),
            ("", "--kubeflow_volumes_json"),
            ("", "--kubeflow_volume_mounts_json"),
            ("", "--kubeflow_tolerations_json"),
            ("", "--kubeflow_affinity_json"),
            ("", "--kubeflow_env_list_json"),
            ("", "--kubeflow_extra_resource_requests_json"),
            ("", "--kubeflow_extra_resource_limits_json"),
            ("", "--kubeflow_pod_spec_overrides_json"),
            ("", "--kubeflow_pod_annotations_json"),
            ("", "--kubeflow_container_kwargs_json"),
            ("", "--kubeflow_labels_json"),
        ],
    },
    Refused {
        group: "Performance arguments",
        reason: "mbperf never changes clocks and drives no other profiler",
        options: &[
            ("-vb", "--enable_vboost"),
            ("-lgc", "--lock_gpu_freq"),
            ("-lmc", "--peak_mem_clk"),
            ("", "--export_nsys_sqlite"),
            ("-pyp", "--pytorch_profiler"),
            ("-mh", "--record_memory_history"),
            ("", "--profiling_gpu_metrics"),
            ("", "--nsys_trace"),
            ("", "--nsys_extra_args"),
        ],
    },
    Refused {
        group: "Performance arguments",
        reason: "start nsys yourself around mbperf: its ranges (step, layer, part) show there (docs/profile.md)",
        options: &[("-en", "--enable_nsys")],
    },
    Refused {
        group: "Performance arguments",
        reason: "a window of steps is not built yet: --profile records one step of each arm, after timing",
        options: &[("", "--profiling_start_step"), ("", "--profiling_stop_step"), ("", "--profiling_ranks")],
    },
    Refused {
        group: "Logging arguments",
        reason: "results are CSV and JSON files",
        options: &[
            ("-wdk", "--wandb_key"),
            ("-wdp", "--wandb_project_name"),
            ("-wde", "--wandb_entity_name"),
            ("-wdj", "--wandb_experiment_name"),
            ("-wds", "--wandb_save_dir"),
            ("-l", "--log_dir"),
        ],
    },
    Refused {
        group: "Testing arguments",
        reason: "losses are compared between the two arms, not with golden curves",
        options: &[
            ("", "--is_long_convergence_run"),
            ("", "--retry_on_testing_failure"),
            ("", "--correlation_threshold"),
            ("", "--high_loss_tolerance"),
            ("", "--medium_loss_tolerance"),
            ("", "--low_loss_tolerance"),
            ("", "--final_loss_tolerance"),
            ("", "--max_outlier_ratio"),
            ("", "--outlier_threshold"),
            ("", "--skip_first_percent_loss"),
        ],
    },
    Refused {
        group: "Testing arguments",
        reason: "`mbperf compare BASE.csv --new NEW.csv` compares with a baseline",
        options: &[("", "--golden_values_path")],
    },
    Refused {
        group: "Testing arguments",
        reason: "it is a threshold of `mbperf compare`: give it there",
        options: &[("", "--timing_threshold"), ("", "--memory_threshold")],
    },
    Refused {
        group: "Testing arguments",
        reason: "statistics take steady steps only, so there is no share of steps to skip",
        options: &[("", "--skip_first_percent_time")],
    },
    Refused {
        group: "Testing arguments",
        reason: "statistics take steady steps only, so there is no window to choose",
        options: &[("", "--eval_time_start_step"), ("", "--eval_time_end_step")],
    },
];

/// The reason why `name` (`--long` or `-short`) is refused, if it is.
pub fn reason(name: &str) -> Option<&'static str> {
    REFUSED.iter().find(|r| r.options.iter().any(|(s, l)| name == *l || name == *s)).map(|r| r.reason)
}
