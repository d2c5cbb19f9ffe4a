//! `--extrapolate`: the step time of the recipe's own number of micro-batches, from steps of a few.
//!
//! A step is what happens once (tokens, reduction, optimizer) and what every micro-batch adds, so its time is a
//! line over the number of micro-batches. 1, 2 and 3 are timed, each as a program of its own; how far they lie off
//! the line goes into the error.

/// Micro-batches of the programs that are timed.
pub const COUNTS: [usize; 3] = [1, 2, 3];

/// One program's step time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Point {
    pub micro_batches: usize,
    /// Median step time and the half-width of its 95 % interval.
    pub step_time_ms: f64,
    pub half_width_ms: f64,
}

/// A step time read off the line.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Extrapolated {
    pub step_time_ms: f64,
    /// 95 % error: that of the points carried along the line, and their misfit carried as far as if it were
    /// all a bend.
    pub error_ms: f64,
    /// Largest distance of a point from the line, relative to its time.
    pub misfit: f64,
}

/// Columns of one run.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Extrapolation {
    /// Micro-batches that the figures are for, and those that were timed.
    pub to: usize,
    pub from: Vec<usize>,
    /// By side.
    pub arms: [Option<Extrapolated>; 2],
}

impl Extrapolation {
    /// Speedup and its 95 % error; errors of the arms are taken as independent.
    pub fn speedup(&self) -> Option<(f64, f64)> {
        let [Some(a), Some(b)] = &self.arms else { return None };
        let ratio = a.step_time_ms / b.step_time_ms;
        let relative = (a.error_ms / a.step_time_ms).hypot(b.error_ms / b.step_time_ms);
        Some((ratio, ratio * relative))
    }
}

/// Least squares line through the points, read at `to`. `None` under three points, where nothing is left to
/// judge the line by, or when the line gives no time.
pub fn fit(points: &[Point], to: usize) -> Option<Extrapolated> {
    let n = points.len() as f64;
    if points.len() < COUNTS.len() {
        return None;
    }
    let x = |p: &Point| p.micro_batches as f64;
    let mean_x = points.iter().map(x).sum::<f64>() / n;
    let mean_y = points.iter().map(|p| p.step_time_ms).sum::<f64>() / n;
    let spread: f64 = points.iter().map(|p| (x(p) - mean_x).powi(2)).sum();
    let slope = points.iter().map(|p| (x(p) - mean_x) * (p.step_time_ms - mean_y)).sum::<f64>() / spread;
    let at = |x: f64| mean_y + slope * (x - mean_x);
    let reach = to as f64 - mean_x;
    // The line's value is a weighted sum of the points: their errors go along with the same weights.
    let carried: f64 =
        points.iter().map(|p| ((1.0 / n + reach * (x(p) - mean_x) / spread) * p.half_width_ms).powi(2)).sum();
    let residual = |p: &Point| (p.step_time_ms - at(x(p))).abs();
    let bend = points.iter().map(residual).fold(0.0, f64::max);
    let far = reach.abs() / spread.sqrt();
    let step_time_ms = at(to as f64);
    let error_ms = carried.sqrt().hypot(bend * (1.0 + far));
    let misfit = points.iter().map(|p| residual(p) / p.step_time_ms).fold(0.0, f64::max);
    let sound = step_time_ms.is_finite() && step_time_ms > 0.0 && error_ms.is_finite();
    sound.then_some(Extrapolated { step_time_ms, error_ms, misfit })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn points(times: [f64; 3], half_width_ms: f64) -> Vec<Point> {
        COUNTS
            .iter()
            .zip(times)
            .map(|(n, t)| Point { micro_batches: *n, step_time_ms: t, half_width_ms })
            .collect()
    }

    #[test]
    fn a_line_is_followed_exactly() {
        let found = fit(&points([13.0, 23.0, 33.0], 0.0), 64).unwrap();
        assert!((found.step_time_ms - 643.0).abs() < 1e-9 && found.error_ms < 1e-9 && found.misfit < 1e-12);
    }

    #[test]
    fn errors_grow_with_the_distance_and_with_a_bend() {
        let near = fit(&points([13.0, 23.0, 33.0], 0.1), 4).unwrap();
        let far = fit(&points([13.0, 23.0, 33.0], 0.1), 64).unwrap();
        // Slope error 0.1 / sqrt(2) a micro-batch over 62 of them.
        assert!((far.error_ms - (0.1f64 / 3f64.sqrt()).hypot(62.0 * 0.1 / 2f64.sqrt())).abs() < 1e-9);
        assert!(far.error_ms > near.error_ms);
        let bent = fit(&points([13.0, 23.5, 33.0], 0.1), 64).unwrap();
        assert!(bent.error_ms > 10.0 && (bent.misfit - 1.0 / 3.0 / 23.5).abs() < 1e-9);
    }

    #[test]
    fn too_little_gives_nothing() {
        assert_eq!(fit(&points([1.0, 2.0, 3.0], 0.0)[..2], 8), None);
        assert_eq!(fit(&points([3.0, 2.0, 1.0], 0.0), 8), None);
        assert_eq!(fit(&points([f64::NAN, 2.0, 3.0], 0.0), 8), None);
    }

    #[test]
    fn the_speedup_carries_both_errors() {
        let arm = |step_time_ms, error_ms| Some(Extrapolated { step_time_ms, error_ms, misfit: 0.0 });
        let both = Extrapolation { to: 8, from: vec![1, 2, 3], arms: [arm(100.0, 3.0), arm(50.0, 2.0)] };
        let (ratio, error) = both.speedup().unwrap();
        assert!((ratio - 2.0).abs() < 1e-12 && (error - 2.0 * 0.05).abs() < 1e-12);
        assert_eq!(Extrapolation::default().speedup(), None);
    }

    proptest! {
        #[test]
        fn any_noisy_line_is_within_its_error(
            once in 0.0f64..50.0, each in 0.5f64..50.0, noise in prop::array::uniform3(-1.0f64..1.0), to in 1usize..200,
        ) {
            let half = 0.01 * each;
            let times = [1.0, 2.0, 3.0].map(|n| once + each * n);
            let noisy = [0, 1, 2].map(|i| times[i] + half * noise[i]);
            let found = fit(&points(noisy, half), to).unwrap();
            let truth = once + each * to as f64;
            // Errors add at most linearly: sqrt(3) times the root of squares.
            prop_assert!((found.step_time_ms - truth).abs() <= 3f64.sqrt() * found.error_ms + 1e-9);
        }
    }
}
