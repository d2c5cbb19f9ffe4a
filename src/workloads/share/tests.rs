//! Shares by hand, and of every recipe.

use super::*;
use crate::recipe::Catalogue;

fn dense(layers: usize) -> ShareInput {
    ShareInput {
        layers: vec![LayerKind::Dense; layers],
        mtp_layers: 0,
        num_gpus: 8,
        tp: 1,
        pp: 1,
        cp: 1,
        ep: 1,
        etp: 1,
        vp: 1,
        pp_rank: 0,
        sequence_parallel: false,
        pipeline_layout: None,
        first_stage_layers: None,
        last_stage_layers: None,
        account_for_embedding: false,
        account_for_loss: false,
        heads: 32,
        kv_heads: 8,
        ffn: 14336,
        vocab: 128256,
        experts: None,
        mamba: None,
        delta_net: None,
        micro_batch: 1,
        global_batch: 128,
        seq: 8192,
    }
}

#[test]
fn sizes_are_split() {
    let share =
        RankShare::from_input(&ShareInput { tp: 2, cp: 2, sequence_parallel: true, ..dense(32) }).unwrap();
    assert_eq!((share.heads, share.kv_heads, share.ffn, share.vocab), (16, 4, 7168, 64128));
    assert_eq!(share.seq_chunks, [(0, 2048), (6144, 2048)]);
    assert_eq!((share.tokens, share.tokens_sequence_parallel), (4096, 2048));
    assert_eq!((share.dp, share.num_microbatches), (2, 64));
    let shared_heads = ShareInput { tp: 8, kv_heads: 2, ..dense(32) };
    assert_eq!(RankShare::from_input(&shared_heads).unwrap().kv_heads, 1);
}

#[test]
fn virtual_stages_alternate() {
    let last = ShareInput { pp: 4, vp: 2, pp_rank: 3, ..dense(32) };
    let share = RankShare::from_input(&last).unwrap();
    let indices: Vec<usize> = share.layers.iter().map(|l| l.index).collect();
    assert_eq!(indices, [12, 13, 14, 15, 28, 29, 30, 31]);
    assert_eq!(share.chunks, [0..4, 4..8]);
    assert_eq!((share.has_embedding, share.has_loss), (false, true));
}

#[test]
fn embedding_and_loss_count_as_layers() {
    let of = |pp_rank| {
        let counted =
            ShareInput { pp: 4, account_for_embedding: true, account_for_loss: true, pp_rank, ..dense(30) };
        RankShare::from_input(&counted).unwrap().layers.len()
    };
    assert_eq!([0, 1, 2, 3].map(of), [7, 8, 8, 7]);
}

#[test]
fn stage_counts_and_layouts() {
    let counts = |input: ShareInput| {
        let stages = pipeline_stages(&input).unwrap();
        stages.iter().map(|s| s.layers.len()).collect::<Vec<_>>()
    };
    let ends = ShareInput { pp: 4, first_stage_layers: Some(5), last_stage_layers: Some(7), ..dense(32) };
    assert_eq!(counts(ends), [5, 10, 10, 7]);
    let layout = ShareInput { pp: 2, vp: 2, pipeline_layout: Some("Et*2|(t*3|)*2,L".to_owned()), ..dense(8) };
    assert_eq!(counts(layout), [2, 3, 3, 0]);
}

#[test]
fn what_does_not_fit_is_said_with_numbers() {
    let message = |input: ShareInput| RankShare::from_input(&input).unwrap_err().to_string();
    assert!(
        message(ShareInput { tp: 3, num_gpus: 9, global_batch: 3, ..dense(32) }).contains("32 / 3 leaves 2")
    );
    assert!(message(ShareInput { pp: 3, num_gpus: 3, ..dense(32) }).contains("pp 3 leaves 2"));
    assert!(message(ShareInput { global_batch: 12, ..dense(32) }).contains("micro-batch 1 x dp 8 = 8"));
    assert!(message(ShareInput { num_gpus: 6, tp: 4, ..dense(32) }).contains("tp 4 x pp 1 x cp 1"));
    assert!(message(ShareInput { pp_rank: 1, ..dense(32) }).contains("--pp_rank 1"));
    let wide = ShareInput { pp: usize::MAX, num_gpus: usize::MAX, ..dense(32) };
    assert!(message(wide).contains("more than there are layers"));
    assert!(message(ShareInput { tp: 0, ..dense(32) }).contains("tp is 0"));
    assert!(message(dense(0)).contains("the number of layers is 0"));
    assert!(message(ShareInput { tp: usize::MAX, ..dense(32) }).contains("8 GPUs"));
    let layout = Some("Et|tL".to_owned());
    assert!(message(ShareInput { pp: 2, pipeline_layout: layout, ..dense(3) }).contains("the model has 3"));
}

/// Every recipe has a share on every stage; the stages together are the model. 28 recipes are impossible as
/// upstream writes them and say so: 13 by their expert grid, 2 by their batch, 2 by their layout, 11 by a remainder.
#[test]
fn every_recipe_has_a_share() {
    let catalogue = Catalogue::load(None).unwrap();
    let mut refused = [0; 4];
    for recipe in catalogue.recipes() {
        let whole = ShareInput::of_values(&recipe.values, recipe.num_gpus).unwrap();
        let known = recipe.impossible().is_some();
        let stated = |code: &str| recipe.issues.iter().any(|i| i == code);
        match RankShare::from_input(&whole) {
            Err(ShareError::Grid { .. }) if stated("expert_grid_does_not_fit") => refused[0] += 1,
            Err(ShareError::Batch { .. }) if stated("gbs_not_multiple_of_mbs_times_dp") => refused[1] += 1,
            Err(ShareError::Layout { .. }) if stated("vp_conflicts_with_pipeline_layout") => refused[2] += 1,
            Err(ShareError::Split { .. }) if stated("layers_do_not_fill_pipeline") => refused[3] += 1,
            Err(other) => panic!("{}: {other}", recipe.function),
            Ok(first) => {
                assert!(!known, "{} is possible", recipe.function);
                assert!(first.has_embedding, "{}", recipe.function);
                let ranks: Vec<RankShare> = (0..whole.pp)
                    .map(|pp_rank| RankShare::from_input(&ShareInput { pp_rank, ..whole.clone() }).unwrap())
                    .collect();
                assert!(ranks.last().unwrap().has_loss, "{}", recipe.function);
                let mut indices: Vec<usize> =
                    ranks.iter().flat_map(|r| r.layers.iter().map(|l| l.index)).collect();
                indices.sort_unstable();
                assert_eq!(indices, (0..whole.layers.len()).collect::<Vec<_>>(), "{}", recipe.function);
            }
        }
    }
    assert_eq!(refused, [13, 2, 2, 11]);
}

/// What a stage holds, in the letters of tests/data/pipeline_stages.tsv.
fn letters(stage: &Stage, layers: &[LayerKind]) -> String {
    let letter = |kind: LayerKind| match kind {
        LayerKind::Dense | LayerKind::DeltaDense => 'd',
        LayerKind::Moe | LayerKind::DeltaMoe => 'e',
        LayerKind::Mamba => 'M',
        LayerKind::AttnOnly => 'a',
        LayerKind::MlpOnly => 'f',
        LayerKind::MoeOnly => 'x',
    };
    let mut text = String::from(if stage.embedding { "E" } else { "" });
    for run in layers[stage.layers.clone()].chunk_by(|a, b| letter(*a) == letter(*b)) {
        text.push_str(&format!("{}{}", letter(run[0]), run.len()));
    }
    text.push_str(&"m".repeat(stage.mtp));
    text.push_str(if stage.loss { "L" } else { "" });
    if text.is_empty() { "0".into() } else { text }
}

/// Layer kinds of each stage of every recipe with a pipeline, against upstream's own split of the same facts.
#[test]
fn stages_of_every_recipe_are_upstreams() {
    let table = include_str!("../../../tests/data/pipeline_stages.tsv");
    let mut expected: std::collections::BTreeMap<&str, &str> = table
        .lines()
        .filter(|l| !l.starts_with('#') && !l.starts_with("function"))
        .filter_map(|l| l.split_once('\t'))
        .collect();
    assert_eq!(expected.len(), 192);
    let catalogue = Catalogue::load(None).unwrap();
    let mut refused = 0;
    for recipe in catalogue.recipes() {
        let input = ShareInput::of_values(&recipe.values, recipe.num_gpus).unwrap();
        if input.pp == 1 {
            continue;
        }
        let (Ok(stages), Some(row)) = (pipeline_stages(&input), expected.remove(recipe.function.as_str()))
        else {
            assert!(recipe.impossible().is_some(), "{} is refused on one side", recipe.function);
            refused += 1;
            continue;
        };
        let texts: Vec<String> = stages.iter().map(|s| letters(s, &input.layers)).collect();
        let runs: Vec<String> = texts
            .chunk_by(|a, b| a == b)
            .map(|run| if run.len() > 1 { format!("{}*{}", run[0], run.len()) } else { run[0].clone() })
            .collect();
        assert_eq!(format!("{}\t{}\t{}", input.pp, input.vp, runs.join(" ")), row, "{}", recipe.function);
        // Each rank's layers are those of its stages, in the order of the chunks.
        for pp_rank in 0..input.pp {
            let Ok(share) = RankShare::from_input(&ShareInput { pp_rank, ..input.clone() }) else { continue };
            let own: Vec<&Stage> = stages.iter().skip(pp_rank).step_by(input.pp).collect();
            assert_eq!(share.chunks.len(), input.vp);
            for (chunk, stage) in share.chunks.iter().zip(own) {
                let indices = share.layers[chunk.clone()].iter().map(|l| l.index);
                assert!(indices.eq(stage.layers.clone()), "{} rank {pp_rank}", recipe.function);
            }
        }
    }
    assert!(expected.is_empty(), "no recipe is called {:?}", expected.keys());
    assert_eq!(refused, 13);
}

#[test]
fn layouts_hold_upstreams_restrictions() {
    let with = |pp: usize, vp: usize, layers: usize, mtp_layers: usize, layout: &str| {
        pipeline_stages(&ShareInput {
            pp,
            vp,
            mtp_layers,
            pipeline_layout: Some(layout.to_owned()),
            ..dense(layers)
        })
    };
    assert!(with(2, 1, 3, 1, "Ett|tmL").is_ok());
    assert!(with(2, 2, 3, 1, "Et|tt|m|L").is_ok());
    for (layout, layers, mtp) in [
        ("Ett|tmL", 3, 0),
        ("Ett|tmL", 3, 2),
        ("Etmt|tL", 3, 1),
        ("Ettm|tL", 3, 1),
        ("Ett|tL", 4, 0),
        ("tt|tL", 3, 0),
        ("Ett|t", 3, 0),
        ("EttL|tL", 3, 0),
    ] {
        assert!(with(2, 1, layers, mtp, layout).is_err(), "{layout}");
    }
    assert!(with(2, 2, 3, 1, "Et|ttm|L").is_err(), "three stages for pp 2 x vp 2");
    assert!(with(2, 2, 4, 2, "Ett|tt|m|mL").is_err(), "multi-token prediction in two stages");
    assert!(
        with(2, 2, 3, 1, "Ett|tm||L").is_err(),
        "multi-token prediction in a stage that is not a rank's last"
    );
    let ends = |first, last, layers| {
        pipeline_stages(&ShareInput {
            pp: 3,
            first_stage_layers: Some(first),
            last_stage_layers: Some(last),
            ..dense(layers)
        })
    };
    assert!(ends(3, 3, 10).is_ok());
    assert!(ends(0, 3, 10).is_err());
    assert!(ends(5, 5, 10).is_err(), "nothing is left for the middle");
}

#[test]
fn what_is_captured_is_said_in_layers() {
    let catalogue = Catalogue::load(None).unwrap();
    let said = |line: &str| {
        let argv = std::iter::once("mbperf").chain(line.split_whitespace());
        let Ok(crate::args::Command::Run(args)) = crate::args::parse(argv) else { panic!("{line}") };
        let config = crate::overrides::resolve(&args, &catalogue, &|_| None).unwrap().config;
        RankShare::of(&config).unwrap().captured_layers(&config.graph)
    };
    let llama = "-m llama -mr llama3_8b -g h100";
    assert_eq!(said(llama), "none");
    assert_eq!(said(&format!("{llama} --cuda_graph_scope attn,mlp")), "attn 32, mlp 32");
    assert_eq!(said(&format!("{llama} --cuda_graph_impl transformer_engine")), "whole_layer 32");
    assert_eq!(said(&format!("{llama} --cuda_graph_scope full_iteration")), "full_iteration 32");
    let hybrid = "-m nemotronh -mr nemotron_3_nano -g h100 --num_layers 4 model.hybrid_override_pattern=ME*M model.recompute_granularity=null";
    assert_eq!(
        said(&format!("{hybrid} --cuda_graph_scope attn,moe_router,mamba")),
        "attn 1, moe_router 1, mamba 2"
    );
}
