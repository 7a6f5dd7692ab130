//! Examples as Arrow columns, a batch at a time.

use crate::example::Example;
use arrow_array::types::ArrowPrimitiveType;
use arrow_array::{ArrayRef, Int32Array, Int64Array, ListArray, PrimitiveArray, StringArray};
use arrow_buffer::OffsetBuffer;
use arrow_schema::{DataType, Field};
use std::sync::Arc;

/// Examples of a batch, at most.
const BATCH_EXAMPLES_MAX: usize = 1024;
/// Tokens of a batch, at most, but for its last example.
const BATCH_TOKENS_MAX: usize = 1 << 20;

/// Examples that wait to become a batch.
#[derive(Default)]
pub(super) struct Batch {
    pub(super) examples: Vec<Example>,
    tokens: usize,
}

impl Batch {
    /// Takes one more; whether the batch is full now.
    pub(super) fn push(&mut self, example: &Example) -> bool {
        self.tokens += example.tokens.len();
        self.examples.push(example.clone());
        self.tokens >= BATCH_TOKENS_MAX || self.examples.len() >= BATCH_EXAMPLES_MAX
    }

    pub(super) fn clear(&mut self) {
        self.examples.clear();
        self.tokens = 0;
    }

    /// `input_ids`
    pub(super) fn ids(&self, item: Field) -> ArrayRef {
        // The ids of an example fit into 31 bits.
        let values = self.examples.iter().flat_map(|example| example.tokens.ids().iter().map(|id| *id as i32));
        self.list(item, Int32Array::from_iter_values(values))
    }

    /// `loss_mask`, as integers of some width.
    pub(super) fn mask<T: ArrowPrimitiveType>(&self, item: Field) -> ArrayRef
    where
        T::Native: From<bool>,
    {
        let bits = self.examples.iter().flat_map(|example| example.tokens.mask()).map(|bit| T::Native::from(bit == 1));
        self.list(item, PrimitiveArray::<T>::from_iter_values(bits))
    }

    fn list<T: ArrowPrimitiveType>(&self, item: Field, values: PrimitiveArray<T>) -> ArrayRef {
        let offsets = OffsetBuffer::from_lengths(self.examples.iter().map(|example| example.tokens.len()));
        Arc::new(ListArray::new(Arc::new(item), offsets, Arc::new(values), None))
    }

    pub(super) fn lengths(&self) -> ArrayRef {
        Arc::new(Int64Array::from_iter_values(self.examples.iter().map(|example| example.tokens.len() as i64)))
    }

    pub(super) fn longs(&self, value: impl Fn(&Example) -> Option<i64>) -> ArrayRef {
        Arc::new(Int64Array::from_iter(self.examples.iter().map(value)))
    }

    pub(super) fn texts<'a, T: AsRef<str>>(&'a self, value: impl Fn(&'a Example) -> T) -> ArrayRef {
        Arc::new(StringArray::from_iter_values(self.examples.iter().map(value)))
    }
}

/// A column that is a list of this field.
pub(super) fn list_field(name: &str, item: Field) -> Field {
    Field::new(name, DataType::List(Arc::new(item)), true)
}
