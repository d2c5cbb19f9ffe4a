//! How many launches a layer and step takes: what a graph saves grows with them, so that they are counted.

use crate::args::{self, Command};
use crate::device::cuda::prep::OfflinePrep;
use crate::overrides;
use crate::recipe::Catalogue;
use crate::workloads::{self, share::RankShare};

/// Kernels, copies and memsets of layer 1, forward and backward, in order, by op. Of libraries: a product counts as one
/// (split-K makes it two), attention is our own (cuDNN's backward takes a few more).
fn of_a_layer(line: &str) -> Vec<(&'static str, usize)> {
    let argv = ["mbperf"].into_iter().chain(line.split_whitespace()).map(String::from);
    let Ok(Command::Run(args)) = args::parse(argv) else { panic!("{line}") };
    let catalogue = Catalogue::load(None).unwrap();
    let cfg = overrides::resolve(&args, &catalogue, &|_| None).unwrap().config;
    let program = workloads::build(&cfg, &RankShare::of(&cfg).unwrap()).unwrap();
    let mut offline = OfflinePrep::new("sm_90a").unwrap();
    let layer = program.launches.iter().filter(|l| l.layer == Some(1));
    layer.map(|l| (l.op.name(), offline.launches(l.op.as_ref()).unwrap())).collect()
}

const SMALL: &str = "--stack_only --num_layers 4 -sl 512";

#[test]
fn launches_of_a_layer_stay_within_the_targets() {
    let dense = format!("-m llama -mr llama3_8b -g h100 -ng 1 -tp 1 -pp 1 -cp 1 {SMALL}");
    let moe = format!(
        "-m qwen -mr qwen3_30b_a3b -g h100 -ng 16 -tp 1 -pp 1 -cp 1 -ep 16 {SMALL} --moe_flex_dispatcher_backend None"
    );
    let padded = format!("{moe} --use_tokendrop true model.moe_token_dispatcher_type=alltoall");
    // A norm's backward writes its weight's gradient whole at 512 tokens and leaves a column sum at 8192.
    let long = dense.replace("-sl 512", "-sl 8192");
    // SPEED asks for 36 of a dense layer and 60 of an expert layer, libraries' own kernels counted. What they may add:
    // a reduction for each of the products that is split over k, and three or four kernels of cuDNN's backward.
    for (line, most) in [(&dense, 36 - 11), (&long, 36 - 10), (&padded, 60 - 21), (&moe, 60)] {
        let found = of_a_layer(line);
        let launches: usize = found.iter().map(|(_, n)| n).sum();
        println!("{launches} launches of {} ops: {line}", found.len());
        let mut last = None;
        for (name, n) in &found {
            if last != Some(name) {
                println!("    {name} {n}");
            }
            last = Some(name);
        }
        assert!(launches <= most && launches >= found.len() / 2, "{line}: {launches}");
    }
}
