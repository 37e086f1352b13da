//! Launches one after the other on a stream, and which of them may still be in flight when a later one runs.
//!
//! In stream order, a launch starts when everything before it has completed. A launch that is started programmatically
//! may run beside the launch before it, from the moment when every block of that one has executed
//! `griddepcontrol.launch_dependents` or has ended. Its own `griddepcontrol.wait` waits until that one has completed and
//! what it did is visible. What is then known of launches before that one depends on what that one did:
//!
//! - If one of its threads has waited, it cannot complete before they have, so they have completed after the wait.
//! - If each of its blocks has waited before it let dependents start, they have completed when the later launch starts.
//! - Otherwise they may be in flight even after the wait.

use std::collections::HashMap;
use std::sync::Arc;

use crate::findings::Site;
use crate::program::{Class, Program};

/// How a launch starts after the launches before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Launching {
    /// When everything before it on the stream has completed.
    ///
    /// A kernel that has a `griddepcontrol.wait` is meant to be started programmatically: each of its threads is checked
    /// to touch no global memory before the wait, as if beside an unknown grid.
    #[default]
    StreamOrder,
    /// Beside the launch before it, until `griddepcontrol.wait`: a programmatic dependent launch.
    ///
    /// Before the wait it may only touch memory that no launch in flight writes, and write none that one of them reads.
    /// As the first launch of a [`Sim`](crate::Sim) it runs beside an unknown grid, which may touch all memory.
    Programmatic,
}

/// A launch that has been simulated, as far as a later one must know it.
#[derive(Debug)]
pub(crate) struct PastLaunch {
    /// Which launch of the device it was.
    pub id: u64,
    /// The name of its kernel.
    pub kernel: String,
    /// The instructions that accessed global memory, by their index in the kernel.
    pub sites: HashMap<u32, Site>,
}

impl PastLaunch {
    /// A launch that executed each instruction so often.
    pub fn new(id: u64, program: &Program<'_>, executed: &[u64]) -> PastLaunch {
        let accesses = |class| {
            matches!(class, Class::GlobalLoad | Class::GlobalStore | Class::Atomic | Class::AsyncCopy)
        };
        let sites = (0..)
            .zip(program.code.iter().zip(executed))
            .filter(|(_, (code, executed))| **executed > 0 && accesses(code.class))
            .map(|(pc, _)| (pc, Site::of(program.kernel, pc)))
            .collect();
        PastLaunch { id, kernel: program.kernel.name.clone(), sites }
    }
}

/// A launch that may be in flight when a later one starts.
#[derive(Clone)]
pub(crate) struct InFlight {
    /// The launch, or `None` for an unknown one, which may access all memory.
    pub launch: Option<Arc<PastLaunch>>,
    /// Whether it has completed once the later one has waited.
    pub until_wait: bool,
}

/// What a launch did about the launches before it.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Conduct {
    /// Whether a thread of it has waited for them.
    pub waited: bool,
    /// Whether each of its blocks has waited before it let dependents start.
    pub waited_first: bool,
}

/// The stream that the launches of a device are on.
#[derive(Default)]
pub(crate) struct Stream {
    /// The last launch, and what it did.
    last: Option<(Arc<PastLaunch>, Conduct)>,
    /// What may have been in flight when that one started.
    in_flight: Vec<InFlight>,
}

impl Stream {
    /// What may be in flight when the next launch starts. `waits` says whether its kernel has a `griddepcontrol.wait`.
    pub fn in_flight(&self, launching: Launching, waits: bool) -> Vec<InFlight> {
        let unknown = InFlight { launch: None, until_wait: true };
        match (launching, &self.last) {
            (Launching::StreamOrder, _) if waits => vec![unknown],
            (Launching::StreamOrder, _) => Vec::new(),
            (Launching::Programmatic, None) => vec![unknown],
            (Launching::Programmatic, Some((last, did))) => {
                let before = self.in_flight.iter().filter(|grid| !(grid.until_wait && did.waited_first));
                let before = before.map(|grid| InFlight {
                    until_wait: grid.until_wait && did.waited,
                    launch: grid.launch.clone(),
                });
                let last = InFlight { launch: Some(Arc::clone(last)), until_wait: true };
                std::iter::once(last).chain(before).collect()
            }
        }
    }

    /// A launch has been simulated, beside these.
    pub fn launched(
        &mut self,
        launching: Launching,
        launch: PastLaunch,
        beside: Vec<InFlight>,
        conduct: Conduct,
    ) {
        self.last = Some((Arc::new(launch), conduct));
        self.in_flight = match launching {
            Launching::StreamOrder => Vec::new(),
            Launching::Programmatic => beside,
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn launch(stream: &mut Stream, id: u64, launching: Launching, waited: bool, waited_first: bool) {
        let beside = stream.in_flight(launching, waited);
        let launch = PastLaunch { id, kernel: format!("kernel {id}"), sites: HashMap::new() };
        stream.launched(launching, launch, beside, Conduct { waited, waited_first });
    }

    /// Which launches a programmatic one runs beside, and whether its wait is enough for each; 0 is unknown.
    fn beside(stream: &Stream) -> Vec<(u64, bool)> {
        let list = stream.in_flight(Launching::Programmatic, true);
        list.iter().map(|grid| (grid.launch.as_ref().map_or(0, |l| l.id), grid.until_wait)).collect()
    }

    #[test]
    fn a_launch_in_stream_order_leaves_nothing_before_it_in_flight() {
        let mut stream = Stream::default();
        assert_eq!(beside(&stream), [(0, true)]);
        launch(&mut stream, 1, Launching::Programmatic, false, false);
        launch(&mut stream, 2, Launching::StreamOrder, false, false);
        assert_eq!(beside(&stream), [(2, true)]);
        assert!(stream.in_flight(Launching::StreamOrder, false).is_empty());
        assert_eq!(stream.in_flight(Launching::StreamOrder, true).len(), 1, "a kernel that waits is checked");
    }

    #[test]
    fn what_the_launch_between_has_waited_for_decides_what_a_wait_covers() {
        for (waited, waited_first, want) in [
            (false, false, vec![(2, true), (1, false)]),
            (true, false, vec![(2, true), (1, true)]),
            (true, true, vec![(2, true)]),
        ] {
            let mut stream = Stream::default();
            launch(&mut stream, 1, Launching::StreamOrder, false, false);
            launch(&mut stream, 2, Launching::Programmatic, waited, waited_first);
            assert_eq!(beside(&stream), want);
        }
    }

    #[test]
    fn a_launch_that_nobody_waited_for_stays_in_flight_over_several_launches() {
        let mut stream = Stream::default();
        launch(&mut stream, 1, Launching::StreamOrder, false, false);
        launch(&mut stream, 2, Launching::Programmatic, false, false);
        launch(&mut stream, 3, Launching::Programmatic, true, true);
        assert_eq!(beside(&stream), [(3, true), (1, false)], "launch 3 has waited for 2 only");
    }
}
