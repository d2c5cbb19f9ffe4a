//! JSON objects whose keys stand once: serde's own maps let the last one win.

use serde::de::{Deserialize, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};
use std::fmt;

/// Settings by key.
#[derive(Debug, Clone, Default)]
pub(super) struct Settings(pub Map<String, Value>);

/// A value whose objects hold each key once, however deep.
struct Strict(Value);

impl<'de> Deserialize<'de> for Settings {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Object;
        impl<'de> Visitor<'de> for Object {
            type Value = Settings;
            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("an object")
            }
            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Settings, A::Error> {
                object(map).map(Settings)
            }
        }
        deserializer.deserialize_map(Object)
    }
}

impl<'de> Deserialize<'de> for Strict {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Any;
        impl<'de> Visitor<'de> for Any {
            type Value = Strict;
            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("a value")
            }
            fn visit_unit<E: Error>(self) -> Result<Strict, E> {
                Ok(Strict(Value::Null))
            }
            fn visit_bool<E: Error>(self, x: bool) -> Result<Strict, E> {
                Ok(Strict(x.into()))
            }
            fn visit_i64<E: Error>(self, x: i64) -> Result<Strict, E> {
                Ok(Strict(x.into()))
            }
            fn visit_u64<E: Error>(self, x: u64) -> Result<Strict, E> {
                Ok(Strict(x.into()))
            }
            fn visit_f64<E: Error>(self, x: f64) -> Result<Strict, E> {
                Ok(Strict(Number::from_f64(x).map_or(Value::Null, Value::Number)))
            }
            fn visit_str<E: Error>(self, x: &str) -> Result<Strict, E> {
                Ok(Strict(x.into()))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Strict, A::Error> {
                let mut items = Vec::new();
                while let Some(Strict(item)) = list.next_element()? {
                    items.push(item);
                }
                Ok(Strict(Value::Array(items)))
            }
            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Strict, A::Error> {
                object(map).map(|o| Strict(Value::Object(o)))
            }
        }
        deserializer.deserialize_any(Any)
    }
}

fn object<'de, A: MapAccess<'de>>(mut map: A) -> Result<Map<String, Value>, A::Error> {
    let mut object = Map::new();
    while let Some((key, Strict(value))) = map.next_entry::<String, Strict>()? {
        if object.contains_key(&key) {
            return Err(A::Error::custom(format!("`{key}` is stated twice")));
        }
        object.insert(key, value);
    }
    Ok(object)
}
