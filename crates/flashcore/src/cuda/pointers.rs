//! Which memory is known to be the GPU's.
//!
//! A kernel that is given a host pointer, or one of another GPU, loses the whole CUDA context, so every address is
//! checked. Asking the driver takes long beside a launch, but its answer is about a whole allocation: the ranges that
//! it named are kept, and a call whose tensors lie in known ranges asks nothing. That memory was freed since is not
//! noticed.

use std::{
    ops::Range,
    sync::{PoisonError, RwLock},
};

use flashcore_driver::{Context, DriverError, MemoryKind, PointerFault};

use crate::Name;

/// Ranges that are kept; with more, all are forgotten and asked for again.
const MOST: usize = 4096;

/// What a call touches: a tensor's name and its bytes.
pub(super) type Span = (Name, Range<u64>);

/// Ranges of the GPU's memory, by their start; no two overlap.
#[derive(Default)]
pub(super) struct KnownMemory {
    ranges: RwLock<Vec<Range<u64>>>,
}

/// An address that a kernel must not be given.
#[derive(Debug, PartialEq)]
pub(super) struct BadPointer {
    pub tensor: Name,
    pub address: u64,
    pub fault: PointerFault,
}

impl KnownMemory {
    /// Checks that all spans lie in the GPU's memory; asks the driver only about those that are not known yet.
    pub(super) fn check(
        &self,
        context: &Context,
        spans: impl Iterator<Item = Span> + Clone,
    ) -> Result<Result<(), BadPointer>, DriverError> {
        let all_known = {
            let ranges = self.ranges.read().unwrap_or_else(PoisonError::into_inner);
            spans.clone().all(|(_, span)| known(&ranges, &span))
        };
        if all_known {
            return Ok(Ok(()));
        }
        context.with_relaxed_capture(|| self.ask_for(context, spans))?
    }

    /// Asks the driver about what is not known. A capture may be going on.
    fn ask_for(
        &self,
        context: &Context,
        spans: impl Iterator<Item = Span>,
    ) -> Result<Result<(), BadPointer>, DriverError> {
        for (tensor, span) in spans {
            // Memory that was put together from parts has one range per part; the driver can be asked about the ends.
            for address in [span.start, span.end - 1] {
                if self.knows(address) {
                    continue;
                }
                match ask(context, address)? {
                    Ok(range) => self.learn(range),
                    Err(fault) => return Ok(Err(BadPointer { tensor, address, fault })),
                }
            }
        }
        Ok(Ok(()))
    }

    fn knows(&self, address: u64) -> bool {
        known(&self.ranges.read().unwrap_or_else(PoisonError::into_inner), &(address..address + 1))
    }

    fn learn(&self, range: Range<u64>) {
        let mut ranges = self.ranges.write().unwrap_or_else(PoisonError::into_inner);
        if ranges.len() >= MOST {
            ranges.clear();
        }
        // What overlaps it was freed in the meantime.
        ranges.retain(|other| other.end <= range.start || other.start >= range.end);
        let place = ranges.partition_point(|other| other.start < range.start);
        ranges.insert(place, range);
    }
}

/// Whether a span lies in known memory; it may go on from one range into the next.
fn known(ranges: &[Range<u64>], span: &Range<u64>) -> bool {
    let mut next = ranges.partition_point(|range| range.end <= span.start);
    let mut reached = span.start;
    while reached < span.end {
        match ranges.get(next) {
            Some(range) if range.start <= reached => reached = range.end,
            _ => return false,
        }
        next += 1;
    }
    true
}

/// The allocation around an address, or what is wrong with the address.
fn ask(context: &Context, address: u64) -> Result<Result<Range<u64>, PointerFault>, DriverError> {
    let info = context.pointer_info(address)?;
    let here = context.device().ordinal();
    Ok(match (info.kind, info.device) {
        (MemoryKind::Unknown, _) => Err(PointerFault::NotCuda),
        (MemoryKind::PinnedHost, _) => Err(PointerFault::PinnedHost),
        (MemoryKind::Device, Some(other)) if other != here => Err(PointerFault::OtherDevice(other)),
        (MemoryKind::Device | MemoryKind::Managed, _) => Ok(match info.range {
            Some((start, len)) => start..start + len as u64,
            None => address..address + 1,
        }),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_span_is_known_where_ranges_hold_it_without_a_gap() {
        let ranges = [100..200, 200..300, 400..500];
        for span in [100..101, 150..200, 199..200, 100..300, 150..250, 400..500] {
            assert!(known(&ranges, &span), "{span:?}");
        }
        for span in [99..101, 250..301, 299..400, 300..400, 450..501, 500..501, 0..1000] {
            assert!(!known(&ranges, &span), "{span:?}");
        }
        assert!(!known(&[], &(0..1)));
    }

    #[test]
    fn a_new_range_takes_the_place_of_what_it_overlaps() {
        let memory = KnownMemory::default();
        for range in [400..500, 100..200, 200..300] {
            memory.learn(range);
        }
        memory.learn(150..250);
        let ranges = memory.ranges.read().unwrap();
        assert_eq!(*ranges, [150..250, 400..500]);
    }

    #[test]
    fn a_program_with_more_allocations_than_are_kept_is_still_served() {
        let memory = KnownMemory::default();
        for start in 0..2 * MOST as u64 {
            memory.learn(start * 10..start * 10 + 10);
            assert!(memory.knows(start * 10 + 5));
        }
        assert!(memory.ranges.read().unwrap().len() <= MOST);
    }
}
