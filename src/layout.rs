//! Which layers each pipeline stage holds: from Megatron's layout string, or from an even or uneven split.

use crate::config::Parallel;

/// What one pipeline rank holds, over all its virtual stages.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Stage {
    /// Indices of decoder layers in the whole model, in the order of the chunks.
    pub layers: Vec<usize>,
    pub embedding: bool,
    pub loss: bool,
    /// Multi-token-prediction layers.
    pub mtp: usize,
}

/// Most letters that a layout may spell: far above any model, far below what would exhaust memory.
const MAX_LETTERS: usize = 8192;

/// The stages of a job, one for each pipeline rank. `num_layers` decoder and `mtp` prediction layers.
///
/// # Errors
/// What does not fit, with the numbers, if the layers cannot be split so.
pub fn stages(parallel: &Parallel, num_layers: usize, mtp: usize) -> Result<Vec<Stage>, String> {
    let pp = parallel.pp.max(1);
    match &parallel.pipeline_layout {
        Some(text) => from_layout(text, pp, parallel.vp.max(1), num_layers, mtp),
        None => split(parallel, pp, num_layers, mtp),
    }
}

/// Stages (virtual ones included) that a layout string spells; `None` if it is malformed.
pub fn chunks(text: &str) -> Option<usize> {
    expand(text).map(|flat| flat.split('|').count())
}

fn from_layout(text: &str, pp: usize, vp: usize, num_layers: usize, mtp: usize) -> Result<Vec<Stage>, String> {
    let flat = expand(text).ok_or_else(|| {
        format!("the pipeline layout `{text}` is not made of E, t, m, L, `|`, commas, brackets and `*count`")
    })?;
    let chunks: Vec<&str> = flat.split('|').collect();
    if chunks.len() != pp * vp {
        return Err(format!("the pipeline layout `{text}` has {} stages, but pp {pp} x vp {vp} is {}", chunks.len(), pp * vp));
    }
    let count = |letter: char| flat.chars().filter(|c| *c == letter).count();
    for (letter, what, wanted) in [('E', "embedding", 1), ('L', "loss", 1), ('t', "layer", num_layers), ('m', "MTP layer", mtp)] {
        if count(letter) != wanted {
            return Err(format!("the pipeline layout `{text}` holds {} x {what} (`{letter}`), the model has {wanted}", count(letter)));
        }
    }
    if !flat.starts_with('E') || !flat.ends_with('L') {
        return Err(format!("the pipeline layout `{text}` must begin with E and end with L"));
    }
    let (mut out, mut next) = (vec![Stage::default(); pp], 0);
    for (i, chunk) in chunks.iter().enumerate() {
        let stage = &mut out[i % pp];
        for letter in chunk.chars() {
            match letter {
                'E' => stage.embedding = true,
                'L' => stage.loss = true,
                'm' => stage.mtp += 1,
                _ => {
                    stage.layers.push(next);
                    next += 1;
                }
            }
        }
    }
    Ok(out)
}

fn split(parallel: &Parallel, pp: usize, num_layers: usize, mtp: usize) -> Result<Vec<Stage>, String> {
    let vp = parallel.vp.max(1);
    let extra = |on: bool| usize::from(on && pp > 1);
    let (embedding, loss) = (extra(parallel.account_for_embedding), extra(parallel.account_for_loss));
    let (first, last) = (parallel.first_stage_layers.filter(|_| pp > 1), parallel.last_stage_layers.filter(|_| pp > 1));
    let mut sizes: Vec<usize> = Vec::with_capacity(pp * vp);
    if first.is_some() || last.is_some() {
        let fixed = first.unwrap_or(0) + last.unwrap_or(0);
        let others = pp - usize::from(first.is_some()) - usize::from(last.is_some());
        let middle = num_layers.checked_sub(fixed).filter(|m| if others == 0 { *m == 0 } else { m % others == 0 });
        let Some(middle) = middle else {
            return Err(format!("{num_layers} layers less {fixed} of the first and last stage do not divide by {others} stages"));
        };
        let rank = |r: usize| match r {
            0 if first.is_some() => first.unwrap_or(0),
            r if r == pp - 1 && last.is_some() => last.unwrap_or(0),
            _ => middle / others.max(1),
        };
        for chunk in 0..pp * vp {
            let layers = rank(chunk % pp);
            if layers % vp != 0 {
                return Err(format!("{layers} layers of pipeline rank {} do not divide by {vp} virtual stages", chunk % pp));
            }
            sizes.push(layers / vp);
        }
    } else {
        let total = num_layers + embedding + loss;
        if !total.is_multiple_of(pp * vp) {
            let counted = if embedding + loss > 0 { " (embedding and loss counted as set)" } else { "" };
            return Err(format!("{total} layers{counted} do not divide by pp {pp} x vp {vp}"));
        }
        sizes = vec![total / (pp * vp); pp * vp];
        let end = pp * vp - 1;
        let taken = [(0, embedding), (end, loss)];
        for (chunk, n) in taken {
            sizes[chunk] = sizes[chunk].checked_sub(n).ok_or("a pipeline stage would hold less than no layer")?;
        }
    }
    let (mut out, mut next) = (vec![Stage::default(); pp], 0);
    for (chunk, size) in sizes.into_iter().enumerate() {
        out[chunk % pp].layers.extend(next..next + size);
        next += size;
    }
    out[0].embedding = true;
    out[pp - 1].loss = true;
    out[pp - 1].mtp = mtp;
    Ok(out)
}

/// `Et*2|(tt|)*2tL` to `Ett|tt|tt|tL`.
fn expand(text: &str) -> Option<String> {
    if text.len() > MAX_LETTERS {
        return None;
    }
    let compact: Vec<char> = text.chars().filter(|c| !c.is_whitespace() && *c != ',').collect();
    let (flat, rest) = sequence(&compact)?;
    rest.is_empty().then_some(flat)
}

/// Letters and groups, each with an optional `*count`, up to the end or a closing bracket.
fn sequence(mut text: &[char]) -> Option<(String, &[char])> {
    let mut out = String::new();
    while let Some((&c, after)) = text.split_first() {
        let (item, mut rest) = match c {
            ')' => break,
            '(' => {
                let (inner, rest) = sequence(after)?;
                (inner, rest.strip_prefix(&[')'])?)
            }
            'E' | 't' | 'm' | 'L' | '|' => (c.to_string(), after),
            _ => return None,
        };
        let mut count = 1;
        if let Some(digits) = rest.strip_prefix(&['*']) {
            let len = digits.iter().take_while(|c| c.is_ascii_digit()).count();
            count = digits[..len].iter().collect::<String>().parse::<usize>().ok()?;
            rest = &digits[len..];
        }
        if count.checked_mul(item.len())?.checked_add(out.len())? > MAX_LETTERS {
            return None;
        }
        out.push_str(&item.repeat(count));
        text = rest;
    }
    Some((out, text))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parallel(pp: usize, vp: usize, layout: Option<&str>) -> Parallel {
        Parallel {
            tp: 1,
            pp,
            cp: 1,
            ep: 1,
            etp: 1,
            vp,
            dp: 1,
            sequence_parallel: false,
            pp_rank: 0,
            pipeline_layout: layout.map(str::to_owned),
            first_stage_layers: None,
            last_stage_layers: None,
            account_for_embedding: false,
            account_for_loss: false,
            use_distributed_optimizer: true,
        }
    }

    fn lengths(stages: &[Stage]) -> Vec<usize> {
        stages.iter().map(|s| s.layers.len()).collect()
    }

    #[test]
    fn layouts_expand() {
        assert_eq!(expand("Et*2|(tt|)*2tL").as_deref(), Some("Ett|tt|tt|tL"));
        assert_eq!(expand("E,t*2|t,m,L").as_deref(), Some("Ett|tmL"));
        for bad in ["", "x", "(t", "t)", "t*", "(t*99999)*99999"] {
            assert!(expand(bad).is_none_or(|f| f.is_empty()), "{bad}");
        }
    }

    #[test]
    fn deepseek_layout_over_16_stages() {
        let s = stages(&parallel(16, 1, Some("E,t*4|t*4|t*4|t*4|t*4|t*4|t*4|t*4|t*4|t*4|t*4|t*4|t*4|t*4|t*4|t,m,L")), 61, 1).unwrap();
        assert_eq!(lengths(&s), [vec![4; 15], vec![1]].concat());
        assert_eq!(s[1].layers, [4, 5, 6, 7]);
        assert!(s[0].embedding && s[15].loss && s[15].mtp == 1);
    }

    #[test]
    fn virtual_stages_interleave() {
        let s = stages(&parallel(2, 2, None), 8, 0).unwrap();
        assert_eq!(s[0].layers, [0, 1, 4, 5]);
        assert_eq!(s[1].layers, [2, 3, 6, 7]);
    }

    #[test]
    fn uneven_splits() {
        let mut p = parallel(4, 1, None);
        (p.first_stage_layers, p.last_stage_layers) = (Some(10), Some(12));
        assert_eq!(lengths(&stages(&p, 62, 0).unwrap()), [10, 20, 20, 12]);
        let mut p = parallel(8, 4, None);
        (p.account_for_embedding, p.account_for_loss) = (true, true);
        assert_eq!(lengths(&stages(&p, 126, 0).unwrap()), [15, 16, 16, 16, 16, 16, 16, 15]);
        assert!(stages(&parallel(3, 1, None), 32, 0).unwrap_err().contains("32 layers do not divide"));
        assert!(stages(&parallel(2, 1, Some("Et|tL")), 3, 0).unwrap_err().contains("the model has 3"));
        assert!(stages(&parallel(2, 2, Some("Et|tL")), 2, 0).unwrap_err().contains("2 stages"));
    }
}
