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

/// Which gain a frontier is of: the speedup's column and what the picture is called.
#[derive(Debug, Clone, Copy)]
struct Ratio {
    column: &'static str,
    table: &'static str,
    title: &'static str,
}

const RATIOS: [Ratio; 2] = [
    Ratio { column: "speedup", table: "frontier", title: "Sweep: gain over memory" },
    Ratio {
        column: "speedup_modelled",
        table: "frontier_modelled",
        title: "Sweep: gain over memory, with the modelled host time",
    },
];

/// Gain over memory of a job's runs with graphs, if they captured different things: as measured, and under the host
/// model where there is one.
pub fn frontiers(group: &Group) -> Vec<Figure> {
    let with_graphs: Vec<&Run> = group
        .runs
        .iter()
        .filter(|r| r.graph().is_some() && r.sides.len() > 1 && r.cell("aa").is_empty())
        .collect();
    let mut scopes: Vec<String> = with_graphs.iter().map(|r| r.scope()).collect();
    scopes.sort();
    scopes.dedup();
    if scopes.len() < 2 {
        return Vec::new();
    }
    RATIOS.iter().filter_map(|ratio| frontier(*ratio, &with_graphs, &group.runs)).collect()
}

/// `None` where no run has a place, as on a CPU.
fn frontier(ratio: Ratio, with_graphs: &[&Run], runs: &[Run]) -> Option<Figure> {
    let mut points: Vec<Point> = with_graphs.iter().filter_map(|r| point(r, runs, ratio.column)).collect();
    if points.is_empty() {
        return None;
    }
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
        ratio.table,
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
    let eager = eager_is_drawn(&points);
    let mut notes = vec![format!(
        "Numbers are the table's lines{}. The dashed line joins what nothing else beats in both gain and memory. \
         Points whose intervals overlap are not told apart by these data.",
        if eager {
            "; 0 is eager"
        } else {
            "; eager, at 0 MiB and 0 %, lies left of the picture: all scopes lie close together, and the axis of memory \
             begins beside them"
        }
    )];
    if points.iter().any(|p| p.interval.is_none()) {
        notes.push("A hollow mark has no interval.".into());
    }
    if left_out > 0 {
        notes.push(format!(
            "{left_out} of {} runs are not drawn: a speedup or a figure of memory is missing.",
            with_graphs.len()
        ));
    }
    let mut legend = vec![
        (Look::new(GREEN, Shape::Diamond), "on the frontier".to_owned()),
        (Look::new(GREY, Shape::Circle), "beaten by another".to_owned()),
    ];
    if eager {
        legend.push((Look::new(INK, Shape::Square), "eager".to_owned()));
    }
    Some(Figure {
        title: ratio.title.into(),
        what: "Each point is what was captured: up is faster, left is smaller.".into(),
        svg: Some(draw_frontier(&points, eager)),
        legend,
        notes,
        table,
    })
}

fn point(run: &Run, runs: &[Run], ratio: &str) -> Option<Point> {
    let (eager, graph) = (*run.sides.iter().find(|r| r.cell("arm") == "eager")?, run.graph()?);
    let percent = |x: f64| (x - 1.0) * 100.0;
    let end = |which: &str| run.figure(&format!("{ratio}_ci95_{which}"));
    let interval = end("low").zip(end("high"));
    Some(Point {
        name: label(run, runs),
        memory_mib: number(graph, "peak_memory_mib")? + number(graph, "graph_memory_mib")?
            - number(eager, "peak_memory_mib")?,
        gain: percent(run.figure(ratio)?),
        interval: interval.map(|(low, high)| (percent(low), percent(high))),
        on_frontier: false,
    })
}

/// Of all these: the least and the greatest.
fn ends(values: impl Iterator<Item = f64>) -> (f64, f64) {
    values.fold((f64::INFINITY, f64::NEG_INFINITY), |(l, h), x| (l.min(x), h.max(x)))
}

/// Values further from 0 than so many times what parts them are drawn on an axis that begins beside them.
const FAR: f64 = 3.0;

fn far_from_0((low, high): (f64, f64)) -> bool {
    low > (high - low) * FAR
}

/// Eager, at 0, is left out where it would press all scopes into one spot.
fn eager_is_drawn(points: &[Point]) -> bool {
    points.len() < 2 || !far_from_0(ends(points.iter().map(|p| p.memory_mib)))
}

/// Values that a point covers upwards: its gain and its interval.
fn heights(p: &Point) -> [f64; 3] {
    let (low, high) = p.interval.unwrap_or((p.gain, p.gain));
    [low, p.gain, high]
}

fn draw_frontier(points: &[Point], eager: bool) -> [String; 2] {
    let (mut x0, mut x1) = ends(points.iter().map(|p| p.memory_mib));
    let (mut y0, mut y1) = ends(points.iter().flat_map(heights));
    if eager {
        (x0, x1) = (x0.min(0.0), x1.max(0.0));
    }
    if eager || !far_from_0((y0, y1)) {
        (y0, y1) = (y0.min(0.0), y1.max(0.0));
    }
    // Memory that is the same to a part of a MiB stays one spot.
    const LEAST_MIB: f64 = 1.0;
    let (dx, dy) = ((x1 - x0).max(LEAST_MIB) * 0.06, (y1 - y0).max(0.1) * 0.1);
    SIZES.map(|size| {
        draw(size.width, HEAD + PLOT + FOOT, |c| {
            let x = Scale::new(x0 - dx, x1 + dx, (MARGIN, size.width - 10.0));
            let y = Scale::new(y0 - dy, y1 + dy, (HEAD + PLOT, HEAD));
            axes(c, size.width, &x, &y, "gain [%]", "more memory than eager [MiB]");
            if y.holds(0.0) {
                c.line(&[(MARGIN, y.at(0.0)), (size.width - 10.0, y.at(0.0))], GREY, 1.0, false);
            }
            let mut front: Vec<&Point> = points.iter().filter(|p| p.on_frontier).collect();
            front.sort_by(|a, b| a.memory_mib.total_cmp(&b.memory_mib));
            let corner = |p: &Point| (x.at(p.memory_mib), y.at(p.gain));
            let mut steps = Vec::new();
            if eager {
                steps.push((x.at(0.0), y.at(0.0)));
            }
            for to in front.into_iter().map(corner) {
                if let Some((_, height)) = steps.last().copied() {
                    steps.push((to.0, height));
                }
                steps.push(to);
            }
            if steps.len() > 1 {
                c.line(&steps, GREEN, 1.5, true);
            }
            for p in points {
                let at = corner(p);
                let look = if p.on_frontier {
                    Look::new(GREEN, Shape::Diamond)
                } else {
                    Look::new(GREY, Shape::Circle)
                };
                if let Some((low, high)) = p.interval {
                    c.line(&[(at.0, y.at(low)), (at.0, y.at(high))], look.color, 1.5, false);
                }
                c.mark(at, MARK, if p.interval.is_some() { look } else { look.hollow() });
            }
            if eager {
                c.mark((x.at(0.0), y.at(0.0)), 4.5, Look::new(INK, Shape::Square));
            }
            let marks: Vec<Numbered> = eager
                .then(|| Numbered { number: 0, mark: (x.at(0.0), y.at(0.0)) })
                .into_iter()
                .chain((1..).zip(points).map(|(number, p)| Numbered { number, mark: corner(p) }))
                .collect();
            let places = numbers(&marks, size.width);
            // Leaders first: no number is crossed by another's.
            for (of, place) in marks.iter().zip(&places) {
                let (dx, dy) = (place.0 - of.mark.0, place.1 - of.mark.1);
                let far = dx.hypot(dy);
                if far > LEADER_FROM {
                    let part = MARK / far;
                    c.line(&[(of.mark.0 + dx * part, of.mark.1 + dy * part), *place], INK, 0.75, false);
                }
            }
            for (of, place) in marks.iter().zip(&places) {
                let text = of.number.to_string();
                // Lines behind a number would cross it.
                let half = text_width(&text, TEXT) / 2.0;
                c.rect((place.0 - half, place.1 - 6.0), (place.0 + half, place.1 + 6.0), WHITE);
                c.text(&text, *place, INK, Align::Middle);
            }
        })
    })
}

/// Radius of a point's mark.
const MARK: f64 = 5.0;
/// A number further from its mark than this has a line to it: it might be taken for a neighbour's.
const LEADER_FROM: f64 = 24.0;

/// A mark and what it is called.
#[derive(Debug, Clone, Copy)]
struct Numbered {
    number: usize,
    mark: (f64, f64),
}

/// A place for each mark's number, near it and clear of marks and of other numbers.
fn numbers(marks: &[Numbered], width: f64) -> Vec<(f64, f64)> {
    /// Rings round a mark that are tried, the nearest first: as far as the picture reaches.
    const RINGS: usize = 16;
    /// Directions on each, as parts of a right angle, those along the axes first.
    const DIRECTIONS: [f64; 16] =
        [0.0, 2.0, 3.0, 1.0, 0.5, 1.5, 2.5, 3.5, 0.25, 0.75, 1.25, 1.75, 2.25, 2.75, 3.25, 3.75];
    let mut placed: Vec<((f64, f64), f64)> = Vec::new();
    for Numbered { number, mark: (x, y) } in marks {
        let half = text_width(&number.to_string(), TEXT) / 2.0;
        let clear = |&(px, py): &(f64, f64)| {
            placed
                .iter()
                .all(|((ox, oy), other)| (px - ox).abs() >= half + other + 4.0 || (py - oy).abs() >= TEXT)
                && marks
                    .iter()
                    .all(|m| (px - m.mark.0).abs() >= half + 6.0 || (py - m.mark.1).abs() >= TEXT * 0.9)
                && px - half > MARGIN
                && px + half < width
                && py - TEXT / 2.0 > HEAD
                && py + TEXT / 2.0 < HEAD + PLOT
        };
        let tries = (1..=RINGS).flat_map(|ring| {
            DIRECTIONS.iter().map(move |turn| {
                let (sin, cos) = (turn * std::f64::consts::FRAC_PI_2).sin_cos();
                (x + cos * (half + 9.0) * ring as f64, y - sin * 15.0 * ring as f64)
            })
        });
        let fallback = (x + half + 9.0, *y);
        placed.push((tries.into_iter().find(|p| clear(p)).unwrap_or(fallback), half));
    }
    placed.into_iter().map(|(place, _)| place).collect()
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
        let few = [(100.0, 100.0), (102.0, 101.0), (104.0, 99.0), (100.0, 104.0), (330.0, 60.0)];
        // As many scopes as a sweep has, all on one spot, at an edge.
        let many = [(300.0, 100.0); 16];
        for marks in [&few[..], &many] {
            let marks: Vec<Numbered> =
                (0..).zip(marks).map(|(number, mark)| Numbered { number, mark: *mark }).collect();
            let places = numbers(&marks, 344.0);
            for (i, a) in places.iter().enumerate() {
                for b in &places[i + 1..] {
                    assert!((a.0 - b.0).abs() > 10.0 || (a.1 - b.1).abs() >= TEXT, "{places:?}");
                }
            }
        }
    }
}
