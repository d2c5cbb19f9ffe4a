//! Text or JSON to a key's value.

use serde_json::{Number, Value};

use super::{Key, KeyError, Kind, find};

/// Parses the right side of `key=text` for a key in any of its spellings.
///
/// Hydra's spellings: `null`, `true`, `[a,b]`, quotes around a string. Returns the table's name of the key.
///
/// # Errors
/// An unknown key, a value of another type, a list without brackets, a group of numbers.
pub fn parse_value(key: &str, text: &str) -> Result<(&'static str, Value), KeyError> {
    let row = find(key)?;
    let text = text.trim();
    if let Kind::Object(fields) = row.kind {
        return Err(KeyError::Group { key: row.name.to_owned(), fields: fields.join(", ") });
    }
    if is_null(row, text) {
        return if row.nullable { Ok((row.name, Value::Null)) } else { Err(wrong(row, text)) };
    }
    let quoted = unquote(text);
    if quoted.is_none() && !text.starts_with(['[', '(']) && text.contains(',') && row.kind != Kind::Str {
        return Err(KeyError::Sweep { key: row.name.to_owned(), text: super::short(text) });
    }
    let word = quoted.unwrap_or(text);
    let value = match row.kind {
        Kind::Int => word.parse::<i64>().ok().map(Value::from),
        Kind::Float => word.parse::<f64>().ok().and_then(Number::from_f64).map(Value::Number),
        Kind::Bool => parse_bool(word).map(Value::Bool),
        Kind::Str => Some(Value::from(word)),
        Kind::Enum(words) => words.contains(&word).then(|| Value::from(word)),
        Kind::StrList => parse_list(text).map(|items| items.into_iter().map(Value::from).collect()),
        Kind::IntList => parse_list(text).and_then(|items| {
            items
                .iter()
                .map(|i| i.parse::<i64>().ok().map(Value::from))
                .collect::<Option<Vec<_>>>()
                .map(Value::Array)
        }),
        Kind::LayerPattern => parse_layers(word),
        Kind::Object(_) => None,
    };
    value.map(|v| (row.name, v)).ok_or_else(|| wrong(row, text))
}

/// Checks a JSON value from a recipe file against its key and brings it to one form: floats as floats,
/// layer patterns as a number or a list.
///
/// # Errors
/// [`KeyError::Value`] if the value has another type or an object has an unknown field.
pub fn canonical_value(key: &Key, value: &Value) -> Result<Value, KeyError> {
    let fine = match (key.kind, value) {
        (_, Value::Null) => key.nullable.then_some(Value::Null),
        (Kind::Int, v) => v.as_i64().map(Value::from),
        (Kind::Float, v) => v.as_f64().and_then(Number::from_f64).map(Value::Number),
        (Kind::Bool, v) => v.as_bool().map(Value::Bool),
        (Kind::Str, Value::String(s)) => Some(Value::from(s.as_str())),
        (Kind::Enum(words), Value::String(s)) => words.contains(&s.as_str()).then(|| value.clone()),
        (Kind::StrList, Value::Array(a)) => a.iter().all(Value::is_string).then(|| value.clone()),
        (Kind::IntList, Value::Array(a)) => a.iter().all(Value::is_i64).then(|| value.clone()),
        (Kind::LayerPattern, Value::String(s)) => parse_layers(s),
        (Kind::LayerPattern, Value::Array(a)) => a.iter().all(Value::is_u64).then(|| value.clone()),
        (Kind::LayerPattern, v) => v.as_u64().map(Value::from),
        (Kind::Object(fields), Value::Object(map)) => {
            if let Some(unknown) = map.keys().find(|k| !fields.contains(&k.as_str())) {
                return Err(KeyError::Unknown {
                    key: format!("{}.{unknown}", key.name),
                    nearest: super::nearest(unknown, fields.iter().copied()),
                });
            }
            Some(value.clone())
        }
        _ => None,
    };
    fine.ok_or_else(|| wrong(key, &value.to_string()))
}

/// `null` and Python's `None`; the word `none` too, unless the key has that word among its own.
fn is_null(row: &Key, text: &str) -> bool {
    let own_none = matches!(row.kind, Kind::Enum(words) if words.contains(&"none")) || row.kind == Kind::Str;
    matches!(text, "null" | "None" | "~") || (text == "none" && !own_none)
}

fn parse_bool(word: &str) -> Option<bool> {
    match word.to_ascii_lowercase().as_str() {
        "true" | "yes" | "on" | "1" => Some(true),
        "false" | "no" | "off" | "0" => Some(false),
        _ => None,
    }
}

fn unquote(text: &str) -> Option<&str> {
    ['"', '\''].into_iter().find_map(|q| text.strip_prefix(q)?.strip_suffix(q))
}

/// `[a, b]` to its items, quotes removed; `[]` is empty.
fn parse_list(text: &str) -> Option<Vec<&str>> {
    let inner = text.strip_prefix('[')?.strip_suffix(']')?.trim();
    if inner.is_empty() {
        return Some(Vec::new());
    }
    inner
        .split(',')
        .map(|item| {
            let item = item.trim();
            let item = unquote(item).unwrap_or(item);
            (!item.is_empty() && !item.contains(['[', ']'])).then_some(item)
        })
        .collect()
}

fn parse_layers(text: &str) -> Option<Value> {
    match text.parse::<u64>() {
        Ok(n) => Some(Value::from(n)),
        Err(_) => expand_layer_pattern(text).map(|layers| layers.into_iter().map(Value::from).collect()),
    }
}

/// Most layers that a pattern may spell: far above any model, far below what would exhaust memory.
const MAX_PATTERN_LAYERS: usize = 4096;

/// Expands Megatron's list arithmetic, `[0]*3+[1]*58` or `([1]*3+[0]*1)*12`, to one number per layer.
/// `None` if the text is not of that form or spells more than 4096 layers.
pub fn expand_layer_pattern(text: &str) -> Option<Vec<u64>> {
    if text.len() > 4 * MAX_PATTERN_LAYERS {
        return None;
    }
    let compact: String = text.chars().filter(|c| !c.is_whitespace()).collect();
    let (layers, rest) = sum(&compact)?;
    rest.is_empty().then_some(layers)
}

/// sum := term ('+' term)*
fn sum(text: &str) -> Option<(Vec<u64>, &str)> {
    let (mut layers, mut rest) = term(text)?;
    while let Some(after) = rest.strip_prefix('+') {
        let (more, tail) = term(after)?;
        layers.extend(more);
        rest = tail;
        if layers.len() > MAX_PATTERN_LAYERS {
            return None;
        }
    }
    Some((layers, rest))
}

/// term := ('[' n (',' n)* ']' | '(' [n (',' n)*] | sum ')') ['*' count]
fn term(text: &str) -> Option<(Vec<u64>, &str)> {
    let (layers, rest) = if let Some(inner) = text.strip_prefix('[') {
        let (list, rest) = inner.split_once(']')?;
        (list.split(',').map(|n| n.parse().ok()).collect::<Option<Vec<u64>>>()?, rest)
    } else {
        // One level a bracket: the depth is bounded by the text's length, which is bounded above.
        let (layers, rest) = sum(text.strip_prefix('(')?)?;
        (layers, rest.strip_prefix(')')?)
    };
    let Some(after) = rest.strip_prefix('*') else { return Some((layers, rest)) };
    let digits = after.bytes().take_while(u8::is_ascii_digit).count();
    let count: usize = after.get(..digits)?.parse().ok()?;
    if count.checked_mul(layers.len())? > MAX_PATTERN_LAYERS {
        return None;
    }
    Some((layers.repeat(count), &after[digits..]))
}

fn wrong(row: &Key, text: &str) -> KeyError {
    let repeated = super::short(text);
    let mut expected = match row.kind {
        Kind::Int => format!("a whole number up to {}", i64::MAX),
        Kind::Float => "a finite number".to_owned(),
        Kind::Bool => "true or false".to_owned(),
        Kind::Str => "text".to_owned(),
        Kind::Enum(words) => format!("one of {}", words.join(", ")),
        Kind::StrList => "a list such as [attn,mlp]".to_owned(),
        Kind::IntList => "a list of whole numbers such as [127,0]".to_owned(),
        Kind::LayerPattern => "a number, a list, or a pattern such as [0]*3+[1]*58".to_owned(),
        Kind::Object(fields) => format!("an object with {}", fields.join(", ")),
    };
    if row.nullable {
        expected.push_str(", or null");
    }
    let hint = match row.kind {
        Kind::StrList | Kind::IntList if !text.starts_with('[') => {
            format!("; write {}=[{repeated}]", row.name)
        }
        Kind::Enum(words) => super::nearest(text, words.iter().copied())
            .map(|n| format!("; did you mean `{n}`?"))
            .unwrap_or_default(),
        _ => String::new(),
    };
    KeyError::Value { key: row.name.to_owned(), text: repeated, expected, hint }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn parsed(key: &str, text: &str) -> Value {
        parse_value(key, text).map(|(_, v)| v).unwrap()
    }

    #[test]
    fn each_kind_parses() {
        assert_eq!(parsed("model.hidden_size", "4096"), json!(4096));
        assert_eq!(parsed("optimizer.lr", "3e-4"), json!(3e-4));
        assert_eq!(parsed("optimizer.lr", "1"), json!(1.0));
        assert_eq!(parsed("model.use_te_rng_tracker", "True"), json!(true));
        assert_eq!(parsed("model.cuda_graph_impl", "none"), json!("none"));
        assert_eq!(parsed("model.cuda_graph_scope", "[attn, 'mlp']"), json!(["attn", "mlp"]));
        assert_eq!(parsed("model.cuda_graph_scope", "[]"), json!([]));
        assert_eq!(parsed("model.recompute_granularity", "null"), Value::Null);
        assert_eq!(parsed("model.recompute_granularity", "none"), Value::Null);
        assert_eq!(parsed("model.moe_layer_freq", "([0]*1+[1]*2)*2"), json!([0, 1, 1, 0, 1, 1]));
        assert_eq!(parsed("model.pipeline_model_parallel_layout", "E,t*2|t,L"), json!("E,t*2|t,L"));
    }

    #[test]
    fn wrong_values_say_what_is_right() {
        let message = |key: &str, text: &str| parse_value(key, text).unwrap_err().to_string();
        assert!(message("model.cuda_graph_scope", "attn,mlp").contains("model.cuda_graph_scope=[attn,mlp]"));
        assert!(message("model.cuda_graph_scope", "attn").contains("write model.cuda_graph_scope=[attn]"));
        assert!(message("model.hidden_size", "4k").contains("a whole number"));
        assert!(message("model.hidden_size", "null").contains("a whole number"));
        assert!(
            message("model.cuda_graph_impl", "transformer_engin")
                .contains("did you mean `transformer_engine`?")
        );
        assert!(message("optimizer.lr", "nan").contains("finite"));
        assert!(message("model.vision", "x").contains("only a recipe file"));
    }

    proptest! {
        #[test]
        fn no_text_panics(key in 0..super::super::KEYS.len(), text in "[-0-9a-z\\[\\](),*+'\" ]{0,24}") {
            let _ = parse_value(super::super::KEYS[key].name, &text);
        }

        #[test]
        fn layer_patterns_expand_as_spelt(a in 0u64..3, n in 0usize..20, b in 0u64..3, m in 0usize..20, k in 1usize..5) {
            let expected = [vec![a; n], vec![b; m]].concat().repeat(k);
            prop_assert_eq!(expand_layer_pattern(&format!("([{a}]*{n}+[{b}]*{m})*{k}")), Some(expected));
        }
    }
}
