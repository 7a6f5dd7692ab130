//! Long lists of token ids, taken out of a whole reply before its JSON is parsed.
//!
//! A whole reply is mostly ids. A JSON parser goes over each of them twice, once to find the end of the list and once to read it; that was
//! a sixth of what a whole reply costs. Here each list is read where it lies, and a reference takes its place in the JSON, so that the
//! parser still decides whose list it was.
//!
//! Why it is safe to look for a key without parsing: inside a JSON string a quote is always escaped, so `,"token_ids":[` can only be a key.

use super::wire::append_compact;
use memchr::{memchr, memmem};

/// Shorter lists, in bytes, stay where they are.
const LIST_BYTES_MIN: usize = 256;
const KEY_END: &[u8] = b"token_ids\":";

/// A reply without its long lists.
#[derive(Debug, PartialEq, Eq)]
pub struct Lifted {
    /// The JSON, with `"#0"`, `"#1"`... in place of lists.
    pub json: Vec<u8>,
    /// The lists.
    pub lists: Vec<Vec<u32>>,
}

/// Takes the long lists under `token_ids` and `prompt_token_ids` out of `json`; `None` when there are none.
pub fn lift(json: &[u8]) -> Option<Lifted> {
    let mut lifted = Lifted { json: Vec::new(), lists: vec![] };
    let (mut from, mut kept) = (0, 0);
    while let Some(found) = memmem::find(&json[from..], KEY_END) {
        let key = from + found;
        from = key + KEY_END.len();
        let blanks = json[from..].iter().take_while(|byte| **byte == b' ').count();
        let start = from + blanks;
        if !is_a_key(&json[..key]) || json.get(start) != Some(&b'[') {
            continue;
        }
        let Some(length) = memchr(b']', &json[start..]).map(|end| end + 1) else { break };
        let mut ids = Vec::new();
        if length < LIST_BYTES_MIN || append_compact(&json[start..start + length], &mut ids).is_none() {
            continue;
        }
        if lifted.lists.is_empty() {
            lifted.json.reserve(json.len() - length);
        }
        lifted.json.extend_from_slice(&json[kept..start]);
        lifted.json.extend_from_slice(reference(lifted.lists.len()).as_bytes());
        lifted.lists.push(ids);
        (from, kept) = (start + length, start + length);
    }
    if lifted.lists.is_empty() {
        return None;
    }
    lifted.json.extend_from_slice(&json[kept..]);
    Some(lifted)
}

fn reference(index: usize) -> String {
    format!("\"#{index}\"")
}

/// The list that this JSON text refers to.
pub fn referred(text: &str) -> Option<usize> {
    text.strip_prefix("\"#")?.strip_suffix('"')?.parse().ok()
}

/// Whether what ends here is the beginning of one of the two keys.
fn is_a_key(before: &[u8]) -> bool {
    let before = before.strip_suffix(b"prompt_").unwrap_or(before);
    match before.strip_suffix(b"\"") {
        Some([.., last]) => matches!(last, b'{' | b',' | b' ' | b'\n' | b'\t' | b'\r'),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::{Value, json};

    fn put_back(lifted: &Lifted) -> Value {
        let mut value: Value = serde_json::from_slice(&lifted.json).unwrap();
        fn walk(value: &mut Value, lists: &[Vec<u32>]) {
            match value {
                Value::Array(all) => all.iter_mut().for_each(|inner| walk(inner, lists)),
                Value::Object(all) => {
                    for (key, inner) in all {
                        let list = inner.as_str().and_then(|text| referred(&format!("\"{text}\"")));
                        match list.filter(|_| key.ends_with("token_ids")) {
                            Some(list) => *inner = json!(lists[list]),
                            None => walk(inner, lists),
                        }
                    }
                }
                _ => {}
            }
        }
        walk(&mut value, &lifted.lists);
        value
    }

    #[test]
    fn short_lists_stay() {
        assert_eq!(lift(br#"{"token_ids":[1,2,3]}"#), None);
        assert_eq!(lift(br#"{"token_ids":null,"prompt_token_ids":"#), None);
    }

    proptest! {
        /// Whatever else is in the reply, texts that look like keys included, it says the same with the lists taken out.
        #[test]
        fn lists_come_back_where_they_were(
            text in r#"([a-z ,{}\[\]:"\\]|"token_ids":\[1,2|,"prompt_token_ids":|token_ids":){0,20}"#,
            answer in prop::collection::vec(any::<u32>(), 0..400),
            prompt in prop::collection::vec(any::<u32>(), 0..400),
            pretty in any::<bool>(),
        ) {
            let reply = json!({
                "id": &text, &text: 1, "prompt_token_ids": prompt,
                "choices": [{"message": {"content": &text, "reasoning": [&text]}, "token_ids": answer, "stop": &text}],
            });
            let bytes = if pretty { serde_json::to_vec_pretty(&reply) } else { serde_json::to_vec(&reply) }.unwrap();
            match lift(&bytes) {
                None => prop_assert!(pretty || (answer.len() < 256 && prompt.len() < 256)),
                Some(lifted) => prop_assert_eq!(put_back(&lifted), reply),
            }
        }
    }
}
