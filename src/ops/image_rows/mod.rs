//! Features of an image among the tokens of a sequence: put in place of its tokens' embeddings, or added to their hidden
//! states (DeepStack, Meng et al., 2024). The image lies at the same positions of every sequence.

use super::support::VECTOR;
use super::{ArgSpec, CpuArgs, Op, Real, check_multiple, int_param, tolerance};
use crate::cpu_reference;
use crate::device::DeviceError;
use crate::device::cuda::prep::{Config, CudaPrep, DevPtr, Issue, KernelSource, Param};
use crate::ops::rope::Positions;
use crate::program::DType;
use rayon::prelude::*;

/// Which rows, and what becomes of them.
#[derive(Debug, Clone, PartialEq)]
pub struct ImageShape {
    /// Of all rows of the rank's sequences.
    pub positions: Positions,
    /// The first of them are here (sequence parallelism keeps the rest elsewhere).
    pub rows: usize,
    pub hidden: usize,
    /// First position of the image.
    pub start: usize,
    /// Its tokens.
    pub len: usize,
    /// In place of what was there; otherwise added to it.
    pub replace: bool,
}

impl ImageShape {
    /// The image's row that belongs to row `row`, if it is one of the image's.
    fn image_row(&self, row: usize) -> Option<usize> {
        let at = self.positions.position(row).checked_sub(self.start).filter(|at| *at < self.len)?;
        Some(row / self.positions.seq.max(1) * self.len + at)
    }
    /// The row that holds row `i` of the images, if it is here.
    fn row_of(&self, i: usize) -> Option<usize> {
        let (b, position) = (i / self.len.max(1), self.start + i % self.len.max(1));
        let [(start0, len0), (start1, len1)] = self.positions.chunks;
        let inside = |start: usize, len: usize| position.checked_sub(start).filter(|at| *at < len);
        let local = inside(start0, len0).or_else(|| inside(start1, len1).map(|at| len0 + at))?;
        Some(b * self.positions.seq + local).filter(|row| *row < self.rows)
    }
    fn image_rows(&self) -> usize {
        self.positions.batch * self.len
    }
    fn x_spec(&self) -> [usize; 2] {
        [self.rows, self.hidden]
    }
    fn image_spec(&self) -> [usize; 2] {
        [self.image_rows(), self.hidden]
    }

    /// `blocks` blocks of `entry`, with the pointers and the shape.
    fn issue(
        &self,
        op: &str,
        cuda: &mut CudaPrep,
        entry: &str,
        blocks: usize,
        pointers: &[DevPtr],
    ) -> Result<Issue, DeviceError> {
        check_multiple(op, "hidden", self.hidden, VECTOR)?;
        if blocks == 0 {
            return Ok(Issue::Nothing);
        }
        int_param(op, "rows", blocks)?;
        let replace = usize::from(self.replace).to_string();
        let kernel = cuda.kernel(SOURCE, entry, &[("REPLACE", replace)], 0)?;
        let [(start0, len0), (start1, len1)] = self.positions.chunks;
        let mut params: Vec<Param> = pointers.iter().map(|&p| p.into()).collect();
        for (what, n) in [
            ("rows", self.rows),
            ("hidden", self.hidden),
            ("rows of a sequence", self.positions.seq),
            ("start of chunk 0", start0),
            ("length of chunk 0", len0),
            ("start of chunk 1", start1),
            ("length of chunk 1", len1),
            ("start of the image", self.start),
            ("tokens of the image", self.len),
        ] {
            params.push(int_param(op, what, n)?.into());
        }
        let threads = (self.hidden / VECTOR).next_multiple_of(32).min(MAX_THREADS);
        cuda.launch(&kernel, Config::linear(blocks, threads as u32), &params)
    }
}

/// Args: x R bf16 `[rows,H]`, image R bf16 `[batch*len,H]`, out W bf16 `[rows,H]`.
#[derive(Debug, Clone, PartialEq)]
pub struct ImageRowsFwd {
    pub shape: ImageShape,
}

/// Args: dout R bf16 `[rows,H]`, [dx W bf16 `[rows,H]`: dout but zero in the image's rows, with `replace`; otherwise dx is dout],
/// dimage W bf16 `[batch*len,H]` (zero for rows that are not here).
#[derive(Debug, Clone, PartialEq)]
pub struct ImageRowsBwd {
    pub shape: ImageShape,
}

const SOURCE: KernelSource = KernelSource { name: "image_rows/kernel.cu", text: include_str!("kernel.cu") };
const MAX_THREADS: usize = 256;

impl ImageRowsFwd {
    fn run<T: Real>(&self, args: &mut CpuArgs<T>) -> Result<(), DeviceError> {
        let (s, h) = (&self.shape, self.shape.hidden.max(1));
        let (x, image, out) = (args.input(0)?, args.input(1)?, args.output(2)?);
        out.par_chunks_mut(h).enumerate().for_each(|(row, out)| {
            out.copy_from_slice(&x[row * h..][..h]);
            let Some(i) = s.image_row(row) else { return };
            for (o, y) in out.iter_mut().zip(&image[i * h..]) {
                *o = if s.replace { *y } else { (*o + *y).bf16() };
            }
        });
        Ok(())
    }
}

impl ImageRowsBwd {
    fn run<T: Real>(&self, args: &mut CpuArgs<T>) -> Result<(), DeviceError> {
        let (s, h, zero) = (&self.shape, self.shape.hidden.max(1), T::of(0.0));
        let dout = args.input(0)?;
        if s.replace {
            for (row, dx) in args.output(1)?.chunks_mut(h).enumerate() {
                match s.image_row(row) {
                    Some(_) => dx.fill(zero),
                    None => dx.copy_from_slice(&dout[row * h..][..h]),
                }
            }
        }
        for (i, dimage) in args.output(1 + usize::from(s.replace))?.chunks_mut(h).enumerate() {
            match s.row_of(i) {
                Some(row) => dimage.copy_from_slice(&dout[row * h..][..h]),
                None => dimage.fill(zero),
            }
        }
        Ok(())
    }
}

impl Op for ImageRowsFwd {
    fn name(&self) -> &'static str {
        "image_rows_fwd"
    }
    fn args(&self) -> Vec<ArgSpec> {
        let s = &self.shape;
        vec![
            ArgSpec::read("x", DType::Bf16, &s.x_spec()),
            ArgSpec::read("image", DType::Bf16, &s.image_spec()),
            ArgSpec::write("out", DType::Bf16, &s.x_spec()),
        ]
    }
    /// A sum for each added element.
    fn flops(&self) -> f64 {
        if self.shape.replace { 0.0 } else { (self.shape.image_rows() * self.shape.hidden) as f64 }
    }
    fn tolerance(&self, _arg: usize) -> f64 {
        tolerance(DType::Bf16, 1, 0)
    }
    cpu_reference!();
    fn prepare(
        &self,
        cuda: &mut CudaPrep,
        args: &[DevPtr],
        _workspace: DevPtr,
    ) -> Result<Issue, DeviceError> {
        self.shape.issue(self.name(), cuda, "image_rows_fwd", self.shape.rows, args)
    }
}

impl Op for ImageRowsBwd {
    fn name(&self) -> &'static str {
        "image_rows_bwd"
    }
    /// Without `replace` the image's rows alone are read and written.
    fn bytes(&self) -> f64 {
        let s = &self.shape;
        let all = s.x_spec().iter().product::<usize>();
        let image = s.image_rows() * s.hidden;
        let moved = if s.replace { 2 * all + image } else { 2 * image };
        (moved * DType::Bf16.size()) as f64
    }
    fn args(&self) -> Vec<ArgSpec> {
        let s = &self.shape;
        let mut args = vec![ArgSpec::read("dout", DType::Bf16, &s.x_spec())];
        if s.replace {
            args.push(ArgSpec::write("dx", DType::Bf16, &s.x_spec()));
        }
        args.push(ArgSpec::write("dimage", DType::Bf16, &s.image_spec()));
        args
    }
    fn tolerance(&self, _arg: usize) -> f64 {
        0.0
    }
    cpu_reference!();
    fn prepare(
        &self,
        cuda: &mut CudaPrep,
        args: &[DevPtr],
        _workspace: DevPtr,
    ) -> Result<Issue, DeviceError> {
        let s = &self.shape;
        let mut pointers = args.to_vec();
        let own = if s.replace { s.rows } else { 0 };
        if !s.replace {
            pointers.insert(1, args[0]); // in dx's place, not written
        }
        s.issue(self.name(), cuda, "image_rows_bwd", own + s.image_rows(), &pointers)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::*;

    fn cases() -> Vec<ImageShape> {
        let whole = ImageShape {
            positions: Positions::whole(2, 9),
            rows: 18,
            hidden: 8,
            start: 2,
            len: 4,
            replace: true,
        };
        // A context-parallel rank that holds the first half of the image; a tensor rank that holds the first rows alone.
        let part = Positions { batch: 2, seq: 6, chunks: [(0, 4), (12, 2)] };
        vec![
            ImageShape { replace: false, ..whole.clone() },
            ImageShape { positions: part, rows: 12, ..whole.clone() },
            ImageShape { rows: 9, ..whole.clone() },
            whole,
        ]
    }

    #[test]
    fn backward_is_the_forwards_gradient() {
        for shape in cases() {
            let (fwd, bwd) = (ImageRowsFwd { shape: shape.clone() }, ImageRowsBwd { shape: shape.clone() });
            let v = inputs(&fwd, 3);
            check_f32_against_f64(&fwd, &v);
            let dout = normals(shape.rows * shape.hidden, 9, 1.0);
            let mut b = vec![dout.clone()];
            b.resize(bwd.args().len(), vec![]);
            let after = run_f64(&bwd, &b);
            check_op_gradient(&fwd, &v, &[(2, &dout)], 0, if shape.replace { &after[1] } else { &dout });
            check_op_gradient(&fwd, &v, &[(2, &dout)], 1, &after[after.len() - 1]);
            assert!(after.iter().flatten().all(|x| x.is_finite()));
        }
    }
}
