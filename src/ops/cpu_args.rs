//! Arguments of a CPU reference: typed slices, taken by position.

use crate::device::DeviceError;
use half::bf16;
use std::iter::Sum;
use std::ops::{Add, AddAssign, Div, Mul, MulAssign, Neg, Sub};

/// Element type that a reference computes in: `f32` rounds stores to bf16, `f64` does not round.
pub trait Real:
    Copy
    + Send
    + Sync
    + PartialOrd
    + Default
    + std::fmt::Debug
    + 'static
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + Neg<Output = Self>
    + AddAssign
    + MulAssign
    + Sum
{
    fn of(x: f64) -> Self;
    fn f64(self) -> f64;
    /// The value as a bf16 store would keep it; unchanged for f64.
    fn bf16(self) -> Self;
    /// The value as an fp32 store would keep it.
    fn f32(self) -> Self;
    fn exp(self) -> Self;
    fn ln(self) -> Self;
    fn sqrt(self) -> Self;
    fn max(self, other: Self) -> Self;
    /// C`[m,n]` = alpha * op(A) op(B) + beta * C by strides (row, column), for the references of products.
    #[allow(clippy::too_many_arguments)]
    fn gemm(
        m: usize,
        k: usize,
        n: usize,
        a: &[Self],
        sa: (usize, usize),
        b: &[Self],
        sb: (usize, usize),
        beta: Self,
        c: &mut [Self],
        sc: (usize, usize),
    );
}

macro_rules! real {
    ($t:ty, $bf16:expr, $f32:expr, $gemm:path) => {
        impl Real for $t {
            fn of(x: f64) -> Self {
                x as $t
            }
            fn f64(self) -> f64 {
                self as f64
            }
            fn bf16(self) -> Self {
                $bf16(self)
            }
            fn f32(self) -> Self {
                $f32(self)
            }
            fn exp(self) -> Self {
                <$t>::exp(self)
            }
            fn ln(self) -> Self {
                <$t>::ln(self)
            }
            fn sqrt(self) -> Self {
                <$t>::sqrt(self)
            }
            fn max(self, other: Self) -> Self {
                <$t>::max(self, other)
            }
            fn gemm(
                m: usize,
                k: usize,
                n: usize,
                a: &[Self],
                sa: (usize, usize),
                b: &[Self],
                sb: (usize, usize),
                beta: Self,
                c: &mut [Self],
                sc: (usize, usize),
            ) {
                if m == 0 || n == 0 {
                    return;
                }
                let last = |rows: usize, cols: usize, s: (usize, usize)| {
                    if rows * cols == 0 { 0 } else { (rows - 1) * s.0 + (cols - 1) * s.1 + 1 }
                };
                assert!(
                    a.len() >= last(m, k, sa) && b.len() >= last(k, n, sb) && c.len() >= last(m, n, sc),
                    "gemm operands are too short"
                );
                // SAFETY: the assertion above keeps every access of the strided product inside its slice.
                unsafe {
                    $gemm(
                        m,
                        k,
                        n,
                        1.0,
                        a.as_ptr(),
                        sa.0 as isize,
                        sa.1 as isize,
                        b.as_ptr(),
                        sb.0 as isize,
                        sb.1 as isize,
                        beta,
                        c.as_mut_ptr(),
                        sc.0 as isize,
                        sc.1 as isize,
                    );
                }
            }
        }
    };
}
real!(f32, |x: f32| bf16::from_f32(x).to_f32(), |x: f32| x, matrixmultiply::sgemm);
real!(f64, |x: f64| x, |x: f64| x, matrixmultiply::dgemm);

/// One argument's memory.
#[derive(Debug)]
pub enum Slot<'a, T> {
    In(&'a [T]),
    Out(&'a mut [T]),
    IntIn(&'a [i32]),
    IntOut(&'a mut [i32]),
    /// Taken already.
    Taken,
}

/// The arguments of one launch on the CPU, in the order of `Op::args`. Each is taken once.
///
/// Float buffers (bf16 and f32 alike) are slices of `T`; the reference rounds with [`Real::bf16`] when it
/// stores to a bf16 argument. `I32`, `U32` and `U8` buffers are slices of `i32`; `U32` words keep their bits.
#[derive(Debug)]
pub struct CpuArgs<'a, T> {
    pub slots: Vec<Slot<'a, T>>,
    /// What the op is called, for messages.
    pub op: &'static str,
}

impl<'a, T: Real> CpuArgs<'a, T> {
    pub fn new(op: &'static str, slots: Vec<Slot<'a, T>>) -> Self {
        Self { slots, op }
    }
    fn take(&mut self, i: usize) -> Slot<'a, T> {
        self.slots.get_mut(i).map_or(Slot::Taken, |s| std::mem::replace(s, Slot::Taken))
    }
    fn wrong<R>(&self, i: usize, want: &str) -> Result<R, DeviceError> {
        Err(DeviceError::internal(format!("{}: argument {i} is not {want}", self.op)))
    }
    /// Float input.
    pub fn input(&mut self, i: usize) -> Result<&'a [T], DeviceError> {
        match self.take(i) {
            Slot::In(s) => Ok(s),
            Slot::Out(s) => Ok(s),
            _ => self.wrong(i, "a float input"),
        }
    }
    /// Float output or updated argument.
    pub fn output(&mut self, i: usize) -> Result<&'a mut [T], DeviceError> {
        match self.take(i) {
            Slot::Out(s) => Ok(s),
            _ => self.wrong(i, "a float output"),
        }
    }
    /// Integer input.
    pub fn ints(&mut self, i: usize) -> Result<&'a [i32], DeviceError> {
        match self.take(i) {
            Slot::IntIn(s) => Ok(s),
            Slot::IntOut(s) => Ok(s),
            _ => self.wrong(i, "an integer input"),
        }
    }
    /// Integer output or updated argument.
    pub fn ints_out(&mut self, i: usize) -> Result<&'a mut [i32], DeviceError> {
        match self.take(i) {
            Slot::IntOut(s) => Ok(s),
            _ => self.wrong(i, "an integer output"),
        }
    }
}
