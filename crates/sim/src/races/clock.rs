//! Vector clocks: who has seen whose accesses.
//!
//! An *agent* is anything that accesses memory in its own time: a warp, or one asynchronous operation in
//! flight. Agents of a cluster are numbered, warps first. An agent stamps its accesses with its own clock; it
//! moves the clock on whenever it publishes what it did (a barrier, an arrival, a fence). An access is ordered
//! before another one if the second agent's vector clock covers the first one's stamp.
//!
//! A warp has two vector clocks. `generic` is what its ordinary accesses may rely on; `proxied` is what the
//! asynchronous operations that it starts may rely on. `fence.proxy.async` raises the second to the first.
//!
//! Within a warp, lanes are ordered among each other only by a barrier, so a stamp says which lanes accessed
//! which bytes, and a release by some lanes publishes only what those lanes did since the last warp barrier.
//!
//! A fence orders nothing by itself, and neither does a relaxed (strong, but not releasing or acquiring) access: only a
//! strong write after a fence publishes, and only a fence after a strong read takes in. What is half ordered in this way
//! travels through barriers with the rest, so that one thread may fence and another write, with a barrier between them.

use std::sync::Arc;

use crate::races::lanes::Lanes;
use crate::races::sync_words::{Published, join};

/// The number of an agent in its cluster.
pub type Agent = u16;

/// When an access happened, and whose it was. Clock 0 means: never.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp {
    /// The agent's clock at the access.
    pub clock: u32,
    /// The agent.
    pub agent: Agent,
    /// The lanes, if the agent is a warp.
    pub lanes: Lanes,
}

impl Stamp {
    /// No access.
    pub const NEVER: Stamp = Stamp { clock: 0, agent: 0, lanes: Lanes::ALL };

    /// The same access seen at the part of `size` bytes that starts at `offset`.
    pub fn part(self, offset: u32, size: u32) -> Stamp {
        Stamp { lanes: self.lanes.part(offset, size), ..self }
    }
}

/// What some lanes of a warp published, while the others did not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct SomeLanes {
    agent: Agent,
    clock: u32,
    lanes: u32,
}

/// A vector clock.
#[derive(Clone, Debug, Default)]
pub struct VClock {
    whole: Vec<u32>,
    some: Vec<SomeLanes>,
    /// What other clusters have published to whoever holds this clock, through words of global memory.
    abroad: Option<Arc<Published>>,
    /// The latest time of all that it covers.
    time: u64,
}

impl VClock {
    /// Whether the access of this stamp is ordered before whoever holds this clock.
    #[inline]
    pub fn covers(&self, stamp: Stamp) -> bool {
        if self.whole.get(usize::from(stamp.agent)).is_some_and(|&c| c >= stamp.clock) {
            return true;
        }
        !self.some.is_empty() && self.some_cover(stamp)
    }

    #[cold]
    fn some_cover(&self, stamp: Stamp) -> bool {
        let lanes = stamp.lanes.mask();
        self.some.iter().any(|s| s.agent == stamp.agent && s.clock >= stamp.clock && lanes & !s.lanes == 0)
    }

    /// Covers everything the agent did up to this clock.
    pub fn raise(&mut self, agent: Agent, clock: u32) {
        let i = usize::from(agent);
        if self.whole.len() <= i {
            self.whole.resize(i + 1, 0);
        }
        self.whole[i] = self.whole[i].max(clock);
    }

    /// Covers what these lanes of the agent did up to this clock.
    fn raise_lanes(&mut self, new: SomeLanes) {
        if self.whole.get(usize::from(new.agent)).is_some_and(|&c| c >= new.clock) {
            return;
        }
        self.some.retain(|s| s.agent != new.agent || s.clock > new.clock || s.lanes & !new.lanes != 0);
        if !self
            .some
            .iter()
            .any(|s| s.agent == new.agent && s.clock >= new.clock && new.lanes & !s.lanes == 0)
        {
            self.some.push(new);
        }
    }

    /// Covers all that the other one covers.
    pub fn join(&mut self, other: &VClock) {
        if self.whole.len() < other.whole.len() {
            self.whole.resize(other.whole.len(), 0);
        }
        for (a, &b) in self.whole.iter_mut().zip(&other.whole) {
            *a = (*a).max(b);
        }
        self.time = self.time.max(other.time);
        for &s in &other.some {
            self.raise_lanes(s);
        }
        if !self.some.is_empty() {
            let whole = &self.whole;
            self.some.retain(|s| whole.get(usize::from(s.agent)).is_none_or(|&c| c < s.clock));
        }
        if let Some(theirs) = &other.abroad {
            match &mut self.abroad {
                None => self.abroad = Some(Arc::clone(theirs)),
                Some(mine) if Arc::ptr_eq(mine, theirs) => {}
                Some(mine) => join(Arc::make_mut(mine), theirs),
            }
        }
    }

    /// The clock up to which the agent is covered in all its lanes.
    #[inline(always)]
    pub fn of(&self, agent: Agent) -> u32 {
        self.whole.get(usize::from(agent)).copied().unwrap_or(0)
    }

    /// Covers nothing any more.
    pub fn clear(&mut self) {
        self.whole.clear();
        self.some.clear();
        self.abroad = None;
        self.time = 0;
    }
}

/// What a barrier carries from those who arrive to those who wait.
#[derive(Clone, Debug, Default)]
pub struct ClockPair {
    /// For ordinary accesses.
    pub generic: VClock,
    /// For asynchronous operations.
    pub proxied: VClock,
    /// What fences and strong accesses have half ordered, where there were any.
    strong: Option<Arc<Strong>>,
}

/// What a fence and a strong access order only together.
#[derive(Clone, Debug, Default)]
struct Strong {
    /// What was done before a fence: strong writes after it publish that.
    fenced: Option<Box<Words>>,
    /// What strong reads have seen: a fence after them takes that in.
    observed: Option<Box<Words>>,
}

/// What is published through words of memory.
#[derive(Clone, Debug, Default)]
struct Words {
    /// Through words of shared memory, within the cluster.
    shared: ClockPair,
    /// Through words of global memory.
    global: Published,
}

impl Words {
    fn join(into: &mut Option<Box<Words>>, from: Option<&Words>) {
        let Some(from) = from else { return };
        let into = into.get_or_insert_default();
        into.shared.join(&from.shared);
        join(&mut into.global, &from.global);
    }
}

impl ClockPair {
    /// Covers all that the other pair covers.
    pub fn join(&mut self, other: &ClockPair) {
        self.generic.join(&other.generic);
        self.proxied.join(&other.proxied);
        if let Some(theirs) = &other.strong {
            self.join_strong(theirs);
        }
    }

    #[cold]
    fn join_strong(&mut self, theirs: &Arc<Strong>) {
        match &mut self.strong {
            None => self.strong = Some(Arc::clone(theirs)),
            Some(mine) if Arc::ptr_eq(mine, theirs) => {}
            Some(mine) => {
                let mine = Arc::make_mut(mine);
                Words::join(&mut mine.fenced, theirs.fenced.as_deref());
                Words::join(&mut mine.observed, theirs.observed.as_deref());
            }
        }
    }

    /// A pair that covers nothing but what fences and strong accesses have half ordered.
    fn half_ordered(strong: Strong) -> ClockPair {
        ClockPair { strong: Some(Arc::new(strong)), ..ClockPair::default() }
    }

    /// Covers an asynchronous operation that has completed: for both kinds of access, because completion
    /// includes a proxy fence.
    pub fn raise(&mut self, agent: Agent, clock: u32) {
        self.generic.raise(agent, clock);
        self.proxied.raise(agent, clock);
    }

    /// Covers for both kinds of access what the clock covers.
    pub fn join_both(&mut self, other: &VClock) {
        self.generic.join(other);
        self.proxied.join(other);
    }

    /// Covers nothing any more.
    pub fn clear(&mut self) {
        self.generic.clear();
        self.proxied.clear();
        self.strong = None;
    }
}

/// The clocks of one warp.
#[derive(Clone, Debug)]
pub struct WarpClock {
    agent: Agent,
    /// What the clock registers show: the instructions that the warp has executed, and at least the time of whatever it
    /// has waited for.
    pub time: u64,
    now: u32,
    /// Accesses of this warp before this clock are ordered among its lanes.
    synced: u32,
    seen: ClockPair,
    /// What only some lanes have acquired since the last warp barrier.
    parted: Vec<(u32, ClockPair)>,
    /// Copies of its own lanes that each lane has waited for, but the others have not.
    own_copies: Vec<(Agent, u32)>,
    /// Fences since the last warp barrier.
    fences: Vec<Fence>,
}

/// A fence since the last warp barrier: until that comes, each lane has fenced only what it did itself.
#[derive(Clone, Debug)]
struct Fence {
    /// The lanes, all bits if all live ones have fenced.
    lanes: u32,
    /// The warp's clock.
    clock: u32,
    /// The cluster, if the fence reaches beyond it.
    cluster: Option<u32>,
    /// What the lanes came after.
    past: Words,
}

/// How an access relates to an earlier one that it conflicts with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Edge {
    /// It is ordered after it.
    Ordered,
    /// Nothing orders the two.
    Missing,
    /// Ordinary accesses would be ordered; a proxy fence is missing.
    MissingProxyFence,
    /// The two are lanes of one warp, without a warp barrier between them.
    MissingWarpBarrier,
}

/// Through which proxy memory is accessed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Proxy {
    /// Ordinary loads and stores, and `cp.async`.
    Generic,
    /// TMA and `wgmma`.
    Async,
}

impl WarpClock {
    /// A warp that has done nothing yet.
    pub fn new(agent: Agent) -> WarpClock {
        WarpClock {
            agent,
            time: 0,
            now: 1,
            synced: 1,
            seen: ClockPair::default(),
            parted: Vec::new(),
            own_copies: Vec::new(),
            fences: Vec::new(),
        }
    }

    /// The stamp of an access that the warp makes now.
    #[inline]
    pub fn stamp(&self, lanes: Lanes) -> Stamp {
        Stamp { clock: self.now, agent: self.agent, lanes }
    }

    /// The warp's agent number.
    pub fn agent(&self) -> Agent {
        self.agent
    }

    /// Whether an access by these lanes now comes after the access of `prior`.
    #[inline(always)]
    pub fn edge(&self, prior: Stamp, lanes: Lanes, proxy: Proxy) -> Edge {
        // Mostly the access is ordered for all lanes.
        let covered = match proxy {
            Proxy::Generic => self.covered(prior.agent),
            Proxy::Async => self.seen.proxied.of(prior.agent),
        };
        if prior.clock <= covered { Edge::Ordered } else { self.edge_of_lanes(prior, lanes, proxy) }
    }

    /// The clock up to which ordinary accesses of this warp, whatever the lane, come after those of an agent.
    #[inline(always)]
    pub fn covered(&self, agent: Agent) -> u32 {
        if agent == self.agent { self.synced - 1 } else { self.seen.generic.of(agent) }
    }

    /// How the two relate where not all lanes are ordered after the earlier one.
    #[inline(never)]
    fn edge_of_lanes(&self, prior: Stamp, lanes: Lanes, proxy: Proxy) -> Edge {
        if proxy == Proxy::Generic && prior.agent == self.agent {
            if prior.lanes == lanes && lanes != Lanes::ALL {
                return Edge::Ordered;
            }
            return lanes_edge(prior, lanes);
        }
        let seen = match proxy {
            Proxy::Generic => &self.seen.generic,
            Proxy::Async => &self.seen.proxied,
        };
        if seen.covers(prior) { Edge::Ordered } else { self.parted_edge(prior, lanes, proxy) }
    }

    #[cold]
    fn parted_edge(&self, prior: Stamp, lanes: Lanes, proxy: Proxy) -> Edge {
        let mask = lanes.mask();
        let parted = |proxy: Proxy| {
            self.parted.iter().filter(|(m, _)| mask & !m == 0).any(|(_, pair)| match proxy {
                Proxy::Generic => pair.generic.covers(prior),
                Proxy::Async => pair.proxied.covers(prior),
            })
        };
        if parted(proxy) {
            return Edge::Ordered;
        }
        if self.own_copies.iter().any(|&(a, c)| a == prior.agent && c >= prior.clock) {
            let same = prior.lanes == lanes && lanes != Lanes::ALL;
            return match proxy {
                Proxy::Generic if same => Edge::Ordered,
                Proxy::Generic => Edge::MissingWarpBarrier,
                Proxy::Async => Edge::MissingProxyFence,
            };
        }
        if proxy == Proxy::Async && self.edge(prior, lanes, Proxy::Generic) == Edge::Ordered {
            return Edge::MissingProxyFence;
        }
        if prior.agent != self.agent && self.parted.iter().any(|(_, pair)| pair.generic.covers(prior)) {
            return Edge::MissingWarpBarrier;
        }
        Edge::Missing
    }

    /// Adds what these lanes of the warp have done and seen to `into`, and moves the warp's clock on.
    /// `live` are the lanes that have not exited.
    pub fn publish(&mut self, mask: u32, live: u32, into: &mut ClockPair) {
        into.join(&self.seen);
        self.own_past(mask, live, &mut into.generic);
        // What only some of these lanes know is published by those.
        for (m, pair) in &self.parted {
            if mask & m != 0 {
                into.join(pair);
            }
        }
        if !self.fences.is_empty() {
            into.join_strong(&Arc::new(Strong { fenced: self.fenced_since(mask, live), observed: None }));
        }
        self.now += 1;
    }

    /// Adds what these lanes have done themselves.
    fn own_past(&self, mask: u32, live: u32, into: &mut VClock) {
        into.time = into.time.max(self.time);
        if mask & live == live {
            into.raise(self.agent, self.now);
            for &(agent, clock) in &self.own_copies {
                into.raise(agent, clock);
            }
        } else {
            into.raise(self.agent, self.synced - 1);
            into.raise_lanes(SomeLanes { agent: self.agent, clock: self.now, lanes: mask });
            for &(agent, clock) in &self.own_copies {
                into.raise_lanes(SomeLanes { agent, clock, lanes: mask });
            }
        }
    }

    /// Takes in what others have published, for these lanes.
    pub fn acquire(&mut self, mask: u32, live: u32, from: &ClockPair) {
        self.time = self.time.max(from.generic.time);
        if mask & live == live {
            self.seen.join(from);
        } else if let Some((_, pair)) = self.parted.iter_mut().find(|(m, _)| *m == mask) {
            pair.join(from);
        } else {
            self.parted.push((mask, from.clone()));
        }
    }

    /// Takes in the completion of an asynchronous operation, for these lanes.
    pub fn acquire_completion(&mut self, mask: u32, live: u32, agent: Agent, clock: u32) {
        if mask & live == live {
            self.seen.raise(agent, clock);
        } else {
            let mut pair = ClockPair::default();
            pair.raise(agent, clock);
            self.acquire(mask, live, &pair);
        }
    }

    /// Each lane has waited for its own copies of this group; other lanes' copies stay unordered until a barrier.
    pub fn acquire_own_copies(&mut self, agent: Agent, clock: u32) {
        match self.own_copies.iter_mut().find(|(a, _)| *a == agent) {
            Some((_, c)) => *c = clock.max(*c),
            None => self.own_copies.push((agent, clock)),
        }
    }

    /// All lanes have met: what each did is ordered before what any does next.
    pub fn sync_lanes(&mut self) {
        if !self.fences.is_empty() {
            let fenced = self.fenced_since(u32::MAX, u32::MAX);
            self.seen.join_strong(&Arc::new(Strong { fenced, observed: None }));
            self.fences.clear();
        }
        self.now += 1;
        self.synced = self.now;
        for (_, pair) in std::mem::take(&mut self.parted) {
            self.seen.join(&pair);
        }
        for (agent, clock) in std::mem::take(&mut self.own_copies) {
            self.seen.generic.raise(agent, clock);
        }
    }

    /// `fence.proxy.async`: later asynchronous operations may rely on what ordinary accesses rely on now.
    pub fn fence_proxy(&mut self, mask: u32, live: u32) {
        let mut past = VClock::default();
        self.own_past(mask, live, &mut past);
        let ClockPair { generic, proxied, .. } = &mut self.seen;
        proxied.join(generic);
        proxied.join(&past);
        for (m, pair) in &mut self.parted {
            if mask & *m != 0 {
                pair.proxied.join(&pair.generic);
            }
        }
        self.now += 1;
    }

    /// What these lanes publish by a release through a word of global memory.
    pub fn publish_abroad(&mut self, cluster: u32, mask: u32, live: u32) -> Published {
        let mut past = self.seen.generic.clone();
        for (_, pair) in self.parted.iter().filter(|(m, _)| mask & m != 0) {
            past.join(&pair.generic);
        }
        self.own_past(mask, live, &mut past);
        self.now += 1;
        let mut published = past.abroad.take().as_deref().cloned().unwrap_or_default();
        published.entry(cluster).or_default().join(&past);
        published
    }

    /// Takes in what was published through a word of global memory, for these lanes.
    pub fn acquire_abroad(&mut self, cluster: u32, mask: u32, live: u32, published: &Published) {
        let mut pair = ClockPair::default();
        if let Some(own) = published.get(&cluster) {
            pair.generic.join(own);
        }
        pair.generic.abroad = Some(Arc::new(published.clone()));
        self.acquire(mask, live, &pair);
    }

    /// Whether an access of another cluster is ordered before an access by these lanes now.
    pub fn covers_foreign(&self, cluster: u32, stamp: Stamp, lanes: Lanes) -> bool {
        let covers = |pair: &ClockPair| {
            let abroad = pair.generic.abroad.as_ref();
            abroad.and_then(|abroad| abroad.get(&cluster)).is_some_and(|clock| clock.covers(stamp))
        };
        let mask = lanes.mask();
        covers(&self.seen) || self.parted.iter().any(|(m, pair)| mask & !m == 0 && covers(pair))
    }

    /// `fence`: these lanes take in what their strong reads have seen, and their strong writes from here on publish what
    /// they have done so far. Beyond the cluster only if the fence is `wide`.
    pub fn fence(&mut self, cluster: u32, mask: u32, live: u32, wide: bool) {
        let observed: Vec<_> = self
            .half_ordered(mask)
            .filter_map(|(lanes, strong)| Some((lanes & mask, strong.observed.clone()?)))
            .collect();
        for (lanes, words) in observed {
            self.acquire(lanes, live, &words.shared);
            if wide && !words.global.is_empty() {
                self.acquire_abroad(cluster, lanes, live, &words.global);
            }
        }
        let mut past = Words::default();
        past.shared.join(&self.seen);
        for (_, pair) in self.parted.iter().filter(|(m, _)| mask & m != 0) {
            past.shared.join(pair);
        }
        past.shared.strong = None;
        past.shared.generic.raise(self.agent, self.synced - 1);
        if wide {
            let mut own = past.shared.generic.clone();
            past.global = own.abroad.take().as_deref().cloned().unwrap_or_default();
            past.global.entry(cluster).or_default().join(&own);
        }
        let lanes = all_lanes(mask, live);
        // A fence of the same lanes that reaches as far covers what an earlier one did.
        self.fences.retain(|fence| fence.lanes & !lanes != 0 || fence.cluster.is_some() && !wide);
        self.fences.push(Fence { lanes, clock: self.now, cluster: wide.then_some(cluster), past });
        self.now += 1;
    }

    /// What these lanes have fenced since the last warp barrier.
    fn fenced_since(&self, mask: u32, live: u32) -> Option<Box<Words>> {
        let mask = all_lanes(mask, live);
        let mut fenced = None;
        for fence in self.fences.iter().filter(|fence| fence.lanes & mask != 0) {
            let lanes = fence.lanes & mask;
            let own = |into: &mut VClock| {
                let past = std::iter::once((self.agent, fence.clock)).chain(self.own_copies.iter().copied());
                for (agent, clock) in past {
                    if lanes == u32::MAX {
                        into.raise(agent, clock);
                    } else {
                        into.raise_lanes(SomeLanes { agent, clock, lanes });
                    }
                }
            };
            let mut words = fence.past.clone();
            own(&mut words.shared.generic);
            if let Some(cluster) = fence.cluster {
                own(words.global.entry(cluster).or_default());
            }
            Words::join(&mut fenced, Some(&words));
        }
        fenced
    }

    /// What fences and strong accesses have half ordered for all lanes, and for some of these.
    fn half_ordered(&self, mask: u32) -> impl Iterator<Item = (u32, &Strong)> {
        let some = self.parted.iter().filter(move |(m, _)| mask & m != 0).map(|(m, pair)| (*m, pair));
        let all = std::iter::once((u32::MAX, &self.seen));
        all.chain(some).filter_map(|(lanes, pair)| Some((lanes, pair.strong.as_deref()?)))
    }

    /// What a strong write of these lanes to a word of shared memory publishes: what was done before a fence.
    pub fn fenced(&self, mask: u32, live: u32) -> Option<ClockPair> {
        Some(self.fenced_words(mask, live)?.shared)
    }

    /// The same for a word of global memory.
    pub fn fenced_abroad(&self, mask: u32, live: u32) -> Option<Published> {
        Some(self.fenced_words(mask, live)?.global).filter(|fenced| !fenced.is_empty())
    }

    fn fenced_words(&self, mask: u32, live: u32) -> Option<Box<Words>> {
        let mut fenced = self.fenced_since(mask, live);
        for (_, strong) in self.half_ordered(mask) {
            Words::join(&mut fenced, strong.fenced.as_deref());
        }
        fenced
    }

    /// A strong read of these lanes sees what was published through a word of shared memory.
    pub fn observe(&mut self, mask: u32, live: u32, published: &ClockPair) {
        let words = Words { shared: published.clone(), global: Published::default() };
        self.observe_words(mask, live, words);
    }

    /// The same for a word of global memory.
    pub fn observe_abroad(&mut self, mask: u32, live: u32, published: Published) {
        self.observe_words(mask, live, Words { shared: ClockPair::default(), global: published });
    }

    fn observe_words(&mut self, mask: u32, live: u32, words: Words) {
        let observed = Strong { fenced: None, observed: Some(Box::new(words)) };
        self.acquire(mask, live, &ClockPair::half_ordered(observed));
    }

    /// Adds what an access by these lanes now may rely on.
    pub fn reach(&self, mask: u32, proxy: Proxy, into: &mut VClock) {
        into.time = into.time.max(self.time);
        let of = |pair: &ClockPair, into: &mut VClock| match proxy {
            Proxy::Generic => into.join(&pair.generic),
            Proxy::Async => into.join(&pair.proxied),
        };
        of(&self.seen, into);
        for (_, pair) in self.parted.iter().filter(|(m, _)| mask & !m == 0) {
            of(pair, into);
        }
    }

    /// Whether some lanes have acquired what others have not.
    pub fn is_parted(&self) -> bool {
        !self.parted.is_empty()
    }

    /// Becomes the clock of an access that several warps make together: what all of them may rely on.
    pub fn meet(&mut self, warps: [&WarpClock; 4]) {
        let [first, rest @ ..] = warps;
        for (mine, of) in [
            (&mut self.seen.generic.whole, WarpClock::generic as fn(&WarpClock) -> &VClock),
            (&mut self.seen.proxied.whole, WarpClock::proxied),
        ] {
            mine.clone_from(&of(first).whole);
            for theirs in rest.map(of) {
                mine.truncate(theirs.whole.len());
                for (clock, &other) in mine.iter_mut().zip(&theirs.whole) {
                    *clock = (*clock).min(other);
                }
            }
        }
    }

    fn generic(&self) -> &VClock {
        &self.seen.generic
    }

    fn proxied(&self) -> &VClock {
        &self.seen.proxied
    }

    /// Those of the lanes that do not know what an agent did up to this clock.
    pub fn unaware(&self, mask: u32, agent: Agent, clock: u32) -> u32 {
        if self.seen.generic.of(agent) >= clock {
            return 0;
        }
        let aware = self.parted.iter().filter(|(_, pair)| pair.generic.of(agent) >= clock);
        aware.fold(mask, |left, (m, _)| left & !m)
    }

    /// Whether an asynchronous operation is known to these lanes to have completed.
    pub fn has_seen(&self, mask: u32, agent: Agent, clock: u32) -> bool {
        // Copies that every lane has waited for count as well: what is started now comes after all of them.
        self.seen.generic.of(agent) >= clock
            || self.own_copies.iter().any(|&(a, c)| a == agent && c >= clock)
            || self.parted.iter().any(|(m, pair)| mask & !m == 0 && pair.generic.of(agent) >= clock)
    }
}

/// The lanes of a mask, with all bits if it has all live lanes.
fn all_lanes(mask: u32, live: u32) -> u32 {
    if mask & live == live { u32::MAX } else { mask }
}

/// The order of two accesses of one warp since its last barrier.
#[cold]
fn lanes_edge(prior: Stamp, lanes: Lanes) -> Edge {
    // The same single lane twice, once as part of a run: that is program order.
    let (a, b) = (prior.lanes.mask(), lanes.mask());
    if a == b && a.is_power_of_two() { Edge::Ordered } else { Edge::MissingWarpBarrier }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FULL: u32 = u32::MAX;

    fn at(clock: &WarpClock) -> Stamp {
        clock.stamp(Lanes::ALL)
    }

    #[test]
    fn an_access_is_ordered_only_after_publish_and_acquire() {
        let (mut a, mut b) = (WarpClock::new(0), WarpClock::new(1));
        let write = at(&a);
        assert_eq!(b.edge(write, Lanes::ALL, Proxy::Generic), Edge::Missing);
        let mut barrier = ClockPair::default();
        a.publish(FULL, FULL, &mut barrier);
        let later = at(&a);
        b.acquire(FULL, FULL, &barrier);
        assert_eq!(b.edge(write, Lanes::ALL, Proxy::Generic), Edge::Ordered);
        assert_eq!(b.edge(later, Lanes::ALL, Proxy::Generic), Edge::Missing);
    }

    #[test]
    fn an_asynchronous_access_needs_the_proxy_fence_on_either_side_of_the_barrier() {
        for fence_before in [true, false] {
            let (mut a, mut b) = (WarpClock::new(0), WarpClock::new(1));
            let write = at(&a);
            let mut barrier = ClockPair::default();
            if fence_before {
                a.fence_proxy(FULL, FULL);
            }
            a.publish(FULL, FULL, &mut barrier);
            b.acquire(FULL, FULL, &barrier);
            if !fence_before {
                assert_eq!(b.edge(write, Lanes::one(0), Proxy::Async), Edge::MissingProxyFence);
                b.fence_proxy(1, FULL);
            }
            assert_eq!(b.edge(write, Lanes::one(0), Proxy::Async), Edge::Ordered);
        }
    }

    #[test]
    fn one_lanes_arrival_does_not_publish_what_other_lanes_did() {
        let (mut a, mut b) = (WarpClock::new(0), WarpClock::new(1));
        let early = a.stamp(Lanes::one(5));
        a.sync_lanes();
        let mine = a.stamp(Lanes::one(0));
        let others = a.stamp(Lanes::one(5));
        let mut barrier = ClockPair::default();
        a.publish(1, FULL, &mut barrier);
        b.acquire(FULL, FULL, &barrier);
        assert_eq!(b.edge(early, Lanes::ALL, Proxy::Generic), Edge::Ordered);
        assert_eq!(b.edge(mine, Lanes::ALL, Proxy::Generic), Edge::Ordered);
        assert_eq!(b.edge(others, Lanes::ALL, Proxy::Generic), Edge::Missing);
    }

    #[test]
    fn one_lanes_wait_helps_the_others_only_after_a_warp_barrier() {
        let (mut a, mut b) = (WarpClock::new(0), WarpClock::new(1));
        let write = at(&a);
        let mut barrier = ClockPair::default();
        a.publish(FULL, FULL, &mut barrier);
        b.acquire(1, FULL, &barrier);
        assert_eq!(b.edge(write, Lanes::one(0), Proxy::Generic), Edge::Ordered);
        assert_eq!(b.edge(write, Lanes::one(3), Proxy::Generic), Edge::MissingWarpBarrier);
        b.sync_lanes();
        assert_eq!(b.edge(write, Lanes::one(3), Proxy::Generic), Edge::Ordered);
    }

    #[test]
    fn lanes_of_a_warp_are_ordered_by_program_order_or_a_warp_barrier() {
        let mut a = WarpClock::new(0);
        let run = a.stamp(Lanes::run(4, 4, 1));
        assert_eq!(a.edge(run, Lanes::run(4, 4, 1), Proxy::Generic), Edge::Ordered);
        assert_eq!(a.edge(run.part(8, 4), Lanes::one(6), Proxy::Generic), Edge::Ordered);
        assert_eq!(a.edge(run.part(8, 4), Lanes::one(5), Proxy::Generic), Edge::MissingWarpBarrier);
        a.sync_lanes();
        assert_eq!(a.edge(run, Lanes::one(1), Proxy::Generic), Edge::Ordered);
    }
}
