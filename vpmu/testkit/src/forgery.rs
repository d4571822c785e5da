//! Forged saved states in JSON, with values that no device would write.

use serde_json::{Value, json};

/// The JSON pointer of each leaf.
pub fn leaves(state: &Value) -> Vec<String> {
    let mut places = Vec::new();
    leaves_of(state, String::new(), &mut places);
    places
}

fn leaves_of(value: &Value, at: String, into: &mut Vec<String>) {
    match value {
        Value::Array(all) => {
            for (index, one) in all.iter().enumerate() {
                leaves_of(one, format!("{at}/{index}"), into);
            }
        }
        Value::Object(all) => {
            for (name, one) in all {
                leaves_of(one, format!("{at}/{name}"), into);
            }
        }
        _ => into.push(at),
    }
}

/// A change to a leaf, or to the array that contains it.
#[derive(Debug, Clone)]
pub enum Forgery {
    Number(u64),
    Plus(u64),
    Flip,
    Null,
    /// Removes the leaf if it is in an array. Otherwise, sets the leaf to null.
    Remove,
    /// Repeats the leaf if it is in an array. Otherwise, sets the leaf to null.
    Repeat,
}

/// Applies a forgery to the leaf at a JSON pointer.
pub fn forge(state: &mut Value, at: &str, forgery: &Forgery) {
    let parent = at.rsplit_once('/').map_or("", |(parent, _)| parent);
    let index = at.rsplit('/').next().and_then(|last| last.parse().ok());
    let leaf = state.pointer(at).cloned().unwrap_or(Value::Null);
    if let (Forgery::Remove | Forgery::Repeat, Some(index)) = (forgery, index)
        && let Some(Value::Array(all)) = state.pointer_mut(parent)
        && index < all.len()
    {
        match forgery {
            Forgery::Remove => drop(all.remove(index)),
            _ => all.insert(index, leaf),
        }
        return;
    }
    if let Some(place) = state.pointer_mut(at) {
        *place = match (forgery, &leaf) {
            (Forgery::Number(number), _) => json!(number),
            (Forgery::Plus(more), leaf) => json!(leaf.as_u64().unwrap_or(0).wrapping_add(*more)),
            (Forgery::Flip, Value::Bool(on)) => json!(!on),
            (Forgery::Flip, leaf) => json!(leaf.as_u64().unwrap_or(0) ^ 1),
            _ => Value::Null,
        };
    }
}
