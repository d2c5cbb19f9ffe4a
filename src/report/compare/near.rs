//! What the other side has in place of a configuration that it lacks. Cells are compared as numbers, so that thousands
//! of configurations are looked through for thousands of others within a second.

use super::keys::{EMPTY, KEY, Key};
use std::collections::HashMap;

/// More differences than this make another configuration, not a near miss.
const NEAR: usize = 4;
/// The number of a cell that no key of the side holds.
const NOWHERE: u32 = u32::MAX;

/// The keys of a side.
pub struct Side<'a> {
    keys: &'a [Key],
    /// Numbers of the cells.
    cells: HashMap<&'a str, u32>,
    /// The keys' cells as numbers.
    numbers: Vec<[u32; KEY.len()]>,
}

impl<'a> Side<'a> {
    pub fn new(keys: &'a [Key]) -> Self {
        let mut cells = HashMap::new();
        let mut numbers = Vec::with_capacity(keys.len());
        for key in keys {
            let mut row = [NOWHERE; KEY.len()];
            for (number, (_, cell)) in row.iter_mut().zip(key.cells()) {
                let next = cells.len() as u32;
                *number = *cells.entry(cell).or_insert(next);
            }
            numbers.push(row);
        }
        Side { keys, cells, numbers }
    }

    /// How the nearest configuration differs from `key`, in words.
    pub fn nearest(&self, key: &Key) -> String {
        let mut asked = [NOWHERE; KEY.len()];
        for (number, (_, cell)) in asked.iter_mut().zip(key.cells()) {
            *number = self.cells.get(cell).copied().unwrap_or(NOWHERE);
        }
        let mut near: Option<(usize, usize)> = None;
        for (at, row) in self.numbers.iter().enumerate() {
            let differences = row.iter().zip(&asked).filter(|(a, b)| a != b).count();
            if differences > 0 && near.is_none_or(|(_, least)| differences < least) {
                near = Some((at, differences));
                // None can be nearer.
                if differences == 1 {
                    break;
                }
            }
        }
        match near.filter(|(_, differences)| *differences <= NEAR) {
            Some((at, _)) => {
                let differences = key.differences(&self.keys[at]);
                let shown = |cell: &str| if cell.is_empty() { EMPTY.to_owned() } else { format!("{cell:?}") };
                let each = differences
                    .iter()
                    .map(|(name, a, b)| format!("{name} ({} here, {} there)", shown(a), shown(b)));
                format!("the nearest row there differs in {}", each.collect::<Vec<_>>().join(", "))
            }
            None => "no row there is like it".into(),
        }
    }
}
