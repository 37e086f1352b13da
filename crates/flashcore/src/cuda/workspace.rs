//! Workspaces: memory that the launches of a plan hand on to each other.
//!
//! It comes from the caller, or from here: one per stream, whose work runs in order and so never needs two at once. A call
//! that is being captured gets memory that belongs to its graph, since nobody knows where and when that will run.

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
};

use flashcore_driver::{CaptureStatus, DeviceBuffer, DriverError, Stream};

use crate::plan::Plan;

/// The handle of the stream that each thread has for itself: one handle, many streams.
const PER_THREAD: usize = 2;

/// The workspaces of a GPU, by stream. What was given once is never given back, for calls that were made before still
/// refer to it; each is at least twice as large as the one before.
#[derive(Default)]
pub(super) struct Workspaces {
    kept: Mutex<HashMap<usize, Vec<DeviceBuffer>>>,
    turn: Mutex<()>,
}

/// A workspace for one call.
pub(super) struct Lease {
    pub address: u64,
    /// Whether the next call on this stream gets the same.
    pub stays: bool,
    /// Freed in stream order, behind the call.
    _own: Option<DeviceBuffer>,
}

impl Lease {
    /// Memory that somebody else keeps.
    pub fn kept(address: u64) -> Self {
        Self { address, stays: true, _own: None }
    }
}

/// What workspaces of a stream are kept under.
pub(super) fn stream_key(stream: &Stream) -> usize {
    stream.as_raw() as usize
}

/// Whether a call on this stream needs memory of its own.
pub(super) fn is_shared(stream: &Stream) -> bool {
    stream_key(stream) == PER_THREAD || !matches!(stream.capture_status(), Ok(CaptureStatus::None))
}

impl Workspaces {
    /// Held while the launches of a plan are queued, if there are several: another thread's, on the same stream and so in
    /// the same workspace, must not come between them.
    pub fn turn(&self, plan: &Plan) -> Option<MutexGuard<'_, ()>> {
        (plan.launches.len() > 1).then(|| self.turn.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// A workspace of so many bytes for whatever is queued in the stream next.
    pub fn get(&self, stream: &Stream, bytes: usize) -> Result<Lease, DriverError> {
        if is_shared(stream) {
            let own = stream.alloc(bytes)?;
            return Ok(Lease { address: own.address(), stays: false, _own: Some(own) });
        }
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let of_stream = kept.entry(stream_key(stream)).or_default();
        if let Some(last) = of_stream.last().filter(|last| last.len() >= bytes) {
            return Ok(Lease::kept(last.address()));
        }
        let made = stream.context().alloc(bytes.next_power_of_two())?;
        let address = made.address();
        of_stream.push(made);
        Ok(Lease::kept(address))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Problem,
        plan::{Hardware, Target},
    };

    #[test]
    fn launches_that_share_a_workspace_are_queued_without_others_between_them() {
        let plan = |text: &str| {
            let problem: Problem = text.parse().unwrap();
            Plan::choose(&problem, &Hardware::typical(Target::Sm90a)).unwrap()
        };
        let workspaces = Workspaces::default();
        let turn = workspaces.turn(&plan("1x8/1x1/16384x256 bf16"));
        assert!(turn.is_some() && workspaces.turn.try_lock().is_err());
        // A plan of one launch waits for nobody.
        assert!(workspaces.turn(&plan("1x8x512x64 f16")).is_none());
        drop(turn);
        assert!(workspaces.turn.try_lock().is_ok());
    }
}
