//! Items that threads take one by one.

use std::sync::atomic::{AtomicUsize, Ordering};

/// Items that threads take one by one, in order.
pub(super) struct Queue<'a, T> {
    items: &'a [T],
    next: AtomicUsize,
}

impl<'a, T> Queue<'a, T> {
    pub(super) fn new(items: &'a [T]) -> Self {
        Self { items, next: AtomicUsize::new(0) }
    }

    /// The next item, for the calling thread alone.
    pub(super) fn take(&self) -> Option<&'a T> {
        self.items.get(self.next.fetch_add(1, Ordering::Relaxed))
    }

    /// The item that a thread would get now; another may be faster.
    pub(super) fn peek(&self) -> Option<&'a T> {
        self.items.get(self.next.load(Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn items_are_taken_once_and_in_order_and_seen_before_they_are_taken() {
        let queue = Queue::new(&[1, 2]);
        assert_eq!((queue.peek(), queue.peek()), (Some(&1), Some(&1)));
        assert_eq!((queue.take(), queue.peek(), queue.take()), (Some(&1), Some(&2), Some(&2)));
        assert_eq!((queue.peek(), queue.take()), (None, None));
    }
}
