//! Pictures of dots on two axes: the sweep's frontier of gain over memory, and the clock over the blocks of a run.

use super::canvas::{
    Align, Canvas, GREEN, GREY, GRID, INK, Look, SIZES, Scale, Shape, TEXT, draw, text_width,
};
use super::data::{Group, Run, label, number};
use super::figure::Figure;
use super::html::{Cell, Table, shown};
use crate::measure::stats::median;
use plotters::style::WHITE;
use std::collections::BTreeMap;

const PLOT: f64 = 230.0;
const HEAD: f64 = 24.0;
const FOOT: f64 = 42.0;
const MARGIN: f64 = 58.0;
/// Dots of a picture of blocks that are all drawn; above, each pixel's lowest and highest are.
const ALL_DRAWN: usize = 1500;

/// Axes, grid and titles; returns the plot's corners.
fn axes(c: &mut Canvas, width: f64, x: &Scale, y: &Scale, title: &str, axis: &str) {
    let (left, right, top, bottom) = (MARGIN, width - 10.0, HEAD, HEAD + PLOT);
    for (value, label) in y.ticks(6) {
        c.line(&[(left, y.at(value)), (right, y.at(value))], GRID, 0.75, false);
        c.text(&label, (left - 6.0, y.at(value)), INK, Align::Right);
    }
    let mut free_from = f64::NEG_INFINITY;
    for (value, label) in x.ticks(((right - left) / 90.0) as usize) {
        let half = text_width(&label, TEXT) / 2.0;
        let middle = x.at(value).min(right - half + 8.0);
        if middle - half > free_from {
            c.line(&[(x.at(value), bottom), (x.at(value), bottom + 4.0)], INK, 1.0, false);
            c.text(&label, (middle, bottom + 13.0), INK, Align::Middle);
            free_from = middle + half + 6.0;
        }
    }
    c.line(&[(left, top), (left, bottom), (right, bottom)], INK, 1.0, false);
    c.text(title, (4.0, HEAD / 2.0 - 3.0), INK, Align::Left);
    c.text(axis, (right, bottom + 31.0), INK, Align::Right);
}

/// A run of the sweep.
struct Point {
    name: String,
    memory_mib: f64,
    gain: f64,
    interval: Option<(f64, f64)>,
    on_frontier: bool,
}

/// Gain over memory of a job's runs with graphs, if they captured different things; `None` for a single one.
pub fn frontier(group: &Group) -> Option<Figure> {
    let with_graphs: Vec<&Run> = group
        .runs
        .iter()
        .filter(|r| r.graph().is_some() && r.sides.len() > 1 && r.cell("aa").is_empty())
        .collect();
    let mut scopes: Vec<String> = with_graphs.iter().map(|r| r.scope()).collect();
    scopes.sort();
    scopes.dedup();
    if scopes.len() < 2 {
        return None;
    }
    let mut points: Vec<Point> = with_graphs.iter().filter_map(|r| point(r, &group.runs)).collect();
    let left_out = with_graphs.len() - points.len();
    let beaten = |a: &Point| {
        points.iter().any(|b| {
            b.gain >= a.gain
                && b.memory_mib <= a.memory_mib
                && (b.gain > a.gain || b.memory_mib < a.memory_mib)
        }) || a.gain < 0.0
    };
    let on: Vec<bool> = points.iter().map(|p| !beaten(p)).collect();
    points.iter_mut().zip(on).for_each(|(p, on)| p.on_frontier = on);
    let mut table = Table::new(
        "frontier",
        &["", "captured", "more memory than eager, MiB", "gain, %", "low, %", "high, %", "on the frontier"],
    );
    for (number, p) in (1..).zip(&points) {
        table.rows.push(vec![
            Cell::text(format!("{number}")),
            Cell::text(&p.name),
            Cell::Figure(p.memory_mib),
            Cell::Figure(p.gain),
            Cell::maybe(p.interval.map(|i| i.0)),
            Cell::maybe(p.interval.map(|i| i.1)),
            Cell::text(if p.on_frontier { "yes" } else { "no" }),
        ]);
    }
    let mut notes = vec![];
    if !points.is_empty() {
        notes.push("Numbers are the table's lines; 0 is eager. The dashed line joins what nothing else beats in both gain and memory. Points whose intervals overlap are not told apart by these data.".to_owned());
    }
    if points.iter().any(|p| p.interval.is_none()) {
        notes.push("A hollow mark has no interval.".into());
    }
    if left_out > 0 {
        notes.push(format!(
            "{left_out} of {} runs are not drawn: a speedup or a figure of memory is missing.",
            with_graphs.len()
        ));
    }
    Some(Figure {
        title: "Sweep: gain over memory".into(),
        what: "Each point is what was captured: up is faster, left is smaller.".into(),
        svg: (!points.is_empty()).then(|| draw_frontier(&points)),
        legend: vec![
            (Look::new(GREEN, Shape::Diamond), "on the frontier".into()),
            (Look::new(GREY, Shape::Circle), "beaten by another".into()),
            (Look::new(INK, Shape::Square), "eager".into()),
        ],
        notes,
        table,
    })
}

fn point(run: &Run, runs: &[Run]) -> Option<Point> {
    let (eager, graph) = (*run.sides.iter().find(|r| r.cell("arm") == "eager")?, run.graph()?);
    let percent = |x: f64| (x - 1.0) * 100.0;
    let interval = run.figure("speedup_ci95_low").zip(run.figure("speedup_ci95_high"));
    Some(Point {
        name: label(run, runs),
        memory_mib: number(graph, "peak_memory_mib")? + number(graph, "graph_memory_mib")?
            - number(eager, "peak_memory_mib")?,
        gain: percent(run.figure("speedup")?),
        interval: interval.map(|(low, high)| (percent(low), percent(high))),
        on_frontier: false,
    })
}

fn draw_frontier(points: &[Point]) -> [String; 2] {
    let xs = points.iter().map(|p| p.memory_mib);
    let ys = points
        .iter()
        .flat_map(|p| [p.gain, p.interval.map_or(p.gain, |i| i.0), p.interval.map_or(p.gain, |i| i.1)]);
    let range = |v: &mut dyn Iterator<Item = f64>| v.fold((0.0f64, 0.0f64), |(l, h), x| (l.min(x), h.max(x)));
    let ((x0, x1), (y0, y1)) = (range(&mut xs.into_iter()), range(&mut ys.into_iter()));
    let (dx, dy) = ((x1 - x0).max(1.0) * 0.06, (y1 - y0).max(0.1) * 0.1);
    SIZES.map(|size| {
        draw(size.width, HEAD + PLOT + FOOT, |c| {
            let x = Scale::new(x0 - dx, x1 + dx, (MARGIN, size.width - 10.0));
            let y = Scale::new(y0 - dy, y1 + dy, (HEAD + PLOT, HEAD));
            axes(c, size.width, &x, &y, "gain [%]", "more memory than eager [MiB]");
            c.line(&[(MARGIN, y.at(0.0)), (size.width - 10.0, y.at(0.0))], GREY, 1.0, false);
            let mut front: Vec<&Point> = points.iter().filter(|p| p.on_frontier).collect();
            front.sort_by(|a, b| a.memory_mib.total_cmp(&b.memory_mib));
            let mut steps = vec![(x.at(0.0), y.at(0.0))];
            for p in front {
                let (from, to) = (steps[steps.len() - 1], (x.at(p.memory_mib), y.at(p.gain)));
                steps.extend([(to.0, from.1), to]);
            }
            if steps.len() > 1 {
                c.line(&steps, GREEN, 1.5, true);
            }
            let marks: Vec<(f64, f64)> =
                std::iter::once((0.0, 0.0)).chain(points.iter().map(|p| (p.memory_mib, p.gain))).collect();
            for p in points {
                let at = (x.at(p.memory_mib), y.at(p.gain));
                let look = if p.on_frontier {
                    Look::new(GREEN, Shape::Diamond)
                } else {
                    Look::new(GREY, Shape::Circle)
                };
                if let Some((low, high)) = p.interval {
                    c.line(&[(at.0, y.at(low)), (at.0, y.at(high))], look.color, 1.5, false);
                }
                c.mark(at, 5.0, if p.interval.is_some() { look } else { look.hollow() });
            }
            c.mark((x.at(0.0), y.at(0.0)), 4.5, Look::new(INK, Shape::Square));
            let places: Vec<(f64, f64)> = marks.iter().map(|(mx, my)| (x.at(*mx), y.at(*my))).collect();
            for (number, place) in numbers(&places, size.width).into_iter().enumerate() {
                // Lines behind a number would cross it.
                let half = text_width(&number.to_string(), TEXT) / 2.0;
                c.rect((place.0 - half, place.1 - 6.0), (place.0 + half, place.1 + 6.0), WHITE);
                c.text(&number.to_string(), place, INK, Align::Middle);
            }
        })
    })
}

/// A place for each mark's number, near it and clear of marks and of other numbers.
fn numbers(marks: &[(f64, f64)], width: f64) -> Vec<(f64, f64)> {
    const TRIES: [(f64, f64); 8] = [
        (1.0, 0.0),
        (-1.0, 0.0),
        (0.0, -1.0),
        (0.0, 1.0),
        (1.0, -1.0),
        (-1.0, -1.0),
        (1.0, 1.0),
        (-1.0, 1.0),
    ];
    let mut placed: Vec<(f64, f64)> = Vec::new();
    for (number, (x, y)) in marks.iter().enumerate() {
        let half = text_width(&number.to_string(), TEXT) / 2.0;
        let clear = |&(px, py): &(f64, f64)| {
            let apart =
                |(ox, oy): &(f64, f64), dx: f64, dy: f64| (px - ox).abs() >= dx || (py - oy).abs() >= dy;
            placed.iter().all(|o| apart(o, half * 2.0 + 4.0, TEXT))
                && marks.iter().all(|m| apart(m, half + 6.0, TEXT * 0.9))
                && px - half > MARGIN
                && px + half < width
                && py > HEAD
                && py < HEAD + PLOT
        };
        let tries = [1.0, 2.0, 3.0, 4.0].iter().flat_map(|far| {
            TRIES.iter().map(move |(dx, dy)| (x + dx * (half + 9.0) * far, y + dy * 15.0 * far))
        });
        let fallback = (x + half + 9.0, *y);
        placed.push(tries.into_iter().find(|p| clear(p)).unwrap_or(fallback));
    }
    placed
}

/// Number of a block, its side, its clock.
type BlockDot = (usize, usize, f64);

/// The SM clock over the blocks of a run; `None` where no block has one.
pub fn clocks_over_blocks(run: &Run, title: String) -> Option<Figure> {
    let blocks = run.file.blocks.as_ref()?.get(run.id())?;
    let dots: Vec<BlockDot> =
        blocks.iter().enumerate().filter_map(|(at, b)| Some((at, b.side, b.sm_clock_mhz?))).collect();
    if dots.is_empty() {
        return None;
    }
    let low = dots.iter().map(|d| d.2).fold(f64::INFINITY, f64::min);
    let high = dots.iter().map(|d| d.2).fold(0.0, f64::max);
    let pad = ((high - low) * 0.1).max(high * 0.01);
    let last = (blocks.len() - 1) as f64;
    let svg = SIZES.map(|size| {
        draw(size.width, HEAD + PLOT + FOOT, |c| {
            let x = Scale::new(-0.5, last + 0.5, (MARGIN, size.width - 10.0));
            let y = Scale::new(low - pad, high + pad, (HEAD + PLOT, HEAD));
            axes(c, size.width, &x, &y, "SM clock [MHz]", "blocks, in their order");
            for (at, side, clock) in thin(&dots, |at| x.at(at as f64)) {
                c.mark(
                    (x.at(at as f64), y.at(clock)),
                    if dots.len() > 200 { 1.8 } else { 3.4 },
                    Look::side(side),
                );
            }
        })
    });
    let mut table = Table::new(
        "blocks",
        &["arm", "blocks", "lowest MHz", "median MHz", "highest MHz", "highest °C", "median W"],
    );
    for side in 0..run.sides.len().min(2) {
        let clocks: Vec<f64> = dots.iter().filter(|d| d.1 == side).map(|d| d.2).collect();
        let of_side = || blocks.iter().filter(move |b| b.side == side);
        let watts: Vec<f64> = of_side().filter_map(|b| b.power_w).collect();
        let hottest = of_side()
            .filter_map(|b| b.temperature_c)
            .fold(None, |m: Option<f64>, t| Some(m.map_or(t, |m| m.max(t))));
        table.rows.push(vec![
            Cell::text(run.side_name(side)),
            Cell::Figure(of_side().count() as f64),
            Cell::maybe(clocks.iter().copied().reduce(f64::min)),
            Cell::maybe(median(&clocks)),
            Cell::maybe(clocks.iter().copied().reduce(f64::max)),
            Cell::maybe(hottest),
            Cell::maybe(median(&watts)),
        ]);
    }
    let notes = if dots.len() > ALL_DRAWN {
        vec![format!(
            "{} blocks are too many to draw each: every pixel shows its lowest and its highest, of each arm.",
            dots.len()
        )]
    } else {
        vec![]
    };
    Some(Figure {
        title,
        what: format!("The clock while each block's last step ran ({} to {} MHz).", shown(low), shown(high)),
        svg: Some(svg),
        legend: (0..run.sides.len().min(2)).map(|s| (Look::side(s), run.side_name(s))).collect(),
        notes,
        table,
    })
}

/// The lowest and the highest of each pixel and side, when there are many.
fn thin(dots: &[BlockDot], x: impl Fn(usize) -> f64) -> Vec<BlockDot> {
    if dots.len() <= ALL_DRAWN {
        return dots.to_vec();
    }
    let mut kept: BTreeMap<(i64, usize), [BlockDot; 2]> = BTreeMap::new();
    for dot in dots {
        let [low, high] = kept.entry((x(dot.0) as i64, dot.1)).or_insert([*dot; 2]);
        if dot.2 < low.2 {
            *low = *dot;
        }
        if dot.2 > high.2 {
            *high = *dot;
        }
    }
    kept.into_values().flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_keep_clear_of_each_other() {
        let marks = [(100.0, 100.0), (102.0, 101.0), (104.0, 99.0), (100.0, 104.0), (330.0, 60.0)];
        let places = numbers(&marks, 344.0);
        for (i, a) in places.iter().enumerate() {
            for b in &places[i + 1..] {
                assert!((a.0 - b.0).abs() > 10.0 || (a.1 - b.1).abs() >= TEXT, "{places:?}");
            }
        }
    }
}
