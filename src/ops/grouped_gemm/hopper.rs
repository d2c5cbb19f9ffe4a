//! The product on Hopper (sm_90a): sizes of hopper.cu, its tensor maps and its launch.

use super::GroupedGemm;
use crate::device::DeviceError;
use crate::device::cuda::matmul::Layout;
use crate::device::cuda::prep::{Config, CudaPrep, DevPtr, Issue, KernelSource, Param};
use crate::device::cuda::tensor_map::Boxes;
use crate::program::DType;

const SOURCE: KernelSource = KernelSource { name: "grouped_gemm/hopper.cu", text: include_str!("hopper.cu") };

/// Compute capability of the one architecture that has wgmma (sm_90a).
const CC: u32 = 90;
/// The numbers of hopper.cu: rows of a block's tile, depth of a stage, stages, threads (a warpgroup that copies, two
/// that multiply), side of the panels that are copied at once.
const TILE_M: usize = 128;
const TILE_K: usize = 64;
const STAGES: usize = 4;
const THREADS: u32 = 3 * 128;
const PANEL: u32 = 64;
/// Columns of a tile: as many as wgmma takes, or half of it for narrow matrices.
const TILE_N: [usize; 2] = [128, 256];
/// What an fp32 row of each of the 128 rows takes on its way out, padded (hopper.cu).
const STAGED_PITCH: usize = 256 + 16;
/// Bytes of a barrier.
const BARRIER: usize = 8;
/// Pairs of blocks read B once, and an expert's last pair may compute [`TILE_M`] rows for nothing. On an H200 they are
/// as fast or faster at every mean number of rows an expert that was measured, from 128 (uneven, 5 %) to 4096.
const PAIRED_ROWS: usize = TILE_M;

/// Whether the kernel is for this device and shape: a tensor map has no empty dimension.
pub(super) fn fits(op: &GroupedGemm, cc: u32) -> bool {
    cc == CC && op.rows > 0
}

/// How the output is cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Cut {
    tile_n: usize,
    /// Blocks one above the other that share B.
    cluster: usize,
}

impl Cut {
    fn of(op: &GroupedGemm) -> Self {
        let rows = if op.layout == Layout::Tn { op.n } else { op.filled / op.experts };
        let wide = op.columns() > TILE_N[0];
        Self { tile_n: TILE_N[wide as usize], cluster: if rows >= PAIRED_ROWS { 2 } else { 1 } }
    }
    /// Most tiles of all clusters: one partly filled an expert, and one where the padding begins.
    fn most_tiles(self, op: &GroupedGemm) -> usize {
        let rows = TILE_M * self.cluster;
        let of_rows = match op.layout {
            Layout::Tn => op.experts * op.n.div_ceil(rows),
            _ => op.rows.div_ceil(rows) + op.experts + 1,
        };
        of_rows * op.columns().div_ceil(self.tile_n)
    }
    /// One block an SM, whole clusters, none without a tile.
    fn blocks(self, op: &GroupedGemm, sm_count: usize) -> usize {
        (sm_count / self.cluster).clamp(1, self.most_tiles(op).max(1)) * self.cluster
    }
    /// The ring, what fp32 outputs pass through, and two barriers a stage.
    fn shared_bytes(self, out: DType) -> usize {
        let ring = (TILE_M + self.tile_n) * TILE_K * DType::Bf16.size() * STAGES;
        let staged = if out == DType::F32 { TILE_M * STAGED_PITCH } else { 0 };
        ring + staged + 2 * STAGES * BARRIER
    }
}

/// A and B as the kernel copies them: panels of 64 x 64.
fn boxes(op: &GroupedGemm) -> [Boxes; 2] {
    let (experts, rows, n, k) = (op.experts, op.rows, op.n, op.k);
    let of = |matrices, rows, columns| Boxes { matrices, rows, columns, box_rows: PANEL, box_columns: PANEL };
    match op.layout {
        Layout::Nt => [of(1, rows, k), of(experts, n, k)],
        Layout::Nn => [of(1, rows, k), of(experts, k, n)],
        Layout::Tn => [of(1, rows, n), of(1, rows, k)],
    }
}

pub(super) fn prepare(
    op: &GroupedGemm,
    cuda: &mut CudaPrep,
    [offsets, a, b, d]: [DevPtr; 4],
) -> Result<Issue, DeviceError> {
    let cut = Cut::of(op);
    let defines = [
        ("LAYOUT", op.layout_number().to_string()),
        ("TILE_N", cut.tile_n.to_string()),
        ("CLUSTER", cut.cluster.to_string()),
        ("OUT", op.out_name().to_string()),
        ("ACCUMULATE", (op.accumulate as u32).to_string()),
    ];
    let shared_bytes = cut.shared_bytes(op.out) as u32;
    let kernel = cuda.kernel(SOURCE, "grouped_gemm_hopper", &defines, shared_bytes)?;
    let config = Config { shared_bytes, ..Config::linear(cut.blocks(op, cuda.sm_count), THREADS) };
    let [of_a, of_b] = boxes(op);
    let mut params = vec![cuda.tensor_map(&of_a, a)?, cuda.tensor_map(&of_b, b)?, offsets.into(), d.into()];
    params.extend([op.experts, op.rows, op.n, op.k].map(|v| Param::I32(v as i32)));
    cuda.launch(&kernel, config, &params)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cuda::prep::OfflinePrep;

    fn op(layout: Layout, experts: usize, rows: usize, n: usize, k: usize) -> GroupedGemm {
        GroupedGemm { experts, rows, filled: rows, n, k, layout, out: DType::Bf16, accumulate: false }
    }

    /// All layouts, also the one that is not taken yet: compiled where NVRTC is, bound in any case.
    #[test]
    fn every_layout_is_prepared_without_a_device() {
        let mut offline = OfflinePrep::new("sm_90a").unwrap();
        for layout in [Layout::Nt, Layout::Nn, Layout::Tn] {
            for (rows, n, k) in [(1, 8, 8), (3000, 264, 520)] {
                for out in [DType::Bf16, DType::F32] {
                    let op =
                        GroupedGemm { out, accumulate: layout == Layout::Tn, ..op(layout, 2, rows, n, k) };
                    let args = [1u64, 2, 3, 4].map(|i| DevPtr(i << 40));
                    prepare(&op, &mut offline.prep(), args).unwrap();
                }
            }
        }
        assert!(offline.usage().iter().all(|(_, u)| u.spill_store_bytes == 0));
    }

    /// Tiles that the kernel's walk finds: expert by expert, then the padding.
    fn tiles(op: &GroupedGemm, cut: Cut, lengths: &[usize]) -> usize {
        let columns = op.columns().div_ceil(cut.tile_n);
        let of = |rows: usize| rows.div_ceil(TILE_M * cut.cluster) * columns;
        if op.layout == Layout::Tn {
            return op.experts * of(op.n);
        }
        lengths.iter().map(|&l| of(l)).sum::<usize>() + of(op.rows - lengths.iter().sum::<usize>())
    }

    #[test]
    fn no_split_of_the_rows_has_more_tiles_than_the_bound() {
        for layout in [Layout::Nt, Layout::Nn, Layout::Tn] {
            let op = op(layout, 4, 1030, 520, 264);
            for cut in [Cut { tile_n: 128, cluster: 1 }, Cut { tile_n: 256, cluster: 2 }] {
                for lengths in [[1030, 0, 0, 0], [257, 257, 257, 257], [1, 1, 1, 1], [129, 1, 0, 899], [0; 4]]
                {
                    let tiles = tiles(&op, cut, &lengths);
                    assert!(tiles <= cut.most_tiles(&op), "{layout:?} {cut:?} {lengths:?}: {tiles}");
                }
            }
        }
    }

    #[test]
    fn grids_are_whole_clusters_on_any_number_of_sms() {
        let small = op(Layout::Nt, 1, 1, 8, 8);
        let large = op(Layout::Nt, 8, 32768, 2048, 1536);
        assert_eq!(Cut::of(&small), Cut { tile_n: 128, cluster: 1 });
        assert_eq!(Cut::of(&large), Cut { tile_n: 256, cluster: 2 });
        assert_eq!(Cut::of(&large).blocks(&large, 132), 132);
        assert_eq!(Cut::of(&large).blocks(&large, 113), 112);
        assert_eq!(Cut::of(&large).blocks(&large, 1), 2);
        assert_eq!(Cut::of(&small).blocks(&small, 132), 3);
    }

    #[test]
    fn a_block_has_the_shared_memory() {
        for (tile_n, out) in [(128, DType::F32), (256, DType::Bf16), (256, DType::F32)] {
            assert!(Cut { tile_n, cluster: 1 }.shared_bytes(out) <= super::super::shared_limit(CC));
        }
    }
}
