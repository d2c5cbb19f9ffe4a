//! Causal depthwise convolution over tokens with SiLU, of Mamba-2 with a bias, of the gated delta net without: out[t, c] =
//! silu(bias`[c]` + sum_k w[c, k] in[t - 3 + k, c]), each sequence from zeros.
//!
//! The input is a column block of the in-projection's output ([z, x, B, C, dt]; [z, q, k, v, b, alpha]): columns `first..first + channels` of rows of
//! `width`. The backward writes whole rows of that output's gradient, with the parts of z and dt that other ops computed.

use super::support::{VECTOR, aligned, sigmoid};
use super::{ArgSpec, CpuArgs, Op, Real, check_multiple, int_param, tolerance};
use crate::cpu_reference;
use crate::device::DeviceError;
use crate::device::cuda::prep::{Config, CudaPrep, DevPtr, Issue, KernelSource, Param};
use crate::program::DType;
use rayon::prelude::*;

/// Width of the filter; `mamba_conv_kernel` and `linear_conv_kernel_dim` of every model.
pub const TAPS: usize = 4;

/// Where the convolution lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConvShape {
    pub batch: usize,
    /// Tokens of a sequence.
    pub seq: usize,
    /// x, B and C; q, k and v.
    pub channels: usize,
    /// Columns before them (z).
    pub first: usize,
    /// Columns after them (dt; b and alpha).
    pub tail: usize,
    pub bias: bool,
}

/// Args: in R bf16 [T, first + channels + tail], weight R bf16 [channels, 4], [bias R bf16 `[channels]` if
/// there is one], out W bf16 [T, channels].
#[derive(Debug, Clone, PartialEq)]
pub struct MambaConvFwd {
    pub shape: ConvShape,
}

/// Args: in, weight, bias as in [`MambaConvFwd`], dout R bf16 [T, channels], dz R bf16 [T, first], ddt R bf16 [T, tail], din W
/// bf16 [T, first + channels + tail], partial W f32 [batch * tiles, partial_cols] (dw as [channels, 4], then dbias; rows to be
/// summed).
#[derive(Debug, Clone, PartialEq)]
pub struct MambaConvBwd {
    pub shape: ConvShape,
}

/// Tokens of a thread: it holds them in registers with three more, in the backward pass with six. On an H200 16 in the backward pass took 6 %
/// longer: fewer rows are read again, but fewer warps fit.
const ROWS: usize = 8;
/// Warps of a block of the backward pass, one after the other along tokens: their sums are one row of the partial gradients.
const SLICES: usize = 4;
/// Channels of a thread: 8 bytes of bf16.
const CHANNELS: usize = 4;
const WARP: usize = 32;
const THREADS: usize = 128;
const _: () = assert!(THREADS == WARP * SLICES);
/// Tokens of a row of the partial gradients.
const TILE: usize = ROWS * SLICES;
const SOURCE: KernelSource = KernelSource { name: "mamba_conv/kernel.cu", text: include_str!("kernel.cu") };

impl ConvShape {
    pub fn tokens(&self) -> usize {
        self.batch * self.seq
    }
    pub fn width(&self) -> usize {
        self.first + self.channels + self.tail
    }
    fn tiles(&self) -> usize {
        self.seq.div_ceil(TILE)
    }
    pub fn partial_rows(&self) -> usize {
        self.batch * self.tiles()
    }
    /// Columns of the partial gradients: of the weights, then of the biases.
    pub fn partial_cols(&self) -> usize {
        (TAPS + usize::from(self.bias)) * self.channels
    }
    /// Arguments before those of the direction.
    fn own_args(&self) -> usize {
        2 + usize::from(self.bias)
    }
    fn inputs(&self) -> Vec<ArgSpec> {
        let bf16 = DType::Bf16;
        let mut args = vec![
            ArgSpec::read("in", bf16, &[self.tokens(), self.width()]),
            ArgSpec::read("weight", bf16, &[self.channels, TAPS]),
        ];
        if self.bias {
            args.push(ArgSpec::read("bias", bf16, &[self.channels]));
        }
        args
    }
    fn read<'a, T: Real>(&self, args: &mut CpuArgs<'a, T>) -> Result<Read<'a, T>, DeviceError> {
        Ok((args.input(0)?, args.input(1)?, if self.bias { Some(args.input(2)?) } else { None }))
    }
    /// Value before SiLU of token `t` of sequence `b`.
    fn before<T: Real>(&self, (x, w, bias): Read<T>, b: usize, t: usize, c: usize) -> T {
        let at = |t: usize| x[(b * self.seq + t) * self.width() + self.first + c];
        (0..TAPS).filter(|k| t + k + 1 >= TAPS).fold(bias.map_or(T::of(0.0), |bias| bias[c]), |sum, k| {
            sum + w[c * TAPS + k] * at(t + k + 1 - TAPS)
        })
    }
    /// Launches the kernel that is called as its op is, on a grid of `[blocks of columns, tiles of a sequence]`.
    fn issue(
        &self,
        op: &'static str,
        cuda: &mut CudaPrep,
        args: &[DevPtr],
        grid: [usize; 2],
        ints: &[(&str, usize)],
    ) -> Result<Issue, DeviceError> {
        if self.tokens() == 0 {
            return Ok(Issue::Nothing);
        }
        for (what, n) in [("channels", self.channels), ("columns before the channels", self.first)] {
            check_multiple(op, what, n, VECTOR)?;
        }
        check_multiple(op, "columns after the channels", self.tail, VECTOR)?;
        aligned(op, args)?;
        const MAX_GRID_YZ: usize = 65_535;
        let [blocks, tiles] = grid;
        if tiles > MAX_GRID_YZ || self.batch > MAX_GRID_YZ {
            return Err(DeviceError::Invalid(format!(
                "{op}: {} sequences of {} tokens exceed the grid; use a smaller micro-batch or sequence",
                self.batch, self.seq
            )));
        }
        let defines = [
            ("ROWS", ROWS.to_string()),
            ("SLICES", SLICES.to_string()),
            ("BIAS", usize::from(self.bias).to_string()),
        ];
        let kernel = cuda.kernel(SOURCE, op, &defines, 0)?;
        let mut params: Vec<Param> = args.iter().map(|&p| p.into()).collect();
        if !self.bias {
            params.insert(2, args[1].into()); // in the bias's place, not read; `bind` checks the number
        }
        for (what, n) in ints {
            params.push(int_param(op, what, *n)?.into());
        }
        let config = Config {
            grid: [blocks as u32, tiles as u32, self.batch as u32],
            block: [THREADS as u32, 1, 1],
            shared_bytes: 0,
        };
        cuda.launch(&kernel, config, &params)
    }
}

/// in, weight and bias.
type Read<'a, T> = (&'a [T], &'a [T], Option<&'a [T]>);

impl MambaConvFwd {
    fn run<T: Real>(&self, args: &mut CpuArgs<T>) -> Result<(), DeviceError> {
        let s = &self.shape;
        let read = s.read(args)?;
        args.output(s.own_args())?.par_chunks_mut(s.channels.max(1)).enumerate().for_each(|(row, out)| {
            for (c, out) in out.iter_mut().enumerate() {
                let p = s.before(read, row / s.seq, row % s.seq, c);
                *out = (p * sigmoid(p)).bf16();
            }
        });
        Ok(())
    }
}

impl MambaConvBwd {
    fn run<T: Real>(&self, args: &mut CpuArgs<T>) -> Result<(), DeviceError> {
        let s = &self.shape;
        let (read, at) = (s.read(args)?, s.own_args());
        let (dout, dz, ddt) = (args.input(at)?, args.input(at + 1)?, args.input(at + 2)?);
        let (din, partial) = (args.output(at + 3)?, args.output(at + 4)?);
        let (channels, seq) = (s.channels.max(1), s.seq.max(1));
        let mut g = vec![T::of(0.0); s.tokens() * s.channels];
        g.par_chunks_mut(channels).enumerate().for_each(|(row, g)| {
            for (c, g) in g.iter_mut().enumerate() {
                let p = s.before(read, row / seq, row % seq, c);
                let y = sigmoid(p);
                *g = dout[row * channels + c] * y * (T::of(1.0) + p * (T::of(1.0) - y));
            }
        });
        din.par_chunks_mut(s.width().max(1)).enumerate().for_each(|(row, out)| {
            let t = row % seq;
            out[..s.first].copy_from_slice(&dz[row * s.first..][..s.first]);
            out[s.first + s.channels..].copy_from_slice(&ddt[row * s.tail..][..s.tail]);
            for c in 0..s.channels {
                // Tap k of token t + 3 - k read this token.
                let sum = (0..TAPS)
                    .filter(|k| t + TAPS - 1 - k < s.seq)
                    .map(|k| read.1[c * TAPS + k] * g[(row + TAPS - 1 - k) * channels + c])
                    .sum::<T>();
                out[s.first + c] = sum.bf16();
            }
        });
        partial.par_chunks_mut(s.partial_cols().max(1)).enumerate().for_each(|(tile, out)| {
            let (b, t0) = (tile / s.tiles(), tile % s.tiles() * TILE);
            let rows = t0..(t0 + TILE).min(s.seq);
            for c in 0..s.channels {
                let grad = |t: usize| g[(b * s.seq + t) * channels + c];
                for k in 0..TAPS {
                    let from = rows.clone().filter(|t| t + k + 1 >= TAPS);
                    let x = |t: usize| read.0[(b * s.seq + t + k + 1 - TAPS) * s.width() + s.first + c];
                    out[c * TAPS + k] = from.map(|t| grad(t) * x(t)).sum::<T>().f32();
                }
                if s.bias {
                    out[TAPS * channels + c] = rows.clone().map(grad).sum::<T>().f32();
                }
            }
        });
        Ok(())
    }
}

impl Op for MambaConvFwd {
    fn name(&self) -> &'static str {
        "mamba_conv_fwd"
    }
    fn args(&self) -> Vec<ArgSpec> {
        let s = &self.shape;
        let mut args = s.inputs();
        args.push(ArgSpec::write("out", DType::Bf16, &[s.tokens(), s.channels]));
        args
    }
    /// Four products with sums, SiLU (five).
    fn flops(&self) -> f64 {
        (self.shape.tokens() * self.shape.channels * (2 * TAPS + 5)) as f64
    }
    /// The channels' columns alone are read.
    fn bytes(&self) -> f64 {
        (self.shape.tokens() * self.shape.channels * 4 + self.shape.partial_cols() * 2) as f64
    }
    fn tolerance(&self, _arg: usize) -> f64 {
        tolerance(DType::Bf16, TAPS, 0)
    }
    cpu_reference!();
    fn prepare(
        &self,
        cuda: &mut CudaPrep,
        args: &[DevPtr],
        _workspace: DevPtr,
    ) -> Result<Issue, DeviceError> {
        let s = &self.shape;
        let ints = [("width", s.width()), ("first", s.first), ("channels", s.channels), ("seq", s.seq)];
        let grid = [(s.channels / CHANNELS).div_ceil(THREADS), s.seq.div_ceil(ROWS)];
        s.issue(self.name(), cuda, args, grid, &ints)
    }
}

impl Op for MambaConvBwd {
    fn name(&self) -> &'static str {
        "mamba_conv_bwd"
    }
    fn args(&self) -> Vec<ArgSpec> {
        let s = &self.shape;
        let (bf16, t) = (DType::Bf16, s.tokens());
        let mut args = s.inputs();
        args.push(ArgSpec::read("dout", bf16, &[t, s.channels]));
        args.push(ArgSpec::read("dz", bf16, &[t, s.first]));
        args.push(ArgSpec::read("ddt", bf16, &[t, s.tail]));
        args.push(ArgSpec::write("din", bf16, &[t, s.width()]));
        args.push(ArgSpec::write("partial", DType::F32, &[s.partial_rows(), s.partial_cols()]));
        args
    }
    /// The forward again, the slope of SiLU (five), and both gradients of the products.
    fn flops(&self) -> f64 {
        (self.shape.tokens() * self.shape.channels * (6 * TAPS + 11)) as f64
    }
    /// The channels' columns alone of `in` are read; dz and ddt are copied.
    fn bytes(&self) -> f64 {
        let s = &self.shape;
        let per_token = 3 * s.channels + 2 * (s.first + s.tail);
        (s.tokens() * per_token * 2 + s.partial_rows() * s.partial_cols() * 4) as f64
    }
    fn tolerance(&self, arg: usize) -> f64 {
        if arg == self.shape.own_args() + 4 {
            tolerance(DType::F32, TILE, 0)
        } else {
            tolerance(DType::Bf16, TAPS, 0)
        }
    }
    cpu_reference!();
    fn prepare(
        &self,
        cuda: &mut CudaPrep,
        args: &[DevPtr],
        _workspace: DevPtr,
    ) -> Result<Issue, DeviceError> {
        let s = &self.shape;
        let ints = [
            ("width", s.width()),
            ("first", s.first),
            ("channels", s.channels),
            ("tail", s.tail),
            ("seq", s.seq),
        ];
        let grid = [(s.width() / CHANNELS).div_ceil(WARP), s.tiles()];
        s.issue(self.name(), cuda, args, grid, &ints)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::*;

    fn check(shape: ConvShape) {
        let (fwd, bwd) = (MambaConvFwd { shape }, MambaConvBwd { shape });
        let at = shape.own_args();
        let v = inputs(&fwd, 2);
        check_f32_against_f64(&fwd, &v);
        let b = [v[..at].to_vec(), inputs(&bwd, 2)[at..].to_vec()].concat();
        check_f32_against_f64(&bwd, &b);
        let after = run_f64(&bwd, &b);
        let (c, w) = (shape.channels, shape.width());
        // Columns outside the channels carry what was given.
        let mut din = after[at + 3].clone();
        for t in 0..shape.tokens() {
            let row = &mut din[t * w..][..w];
            assert_eq!(row[..shape.first], b[at + 1][t * shape.first..][..shape.first]);
            assert_eq!(row[shape.first + c..], b[at + 2][t * shape.tail..][..shape.tail]);
            row[..shape.first].fill(0.0);
            row[shape.first + c..].fill(0.0);
        }
        let outs = [(at, b[at].as_slice())];
        check_op_gradient(&fwd, &v, &outs, 0, &din);
        let sum =
            |i: usize| (0..shape.partial_rows()).map(|r| after[at + 4][r * shape.partial_cols() + i]).sum();
        let dw: Vec<f64> = (0..TAPS * c).map(sum).collect();
        check_op_gradient(&fwd, &v, &outs, 1, &dw);
        if shape.bias {
            let db: Vec<f64> = (TAPS * c..(TAPS + 1) * c).map(sum).collect();
            check_op_gradient(&fwd, &v, &outs, 2, &db);
        }
    }

    #[test]
    fn backward_is_the_forwards_gradient() {
        check(ConvShape { batch: 2, seq: 5, channels: 3, first: 2, tail: 1, bias: true });
        check(ConvShape { batch: 2, seq: 5, channels: 3, first: 2, tail: 1, bias: false });
        check(ConvShape { batch: 1, seq: 2, channels: 2, first: 1, tail: 2, bias: true });
        // Two tiles.
        check(ConvShape { batch: 1, seq: TILE + 3, channels: 1, first: 1, tail: 1, bias: true });
    }

    #[test]
    fn tokens_see_no_later_ones() {
        let shape = ConvShape { batch: 1, seq: 9, channels: 1, first: 0, tail: 0, bias: true };
        let fwd = MambaConvFwd { shape };
        let mut v = inputs(&fwd, 4);
        let before = run_f64(&fwd, &v)[3].clone();
        v[0][4] += 1.0;
        let after = run_f64(&fwd, &v)[3].clone();
        let moved: Vec<bool> = before.iter().zip(&after).map(|(a, b)| a != b).collect();
        assert_eq!(moved, [false, false, false, false, true, true, true, true, false]);
    }
}
