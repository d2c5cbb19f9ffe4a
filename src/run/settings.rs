//! What the command line asks of the measurement, the shrinking and the output.

use crate::args::Args;
use crate::config::GraphImpl;
use crate::device::Arm;
use crate::measure::Options;
use crate::measure::options::Samplers;
use crate::overrides::Resolved;
use crate::report::Target;
use crate::workloads::shrink;

/// Where rows go.
pub(super) fn target(resolved: &Resolved, args: &Args) -> Target {
    let i = &resolved.config.identity;
    let output = args.mbperf.output.as_ref().and_then(|p| p.to_str());
    Target::new(output, &i.recipe, &i.gpu, &i.recipe_dtype)
}

/// Sizes that the command line names: shrinking leaves them.
pub(super) fn given(args: &Args) -> shrink::Given {
    shrink::Given {
        layers: args.general.num_layers.is_some(),
        hidden: args.general.hidden_size.is_some(),
        sequence: args.training.seq_length.is_some(),
        vocabulary: args.data.vocab_size.is_some(),
        experts: args.general.num_moe_experts.is_some(),
    }
}

/// How it is measured.
pub(super) fn options(resolved: &Resolved, args: &Args, on_gpu: bool) -> Options {
    let own = &args.mbperf;
    let (max_time_s, longest_time_s) = Options::times(own.max_time, on_gpu);
    Options {
        max_time_s,
        longest_time_s,
        margin: own.margin,
        equality_steps: own.equality_steps.and_then(|n| usize::try_from(n).ok()),
        warmup_steps: resolved.config.graph.warmup_steps,
        max_steps: resolved.max_steps,
        graph: resolved.config.graph.implementation != GraphImpl::None,
        aa: own.aa.map(|a| match a {
            crate::args::Arm::Eager => Arm::Eager,
            crate::args::Arm::Graph => Arm::Graph,
        }),
        alone: None,
        busy: on_gpu && !own.no_samplers,
        profile: own.profile,
        host_costs: None,
        samplers: match (own.no_samplers, own.alternate_samplers) {
            (true, _) => Samplers::Off,
            (false, true) => Samplers::EverySecondPair,
            (false, false) => Samplers::EveryBlock,
        },
        block_steps: own.block_steps.map(|n| n as usize),
        device_spin: own.spin_percent.map_or(0.0, |percent| percent / 100.0),
    }
}
