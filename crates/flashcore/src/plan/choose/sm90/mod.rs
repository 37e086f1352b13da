//! The choice of the Hopper kernel's schedule. Every limit and pace here was measured on an H200.

mod blocks;
mod fp8;
mod section;

use flashcore_kernels::{Schedule as Any, Spec, sm90::fwd::Schedule};

pub(in crate::plan) use self::{
    blocks::schedules,
    section::{packed_section, section},
};
use self::{
    blocks::{
        LAZY_LONG, for_few, for_lengths, for_many, for_packed, for_parts, for_short_streams, for_some,
        for_streams, in_pairs, streams_together, together, widest,
    },
    section::key_tiles,
};
use crate::{
    Mask, Problem, Queries,
    plan::{Hardware, MAX_SHARED_TILES},
};

/// Queries of a warpgroup.
const GROUP: usize = 64;

/// Keys of the tiles that a block is counted to walk over when there are few blocks.
const KEY_TILE: usize = 128;

/// Key tiles of a short walk, where two warpgroups are better than two blocks.
const SHORT_WALK: usize = 4;

/// Key tiles of a walk that is long enough to be shared where it decides how long everything takes.
const WALK: usize = 5;

/// Key tiles of a walk that is so long that its tiles should be large.
const LONG_WALK: usize = 12;

/// Key tiles of a chain that is worth cutting in two, where nothing but the longest chain takes time.
const LONG_CHAIN: usize = 16;

/// The share of the multiprocessors that larger clusters can take up at once: each lies in one group of
/// multiprocessors, and groups are no multiples of it. 32 clusters of 4 take as long as two rounds on 132.
const CLUSTERED: (usize, usize) = (9, 10);

/// The share of the multiprocessors below which clusters leave too many of them idle.
const IDLE: (usize, usize) = (3, 4);

/// Keys of which one has little weight.
const LONG_KEYS: usize = 8192;

/// The widest heads whose keys are not worth sharing between two blocks, unless there are many.
const WIDE_HEAD: u32 = 192;

/// Rounds of tiles from which on it does not matter that two blocks take their tiles together.
const MANY_ROUNDS: usize = 4;

/// Bytes of the keys and values of a tile up to which the start of its walk counts.
const SHORT_BYTES: usize = 512 << 10;

/// The fewest keys of a part that is worth a block of its own.
const PART_KEYS: usize = 128;

/// The fewest bytes of its keys and values.
const PART_BYTES: usize = 64 << 10;

/// The schedule of the Hopper kernel for a problem, and why; `None` where none fits.
pub(in crate::plan) fn choose(problem: &Problem, spec: &Spec, hardware: &Hardware) -> Option<(Any, String)> {
    if spec.dtype.is_fp8() {
        let (schedule, what) = fp8::choose(problem, spec, hardware)?;
        return Some((Any::Sm90Fwd(schedule), format!("Hopper has wgmma and TMA; {what}")));
    }
    let (problem, given, spec) = (&without_mask(problem, spec), spec, &unmasked(spec));
    type Candidates = Vec<Schedule>;
    let fitting = |candidates: Candidates| {
        candidates.into_iter().find(|&it| Any::Sm90Fwd(it).check(given, hardware.target).is_ok())
    };
    let lazy = |schedule: Schedule| {
        let lazy = if problem.len_k >= LONG_KEYS { LAZY_LONG } else { schedule.lazy };
        Schedule { lazy, ..schedule }
    };
    if let Queries::Packed { total } = problem.queries {
        let (rows, sms) = (fitting(for_many(spec))?.rows() as usize, hardware.sms as usize);
        let most = (total / rows + problem.batch.min(total)) * problem.heads_q;
        let schedule = fitting(for_packed(spec, most >= sms))?;
        let what = format!(
            "up to {most} tiles of {rows} queries of {} sequences, which blocks of {} find on the GPU",
            problem.batch,
            schedule.rows()
        );
        return Some((Any::Sm90Fwd(lazy(schedule)), format!("Hopper has wgmma and TMA; {what}")));
    }
    let tiles = |rows: u32| problem.len_q.div_ceil(rows as usize) * problem.heads_q * problem.batch;
    let sms = hardware.sms as usize;
    let many = fitting(for_many(spec).into_iter().chain(for_some(spec)).collect())?;
    let (wide, narrow) = (tiles(many.rows()), tiles(64));
    let widest_head = spec.head_dim.max(spec.head_dim_v);
    let key_tiles = problem.len_k.div_ceil(KEY_TILE);
    let full = narrow >= sms * 9 / 10;
    let together = || fitting(together(spec, 1, key_tiles >= LONG_WALK));
    let streams = || fitting(streams_together(spec));
    let row_bytes = (spec.head_dim + spec.head_dim_v) as usize * spec.dtype.size() as usize;
    let short = || fitting(for_short_streams(spec)).filter(|_| problem.len_k * row_bytes <= SHORT_BYTES);
    // Without lengths of their own, sequences are alike; and where all are short, a second launch costs more than it evens out.
    let uneven = problem.batch > 1 && (spec.key_lengths || spec.packed_k);
    let long = problem.len_k * row_bytes > SHORT_BYTES;
    if let Some(shared) = fitting(for_lengths(spec)).filter(|_| problem.len_q <= GROUP && uneven && long) {
        let most = (narrow as u64).saturating_mul(problem.len_k.div_ceil(shared.block_n as usize) as u64);
        if most <= MAX_SHARED_TILES {
            let what = format!(
                "up to {most} key tiles of {} sequences, which {sms} blocks find on the GPU and share evenly, whatever the lengths \
                 are; a second launch merges what they have",
                problem.batch
            );
            return Some((Any::Sm90Fwd(lazy(shared)), format!("Hopper has wgmma and TMA; {what}")));
        }
    }
    let (schedule, what) = if let Some(short) =
        short().filter(|_| problem.len_q <= GROUP && narrow > sms && key_tiles >= SHORT_WALK)
    {
        (
            short,
            format!(
                "{narrow} tiles of up to {GROUP} queries on {sms} SMs have few keys each: two blocks stay on each SM"
            ),
        )
    } else if let Some(streams) =
        streams().filter(|_| problem.len_q <= GROUP && full && key_tiles >= SHORT_WALK)
    {
        (
            streams,
            format!(
                "{narrow} tiles of up to {GROUP} queries keep {sms} SMs busy, two warpgroups reading for each"
            ),
        )
    } else if let Some(both) = together().filter(|_| {
        // Twice as many tiles as multiprocessors take turns, and the longest decide.
        spec.right && narrow > sms && narrow <= 2 * sms && key_tiles > WALK
    }) {
        (
            both,
            format!(
                "{narrow} tiles of {GROUP} queries on {sms} SMs wait for the longest: two warpgroups share each"
            ),
        )
    } else if !spec.right
        && narrow > sms
        && key_tiles > WALK
        && (2 * narrow <= 3 * sms || widest_head > 64 && wide < sms * 9 / 10)
    {
        // Somewhat more tiles than multiprocessors, and all of them long: blocks of which several fit on one.
        let split = if widest_head <= 64 && spec.head_dim_v.is_multiple_of(16) { 2 } else { 1 };
        let few = for_few(spec, split, false).into_iter().filter(|few| few.block_n <= 64);
        let few = fitting(few.collect())?;
        (
            few,
            format!(
                "{narrow} tiles of {GROUP} queries are somewhat more than {sms} SMs: small blocks come out even"
            ),
        )
    } else if widest_head <= 64 && narrow > sms {
        let some = fitting(for_some(spec))?;
        let four = fitting(widest(spec).into_iter().collect());
        among(problem, spec, sms, [Some(many), four, Some(some)].into_iter().flatten(), narrow)?
    } else if problem.len_q <= GROUP && full {
        let streams = fitting(for_streams(spec, narrow <= sms))?;
        (streams, format!("{narrow} tiles of up to {GROUP} queries keep {sms} SMs busy reading keys"))
    } else if wide >= sms * 9 / 10 {
        let long = widest_head > WIDE_HEAD || problem.len_k >= LONG_KEYS;
        let pairs = fitting(in_pairs(spec)).filter(|_| long && wide >= MANY_ROUNDS * sms);
        let share = if pairs.is_some() { ", two blocks reading keys for each other" } else { "" };
        (pairs.unwrap_or(many), format!("{wide} tiles of {} queries keep {sms} SMs busy{share}", many.rows()))
    } else {
        let few = few(problem, spec, sms, narrow, &fitting)?;
        let share = match (few.split, few.together) {
            _ if few.parts > 1 => {
                format!(", so {} share the keys of one, and a second launch merges what they have", few.parts)
            }
            (1, false) => String::new(),
            (1, true) => ", so two warpgroups share the keys of each".into(),
            (split, false) => format!(", so {split} share the keys of one"),
            (split, true) => format!(", so two warpgroups in each of {split} blocks share the keys of one"),
        };
        (few, format!("{narrow} tiles of {GROUP} queries leave SMs of {sms} idle{share}"))
    };
    Some((Any::Sm90Fwd(lazy(schedule)), format!("Hopper has wgmma and TMA; {what}")))
}

/// A spec as far as it decides which blocks are best. Few queries of heads that share keys see nearly the same of them.
fn unmasked(spec: &Spec) -> Spec {
    if spec.rows_per_query == 1 {
        *spec
    } else {
        Spec { left: false, right: false, top_left: false, ..*spec }
    }
}

/// The same for a problem: with the keys alone that its window leaves, if it has one.
fn without_mask(problem: &Problem, spec: &Spec) -> Problem {
    if spec.rows_per_query == 1 {
        return *problem;
    }
    let queries = problem.len_q / spec.rows_per_query as usize;
    let band = problem.mask.band();
    let seen = |side: Option<usize>| side.unwrap_or(problem.len_k).saturating_add(queries);
    let seen = seen(band.left).saturating_add(band.right.unwrap_or(problem.len_k));
    Problem { mask: Mask::None, len_k: problem.len_k.min(seen), ..*problem }
}

/// For a GPU that the tiles do not fill: how many warpgroups and blocks share the keys of each of `narrow` tiles.
fn few(
    problem: &Problem,
    spec: &Spec,
    sms: usize,
    narrow: usize,
    fitting: &dyn Fn(Vec<Schedule>) -> Option<Schedule>,
) -> Option<Schedule> {
    let key_tiles = problem.len_k.div_ceil(KEY_TILE);
    let clusters = |size: usize| narrow * size <= sms * CLUSTERED.0 / CLUSTERED.1;
    let narrow_heads = spec.head_dim.max(spec.head_dim_v) <= 64;
    let split = match () {
        () if clusters(8) && key_tiles >= LONG_CHAIN => 8,
        () if clusters(4) && key_tiles >= 8 => 4,
        () if 2 * narrow <= sms && key_tiles >= 2 => 2,
        // The longest chain is what takes time.
        () if spec.right && key_tiles >= LONG_CHAIN => 2,
        () if narrow_heads && key_tiles > SHORT_WALK => 2,
        () => 1,
    };
    let split = if spec.head_dim_v.is_multiple_of(8 * split) { split } else { 1 };
    // Clusters that leave so many multiprocessors idle lose more than a second launch costs. Pairs of blocks with two
    // warpgroups each do not: they read as fast as the memory gives, unless heads share it.
    let idle = narrow * (split as usize) * IDLE.1 < sms * IDLE.0;
    let pairs = split == 2 && 4 * narrow <= sms && !spec.grouped;
    let long = if narrow_heads { 2 * LONG_CHAIN } else { LONG_CHAIN };
    if key_tiles >= long && idle && !pairs {
        let row_bytes = (spec.head_dim + spec.head_dim_v) * spec.dtype.size();
        let part = PART_KEYS.max(PART_BYTES.div_ceil(row_bytes as usize));
        let parts = (sms / narrow.max(1)).min(problem.len_k / part);
        if parts > 1 {
            let filled = problem.len_q.min(GROUP) > GROUP / 2;
            let fits = fitting(for_parts(spec, parts as u32, problem.len_k / parts, filled));
            if fits.is_some() {
                return fits;
            }
        }
    }
    let alone = narrow * split as usize <= sms;
    // Two warpgroups need a few key tiles each; with narrow heads they also need a multiprocessor for themselves, and with
    // wide ones four blocks or more read as fast as they can without.
    let both = if narrow_heads { alone } else { narrow <= sms && split <= 2 };
    if key_tiles > 2 && both {
        let even = split == 2 && key_tiles.is_multiple_of(4);
        let long = even || key_tiles >= LONG_WALK * split as usize;
        let both = fitting(together(spec, split, long));
        if both.is_some() {
            return both;
        }
    }
    let for_few = |split| fitting(for_few(spec, split, narrow * split as usize <= sms));
    for_few(split).or_else(|| for_few(1))
}

/// For narrow heads, and a GPU that is full: the blocks that are likely to be done first. `narrow` is the number of
/// tiles of 64 queries.
fn among(
    problem: &Problem,
    spec: &Spec,
    sms: usize,
    candidates: impl Iterator<Item = Schedule>,
    narrow: usize,
) -> Option<(Schedule, String)> {
    let mut best = candidates.min_by(|a, b| {
        let estimate = |it: &Schedule| estimate(problem, spec, *it, sms);
        estimate(a).total_cmp(&estimate(b))
    })?;
    if best.warpgroups == 1 && narrow <= best.ctas as usize * sms && !spec.right {
        // A block each, and nothing that would have to come out even.
        best = Schedule { persistent: false, q_stages: 1, ..best };
    }
    let rows = best.rows();
    let tiles = problem.len_q.div_ceil(rows as usize) * problem.heads_q * problem.batch;
    Some((best, format!("{tiles} tiles of {rows} queries are likely to be done first on {sms} SMs")))
}

/// How many TFLOP/s a whole H200 reaches with a schedule at head_dim 64 where nothing is uneven.
fn pace(schedule: Schedule, uneven: bool) -> f64 {
    match (schedule.warpgroups, uneven) {
        (4, false) => 515.0,
        // Its key tiles are half as long, and so is what lies beyond a mask's edge.
        (4, true) => 540.0,
        (3, _) => 553.0,
        _ => 472.0,
    }
}

/// How long a schedule of persistent blocks is likely to take, in units of its own.
fn estimate(problem: &Problem, spec: &Spec, schedule: Schedule, sms: usize) -> f64 {
    let heads = problem.heads_q * problem.batch;
    let (slots, warpgroups) = (sms * schedule.ctas as usize, schedule.warpgroups as usize);
    let pace = pace(schedule, spec.right) / f64::from(schedule.ctas);
    let block_n = schedule.block_n as usize;
    if !spec.right {
        // Tiles are alike, so whole rounds of them are taken up.
        let (rows, key_tiles) = (GROUP * warpgroups, problem.len_k.div_ceil(block_n));
        let rounds = (problem.len_q.div_ceil(rows) * heads).div_ceil(slots);
        return (rounds * rows * key_tiles * block_n) as f64 / pace;
    }
    // Each warpgroup walks over the keys that its own rows see. Blocks come out even, unless one is too long for that,
    // which lasts as long as its longest warpgroup.
    let groups: Vec<u64> = (0..problem.len_q.div_ceil(GROUP))
        .map(|group| GROUP as u64 * key_tiles(problem, group, GROUP, block_n) * block_n as u64)
        .collect();
    let longest = groups.iter().max().map_or(0, |&longest| longest * warpgroups as u64);
    let all = groups.iter().sum::<u64>() as f64 * heads as f64;
    (longest as f64).max(all / slots as f64) / pace
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType;
    use crate::plan::{Plan, Target};

    /// What was fastest on an H200, or within 2 % of it: batch, heads, length, and the queries of a block without a mask
    /// and with a causal one.
    const FASTEST: [(usize, usize, usize, u32, u32); 17] = [
        (4, 16, 512, 256, 64),
        (8, 16, 512, 256, 256),
        (16, 16, 512, 256, 256),
        (32, 32, 512, 256, 256),
        (16, 32, 1024, 256, 256),
        (8, 32, 2048, 192, 256),
        (4, 32, 4096, 192, 192),
        (2, 32, 8192, 192, 192),
        (1, 32, 16384, 192, 192),
        (2, 16, 512, 64, 64),
        (1, 16, 1024, 64, 64),
        (2, 16, 1024, 256, 64),
        (1, 8, 2048, 64, 64),
        (1, 16, 2048, 256, 64),
        (1, 8, 4096, 256, 64),
        (2, 8, 1024, 64, 64),
        (4, 16, 384, 192, 64),
    ];

    #[test]
    fn narrow_heads_get_the_blocks_that_were_fastest() {
        for (batch, heads, len, full, causal) in FASTEST {
            for (mask, rows) in [(Mask::None, full), (Mask::Causal, causal)] {
                let problem = Problem::new(batch, heads, len, 64, DType::F16).with_mask(mask);
                let plan = Plan::choose(&problem, &Hardware::typical(Target::Sm90a)).unwrap();
                let Any::Sm90Fwd(schedule) = plan.main().schedule else { panic!("{plan}") };
                assert_eq!(schedule.rows(), rows, "{plan}");
            }
        }
    }

    /// What was fastest on an H200 for 32 query heads that share 8 key heads, or within 3 % of it: batch, keys, head_dim,
    /// and the blocks that share the keys of a tile.
    const FASTEST_DECODE: [(usize, usize, usize, u32); 15] = [
        (1, 1024, 128, 4),
        (1, 2048, 128, 16),
        (1, 4096, 128, 16),
        (1, 32768, 128, 16),
        (2, 32768, 128, 8),
        (4, 4096, 128, 2),
        (5, 8192, 128, 3),
        (8, 4096, 128, 2),
        (16, 4096, 128, 1),
        (64, 4096, 128, 1),
        (1, 4096, 64, 16),
        (1, 32768, 64, 16),
        (8, 4096, 64, 2),
        (16, 4096, 64, 1),
        (64, 4096, 64, 1),
    ];

    #[test]
    fn one_query_per_head_gets_the_blocks_that_were_fastest() {
        for (batch, keys, head_dim, split) in FASTEST_DECODE {
            let problem = Problem::new(batch, 32, 1, head_dim, DType::BF16).with_kv(8, keys);
            let plan = Plan::choose(&problem, &Hardware::typical(Target::Sm90a)).unwrap();
            let Any::Sm90Fwd(schedule) = plan.main().schedule else { panic!("{plan}") };
            assert_eq!((schedule.split * schedule.parts, schedule.rows()), (split, 64), "{plan}");
        }
    }

    #[test]
    fn short_walks_of_many_tiles_get_blocks_that_stay() {
        for (problem, stays) in [
            ("256x16/2x1/512x64 bf16", true),
            ("32x32/8x1/1024x128 bf16", true),
            ("128x32/8x1/1024x128 bf16", true),
            ("16x32x1/2048x64 bf16", true),
            ("64x32/8x1/4096x128 bf16", false),
            ("16x32/8x1/1024x128 bf16", false),
        ] {
            let plan = Plan::choose(&problem.parse().unwrap(), &Hardware::typical(Target::Sm90a)).unwrap();
            let Any::Sm90Fwd(schedule) = plan.main().schedule else { panic!("{plan}") };
            assert_eq!((schedule.persistent, schedule.ctas == 2), (stays, stays), "{plan}");
        }
    }

    #[test]
    fn every_head_dim_has_a_schedule_whatever_there_is_of_tiles_and_keys() {
        for head_dim in (8..=256).step_by(8) {
            for (heads, len_q, len_k) in [
                (12, 1024, 1024),
                (16, 1024, 1024),
                (8, 512, 512),
                (4, 2048, 2048),
                (140, 1, 900),
                (3, 40, 9000),
            ] {
                for mask in [Mask::None, Mask::Causal] {
                    let problem = Problem::new(1, heads, len_q, head_dim, DType::F16);
                    let problem = problem.with_kv(heads, len_k).with_mask(mask);
                    let plan = Plan::choose(&problem, &Hardware::typical(Target::Sm90a)).unwrap();
                    assert!(matches!(plan.main().schedule, Any::Sm90Fwd(_)), "{plan}");
                }
            }
        }
    }

    #[test]
    fn one_query_per_head_is_not_given_a_wide_block() {
        let problem = Problem::new(64, 32, 1, 64, DType::F16).with_kv(32, 1024);
        let plan = Plan::choose(&problem, &Hardware::typical(Target::Sm90a)).unwrap();
        let Any::Sm90Fwd(schedule) = plan.main().schedule else { panic!("{plan}") };
        assert_eq!(schedule.rows(), 64);
    }

    /// Heads, length, head_dim, causal, and how many warpgroups and blocks share the keys of 64 queries.
    type Shared = (usize, usize, usize, bool, (u32, u32));

    /// What was fastest on an H200, or within 3 % of it.
    const FASTEST_SHARED: [Shared; 24] = [
        (8, 256, 64, false, (1, 2)),
        (8, 384, 64, false, (2, 2)),
        (8, 512, 64, false, (2, 2)),
        (8, 512, 64, true, (2, 2)),
        (4, 1024, 64, false, (2, 2)),
        (16, 512, 64, false, (2, 1)),
        (16, 512, 64, true, (2, 1)),
        (8, 768, 64, false, (1, 2)),
        (8, 1024, 64, false, (1, 2)),
        (8, 1024, 64, true, (1, 2)),
        (4, 2048, 64, false, (1, 2)),
        (12, 1024, 64, false, (1, 2)),
        (12, 1024, 64, true, (2, 1)),
        (16, 768, 64, true, (2, 1)),
        (8, 2048, 64, true, (2, 1)),
        (8, 2048, 64, false, (1, 1)),
        (8, 512, 128, false, (2, 2)),
        (8, 1024, 128, false, (2, 1)),
        (8, 1024, 128, true, (2, 1)),
        (4, 2048, 128, false, (2, 1)),
        (4, 2048, 128, true, (2, 2)),
        (8, 2048, 128, true, (2, 1)),
        (12, 768, 128, false, (1, 1)),
        (12, 768, 128, true, (2, 1)),
    ];

    #[test]
    fn keys_are_shared_as_was_fastest() {
        for (heads, len, head_dim, causal, shared) in FASTEST_SHARED {
            let mask = if causal { Mask::Causal } else { Mask::None };
            let problem = Problem::new(1, heads, len, head_dim, DType::F16).with_mask(mask);
            let plan = Plan::choose(&problem, &Hardware::typical(Target::Sm90a)).unwrap();
            let Any::Sm90Fwd(schedule) = plan.main().schedule else { panic!("{plan}") };
            let warpgroups = if schedule.together { schedule.warpgroups } else { 1 };
            assert_eq!((warpgroups, schedule.split), shared, "{plan}");
            assert_eq!(schedule.rows(), 64, "{plan}");
        }
    }
}
