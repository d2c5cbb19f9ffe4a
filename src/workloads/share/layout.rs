//! The pipeline split: which layers each virtual stage has.

use std::ops::Range;

use super::{ShareError, ShareInput, product};

/// One virtual stage. Stage `s` belongs to pipeline rank `s % pp`.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Stage {
    /// Decoder layers, as indices in the whole model.
    pub layers: Range<usize>,
    pub embedding: bool,
    /// Multi-token-prediction layers.
    pub mtp: usize,
    pub loss: bool,
}

/// All virtual stages of the model in order, `pp * vp` of them.
///
/// # Errors
/// A layout string that is malformed or disagrees with pp, vp or the number of layers; a uniform split with a
/// remainder; first or last stage counts that leave no even middle.
pub fn pipeline_stages(input: &ShareInput) -> Result<Vec<Stage>, ShareError> {
    match &input.pipeline_layout {
        Some(layout) => from_layout(input, layout),
        None => from_counts(input, &layer_counts(input)?),
    }
}

/// Consecutive layers in the given numbers; embedding first, multi-token prediction and loss last.
fn from_counts(input: &ShareInput, counts: &[usize]) -> Result<Vec<Stage>, ShareError> {
    let mut start = 0;
    let last = counts.len().saturating_sub(1);
    let stage = |(i, count): (usize, &usize)| {
        let layers = start..start + count;
        start = layers.end;
        Stage {
            layers,
            embedding: i == 0,
            mtp: if i == last { input.mtp_layers } else { 0 },
            loss: i == last,
        }
    };
    Ok(counts.iter().enumerate().map(stage).collect())
}

/// Decoder layers of each virtual stage without a layout string, as Megatron splits them: the embedding and
/// the loss count as layers if asked, the first and last rank may have counts of their own, the rest is even.
fn layer_counts(input: &ShareInput) -> Result<Vec<usize>, ShareError> {
    let layers = input.layers.len();
    let ShareInput { pp, vp, .. } = *input;
    let uneven = |reason: String| ShareError::Split { layers, reason };
    let (first, last) = (input.first_stage_layers, input.last_stage_layers);
    let extra = usize::from(input.account_for_embedding) + usize::from(input.account_for_loss);
    if pp > layers + extra {
        return Err(uneven(format!("pp {pp} is more than there are layers; change -pp")));
    }
    // Layers of each pipeline rank.
    let mut ranks = vec![0; pp];
    if (first.is_some() || last.is_some()) && pp > 1 {
        if extra > 0 {
            return Err(uneven(
                "first and last stage counts exclude counting embedding or loss as layers".to_owned(),
            ));
        }
        let given = first.unwrap_or(0).saturating_add(last.unwrap_or(0));
        let middle = pp - usize::from(first.is_some()) - usize::from(last.is_some());
        let left = layers
            .checked_sub(given)
            .ok_or_else(|| uneven(format!("the first and last stage alone have {given}; lower them")))?;
        if first == Some(0) || last == Some(0) {
            return Err(uneven("the first and the last stage must have a layer at least".to_owned()));
        }
        if (middle == 0) != (left == 0) || (middle > 0 && left % middle != 0) {
            return Err(uneven(format!(
                "{left} layers are left for {middle} middle stages; change -pp or the counts"
            )));
        }
        ranks.fill(left.checked_div(middle).unwrap_or(0));
        if let (Some(count), Some(rank)) = (first, ranks.first_mut()) {
            *rank = count;
        }
        if let (Some(count), Some(rank)) = (last, ranks.last_mut()) {
            *rank = count;
        }
    } else {
        let total = layers + extra;
        if !total.is_multiple_of(pp) {
            let counted = if extra > 0 {
                format!("{layers} layers + {extra} for embedding and loss")
            } else {
                format!("{layers} layers")
            };
            return Err(uneven(format!(
                "{counted} over pp {pp} leaves {}; change -pp or --num_layers",
                total % pp
            )));
        }
        ranks.fill(total / pp);
    }
    // Virtual stages: stage s = chunk * pp + rank, every chunk of a rank equally long.
    let mut counts = Vec::with_capacity(product(&[pp, vp]).min(layers + pp));
    if vp > layers + extra {
        return Err(uneven(format!("vp {vp} is more than there are layers; change -vp")));
    }
    for _ in 0..vp {
        for count in &ranks {
            if count % vp != 0 {
                return Err(uneven(format!(
                    "{count} layers a rank over vp {vp} leaves {}; change -vp",
                    count % vp
                )));
            }
            counts.push(count / vp);
        }
    }
    take_extra(counts.first_mut(), input.account_for_embedding, "embedding").map_err(&uneven)?;
    take_extra(counts.last_mut(), input.account_for_loss, "loss").map_err(&uneven)?;
    Ok(counts)
}

/// Gives the place of one layer to the embedding or the loss.
fn take_extra(count: Option<&mut usize>, counted: bool, what: &str) -> Result<(), String> {
    match count {
        Some(count) if counted => {
            *count =
                count.checked_sub(1).ok_or_else(|| format!("a stage is too small to hold the {what}"))?;
            Ok(())
        }
        _ => Ok(()),
    }
}

/// Virtual stages that a layout string spells, from which the size of a virtual pipeline follows; `None` if it is
/// malformed.
pub fn layout_stages(layout: &str) -> Option<usize> {
    expand(layout).ok().map(|letters| letters.split('|').count())
}

fn from_layout(input: &ShareInput, layout: &str) -> Result<Vec<Stage>, ShareError> {
    let wrong = |reason: String| ShareError::Layout { layout: layout.to_owned(), reason };
    let letters = expand(layout).map_err(&wrong)?;
    let mut stages = Vec::new();
    let mut start = 0;
    for letters in letters.split('|') {
        let count = |letter: char| letters.chars().filter(|l| *l == letter).count();
        let layers = start..start + count('t');
        start = layers.end;
        stages.push(Stage { layers, embedding: count('E') > 0, mtp: count('m'), loss: count('L') > 0 });
    }
    let (pp, vp) = (input.pp, input.vp);
    if stages.len() != product(&[pp, vp]) {
        return Err(wrong(format!(
            "it has {} stages, but pp {pp} x vp {vp} = {}",
            stages.len(),
            product(&[pp, vp])
        )));
    }
    let mtp: usize = stages.iter().map(|s| s.mtp).sum();
    for (what, letter, has, needed) in [
        ("layers", 't', start, input.layers.len()),
        ("multi-token-prediction layers", 'm', mtp, input.mtp_layers),
    ] {
        if has != needed {
            return Err(wrong(format!("it has {has} {what} (`{letter}`), the model has {needed}")));
        }
    }
    let placed = stages.iter().filter(|s| s.mtp > 0).count() <= 1
        && stages.iter().rev().take(pp).filter(|s| s.mtp > 0).count() == usize::from(mtp > 0)
        && letters.rfind('t').unwrap_or(0) <= letters.find('m').unwrap_or(letters.len());
    if !placed {
        return Err(wrong("all `m` must stand in one of the last pp stages, after the last `t`".to_owned()));
    }
    let ends = (letters.starts_with('E'), letters.ends_with('L'));
    let once = |letter| letters.matches(letter).count() == 1;
    if ends != (true, true) || !once('E') || !once('L') {
        return Err(wrong("it must begin with the only `E` and end with the only `L`".to_owned()));
    }
    Ok(stages)
}

/// Longest expanded layout: letters of the deepest model many times over, little enough for any memory.
const MAX_LETTERS: usize = 4096;

/// Writes out `t*4`, `(tt|)*3` and drops the commas: `E,t*2|(t|)*2L` is `Ett|t|t|L`.
/// A multiplier belongs to the letter or the parenthesis just before it.
fn expand(layout: &str) -> Result<String, String> {
    let letters: Vec<char> = layout.chars().filter(|c| !c.is_whitespace()).collect();
    if letters.len() > MAX_LETTERS {
        return Err(format!("it is longer than {MAX_LETTERS} letters"));
    }
    // One entry per open parenthesis, the outermost first.
    let mut open: Vec<String> = vec![String::new()];
    let mut i = 0;
    while let Some(&letter) = letters.get(i) {
        i += 1;
        let unit = match letter {
            ',' => continue,
            '(' => {
                open.push(String::new());
                continue;
            }
            ')' if open.len() > 1 => open.pop().unwrap_or_default(),
            'E' | 't' | 'm' | 'L' | '|' => letter.to_string(),
            other => return Err(format!("`{other}` at {i} is none of E t m L | ( ) * ,")),
        };
        let mut times = 1;
        if letters.get(i) == Some(&'*') {
            let digits: String = letters[i + 1..].iter().take_while(|c| c.is_ascii_digit()).collect();
            times = digits.parse().map_err(|_| format!("`*` at {} is not followed by a number", i + 1))?;
            i += 1 + digits.len();
        }
        if product(&[unit.len(), times]) > MAX_LETTERS {
            return Err(format!("it spells more than {MAX_LETTERS} letters"));
        }
        if let Some(text) = open.last_mut() {
            text.push_str(&unit.repeat(times));
            if text.len() > MAX_LETTERS {
                return Err(format!("it spells more than {MAX_LETTERS} letters"));
            }
        }
    }
    match open.as_slice() {
        [text] => Ok(text.clone()),
        _ => Err("a parenthesis is not closed".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layouts_expand() {
        assert_eq!(expand("E,t*2|(t|)*2L").unwrap(), "Ett|t|t|L");
        assert_eq!(expand("Et*4|(t*4|)*2tmL").unwrap(), "Etttt|tttt|tttt|tmL");
        for bad in ["Ex", "E(t", "Et*", "Et*99999999999", "E(t*4000)*4000L", "E)L"] {
            assert!(expand(bad).is_err(), "{bad}");
        }
    }

    proptest::proptest! {
        #[test]
        fn no_layout_panics(text in "[EtmL|()*,0-9 x]{0,40}") {
            let _ = expand(&text);
        }
    }
}
