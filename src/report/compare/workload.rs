//! Settings of a command line that change the work of a step and have no column of their own: read back from
//! the column `command`, so that a `--hidden_size` on one side is no regression of the other.

use crate::args::{self, Args, Command, OptimizerChoice, Staging, defaults};
use crate::config::{ExpertGemm, Routing};
use crate::ops::collective::held::CommModel;
use std::collections::BTreeMap;

/// The settings in one canonical text; empty when there are none. `None`: no command line of a run.
pub fn settings(command: &str) -> Option<String> {
    let words = words(command)?;
    if words.first()? != "mbperf" {
        return None;
    }
    match args::parse(words).ok()? {
        Command::Run(args) => Some(of(&args)),
        _ => None,
    }
}

/// Keys whose values are in columns of their own.
const IN_COLUMNS: [&str; 3] = ["model.cuda_graph_impl", "model.cuda_graph_scope", "rng.seed"];

fn of(args: &Args) -> String {
    let (general, parallel, performance, own) =
        (&args.general, &args.parallelism, &args.performance, &args.mbperf);
    let mut settings = BTreeMap::new();
    let mut add = |name: &str, value: Option<String>| {
        if let Some(value) = value {
            settings.insert(name.to_owned(), value);
        }
    };
    fn text<T: std::fmt::Debug>(value: &Option<T>) -> Option<String> {
        value.as_ref().map(|v| format!("{v:?}"))
    }
    add("--hidden_size", text(&general.hidden_size));
    add("--num_moe_experts", text(&general.num_moe_experts));
    add("--first_k_dense_replace", text(&general.first_k_dense_replace));
    add("--pipeline_model_parallel_layout", text(&general.pipeline_model_parallel_layout));
    add("--vocab_size", text(&args.data.vocab_size));
    add("--virtual_pipeline_model_parallel_size", text(&parallel.virtual_pipeline_model_parallel_size));
    add("--expert_tensor_parallel_size", text(&parallel.expert_tensor_parallel_size));
    add("--optimizer_type", text(&performance.optimizer_type));
    add("--use_tokendrop", text(&performance.use_tokendrop));
    add("--moe_a2a_overlap", text(&performance.moe_a2a_overlap));
    add("--recompute_num_layers", text(&performance.recompute_num_layers));
    add("--recompute_modules", text(&performance.recompute_modules));
    add("--activation_offload_layers", text(&performance.activation_offload_layers));
    add("--moe_flex_dispatcher_backend", text(&performance.moe_flex_dispatcher_backend));
    add("--grad_dtype", text(&own.grad_dtype));
    // Given or left out, a default is the same.
    add("--moe_routing", (own.moe_routing != Routing::Recipe).then(|| format!("{:?}", own.moe_routing)));
    add(
        "--moe_row_bound",
        (own.moe_row_bound != defaults::MOE_ROW_BOUND).then(|| own.moe_row_bound.to_string()),
    );
    add("--expert_gemm", (own.expert_gemm != ExpertGemm::Grouped).then(|| format!("{:?}", own.expert_gemm)));
    add("--graph_staging", (own.graph_staging != Staging::Auto).then(|| format!("{:?}", own.graph_staging)));
    add("--optimizer", (own.optimizer != OptimizerChoice::Adam).then(|| format!("{:?}", own.optimizer)));
    add("--comm_model", (own.comm_model != CommModel::Copy).then(|| own.comm_model.to_string()));
    add("--full_size", own.full_size.then(|| "true".into()));
    // The last of a repeated key is in force.
    let given = args.overrides.iter().filter_map(|o| o.split_once('='));
    for (key, value) in given.filter(|(key, _)| !IN_COLUMNS.contains(key)) {
        add(key, Some(value.into()));
    }
    settings.iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>().join(" ")
}

/// Words of a line as `run` quoted them: blanks apart, single quotes around, `'\''` for a quote.
fn words(line: &str) -> Option<Vec<String>> {
    let (mut words, mut word, mut quoted) = (Vec::new(), None::<String>, false);
    let mut chars = line.chars();
    while let Some(c) = chars.next() {
        match c {
            '\'' => {
                quoted = !quoted;
                word.get_or_insert_default();
            }
            _ if quoted => word.get_or_insert_default().push(c),
            '\\' => word.get_or_insert_default().push(chars.next()?),
            ' ' => words.extend(word.take()),
            _ => word.get_or_insert_default().push(c),
        }
    }
    words.extend(word);
    (!quoted).then_some(words)
}

#[cfg(test)]
mod tests {
    use super::*;

    const RUN: &str = "mbperf -m llama -mr llama3_8b -g h100";

    #[test]
    fn words_come_back_as_they_were_quoted() {
        assert_eq!(words("a 'b c' 'it'\\''s' ''").unwrap(), ["a", "b c", "it's", ""]);
        assert_eq!(words("a 'b"), None);
        assert_eq!(words(""), Some(vec![]));
    }

    #[test]
    fn outputs_and_budgets_are_no_workload_and_sizes_are() {
        let plain = settings(RUN).unwrap();
        assert_eq!(plain, "");
        for same in [
            "-o x.csv --max_time 5 -q",
            "--moe_routing recipe",
            "-tp 1",
            "--margin 0.02",
            "model.cuda_graph_scope=[]",
        ] {
            assert_eq!(settings(&format!("{RUN} {same}")).unwrap(), plain, "{same}");
        }
        for other in
            ["--hidden_size 512", "--moe_routing skewed", "model.ffn_hidden_size=64", "--optimizer none"]
        {
            assert_ne!(settings(&format!("{RUN} {other}")).unwrap(), plain, "{other}");
        }
        assert_eq!(settings("mbperf rules"), None);
        assert_eq!(settings("python run_script.py"), None);
    }
}
