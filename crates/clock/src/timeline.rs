//! Timelines: the stamps of a kernel as sections on one time axis, where that time goes, and the files that show it.
//!
//! On a GPU a section is timed by its multiprocessor's own clock, which ticks every cycle but means nothing on another
//! multiprocessor. The clock that all share ticks too rarely for sections. So every track has both at its start and end:
//! their rate follows from calls that lie far apart, and the place of a multiprocessor's clock on the shared axis is the
//! latest that all its pairs allow, because a coarse clock shows the time of its last tick.

use std::collections::{BTreeMap, HashMap};
use std::io::{self, Write};

use flashcore_judge::stats;
use flashcore_kernels::Phase;
use flashcore_ptx::{Moment, Track};
use flashcore_report::timeline as picture;
use serde::Serialize;
use serde_json::json;

use crate::traced::Replay;

/// The most sections in a file for a viewer; whole multiprocessors are left out beyond that.
const MOST_SECTIONS: usize = 200_000;
/// The longest piece of a timeline that is drawn: microseconds, or thousands of instructions.
const LONGEST_PICTURE: f64 = 8.0;

/// What the time axis counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Microseconds on a GPU.
    Microseconds,
    /// Thousands of instructions in the simulator.
    Instructions,
}

impl Unit {
    /// Its name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Unit::Microseconds => "µs",
            Unit::Instructions => "1000 instructions",
        }
    }
}

/// What a role does for a while.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Slice {
    /// What it does.
    pub section: Phase,
    /// Which of many: a key tile, or the first row of a tile of queries.
    pub number: Option<u32>,
    /// When it begins and ends.
    pub time: (f64, f64),
}

/// What one role of one block does, from its start to its end.
#[derive(Clone, Debug, PartialEq)]
pub struct Lane {
    /// The multiprocessor.
    pub sm: u32,
    /// The block.
    pub block: u32,
    /// The role's number.
    pub role: usize,
    /// Its sections: each begins where the one before it ends.
    pub slices: Vec<Slice>,
}

impl Lane {
    /// When it begins and ends.
    pub fn time(&self) -> (f64, f64) {
        let edge = |slice: Option<&Slice>| slice.map_or((0.0, 0.0), |slice| slice.time);
        (edge(self.slices.first()).0, edge(self.slices.last()).1)
    }
}

/// All roles on one axis, which begins with the first of them.
#[derive(Clone, Debug, PartialEq)]
pub struct Timeline {
    /// What the axis counts.
    pub unit: Unit,
    /// The names of the roles.
    pub roles: Vec<String>,
    /// By multiprocessor, block and role.
    pub lanes: Vec<Lane>,
    /// The time that counts as this call's: from the end of the call before to its own end.
    pub window: (f64, f64),
    /// Stamps that found no room.
    pub lost: u64,
}

/// One line of the table of where the time goes.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    /// Who.
    pub role: String,
    /// What; `no block` is the time in which no such role runs: before, between and after blocks.
    pub section: &'static str,
    /// How often, over all blocks.
    pub count: usize,
    /// How long it takes each time.
    pub each: f64,
    /// The total, for the average place at which such a role runs.
    pub total: f64,
    /// The share of the kernel.
    pub share: f64,
}

/// The section of the time in which a role does not run.
pub const NO_BLOCK: &str = "no block";

/// Puts the clocks of all multiprocessors on one axis, in nanoseconds since `base`.
struct Axis {
    base: u64,
    /// Nanoseconds per tick.
    rate: f64,
    /// A tick of each multiprocessor's clock, and its time.
    anchors: HashMap<u32, (u32, f64)>,
}

/// How long the call of a replay lasts, in nanoseconds.
pub fn call_ns(replay: &Replay) -> Result<f64, String> {
    Axis::of(replay).map(|(_, (from, to))| to - from)
}

/// The smallest step between two readings of the clock that multiprocessors share, in nanoseconds: with many readings, its
/// tick.
pub fn tick_ns(replay: &Replay) -> Option<u64> {
    let tracks = [&replay.first, &replay.before, &replay.last].into_iter().flatten();
    let mut readings: Vec<u64> = tracks.flat_map(|track| edges(track).map(|moment| moment.global)).collect();
    readings.sort_unstable();
    readings.dedup();
    readings.windows(2).map(|pair| pair[1] - pair[0]).min()
}

/// Ticks from one reading of a 32-bit clock to another, which may have wrapped.
fn ticks(from: u32, to: u32) -> f64 {
    f64::from(to.wrapping_sub(from).cast_signed())
}

fn edges(track: &Track) -> [Moment; 2] {
    [track.start, track.end]
}

impl Axis {
    fn new(rate: f64, tracks: &[&Track]) -> Self {
        let base = tracks.iter().map(|track| track.start.global).min().unwrap_or(0);
        let mut anchors: HashMap<u32, (u32, f64)> = HashMap::new();
        for (sm, moment) in tracks.iter().flat_map(|track| edges(track).map(|moment| (track.sm, moment))) {
            let (anchor, time) = anchors.entry(sm).or_insert((moment.clock, f64::NEG_INFINITY));
            let here =
                (moment.global.wrapping_sub(base).cast_signed()) as f64 - rate * ticks(*anchor, moment.clock);
            *time = time.max(here);
        }
        Self { base, rate, anchors }
    }

    /// Nanoseconds per tick, from tracks that lie far apart.
    fn rate(first: &[Track], last: &[Track]) -> Option<f64> {
        let mut ends: HashMap<u32, (Option<Moment>, Option<Moment>)> = HashMap::new();
        for track in first {
            let start = &mut ends.entry(track.sm).or_default().0;
            *start = start.filter(|it| it.global <= track.start.global).or(Some(track.start));
        }
        for track in last {
            let end = &mut ends.entry(track.sm).or_default().1;
            *end = end.filter(|it| it.global >= track.end.global).or(Some(track.end));
        }
        let rates = ends.values().filter_map(|&(start, end)| {
            let (start, end) = (start?, end?);
            let passed = ticks(start.clock, end.clock);
            (passed > 0.0).then(|| end.global.checked_sub(start.global).map(|ns| ns as f64 / passed))?
        });
        stats::median(&rates.collect::<Vec<f64>>()).filter(|rate| *rate > 0.0)
    }

    /// The axis of a call on a GPU, and from when to when the call lasts.
    fn of(replay: &Replay) -> Result<(Self, (f64, f64)), String> {
        let rate = Self::rate(&replay.first, &replay.last)
            .ok_or("the kernel left no stamps, or none that show how fast its clocks run")?;
        let near: Vec<&Track> = replay.before.iter().chain(&replay.last).collect();
        let axis = Self::new(rate, &near);
        let window = (axis.end(&replay.before), axis.end(&replay.last));
        Ok((axis, window))
    }

    /// The time of a clock's reading, in nanoseconds.
    fn at(&self, sm: u32, clock: u32) -> f64 {
        let (anchor, time) = self.anchors.get(&sm).copied().unwrap_or_default();
        time + self.rate * ticks(anchor, clock)
    }

    /// When the last of some tracks ended.
    fn end(&self, tracks: &[Track]) -> f64 {
        tracks.iter().map(|track| self.at(track.sm, track.end.clock)).fold(f64::NEG_INFINITY, f64::max)
    }
}

impl Timeline {
    /// Of a call on a GPU. Roles are named in order.
    pub fn measured(roles: Vec<String>, replay: &Replay) -> Result<Self, String> {
        let (axis, window) = Axis::of(replay)?;
        Self::new(Unit::Microseconds, roles, &replay.last, &axis, window)
    }

    /// Of a run in the simulator, whose clocks all count instructions from the launch on.
    pub fn simulated(roles: Vec<String>, tracks: &[Track]) -> Result<Self, String> {
        let axis = Axis::new(1.0, &tracks.iter().collect::<Vec<_>>());
        let window = (-(axis.base as f64), axis.end(tracks));
        Self::new(Unit::Instructions, roles, tracks, &axis, window)
    }

    fn new(
        unit: Unit,
        roles: Vec<String>,
        tracks: &[Track],
        axis: &Axis,
        window: (f64, f64),
    ) -> Result<Self, String> {
        let starts = tracks.iter().map(|track| axis.at(track.sm, track.start.clock));
        let origin = starts.fold(window.0, f64::min);
        // A thousand nanoseconds, or a thousand instructions.
        let place = |ns: f64| (ns - origin) / 1e3;
        let mut lanes = Vec::with_capacity(tracks.len());
        for track in tracks {
            let mut slices: Vec<Slice> = Vec::with_capacity(track.stamps.len() + 1);
            let begin = place(axis.at(track.sm, track.start.clock));
            slices.push(Slice { section: Phase::Setup, number: None, time: (begin, begin) });
            for stamp in &track.stamps {
                let at = place(axis.at(track.sm, stamp.clock));
                let section = Phase::of(stamp.section)
                    .ok_or_else(|| format!("a stamp names section {}, which there is not", stamp.section))?;
                if let Some(before) = slices.last_mut() {
                    before.time.1 = at;
                }
                slices.push(Slice { section, number: stamp.number, time: (at, at) });
            }
            if let Some(last) = slices.last_mut() {
                last.time.1 = place(axis.at(track.sm, track.end.clock));
            }
            let (sm, block, role) = (track.sm, track.block, track.role as usize);
            lanes.push(Lane { sm, block, role, slices });
        }
        if lanes.is_empty() {
            return Err("the kernel left no stamps".into());
        }
        lanes.sort_by_key(|lane| (lane.sm, lane.block, lane.role));
        let lost = tracks.iter().map(|track| u64::from(track.lost)).sum();
        Ok(Self { unit, roles, lanes, window: (place(window.0), place(window.1)), lost })
    }

    /// How long the call took.
    pub fn length(&self) -> f64 {
        self.window.1 - self.window.0
    }

    /// Where the time goes, by what a role is called; its parts add up to the length of the call.
    pub fn table<'a>(&'a self, called: impl Fn(&'a str) -> &'a str) -> Vec<Row> {
        let mut names: Vec<&str> = Vec::new();
        for role in &self.roles {
            let name = called(role);
            if !names.contains(&name) {
                names.push(name);
            }
        }
        names
            .into_iter()
            .flat_map(|name| self.rows_of(name, |role| called(&self.roles[role]) == name))
            .collect()
    }

    fn rows_of(&self, name: &str, is: impl Fn(usize) -> bool) -> Vec<Row> {
        let lanes: Vec<&Lane> = self.lanes.iter().filter(|lane| is(lane.role)).collect();
        let places = places(&lanes) as f64;
        let mut totals: BTreeMap<Phase, (usize, f64)> = BTreeMap::new();
        for slice in lanes.iter().flat_map(|lane| &lane.slices) {
            let (count, total) = totals.entry(slice.section).or_default();
            *count += 1;
            *total += (slice.time.1.min(self.window.1) - slice.time.0.max(self.window.0)).max(0.0);
        }
        let all = places * self.length();
        let known: f64 = totals.values().map(|(_, total)| total).sum();
        let row = |section: &'static str, count: usize, total: f64| Row {
            role: name.to_string(),
            section,
            count,
            each: total / count.max(1) as f64,
            total: total / places.max(1.0),
            share: total / all,
        };
        let mut rows: Vec<Row> =
            totals.into_iter().map(|(section, (count, total))| row(section.name(), count, total)).collect();
        rows.sort_by(|a, b| b.share.total_cmp(&a.share));
        rows.push(row(NO_BLOCK, lanes.len(), all - known));
        rows
    }

    /// The multiprocessors, the one that ends last first.
    fn by_end(&self) -> Vec<u32> {
        let mut ends: BTreeMap<u32, f64> = BTreeMap::new();
        for lane in &self.lanes {
            let end = ends.entry(lane.sm).or_insert(f64::NEG_INFINITY);
            *end = end.max(lane.time().1);
        }
        let mut sms: Vec<(u32, f64)> = ends.into_iter().collect();
        sms.sort_by(|a, b| b.1.total_cmp(&a.1));
        sms.into_iter().map(|(sm, _)| sm).collect()
    }

    /// The lanes of those multiprocessors that end last, as many as a viewer takes.
    pub fn shown(&self) -> Vec<&Lane> {
        let (mut shown, mut sections) = (Vec::new(), 0);
        for sm in self.by_end() {
            let lanes = || self.lanes.iter().filter(|lane| lane.sm == sm);
            sections += lanes().map(|lane| lane.slices.len()).sum::<usize>();
            if sections > MOST_SECTIONS && !shown.is_empty() {
                break;
            }
            shown.extend(lanes());
        }
        shown.sort_by_key(|lane| (lane.sm, lane.block, lane.role));
        shown
    }

    /// Writes the lanes that are shown as a trace in the Chrome format, which Perfetto opens: a process per
    /// multiprocessor, a thread per block and role.
    pub fn write_trace(&self, about: &str, out: &mut dyn Write) -> io::Result<()> {
        let shown = self.shown();
        let about = json!({ "about": about, "window": self.window, "one_microsecond_is": match self.unit {
            Unit::Microseconds => "one microsecond",
            Unit::Instructions => "one thousand instructions",
        }});
        write!(out, "{{\"displayTimeUnit\":\"ns\",\"otherData\":{about},\"traceEvents\":[")?;
        let mut separator = "\n";
        let mut event = |out: &mut dyn Write, event: serde_json::Value| {
            write!(out, "{separator}{event}")?;
            separator = ",\n";
            Ok::<(), io::Error>(())
        };
        let mut named = None;
        for lane in shown {
            let (sm, thread) = (lane.sm, lane.block as usize * self.roles.len() + lane.role);
            let mut name = |what: &str, name: String| {
                event(
                    out,
                    json!({ "ph": "M", "name": what, "pid": sm, "tid": thread, "args": { "name": name } }),
                )
            };
            if named != Some(sm) {
                name("process_name", format!("SM {sm}"))?;
                named = Some(sm);
            }
            name("thread_name", self.lane_name(lane))?;
            for Slice { section, number, time: (from, to) } in &lane.slices {
                let of = if *section == Phase::QWait { "row" } else { "tile" };
                let args = number.map_or_else(|| json!({}), |number| json!({ of: number }));
                let round = |time: f64| (time * 1e4).round() / 1e4;
                let (begin, end) = (round(*from), round(*to));
                event(
                    out,
                    json!({
                        "ph": "X", "name": section.name(), "cat": if section.is_wait() { "wait" } else { "work" },
                        "pid": sm, "tid": thread, "ts": begin, "dur": round(end - begin), "args": args,
                    }),
                )?;
            }
        }
        writeln!(out, "\n]}}")
    }

    fn lane_name(&self, lane: &Lane) -> String {
        format!("block {} {}", lane.block, self.roles[lane.role])
    }

    /// A picture of the multiprocessor that ends last: all of it, or a piece from the middle.
    pub fn picture(&self, about: &str) -> String {
        let sm = self.by_end().first().copied().unwrap_or(0);
        let lanes: Vec<&Lane> = self.lanes.iter().filter(|lane| lane.sm == sm).collect();
        let begin = lanes.iter().map(|lane| lane.time().0).fold(f64::INFINITY, f64::min);
        let end = lanes.iter().map(|lane| lane.time().1).fold(0.0, f64::max);
        let time = if end - begin <= LONGEST_PICTURE {
            (begin, end)
        } else {
            let middle = f64::midpoint(begin, end);
            (middle - LONGEST_PICTURE / 2.0, middle + LONGEST_PICTURE / 2.0)
        };
        let inside = |slice: &&Slice| slice.time.1 > time.0 && slice.time.0 < time.1;
        let rows = lanes.iter().map(|lane| {
            let spans = lane.slices.iter().filter(inside).map(|slice| picture::Span {
                name: slice.section.name(),
                time: slice.time,
                words: match slice.number {
                    Some(number) => {
                        format!("{} {number}: {:.3}", slice.section.name(), slice.time.1 - slice.time.0)
                    }
                    None => format!("{}: {:.3}", slice.section.name(), slice.time.1 - slice.time.0),
                },
            });
            (self.lane_name(lane), spans.collect::<Vec<_>>())
        });
        let rows = rows.filter(|(_, spans)| !spans.is_empty()).collect();
        let title = format!("{about}: multiprocessor {sm}");
        let unit = self.unit.name().to_string();
        picture::Timeline { title, unit, time, rows, look }.file("the kernel's own stamps")
    }
}

/// How many of these lanes run at once: summed over the multiprocessors, the most on each.
fn places(lanes: &[&Lane]) -> usize {
    let mut events: Vec<(u32, f64, i32)> = Vec::with_capacity(2 * lanes.len());
    for lane in lanes {
        let (begin, end) = lane.time();
        events.extend([(lane.sm, begin, 1), (lane.sm, end, -1)]);
    }
    // At the same moment one ends before another begins.
    events.sort_by(|a, b| a.0.cmp(&b.0).then(a.1.total_cmp(&b.1)).then(a.2.cmp(&b.2)));
    let on = |events: &[(u32, f64, i32)]| {
        let mut now = 0;
        events.iter().fold(0, |most, event| {
            now += event.2;
            now.max(most)
        })
    };
    events.chunk_by(|a, b| a.0 == b.0).map(|events| on(events).unsigned_abs() as usize).sum()
}

/// The colour of a section in a picture, and whether it is pale. Waiting for a product has the product's colour.
fn look(name: &str) -> (usize, bool) {
    use Phase::*;
    let Some(section) = Phase::ALL.iter().copied().find(|section| section.name() == name) else {
        return (9, true);
    };
    let colour = match section {
        Softmax => 0,
        Qk | QkWait => 1,
        QWait | KWait | VWait | SlotWait => 2,
        CopyQ | CopyK | CopyV => 3,
        Merge => 4,
        Pv | PvWait => 5,
        Turn | Skip => 6,
        Rescale => 7,
        Store => 8,
        Setup | LaunchWait | Tile => 9,
    };
    (colour, section.is_wait())
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashcore_ptx::Stamped;

    /// A track whose clock runs at `rate` ticks per nanosecond from `offset` on; the shared clock ticks every 32 ns.
    fn track(sm: u32, block: u32, role: u32, ns: &[u64], (rate, offset): (f64, u32)) -> Track {
        let clock = |ns: u64| offset.wrapping_add((ns as f64 * rate) as u32);
        let moment = |ns: u64| Moment { global: 1_700_000_000_000_000_000 + ns / 32 * 32, clock: clock(ns) };
        let (first, last) = (ns[0], ns[ns.len() - 1]);
        let stamps = ns[1..ns.len() - 1].iter().map(|&ns| Stamped {
            clock: clock(ns),
            section: Phase::Softmax as u8,
            number: Some(7),
        });
        Track { block, role, sm, start: moment(first), end: moment(last), stamps: stamps.collect(), lost: 0 }
    }

    fn timeline() -> Timeline {
        // Two multiprocessors whose clocks have nothing to do with each other, one of them about to wrap.
        let clocks = [(1.7, 5_000), (1.7, u32::MAX - 3_000)];
        let call = |start: u64| -> Vec<Track> {
            let times = [start, start + 100, start + 900, start + 1_000];
            (0..2).map(|sm| track(sm as u32, sm as u32, 0, &times, clocks[sm])).collect()
        };
        let replay = Replay { first: call(0), before: call(98_800), last: call(100_000) };
        assert!((call_ns(&replay).unwrap() - 1_200.0).abs() < 50.0);
        // The readings at 99_776 and at 100_000 are the closest.
        assert_eq!(tick_ns(&replay), Some(224));
        Timeline::measured(vec!["worker".into()], &replay).unwrap()
    }

    #[test]
    fn clocks_of_all_multiprocessors_come_on_one_axis() {
        let timeline = timeline();
        assert_eq!(timeline.lanes.len(), 2);
        let (a, b) = (&timeline.lanes[0], &timeline.lanes[1]);
        for (a, b) in a.slices.iter().zip(&b.slices) {
            assert!((a.time.0 - b.time.0).abs() < 0.04 && (a.time.1 - b.time.1).abs() < 0.04, "{a:?} {b:?}");
        }
        // From the end of the call before, at 99.8 µs, to the end of this one, at 101.
        assert!((timeline.length() - 1.2).abs() < 0.05, "{}", timeline.length());
    }

    #[test]
    fn the_parts_add_up_to_the_call() {
        let timeline = timeline();
        let rows = timeline.table(|role| role);
        let (total, share) = rows.iter().fold((0.0, 0.0), |(t, s), row| (t + row.total, s + row.share));
        assert!((total - timeline.length()).abs() < 1e-9 && (share - 1.0).abs() < 1e-9, "{rows:?}");
        let of = |section: &str| rows.iter().find(|row| row.section == section).unwrap();
        assert_eq!(of("softmax").count, 4);
        assert!(
            (of("softmax").total - 0.9).abs() < 0.01 && (of("setup").total - 0.1).abs() < 0.01,
            "{rows:?}"
        );
        assert!((of(NO_BLOCK).total - 0.2).abs() < 0.05, "{rows:?}");
    }

    #[test]
    fn blocks_that_follow_each_other_take_one_place_and_blocks_side_by_side_two() {
        let lane = |sm, from, to| Lane {
            sm,
            block: 0,
            role: 0,
            slices: vec![Slice { section: Phase::Setup, number: None, time: (from, to) }],
        };
        let lanes = [lane(0, 0.0, 1.0), lane(0, 1.0, 2.0), lane(1, 0.0, 2.0), lane(1, 1.0, 3.0)];
        assert_eq!(places(&lanes.iter().collect::<Vec<_>>()), 3);
    }

    #[test]
    fn every_section_has_a_name_of_its_own() {
        let names: std::collections::BTreeSet<&str> = Phase::ALL.iter().map(|it| it.name()).collect();
        assert_eq!(names.len(), Phase::ALL.len());
        for (number, section) in Phase::ALL.iter().enumerate() {
            assert_eq!(Phase::of(number as u8), Some(*section));
        }
        assert!(Phase::ALL.len() <= 32, "a stamp has five bits for it");
    }
}
