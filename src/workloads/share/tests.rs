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
