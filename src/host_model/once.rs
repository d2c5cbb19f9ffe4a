//! Tables of a model's file: each part once. serde's own maps let the last of two figures win in silence.

use serde::de::{Deserializer, Error, MapAccess, Visitor};
use std::collections::BTreeMap;
use std::fmt;

/// Milliseconds by part.
///
/// # Errors
/// A part that is stated twice, by name.
pub(super) fn once<'de, D: Deserializer<'de>>(from: D) -> Result<BTreeMap<String, f64>, D::Error> {
    struct Table;
    impl<'de> Visitor<'de> for Table {
        type Value = BTreeMap<String, f64>;
        fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
            f.write_str("an object of times by part")
        }
        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
            let mut table = BTreeMap::new();
            while let Some((part, ms)) = map.next_entry::<String, f64>()? {
                if table.contains_key(&part) {
                    return Err(A::Error::custom(format!("part {part:?} is stated twice")));
                }
                table.insert(part, ms);
            }
            Ok(table)
        }
    }
    from.deserialize_map(Table)
}
