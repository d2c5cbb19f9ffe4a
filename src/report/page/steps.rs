//! Every step of a run as a dot: first those before timing, none of which counts, then the timed blocks over time. What
//! no statistic contains is shaded and hollow.
//!
//! Over 500 lines: two panels that share scales, shading and marks; with the tests of what is drawn and what is merged.

use super::beside::{Pacing, Phase, Step};
use super::canvas::{
    Align, Canvas, Fill, GREY, GRID, INK, Look, SHADE, SHADE_DARK, SHADE_LIGHT, SIZES, Scale, Shape, Size,
    TEXT, draw, text_width,
};
use super::data::{Run, number};
use super::figure::Figure;
use super::html::{Cell, Table, shown};
use crate::measure::stats::median;
use std::collections::HashMap;

/// Dots of a panel that are all drawn; above, each pixel's lowest and highest are.
const ALL_DRAWN: usize = 1500;
/// Height of a panel's plot.
const PLOT: f64 = 190.0;
/// Above it the title, below it the axis.
const HEAD: f64 = 22.0;
const FOOT: f64 = 42.0;
/// Left of it the ticks' labels.
const MARGIN: f64 = 58.0;
/// Of the wide picture, the part before timing.
const BEFORE_PART: f64 = 0.36;
/// Times further apart than this are drawn on a logarithmic axis.
const LOG_FROM: f64 = 8.0;
/// Above so many counted steps the axis covers the middle 98 % of them and half of their range on either side (a
/// normal distribution whole), and the rest lies at its edge.
const TRIM_FROM: usize = 200;
const TRIM_REACH: f64 = 0.5;
/// Of a panel that is not drawn whole, pixels that share a dot at the edge, so that dots are seen there and no bar.
const EDGE_SPREAD: f64 = 8.0;

/// Width of a strip in which one arm's marks lie on top.
const STRIP: f64 = 8.0;
/// More phases before timing than this are one line by phase and arm in the table.
const MOST_PHASES: usize = 60;

/// A dot.
#[derive(Debug, Clone, Copy)]
struct Dot {
    side: usize,
    phase: Phase,
    /// Where its time begins and ends on the axis.
    from: f64,
    to: f64,
    ms: f64,
}

struct Panel {
    title: &'static str,
    axis: &'static str,
    dots: Vec<Dot>,
    timed: bool,
    /// Medians by side, from the rows.
    medians: [Option<f64>; 2],
}

/// The picture and its table; `None` where there are no steps. `spread`: pixels that share a lowest and a highest dot.
pub fn figure(run: &Run, title: String, spread: f64) -> Option<Figure> {
    let steps = run.steps();
    if steps.is_empty() {
        return None;
    }
    let panels = panels(run, steps);
    let beyond: Vec<String> = panels.iter().filter_map(beyond).collect();
    let mut notes =
        vec!["Filled: counted in the statistics. Hollow, on shaded ground: counted in none.".to_owned()];
    if panels.iter().any(|p| p.dots.iter().any(|d| d.phase == Phase::Capture)) {
        notes.push(
            "The cross is the one-off cost of the graphs (capture, instantiation, upload). Letters stand for the table's lines."
                .into(),
        );
    }
    notes.extend(beyond);
    let most = panels.iter().map(|p| p.dots.len()).max().unwrap_or(0);
    if most > ALL_DRAWN {
        notes.push(format!(
            "{} steps are too many to draw each: where a panel has over {ALL_DRAWN}, every {} of the width shows its lowest and its highest, of each arm, counted and not. The table counts all.",
            steps.len(),
            if spread <= 1.0 { "pixel".to_owned() } else { format!("{spread:.0} pixels") }
        ));
        notes.push("Where marks overlap, each arm lies on top in every second strip.".into());
    }
    let mixed = panels.iter().filter(|p| p.timed).any(|p| {
        let x = Scale::new(p.dots[0].from, p.dots[p.dots.len() - 1].to, (0.0, SIZES[0].width));
        grounds(&p.dots, &x).iter().any(|(_, _, ground)| *ground == Ground::Mixed)
    });
    let mut legend: Vec<(Look, String)> =
        (0..run.sides.len().min(2)).map(|side| (Look::side(side), run.side_name(side))).collect();
    legend.extend(
        (0..run.sides.len().min(2))
            .map(|side| (Look::side(side).hollow(), format!("{}, not counted", run.side_name(side)))),
    );
    legend.push((Look::new(INK, Shape::Cross), "making the graphs".into()));
    legend.push((Look::new(SHADE_DARK, Shape::Square).bar(Fill::Solid), "not counted".into()));
    if mixed {
        let look = Look::new(SHADE_LIGHT, Shape::Square).bar(Fill::Solid);
        legend.push((look, "counted and not, too close to shade apart".into()));
    }
    Some(Figure {
        title,
        what: String::new(),
        svg: Some(svg(&panels, spread)),
        legend,
        notes,
        table: table(run, &panels),
    })
}

fn panels(run: &Run, steps: &[Step]) -> Vec<Panel> {
    let medians = |column: &str| [0, 1].map(|at| run.sides.get(at).and_then(|row| number(row, column)));
    let mut before: Vec<Dot> = Vec::new();
    let mut timed: Vec<(Pacing, Dot)> = Vec::new();
    let mut clock_s = 0.0;
    let one_off = run.graph().and_then(|row| {
        let costs = ["capture_ms", "instantiate_ms", "upload_ms"].map(|c| number(row, c));
        costs.iter().any(Option::is_some).then(|| (costs.iter().flatten().sum::<f64>(), row))
    });
    let graph_side = one_off.and_then(|(_, row)| run.sides.iter().position(|r| std::ptr::eq(*r, row)));
    for step in steps {
        if step.block.is_some() {
            let from = clock_s;
            clock_s += step.wall_ms / 1e3;
            timed.push((
                step.pacing,
                Dot { side: step.side, phase: step.phase, from, to: clock_s, ms: step.wall_ms },
            ));
            continue;
        }
        let mut push = |side, phase, ms| {
            let from = before.len() as f64;
            before.push(Dot { side, phase, from, to: from + 1.0, ms });
        };
        if let (Phase::FirstReplay, Some((ms, _)), Some(side)) = (step.phase, one_off, graph_side)
            && !before_has_capture(&timed, step)
        {
            push(side, Phase::Capture, ms);
        }
        push(step.side, step.phase, step.wall_ms);
    }
    let mut panels = Vec::new();
    if !before.is_empty() {
        panels.push(Panel {
            title: match before.iter().any(|d| d.phase == Phase::FinalCheck) {
                true => "before and after timing [ms]",
                false => "before timing [ms]",
            },
            axis: "steps, in their order",
            dots: before,
            timed: false,
            medians: [None, None],
        });
    }
    for (pacing, title, column) in [
        (Pacing::RunAhead, "timed: one step runs ahead [ms]", "step_time_ms_median"),
        (Pacing::Sync, "timed: each step waited for [ms]", "step_time_ms_sync_median"),
        (Pacing::Drained, "issued to a queue that never fills [ms]", ""),
        (Pacing::Modelled, "timed: under the host model [ms]", "step_time_ms_modelled_median"),
    ] {
        let dots: Vec<Dot> = timed.iter().filter(|(p, _)| *p == pacing).map(|(_, d)| *d).collect();
        if !dots.is_empty() {
            let axis = "seconds of timing";
            panels.push(Panel { title, axis, dots, timed: true, medians: medians(column) });
        }
    }
    panels
}

/// A first replay among timed steps has no place before timing.
fn before_has_capture(timed: &[(Pacing, Dot)], step: &Step) -> bool {
    !timed.is_empty() || step.pacing != Pacing::Sync
}

/// Where each panel lies: side by side in the wide picture where they belong together.
fn svg(panels: &[Panel], spread: f64) -> [String; 2] {
    SIZES.map(|size| {
        let places = places(panels, size);
        let height = places.iter().map(|p| p.1).fold(0.0, f64::max) + HEAD + PLOT + FOOT;
        draw(size.width, height, |c| {
            for (panel, (left, top, right)) in panels.iter().zip(&places) {
                paint(c, panel, (left + MARGIN, top + HEAD, right - 8.0, top + HEAD + PLOT), spread);
            }
        })
    })
}

/// (left, top, right) of each panel.
fn places(panels: &[Panel], size: Size) -> Vec<(f64, f64, f64)> {
    let row = HEAD + PLOT + FOOT;
    let pair = size.class == "wide" && panels.len() > 1 && !panels[0].timed;
    let split = size.width * BEFORE_PART;
    (0..panels.len())
        .map(|at| match (pair, at) {
            (true, 0) => (0.0, 0.0, split),
            (true, 1) => (split, 0.0, size.width),
            (true, n) => (0.0, (n - 1) as f64 * row, size.width),
            (false, n) => (0.0, n as f64 * row, size.width),
        })
        .collect()
}

/// Range of times that the axis covers.
fn range(panel: &Panel) -> (f64, f64) {
    let counted = |d: &&Dot| !panel.timed || d.phase.counts();
    let mut times: Vec<f64> = panel.dots.iter().filter(counted).map(|d| d.ms).collect();
    if times.is_empty() {
        times = panel.dots.iter().map(|d| d.ms).collect();
    }
    times.sort_by(f64::total_cmp);
    let (mut low, mut high) = (times[0], times[times.len() - 1]);
    if panel.timed && times.len() > TRIM_FROM {
        let cut = times.len() / 100;
        let (from, to) = (times[cut], times[times.len() - 1 - cut]);
        let reach = (to - from) * TRIM_REACH;
        (low, high) = (low.max(from - reach), high.min(to + reach));
    }
    for median in panel.medians.iter().flatten() {
        (low, high) = (low.min(*median), high.max(*median));
    }
    (low, high)
}

fn is_log(panel: &Panel) -> bool {
    let (low, high) = range(panel);
    low > 0.0 && high / low > LOG_FROM
}

fn y_scale(panel: &Panel, pixels: (f64, f64)) -> Scale {
    let (low, high) = range(panel);
    if is_log(panel) {
        return Scale::log(low / 1.3, high * 1.3, pixels);
    }
    let pad = ((high - low) * 0.12).max(high.abs() * 0.002);
    Scale::new(low - pad, high + pad, pixels)
}

/// Dots that the axis does not reach, in words.
fn beyond(panel: &Panel) -> Option<String> {
    let scale = y_scale(panel, (0.0, 1.0));
    let out: Vec<f64> = panel.dots.iter().map(|d| d.ms).filter(|ms| !scale.holds(*ms)).collect();
    let (low, high) = out.iter().fold((f64::INFINITY, 0.0f64), |(l, h), x| (l.min(*x), h.max(*x)));
    (!out.is_empty()).then(|| {
        format!(
            "{}: {} of {} steps lie beyond the axis and are drawn at its edge ({} to {} ms).",
            panel.title.trim_end_matches(" [ms]"),
            out.len(),
            panel.dots.len(),
            shown(low),
            shown(high)
        )
    })
}

fn paint(c: &mut Canvas, panel: &Panel, (left, top, right, bottom): (f64, f64, f64, f64), spread: f64) {
    let first = panel.dots.first().map_or(0.0, |d| d.from);
    let last = panel.dots.last().map_or(1.0, |d| d.to);
    let x = Scale::new(first, last, (left, right));
    let y = y_scale(panel, (bottom, top));
    shade(c, panel, &x, (top, bottom));
    for (value, label) in y.ticks(5) {
        let at = y.at(value);
        c.line(&[(left, at), (right, at)], GRID, 0.75, false);
        c.text(&label, (left - 6.0, at), INK, Align::Right);
    }
    for (side, median) in panel.medians.iter().enumerate() {
        if let Some(ms) = median {
            let look = Look::side(side);
            c.line(&[(left, y.at(*ms)), (right, y.at(*ms))], look.color, 1.25, look.dashed);
        }
    }
    let pixel = |d: &Dot| {
        let share = if y.holds(d.ms) { spread } else { spread.max(EDGE_SPREAD) };
        (x.at((d.from + d.to) / 2.0) / share) as i64
    };
    let mut kept = thin(&panel.dots, pixel);
    if panel.dots.len() > ALL_DRAWN {
        // Where marks overlap the last drawn hides the others: each arm is that in every second strip.
        let strip = |d: &Dot| (x.at((d.from + d.to) / 2.0) / STRIP) as usize;
        kept.sort_by_key(|d| (strip(d) + d.side) % 2);
    }
    let radius = match kept.len() {
        0..=60 => 3.6,
        61..=400 => 2.6,
        _ => 1.7,
    };
    for dot in kept {
        let place = (x.at((dot.from + dot.to) / 2.0), y.at(dot.ms));
        let look = match dot.phase {
            Phase::Capture => Look::new(INK, Shape::Cross),
            phase if phase.counts() => Look::side(dot.side),
            _ => Look::side(dot.side).hollow(),
        };
        c.mark(place, if dot.phase == Phase::Capture { 5.0 } else { radius }, look);
    }
    c.line(&[(left, top), (left, bottom), (right, bottom)], INK, 1.0, false);
    let title = panel.title.replace("[ms]", if is_log(panel) { "[ms, log]" } else { "[ms]" });
    c.text(&title, (left - MARGIN + 4.0, top - HEAD / 2.0 - 3.0), INK, Align::Left);
    if panel.timed {
        let mut free_from = f64::NEG_INFINITY;
        for (value, label) in x.ticks(((right - left) / 90.0) as usize) {
            let half = text_width(&label, TEXT) / 2.0;
            let middle = x.at(value).min(right - half + 6.0);
            if middle - half > free_from {
                c.line(&[(x.at(value), bottom), (x.at(value), bottom + 4.0)], INK, 1.0, false);
                c.text(&label, (middle, bottom + 13.0), INK, Align::Middle);
                free_from = middle + half + 6.0;
            }
        }
    }
    c.text(panel.axis, (right, bottom + 31.0), INK, Align::Right);
}

/// Grounds of phases that do not count; before timing each phase with its letter.
fn shade(c: &mut Canvas, panel: &Panel, x: &Scale, (top, bottom): (f64, f64)) {
    const LETTER: f64 = 10.0;
    if panel.timed {
        for (from, to, ground) in grounds(&panel.dots, x) {
            c.rect((from, top), (to, bottom), if ground == Ground::Uncounted { SHADE } else { SHADE_LIGHT });
        }
        return;
    }
    let (mut from, mut drawn) = (x.at(panel.dots[0].from), 0);
    for (number, segment) in segments(&panel.dots, false).enumerate() {
        let (own, to) = (x.at(segment[0].from), x.at(segment[segment.len() - 1].to));
        // What is too narrow shares a ground with its neighbours.
        if to - from < LEAST {
            continue;
        }
        // Neighbours are told apart by their ground.
        let alone = to - own >= LEAST;
        c.rect((from, top), (to, bottom), if drawn % 2 == 1 && alone { SHADE_DARK } else { SHADE });
        if to - own >= LETTER {
            c.text(&letter(number), ((own + to) / 2.0, bottom + 13.0), INK, Align::Middle);
        }
        if alone {
            c.line(&[(to, top), (to, bottom)], GREY, 0.5, false);
        }
        (from, drawn) = (to, drawn + 1);
    }
}

/// Nothing narrower is drawn.
const LEAST: f64 = 0.75;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ground {
    Uncounted,
    /// Steps that do not count lie closer among those that do than can be drawn apart.
    Mixed,
}

/// What is shaded among timed steps, in pixels from left to right: ranges that lie apart, at most as many as the picture is wide.
fn grounds(dots: &[Dot], x: &Scale) -> Vec<(f64, f64, Ground)> {
    let mut grounds: Vec<(f64, f64, Ground)> = Vec::new();
    for segment in segments(dots, true).filter(|s| !s[0].phase.counts()) {
        let (from, to) = (x.at(segment[0].from), x.at(segment[segment.len() - 1].to));
        let wide = LEAST.max(to - from);
        let (from, to) = ((from + to - wide) / 2.0, (from + to + wide) / 2.0);
        match grounds.last_mut() {
            // Seen as one, with counted steps between them.
            Some(last) if from - last.1 < LEAST => {
                (last.1, last.2) = (to, Ground::Mixed);
            }
            _ => grounds.push((from, to, Ground::Uncounted)),
        }
    }
    grounds
}

/// Dots in a row that are of one phase, and before timing of one side.
fn segments(dots: &[Dot], timed: bool) -> impl Iterator<Item = &[Dot]> {
    dots.chunk_by(move |a, b| {
        a.phase == b.phase && (timed || a.side == b.side) && (!timed || (b.from - a.to).abs() < 1e-9)
    })
}

/// `A`, `B` ... `Z`, `AA` ...
fn letter(number: usize) -> String {
    let last = char::from(b'A' + (number % 26) as u8);
    if number < 26 { last.to_string() } else { format!("{}{last}", letter(number / 26 - 1)) }
}

/// The lowest and the highest dot of each bucket, of each side, counted and not; all of them where they are few.
fn thin(dots: &[Dot], bucket: impl Fn(&Dot) -> i64) -> Vec<&Dot> {
    if dots.len() <= ALL_DRAWN {
        return dots.iter().collect();
    }
    let mut buckets: HashMap<(usize, bool, i64), (usize, usize)> = HashMap::new();
    for (at, dot) in dots.iter().enumerate() {
        let key = (dot.side, dot.phase.counts(), bucket(dot));
        let (low, high) = buckets.entry(key).or_insert((at, at));
        if dot.ms < dots[*low].ms {
            *low = at;
        }
        if dot.ms > dots[*high].ms {
            *high = at;
        }
    }
    let mut kept: Vec<usize> = buckets.into_values().flat_map(|(low, high)| [low, high]).collect();
    kept.sort_unstable();
    kept.dedup();
    kept.into_iter().map(|at| &dots[at]).collect()
}

/// Counts and times by phase, arm and pacing: all steps, however many are drawn.
fn table(run: &Run, panels: &[Panel]) -> Table {
    let mut table = Table::new(
        "steps",
        &["", "phase", "arm", "steps", "lowest ms", "median ms", "highest ms", "in the statistics"],
    );
    let mut line = |mark: String, phase: Phase, what: &str, side: usize, times: &[f64]| {
        let least = times.iter().copied().fold(f64::INFINITY, f64::min);
        let most = times.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let steps = if phase == Phase::Capture { Cell::Empty } else { Cell::Figure(times.len() as f64) };
        let arm = if side < run.sides.len() { run.side_name(side) } else { "–".into() };
        table.rows.push(vec![
            Cell::text(mark),
            Cell::text(format!("{}{what}", phase.name())),
            Cell::text(arm),
            steps,
            Cell::Figure(least),
            Cell::maybe(median(times)),
            Cell::Figure(most),
            Cell::text(if phase.counts() { "yes" } else { "no" }),
        ]);
    };
    for panel in panels {
        if !panel.timed && segments(&panel.dots, false).nth(MOST_PHASES).is_none() {
            for (number, segment) in segments(&panel.dots, false).enumerate() {
                let times: Vec<f64> = segment.iter().map(|d| d.ms).collect();
                line(letter(number), segment[0].phase, "", segment[0].side, &times);
            }
            continue;
        }
        // The phase's name goes before it: ": one step runs ahead", ", issued to ...".
        let said = panel.title.trim_end_matches(" [ms]");
        let what = match said.strip_prefix("timed: ") {
            _ if !panel.timed => String::new(),
            Some(rest) => format!(": {rest}"),
            None => format!(", {said}"),
        };
        let mut groups: Vec<((Phase, usize), Vec<f64>)> = Vec::new();
        for dot in &panel.dots {
            match groups.iter_mut().find(|(key, _)| *key == (dot.phase, dot.side)) {
                Some((_, times)) => times.push(dot.ms),
                None => groups.push(((dot.phase, dot.side), vec![dot.ms])),
            }
        }
        groups.sort_by_key(|(key, _)| *key);
        for ((phase, side), times) in groups {
            line(String::new(), phase, &what, side, &times);
        }
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dots(n: usize) -> Vec<Dot> {
        let ms = |i: usize| if i == n / 2 { 900.0 } else { 5.0 + (i % 7) as f64 };
        let phase = |i: usize| if i.is_multiple_of(50) { Phase::Switch } else { Phase::Steady };
        (0..n)
            .map(|i| Dot { side: i / 50 % 2, phase: phase(i), from: i as f64, to: i as f64 + 1.0, ms: ms(i) })
            .collect()
    }

    #[test]
    fn thinning_keeps_the_extremes_and_bounds_the_rest() {
        let all = dots(100_000);
        let kept = thin(&all, |d| (d.from / 100_000.0 * 500.0) as i64);
        assert!(kept.len() <= 500 * 2 * 4 && kept.len() > 500, "{}", kept.len());
        let most = |d: &[&Dot]| d.iter().map(|d| d.ms).fold(0.0, f64::max);
        assert_eq!(most(&kept), 900.0);
        assert!(kept.windows(2).all(|w| w[0].from < w[1].from));
        assert_eq!(thin(&all[..100], |_| 0).len(), 100);
    }

    /// However many steps there are: what does not count is shaded, in ranges that the picture has room for.
    #[test]
    fn steps_that_do_not_count_are_shaded_among_any_number() {
        let of = |dots: &[Dot]| {
            let grounds = grounds(dots, &Scale::new(0.0, dots.len() as f64, (0.0, 400.0)));
            assert!(grounds.windows(2).all(|w| w[1].0 > w[0].1) && grounds.len() <= 400, "{grounds:?}");
            grounds
        };
        assert_eq!(of(&dots(500)).len(), 10);
        let some = of(&dots(5_000));
        assert!(some.len() == 100 && some.iter().all(|g| g.2 == Ground::Uncounted), "{some:?}");
        // Eight switches a pixel: all of it is both.
        let many = of(&dots(100_000));
        assert!(many.len() == 1 && many[0].2 == Ground::Mixed && many[0].1 - many[0].0 > 395.0, "{many:?}");
    }

    #[test]
    fn letters_go_on_after_z() {
        assert_eq!([0, 25, 26, 51, 52].map(letter), ["A", "Z", "AA", "AZ", "BA"].map(String::from));
    }
}
