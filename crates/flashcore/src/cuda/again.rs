//! Calls that were made before, ready to be launched again.
//!
//! Programs make the same calls over and over: the same problem on the same tensors. What such a call goes through
//! (its addresses checked, its tensor maps made, its parameters packed) is kept, in a table of fixed size in which a new
//! call takes the place of an old one: a call that is found again is one look-up and the launch, and one that is not
//! allocates nothing either. Brief calls that keep coming back become graphs, which the driver launches faster than
//! kernels with their parameters.

#![allow(unsafe_code)] // A launch is unsafe by nature; a graph's is the launch that it was made of.

use std::{
    hash::BuildHasher,
    sync::{
        Arc, Mutex, OnceLock, RwLock,
        atomic::{AtomicU32, Ordering},
    },
};

use flashcore_driver::{CaptureMode, CaptureStatus, Context, DriverError, GraphExec, Stream, StreamOptions};

use flashcore_ptx::TraceSize;

use super::{
    Ready,
    key::{Key, QuickState},
};
use crate::{contract::Call, plan::Packed, signature::PerTensor, tensor::Raw};

/// Calls that are kept.
const SLOTS: usize = 256;

/// Places that a call may take, so that two that come in turns hardly ever drive each other out.
const WAYS: usize = 4;

/// How often a call is repeated before it becomes a graph, which costs as much as some ten launches.
const REPEATS: u32 = 2;

/// Everything that a launch depends on.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct CallKey {
    plan: Key,
    /// Address and strides of each tensor; the problem has the shapes.
    tensors: PerTensor<(usize, [usize; 3])>,
    lengths: Option<u64>,
    /// What the workspace depends on: the stream, and the caller's own if there is one.
    workspace: (usize, Option<u64>),
    /// Where kernels write their stamps, if they do.
    trace: Option<(u64, TraceSize)>,
}

impl CallKey {
    pub(super) fn new(
        plan: &Key,
        call: &Call<'_>,
        workspace: (usize, Option<u64>),
        trace: Option<(u64, TraceSize)>,
    ) -> Self {
        let at = |raw: &Raw| {
            let [batch, head, row, _] = raw.layout.strides;
            (raw.ptr as usize, [batch, head, row])
        };
        Self { plan: *plan, tensors: call.tensors.map(at), lengths: call.device_lengths, workspace, trace }
    }

    fn hash(&self) -> usize {
        QuickState::default().hash_one(self) as usize
    }
}

/// A call with everything that its launch takes.
pub(super) struct Made {
    key: CallKey,
    pub ready: Arc<Ready>,
    pub packed: Packed,
    repeats: AtomicU32,
    graph: OnceLock<Mutex<GraphExec>>,
}

impl Made {
    /// Launches the call: as a graph, once it was repeated, because that costs the host a third of a kernel's launch;
    /// as a kernel until then, where the stream is being recorded, and while another thread launches the graph.
    pub fn launch(
        &self,
        stream: &Stream,
        kernel: impl Fn(&Stream) -> Result<(), DriverError>,
    ) -> Result<(), DriverError> {
        if !self.ready.brief {
            return kernel(stream);
        }
        if let Some(graph) = self.graph.get() {
            return match graph.try_lock() {
                // SAFETY: the graph is this call's launch; what holds for that holds for it.
                Ok(graph) if records_nothing(stream) => unsafe { graph.launch(stream) },
                _ => kernel(stream),
            };
        }
        if self.repeats.fetch_add(1, Ordering::Relaxed) == REPEATS && records_nothing(stream) {
            // A call that cannot be recorded is launched as before.
            let recorded = stream.context().with_relaxed_capture(|| record(stream.context(), &kernel));
            if let Ok(Ok(graph)) = recorded {
                let _ = self.graph.set(Mutex::new(graph));
            }
        }
        kernel(stream)
    }
}

fn records_nothing(stream: &Stream) -> bool {
    matches!(stream.capture_status(), Ok(CaptureStatus::None))
}

/// A graph of one call.
fn record(
    context: &Context,
    kernel: impl Fn(&Stream) -> Result<(), DriverError>,
) -> Result<GraphExec, DriverError> {
    let aside = context.stream(StreamOptions::default())?;
    let graph = aside.capture(CaptureMode::Relaxed, kernel)?.instantiate()?;
    graph.upload(&aside)?;
    aside.synchronize()?;
    Ok(graph)
}

/// Calls by what they depend on.
pub(super) struct KnownCalls {
    slots: Box<[RwLock<Option<Made>>]>,
}

impl Default for KnownCalls {
    fn default() -> Self {
        Self { slots: (0..SLOTS).map(|_| RwLock::new(None)).collect() }
    }
}

impl KnownCalls {
    /// Launches a call that was made before; `None` if it was not, or has made room for another.
    pub(super) fn again<T>(&self, key: &CallKey, launch: impl FnOnce(&Made) -> T) -> Option<T> {
        // Whoever is changing a slot is making another call.
        let slots = self.ways(key.hash()).iter().filter_map(|slot| slot.try_read().ok());
        let mut found = slots.filter(|slot| slot.as_ref().is_some_and(|made| made.key == *key));
        found.next()?.as_ref().map(launch)
    }

    /// The places of calls with this hash.
    fn ways(&self, hash: usize) -> &[RwLock<Option<Made>>] {
        let first = hash % (SLOTS / WAYS) * WAYS;
        &self.slots[first..first + WAYS]
    }

    /// Keeps a call.
    pub(super) fn remember(&self, key: &CallKey, ready: Arc<Ready>, packed: Packed) {
        let hash = key.hash();
        let ways = self.ways(hash);
        let free = ways.iter().find(|slot| slot.try_read().is_ok_and(|made| made.is_none()));
        if let Ok(mut slot) = free.unwrap_or(&ways[hash / SLOTS % WAYS]).try_write() {
            let (key, repeats, graph) = (*key, AtomicU32::new(0), OnceLock::new());
            let context = ready.context().clone();
            let old = slot.replace(Made { key, ready, packed, repeats, graph });
            // A graph that goes would spoil a recording that this thread is making.
            if old.as_ref().is_some_and(|old| old.graph.get().is_some()) {
                let _ = context.with_relaxed_capture(|| drop(old));
            }
        }
    }
}
