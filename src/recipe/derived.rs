//! What follows from a recipe's values: the kind of every layer, the padded vocabulary.

use serde_json::Value;
use thiserror::Error;

use super::Values;
use crate::config::LayerKind;

/// Why a model's layers cannot be told.
#[derive(Debug, Clone, PartialEq, Error)]
pub enum LayerError {
    #[error("model.num_layers is {0}: it must be a whole number from 1 to {MAX_LAYERS}")]
    Count(Value),
    #[error(
        "model.hybrid_override_pattern: `{letter}` at {at} is none of M (Mamba-2), * (attention), - (MLP), E (experts)"
    )]
    Letter { letter: char, at: usize },
    #[error("{key} has {has} layers, but model.num_layers is {needed}; change one of them")]
    Length { key: &'static str, has: usize, needed: usize },
    #[error("model.moe_layer_freq is 0: it must be at least 1")]
    Frequency,
    #[error(
        "{key} has {value} for layer {layer}: a list has 1 or 0 for each layer, whether it is of that kind"
    )]
    Flag { key: &'static str, value: Value, layer: usize },
    #[error(
        "model.attention_variant is {DELTA_NET}, but model.linear_attention_freq does not say which layers: give a list (1 is \
         a gated delta net, 0 full attention), or N for full attention in every N-th layer"
    )]
    NoDeltaLayers,
}

/// `model.attention_variant` of models with gated delta net layers.
pub const DELTA_NET: &str = "gated_delta_net";
/// `model.attention_variant` of DeepSeek-V4's attention.
pub const SHARED_KV: &str = "dsv4_hybrid";

/// Most layers of a model: the deepest has 126; more would be a slip of the hand.
pub const MAX_LAYERS: u64 = 4096;

/// The kind of every decoder layer, from `model.hybrid_override_pattern`, or from `model.moe_layer_freq` and
/// `model.linear_attention_freq`.
///
/// # Errors
/// No or too many layers; a pattern of another length or with another letter.
pub fn layer_kinds(values: &Values) -> Result<Vec<LayerKind>, LayerError> {
    let count = values.get("model.num_layers").cloned().unwrap_or(Value::Null);
    let layers = match count.as_u64() {
        Some(n) if (1..=MAX_LAYERS).contains(&n) => n as usize,
        _ => return Err(LayerError::Count(count)),
    };
    if let Some(pattern) = values.get("model.hybrid_override_pattern").and_then(Value::as_str) {
        let kinds = hybrid_kinds(pattern)?;
        return match kinds.len() {
            has if has == layers => Ok(kinds),
            has => Err(LayerError::Length { key: "model.hybrid_override_pattern", has, needed: layers }),
        };
    }
    let mut kinds = mlp_kinds(values, layers)?;
    if values.get("model.attention_variant").and_then(Value::as_str) == Some(DELTA_NET) {
        let linear: Vec<bool> = match values.get("model.linear_attention_freq") {
            Some(Value::Array(list)) if list.len() == layers => flags("model.linear_attention_freq", list)?,
            Some(Value::Array(flags)) => {
                let key = "model.linear_attention_freq";
                return Err(LayerError::Length { key, has: flags.len(), needed: layers });
            }
            other => match other.and_then(Value::as_u64) {
                None | Some(0) => return Err(LayerError::NoDeltaLayers),
                Some(every) => (1..=layers as u64).map(|i| !i.is_multiple_of(every)).collect(),
            },
        };
        for (kind, _) in kinds.iter_mut().zip(linear).filter(|(_, linear)| *linear) {
            *kind = if *kind == LayerKind::Moe { LayerKind::DeltaMoe } else { LayerKind::DeltaDense };
        }
    }
    Ok(kinds)
}

/// A list of 1 and 0.
fn flags(key: &'static str, list: &[Value]) -> Result<Vec<bool>, LayerError> {
    let flag = |(at, value): (usize, &Value)| match value.as_u64() {
        Some(n @ (0 | 1)) => Ok(n == 1),
        _ => Err(LayerError::Flag { key, value: value.clone(), layer: at + 1 }),
    };
    list.iter().enumerate().map(flag).collect()
}

/// Dense or experts, by layer.
fn mlp_kinds(values: &Values, layers: usize) -> Result<Vec<LayerKind>, LayerError> {
    if values.get("model.num_moe_experts").is_none_or(Value::is_null) {
        return Ok(vec![LayerKind::Dense; layers]);
    }
    let kind = |moe: bool| if moe { LayerKind::Moe } else { LayerKind::Dense };
    match values.get("model.moe_layer_freq") {
        Some(Value::Array(list)) if list.len() == layers => {
            Ok(flags("model.moe_layer_freq", list)?.into_iter().map(kind).collect())
        }
        Some(Value::Array(flags)) => {
            Err(LayerError::Length { key: "model.moe_layer_freq", has: flags.len(), needed: layers })
        }
        other => match other.and_then(Value::as_u64).unwrap_or(1) {
            0 => Err(LayerError::Frequency),
            every => Ok((0..layers as u64).map(|i| kind(i.is_multiple_of(every))).collect()),
        },
    }
}

/// One kind per letter of a hybrid pattern.
///
/// # Errors
/// [`LayerError::Letter`].
pub fn hybrid_kinds(pattern: &str) -> Result<Vec<LayerKind>, LayerError> {
    let kind = |(i, letter): (usize, char)| match letter {
        'M' => Ok(LayerKind::Mamba),
        '*' => Ok(LayerKind::AttnOnly),
        '-' => Ok(LayerKind::MlpOnly),
        'E' => Ok(LayerKind::MoeOnly),
        letter => Err(LayerError::Letter { letter, at: i + 1 }),
    };
    pattern.chars().enumerate().map(kind).collect()
}

/// The vocabulary as it is split over `tp` ranks: padded to a multiple of
/// `model.make_vocab_size_divisible_by` x tp if `model.should_pad_vocab`. 0 without a vocabulary.
pub fn padded_vocab(values: &Values, tp: usize) -> usize {
    let number = |key: &str| values.get(key).and_then(Value::as_u64).map(|n| n as usize);
    let vocab = number("model.vocab_size").unwrap_or(0);
    let pad = values.get("model.should_pad_vocab").and_then(Value::as_bool).unwrap_or(false);
    let unit = number("model.make_vocab_size_divisible_by").unwrap_or(1).max(1).saturating_mul(tp.max(1));
    if pad { vocab.div_ceil(unit).saturating_mul(unit) } else { vocab }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn values(pairs: &[(&str, Value)]) -> Values {
        pairs.iter().map(|(k, v)| (format!("model.{k}"), v.clone())).collect()
    }

    #[test]
    fn kinds_follow_the_pattern() {
        use LayerKind::{AttnOnly, Dense, Mamba, MlpOnly, Moe, MoeOnly};
        let hybrid = values(&[("num_layers", json!(4)), ("hybrid_override_pattern", json!("M*-E"))]);
        assert_eq!(layer_kinds(&hybrid), Ok(vec![Mamba, AttnOnly, MlpOnly, MoeOnly]));
        let leading =
            [("num_layers", json!(3)), ("num_moe_experts", json!(8)), ("moe_layer_freq", json!([0, 1, 1]))];
        assert_eq!(layer_kinds(&values(&leading)), Ok(vec![Dense, Moe, Moe]));
        let two =
            [("num_layers", json!(3)), ("num_moe_experts", json!(8)), ("moe_layer_freq", json!([0, 2, 1]))];
        let said = layer_kinds(&values(&two)).unwrap_err().to_string();
        assert!(said.contains("model.moe_layer_freq has 2 for layer 2"), "{said}");
        let every = [("num_layers", json!(3)), ("num_moe_experts", json!(8)), ("moe_layer_freq", json!(2))];
        assert_eq!(layer_kinds(&values(&every)), Ok(vec![Moe, Dense, Moe]));
        use LayerKind::{DeltaDense, DeltaMoe};
        let delta = |freq: Value| {
            values(&[
                ("num_layers", json!(4)),
                ("num_moe_experts", json!(8)),
                ("moe_layer_freq", json!([0, 1, 1, 1])),
                ("attention_variant", json!("gated_delta_net")),
                ("linear_attention_freq", freq),
            ])
        };
        assert_eq!(layer_kinds(&delta(json!([1, 0, 1, 1]))), Ok(vec![DeltaDense, Moe, DeltaMoe, DeltaMoe]));
        assert_eq!(layer_kinds(&delta(json!(2))), Ok(vec![DeltaDense, Moe, DeltaMoe, Moe]));
        assert_eq!(layer_kinds(&delta(json!(null))), Err(LayerError::NoDeltaLayers));
        assert_eq!(layer_kinds(&delta(json!(0))), Err(LayerError::NoDeltaLayers));
        assert!(matches!(layer_kinds(&delta(json!([1, 0]))), Err(LayerError::Length { has: 2, .. })));
        let three = layer_kinds(&delta(json!([1, 0, 3, 1])));
        assert!(matches!(three, Err(LayerError::Flag { layer: 3, .. })), "{three:?}");
        assert_eq!(layer_kinds(&values(&[("num_layers", json!(0))])), Err(LayerError::Count(json!(0))));
        assert_eq!(hybrid_kinds("MX"), Err(LayerError::Letter { letter: 'X', at: 2 }));
    }

    #[test]
    fn vocabulary_is_padded_when_asked() {
        let of = |pad: bool| {
            values(&[
                ("vocab_size", json!(1000)),
                ("make_vocab_size_divisible_by", json!(128)),
                ("should_pad_vocab", json!(pad)),
            ])
        };
        assert_eq!((padded_vocab(&of(true), 2), padded_vocab(&of(false), 2)), (1024, 1000));
    }
}
