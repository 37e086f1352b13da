//! The blocks that Hopper's forward kernel has for a spec, by what there is of them. All were measured on an H200.

use flashcore_kernels::{Spec, sm90::fwd::Schedule};

/// How far the largest probability may grow before the output is rescaled, as a power of two. At 1 the error is within
/// 3 % of that with exact maxima, at 8 up to 10 % above.
pub(super) const LAZY: u32 = 1;

/// The same for many keys, where one probability matters less.
pub(super) const LAZY_LONG: u32 = 2;

/// Every schedule that a plan may have for a spec, best first: those for many tiles of queries, then those for few.
pub(in crate::plan) fn schedules(spec: &Spec) -> Vec<Schedule> {
    if spec.dtype.is_fp8() {
        return super::fp8::schedules(spec);
    }
    let either = Schedule::SPLITS.into_iter().flat_map(|split| [(split, true), (split, false)]);
    let few = either.clone().flat_map(|(split, alone)| for_few(spec, split, alone));
    let together = either.flat_map(|(split, long)| together(spec, split, long));
    let streams = [true, false].into_iter().flat_map(|alone| for_streams(spec, alone));
    let many = for_many(spec).into_iter().chain(widest(spec)).chain(in_pairs(spec));
    let streams = streams.chain(streams_together(spec)).chain(for_short_streams(spec));
    many.chain(for_some(spec)).chain(few).chain(together).chain(streams).collect()
}

/// The widest blocks, where heads are narrow enough: four warpgroups hide more of each other's softmax, and lengths
/// are more often multiples of their 256 queries than of 192.
pub(super) fn widest(spec: &Spec) -> Option<Schedule> {
    let four = Schedule { stages: 4, ..wide(4, 64, 2) };
    (spec.head_dim.max(spec.head_dim_v) <= 64).then_some(four)
}

/// Persistent blocks, one per multiprocessor, whose warpgroups take turns.
pub(super) fn wide(warpgroups: u32, block_n: u32, q_stages: u32) -> Schedule {
    Schedule {
        warpgroups,
        block_n,
        stages: 2,
        q_stages,
        ctas: 1,
        split: 1,
        pingpong: true,
        lazy: LAZY,
        poly: 0,
        persistent: true,
        pairs: false,
        together: false,
        parts: 1,
        by_length: false,
        in_turn: false,
        multicast: 1,
        flush: 1,
        q_regs: false,
        turned: false,
    }
}

/// For grids that fill the GPU several times: the widest blocks, persistent. Measured on an H200.
pub(super) fn for_many(spec: &Spec) -> Vec<Schedule> {
    match spec.head_dim.max(spec.head_dim_v) {
        ..=64 => vec![wide(3, 128, 2), wide(3, 112, 2), wide(2, 128, 2)],
        65..=96 => vec![wide(2, 128, 2), wide(2, 112, 2)],
        97..=128 => [128, 112].map(|n| Schedule { q_regs: true, ..wide(2, n, 2) }).into(),
        129..=192 => vec![wide(2, 96, 1), wide(2, 80, 1)],
        _ => vec![wide(2, 64, 1), wide(2, 48, 1)],
    }
}

/// The same in clusters of two blocks, each of which copies half of every key tile for both: half the reads of the L2
/// cache, and so less power. Without a mask only, where both always need the same keys. Measured on an H200.
pub(super) fn in_pairs(spec: &Spec) -> Vec<Schedule> {
    let alike = !spec.is_masked() && !spec.has_foreign_keys() && spec.head_dim.max(spec.head_dim_v) > 64;
    let many = for_many(spec).into_iter().filter(|_| alike);
    many.map(|many| Schedule { multicast: 2, ..many }).collect()
}

/// For grids that fill the GPU, but not many times: narrow persistent blocks, two per multiprocessor where they fit.
pub(super) fn for_some(spec: &Spec) -> Vec<Schedule> {
    for_many(spec)
        .into_iter()
        .flat_map(|wide| {
            let narrow = Schedule { warpgroups: 1, q_stages: 2, pingpong: false, ..wide };
            [Schedule { ctas: 2, ..narrow }, narrow]
        })
        .collect()
}

/// For packed sequences, whose tiles only the GPU knows: persistent blocks, wide ones where there may be `many` tiles.
pub(super) fn for_packed(spec: &Spec, many: bool) -> Vec<Schedule> {
    let wide = for_many(spec).into_iter().filter(|_| many);
    wide.chain(for_some(spec)).collect()
}

/// For grids that leave multiprocessors idle, or wait for their longest tiles: two warpgroups share the keys of the
/// same queries, and `split` blocks those of a tile. `long`: there are many keys. Measured on an H200.
pub(super) fn together(spec: &Spec, split: u32, long: bool) -> Vec<Schedule> {
    let tiles: &[(u32, u32)] = match spec.head_dim.max(spec.head_dim_v) {
        ..=64 if long => &[(128, 4), (64, 4)],
        ..=128 => &[(64, 4), (64, 2)],
        _ => &[],
    };
    let both = |(block_n, stages)| Schedule {
        pingpong: false,
        persistent: false,
        stages,
        split,
        together: true,
        ..wide(2, block_n, 1)
    };
    tiles.iter().copied().map(both).collect()
}

/// For few queries against many keys, where reading the keys is what takes time: narrow persistent blocks,
/// with as many keys in flight as fit. `alone`: there are no more tiles than multiprocessors. Measured on an H200.
pub(super) fn for_streams(spec: &Spec, alone: bool) -> Vec<Schedule> {
    let deep = for_few(spec, 1, false)
        .into_iter()
        .flat_map(|few| [4, 3, 2].map(|stages| Schedule { stages, persistent: true, ..few }));
    let short = deep.clone().filter(|deep| deep.block_n == 64);
    let beside = short.map(|short| Schedule { ctas: 2, ..short }).filter(|_| !alone);
    beside.chain(deep).collect()
}

/// The same for walks so short that the start of each counts: two blocks per multiprocessor, which fetch the next tile's
/// queries and keys while the output of this one leaves. Measured on an H200.
pub(super) fn for_short_streams(spec: &Spec) -> Vec<Schedule> {
    let block_n = if spec.head_dim.max(spec.head_dim_v) <= 64 { 128 } else { 64 };
    let few = for_few(spec, 1, false).into_iter().filter(|few| few.block_n == block_n);
    few.map(|few| Schedule { stages: 2, q_stages: 2, ctas: 2, persistent: true, ..few }).collect()
}

/// The same where the keys are enough for two warpgroups to share, and heads are not too wide for it.
pub(super) fn streams_together(spec: &Spec) -> Vec<Schedule> {
    let block_n = if spec.head_dim.max(spec.head_dim_v) <= 64 { 64 } else { 32 };
    let both = together(spec, 1, false).into_iter();
    both.map(|both| Schedule { block_n, ..both }).collect()
}

/// For grids that leave multiprocessors idle: narrow blocks, `split` of which share the keys of a tile. `alone`:
/// there are no more blocks than multiprocessors.
pub(super) fn for_few(spec: &Spec, split: u32, alone: bool) -> Vec<Schedule> {
    // The wider the head and the more blocks merge, the sooner a block should have the next keys.
    let block_n: &[u32] = match spec.head_dim.max(spec.head_dim_v) {
        ..=64 => &[128, 64],
        65..=128 if split <= 2 => &[128, 64, 32],
        65..=128 => &[64, 32],
        _ => &[64, 32, 16],
    };
    // With a third stage no two of the narrowest blocks fit on a multiprocessor, and the next launch cannot crowd where
    // this one's blocks are still at work.
    let stages: &[u32] = if alone { &[3, 2] } else { &[2] };
    let narrow = |(block_n, stages)| Schedule {
        warpgroups: 1,
        block_n,
        stages,
        q_stages: 1,
        ctas: 1,
        split,
        pingpong: false,
        lazy: LAZY,
        poly: 0,
        persistent: false,
        pairs: false,
        together: false,
        parts: 1,
        by_length: false,
        in_turn: false,
        multicast: 1,
        flush: 1,
        q_regs: false,
        turned: false,
    };
    block_n.iter().flat_map(|&n| stages.iter().map(move |&stages| (n, stages))).map(narrow).collect()
}

/// For few tiles against many keys: narrow blocks with as many keys in flight as fit, each for one of `parts` parts of the
/// keys, of `keys` each. `filled`: most rows of a tile are queries, so that there is as much to compute as to read.
pub(super) fn for_parts(spec: &Spec, parts: u32, keys: usize, filled: bool) -> Vec<Schedule> {
    let few = for_few(spec, 1, true).into_iter().map(|few| Schedule { parts, ..few });
    let both = together(spec, 1, true).into_iter().map(|both| Schedule { parts, ..both });
    let deep = few.clone().take(1).map(|few| match spec.head_dim.max(spec.head_dim_v) {
        ..=64 => Schedule { stages: 4, ..few },
        // Short walks should begin with the first keys that arrive.
        _ if keys < SHORT_PART => Schedule { block_n: 64, stages: 6, ..few },
        _ => few,
    });
    if filled { both.chain(few).collect() } else { deep.chain(few).collect() }
}

/// For few queries of sequences of different lengths: persistent blocks with as many keys in flight as fit, which share all keys
/// by length. Tiles are short, so that shares are even and short sequences waste little. Not measured.
pub(super) fn for_lengths(spec: &Spec) -> Vec<Schedule> {
    let tiles: &[(u32, u32)] = match spec.head_dim.max(spec.head_dim_v) {
        ..=64 => &[(128, 4), (64, 4)],
        65..=128 => &[(64, 6), (64, 4), (32, 4)],
        _ => &[(32, 5), (32, 4), (16, 4)],
    };
    let few = for_few(spec, 1, true).into_iter().take(1);
    few.flat_map(|few| {
        tiles.iter().map(move |&(block_n, stages)| Schedule {
            block_n,
            stages,
            q_stages: 2,
            persistent: true,
            by_length: true,
            ..few
        })
    })
    .collect()
}

/// Keys of a part that is short.
const SHORT_PART: usize = 512;
