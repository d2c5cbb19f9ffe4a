use super::*;
use crate::ops::Op;
use crate::ops::rng::{WORD_MICRO_BATCH, WORDS};
use crate::ops::testing::{check_f32_against_f64, inputs, normals, run_f64};

fn sort(tokens: usize, topk: usize, experts: usize, capacity: Option<usize>, rows: usize) -> MoeSort {
    let capacity = capacity.map(|rows| Capacity { rows, padded: true, by_position: false });
    MoeSort {
        tokens,
        topk,
        experts,
        modulo: false,
        capacity,
        rows,
        tally: Tally { micro_batches: 2, stride: 3 },
    }
}

/// All buffers after a sort for micro-batch `number` of the job.
fn run_sort(op: &MoeSort, index: &[f64], probs: &[f64], number: u32, fault: f64) -> Vec<Vec<f64>> {
    let mut words = vec![0.0; WORDS];
    words[WORD_MICRO_BATCH] = number as f64;
    let tally = vec![7.0; op.tally.micro_batches * Tally::COLUMNS];
    run_f64(op, &[index.to_vec(), probs.to_vec(), words, vec![], vec![], vec![], vec![fault], tally])
}

/// (offsets, dest, src, fault) of a choice.
fn sorted(op: &MoeSort, index: &[f64], probs: &[f64]) -> [Vec<f64>; 4] {
    let out = run_sort(op, index, probs, 0, 0.0);
    [out[3].clone(), out[4].clone(), out[5].clone(), out[6].clone()]
}

/// The second of this rank's micro-batches, where three ranks take them in turn: its line alone is written.
#[test]
fn the_tally_has_a_line_of_each_micro_batch() {
    let index = [0.0, 0.0, 0.0, 0.0, 1.0, 0.0];
    let tally = |op: &MoeSort, index: &[f64]| run_sort(op, index, &[0.5; 6], 5, 0.0)[7].clone();
    let padded = sort(6, 1, 2, Some(3), 7);
    // Five of bin 0, of which three stay; one of bin 1, made up to three.
    assert_eq!(tally(&padded, &index), [7.0, 7.0, 7.0, 6.0, 2.0, 2.0]);
    let capacity = Some(Capacity { rows: 2, padded: false, by_position: true });
    assert_eq!(tally(&MoeSort { capacity, ..padded }, &index)[3..], [6.0, 3.0, 0.0]);
    assert_eq!(tally(&sort(6, 1, 2, None, 6), &index)[3..], [6.0, 0.0, 0.0]);
    assert_eq!(tally(&sort(6, 1, 2, None, 4), &index)[3..], [6.0, 2.0, 0.0], "more than there are rows");
    assert_eq!(tally(&sort(6, 1, 1, None, 6), &index)[3..], [5.0, 0.0, 0.0], "an expert of another rank");
}

#[test]
fn sort_is_stable_and_without_gaps() {
    let index = [2.0, 0.0, 0.0, 2.0, 2.0, 1.0];
    let [offsets, dest, src, fault] = sorted(&sort(3, 2, 4, None, 8), &index, &[0.5; 6]);
    assert_eq!(offsets, [0.0, 2.0, 3.0, 6.0, 6.0]);
    assert_eq!(dest, [3.0, 0.0, 1.0, 4.0, 5.0, 2.0]);
    assert_eq!(src, [1.0, 2.0, 5.0, 0.0, 3.0, 4.0, -1.0, -1.0]);
    assert_eq!(fault, [0.0]);
}

#[test]
fn modulo_folds_experts_and_others_are_dropped() {
    let index = [5.0, 2.0, 3.0, 4.0];
    let [_, dest, ..] = sorted(&MoeSort { modulo: true, ..sort(2, 2, 3, None, 4) }, &index, &[0.5; 4]);
    assert_eq!(dest, [2.0, 3.0, 0.0, 1.0]);
    let [offsets, dest, ..] = sorted(&sort(2, 2, 3, None, 4), &index, &[0.5; 4]);
    assert_eq!((offsets, dest), (vec![0.0, 0.0, 0.0, 1.0], vec![-1.0, 0.0, -1.0, -1.0]));
}

#[test]
fn capacity_keeps_the_most_probable_in_token_order() {
    let index = [0.0, 0.0, 0.0, 0.0, 1.0, 0.0];
    let probs = [0.3, 0.9, 0.3, 0.1, 0.2, 0.3];
    let [offsets, dest, src, fault] = sorted(&sort(6, 1, 2, Some(3), 7), &index, &probs);
    assert_eq!(offsets, [0.0, 3.0, 6.0]);
    assert_eq!(dest, [0.0, 1.0, 2.0, -1.0, 3.0, -1.0], "ties go to the lower pair");
    assert_eq!(src, [0.0, 1.0, 2.0, 4.0, -1.0, -1.0, -1.0]);
    assert_eq!(fault, [0.0]);
}

#[test]
fn a_capacity_without_padding_leaves_no_gaps() {
    let index = [0.0, 0.0, 0.0, 0.0, 1.0, 0.0];
    let probs = [0.3, 0.9, 0.3, 0.1, 0.2, 0.4];
    let policy = |by_position| MoeSort {
        capacity: Some(Capacity { rows: 2, padded: false, by_position }),
        ..sort(6, 1, 3, None, 6)
    };
    let [offsets, dest, src, fault] = sorted(&policy(false), &index, &probs);
    assert_eq!(offsets, [0.0, 2.0, 3.0, 3.0]);
    assert_eq!(dest, [-1.0, 0.0, -1.0, -1.0, 2.0, 1.0]);
    assert_eq!(src, [1.0, 5.0, 4.0, -1.0, -1.0, -1.0]);
    assert_eq!(fault, [0.0]);
    let [_, dest, ..] = sorted(&policy(true), &index, &probs);
    assert_eq!(dest, [0.0, 1.0, -1.0, -1.0, 2.0, -1.0], "by position the first stay");
}

#[test]
fn overflow_is_a_fault_and_stays_inside_the_rows() {
    let [offsets, dest, src, fault] = sorted(&sort(4, 1, 2, None, 3), &[1.0, 1.0, 0.0, 1.0], &[1.0; 4]);
    assert_eq!(fault, [1.0]);
    assert_eq!(offsets, [0.0, 1.0, 3.0]);
    assert_eq!(dest, [1.0, 2.0, 0.0, -1.0]);
    assert_eq!(src, [2.0, 0.0, 1.0]);
}

/// The word is read once a step: a micro-batch that fits must not hide an earlier one that did not.
#[test]
fn a_fault_stays() {
    let op = sort(2, 1, 2, None, 2);
    assert_eq!(run_sort(&op, &[0.0, 1.0], &[1.0; 2], 0, 1.0)[6], [1.0]);
}

#[test]
fn dest_and_src_are_inverse() {
    for capacity in [None, Some(40)] {
        let mut op = MoeSort { modulo: true, ..sort(301, 3, 7, capacity, 1000) };
        for padded in [true, false] {
            if let Some(c) = &mut op.capacity {
                c.padded = padded;
            }
            check_inverse(&op);
        }
    }
}

fn check_inverse(op: &MoeSort) {
    {
        let out = run_f64(op, &inputs(op, 5));
        let (dest, src) = (&out[4], &out[5]);
        let kept = dest.iter().filter(|&&r| r >= 0.0).count();
        assert_eq!(kept, src.iter().filter(|&&p| p >= 0.0).count());
        assert!(op.capacity.is_some() || kept == 903);
        for (pair, &row) in dest.iter().enumerate().filter(|(_, r)| **r >= 0.0) {
            assert_eq!(src[row as usize], pair as f64);
        }
    }
}

#[test]
fn impossible_sorts_are_refused() {
    assert!(sort(4, 1, 513, None, 4).cpu_f64_refuses());
    assert!(sort(4, 1, 2, Some(3), 5).cpu_f64_refuses());
}

impl MoeSort {
    fn cpu_f64_refuses(&self) -> bool {
        let mut args = crate::ops::CpuArgs::new("moe_sort", Vec::new());
        matches!(self.cpu_f64(&mut args), Err(crate::device::DeviceError::Invalid(_)))
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(x, y)| x * y).sum()
}

/// Sort, gather and combine of one layer: <G x, y> = <x, G^T y>, rows and probabilities alike.
#[test]
fn gather_and_combine_are_transposes() {
    let (t, k, h, r) = (37, 3, 16, 100);
    for capacity in [None, Some(12)] {
        let routing = sort(t, k, 7, capacity, r + 20);
        let values = inputs(&routing, 11);
        let [_, dest, src, _] = sorted(&routing, &values[0], &values[1]);
        let gather = GatherRows { rows: r + 20, in_rows: t, hidden: h, div: k, probs: true };
        let combine = CombineRows {
            tokens: t,
            topk: k,
            rows: r + 20,
            hidden: h,
            residual: false,
            shared: false,
            dprobs: true,
        };
        let (x, y) = (normals(t * h, 1, 1.0), normals((r + 20) * h, 2, 1.0));
        let (p, q) = (normals(t * k, 3, 1.0), normals(r + 20, 4, 1.0));
        let forward = run_f64(&gather, &[x.clone(), src, p.clone(), vec![], vec![]]);
        let backward = run_f64(&combine, &[y.clone(), dest, q.clone(), vec![], vec![]]);
        assert!((dot(&forward[3], &y) - dot(&x, &backward[3])).abs() < 1e-10);
        assert!((dot(&forward[4], &q) - dot(&p, &backward[4])).abs() < 1e-12);
        assert!(forward[3].iter().any(|v| *v != 0.0));
    }
}

#[test]
fn combine_adds_residual_and_shared() {
    let op =
        CombineRows { tokens: 2, topk: 2, rows: 3, hidden: 8, residual: true, shared: true, dprobs: false };
    let row = |v: f64| vec![v; 8];
    let rows = [row(1.0), row(2.0), row(4.0)].concat();
    let added = [row(10.0), row(20.0)].concat();
    let shared = [row(100.0), row(200.0)].concat();
    let out = run_f64(&op, &[rows, vec![2.0, 0.0, -1.0, 1.0], added, shared, vec![]]);
    assert_eq!(out[4], [row(115.0), row(222.0)].concat());
}

#[test]
fn bf16_rows_stay_within_tolerance() {
    let combine =
        CombineRows { tokens: 19, topk: 4, rows: 50, hidden: 24, residual: true, shared: true, dprobs: true };
    check_f32_against_f64(&combine, &inputs(&combine, 3));
    let gather = GatherRows { rows: 50, in_rows: 19, hidden: 24, div: 4, probs: true };
    check_f32_against_f64(&gather, &inputs(&gather, 3));
}

#[test]
fn chunk_map_turns_rank_order_into_expert_order() {
    // Two ranks of two local experts; chunks (rank, l) of 1, 2, 0, 3 rows; one row is unused.
    let op = ChunkMap { experts: 4, local: 2, rows: 7 };
    let out = run_f64(&op, &[vec![0.0, 1.0, 3.0, 3.0, 6.0], vec![], vec![], vec![]]);
    assert_eq!(out[1], [0.0, 1.0, 6.0]);
    assert_eq!(out[2], [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, -1.0]);
    let out = run_f64(&op, &[vec![0.0, 1.0, 3.0, 5.0, 6.0], vec![], vec![], vec![]]);
    assert_eq!(out[1], [0.0, 3.0, 6.0]);
    assert_eq!(out[2], [0.0, 3.0, 4.0, 1.0, 2.0, 5.0, -1.0]);
    assert_eq!(out[3], [0.0, 3.0, 4.0, 1.0, 2.0, 5.0, -1.0]);
}
