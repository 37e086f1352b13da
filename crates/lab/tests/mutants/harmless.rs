//! The mutants that change nothing, each with the reason.

use std::fmt;

use crate::faults::Change::{self, *};

/// Some mutants that live, and why they may.
pub struct Entry {
    /// Parts of the schedule's text, and after a `!` such as it must not have.
    schedule: &'static [&'static str],
    /// Parts of the place: the author's words, the instruction and which of them, the emitter's file.
    place: &'static [&'static str],
    /// What was done.
    change: Change,
    /// How many there are in each schedule.
    pub count: usize,
    /// Why it changes nothing.
    reason: &'static str,
}

impl Entry {
    /// Whether it speaks of a schedule.
    pub fn is_for(&self, schedule: &str) -> bool {
        self.schedule.iter().all(|part| match part.strip_prefix('!') {
            Some(part) => !schedule.contains(part),
            None => schedule.contains(part),
        })
    }

    /// Whether it speaks of a mutant.
    pub fn fits(&self, schedule: &str, place: &str, change: Change) -> bool {
        self.is_for(schedule) && self.place.iter().all(|part| place.contains(part)) && self.change == change
    }
}

impl fmt::Display for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} at {} ({})", self.change, self.place.join(" … "), self.reason)
    }
}

const fn entry(
    schedule: &'static [&'static str],
    place: &'static [&'static str],
    change: Change,
    count: usize,
    reason: &'static str,
) -> Entry {
    Entry { schedule, place, change, count, reason }
}

const SEEN_BY_ALL: &str = "a tile that every row sees is masked for nothing";
const ZERO_IN_THE_END: &str =
    "the block has no key of its batch entry: it works for nothing, and writes zeros in the end";
const BROUGHT_FOR_NOTHING: &str =
    "the sum of a tile that this block does not round is brought, and written over";
const NOTHING_OWED: &str =
    "with one slot of queries none is left to release here: it was released at the end of its tile";
const NO_FURTHER_QUERIES: &str = "a block ends with its tile: there are no further queries";
const NO_FURTHER_VALUES: &str = "a block ends with its tile: there are no values after the last";
const WAITED_ALREADY: &str = "with one slot of queries, the end of every tile has waited for the same";
const NO_TURN: &str = "after the first of several slots the parity does not change";
const BEFORE_THE_LAST_KEY: &str =
    "these tiles end before the last key of every row, so the comparison with it always holds";
const FILLED_AFTER: &str =
    "the row too many lands at the start of the next tile in shared memory, which is filled after it";
const FEWER_REGISTERS: &str = "the assembler has fewer registers to give, and spills: slow, not wrong";
const COME_FOR_GOOD: &str = "a warp that ends counts as arrived, and its block's memory stays until the consumers have all that is sent to them";
const EMPTY_ROUND: &str = "one more round, in which no tile is left";
const PASSED_KEYS: &str =
    "the keys are not read, and the wait for the values or queries before says that their slot had been free";

const MET_AGAIN: &str = "the simulator's lanes have met again after what one of them did alone";
const FENCED_BEFORE: &str =
    "nobody has touched these registers since the fence before; the assembler wants one after every loop";
const HANDED_AFTER: &str = "the probabilities that have come say that the queries are there: the other warpgroup has waited for them";
const HAVE_ALL_KEYS: &str = "tiles before another one have all their keys, so the comparison always holds";
const NAMED_ELSEWHERE: &str =
    "no table here names the page behind the last of the pool: one in the kernel's own tests does";
const BEHIND_THE_LAST_QUERY: &str = "a tile behind the last query, none of whose rows is stored";
const NOT_COMPUTED: &str = "a step behind the last is copied, and nobody computes it";
const NOTHING_AFTER: &str = "after the last step nobody waits for it";

/// All of them.
pub const HARMLESS: &[Entry] = &[
    entry(
        &["sm90_bwd:", "!rounds=1"],
        &["or.b32", "descriptor.rs"],
        OtherLeading,
        18,
        "these head dims are one panel wide: without another panel, there is no distance to it",
    ),
    entry(
        &["sm90_bwd:block_m=64", "rounds=1"],
        &["or.b32", "descriptor.rs"],
        OtherLeading,
        14,
        "these tiles are one panel wide: without another panel, there is no distance to it",
    ),
    entry(
        &["sm90_bwd:block_m=128", "rounds=1"],
        &["or.b32", "descriptor.rs"],
        OtherLeading,
        18,
        "these tiles are one panel wide: without another panel, there is no distance to it",
    ),
    entry(
        &["sm90_bwd:", "rounds=1"],
        &["setp.gt.s32", "bwd/block.rs", "of this block: those before it have added"],
        OffByOne,
        1,
        BROUGHT_FOR_NOTHING,
    ),
    entry(
        &["sm90_bwd:", "rounds=1"],
        &["setp.gt.s32", "bwd/block.rs", "the query tiles that see no key behind these"],
        OffByOne,
        1,
        BROUGHT_FOR_NOTHING,
    ),
    entry(&["sm90_bwd:"], &["griddepcontrol.launch_dependents"], Drop, 1, "the next grid only starts later"),
    entry(
        &["sm90_bwd:"],
        &["consumer / -", "griddepcontrol.wait"],
        Drop,
        1,
        "consumers read only what others copy, and key lengths, which the grid before does not write",
    ),
    entry(&["sm90_bwd:block_m=128"], &["barriers / -", "setmaxnreg.inc"], Drop, 1, FEWER_REGISTERS),
    entry(&["sm90_bwd:"], &["its slot is free", "setp.lt.u32"], OffByOne, 1, "a block has no further warp"),
    entry(
        &["sm90_bwd:"],
        &["the query tiles that see these keys", "setp.lt.s32"],
        OffByOne,
        1,
        ZERO_IN_THE_END,
    ),
    entry(&["sm90_bwd:"], &["work: which keys these rows see", "setp"], OffByOne, 2, SEEN_BY_ALL),
    entry(
        &["sm90_bwd:", "!rounds=1"],
        &["walk: the first scores / -", "setp.lt.s32"],
        OffByOne,
        1,
        "no row is behind the last key",
    ),
    entry(&["sm90_bwd:", "!rounds=1"], &["which keys of which head", "bar.warp.sync"], Drop, 3, MET_AGAIN),
    entry(&["sm90_bwd:", "rounds=1"], &["which keys of which head", "bar.warp.sync"], Drop, 4, MET_AGAIN),
    entry(&["sm90_bwd:"], &["dS, for all of dQ", "bar.warp.sync"], Drop, 2, MET_AGAIN),
    entry(
        &["sm90_bwd:", "!rounds=1"],
        &["the turn of this block", "fence.proxy.async.global"],
        Drop,
        1,
        "the copies that this orders have all been made by the copy engine",
    ),
    entry(
        &["sm90_bwd:", "rounds=1"],
        &["fence.proxy.async.global", "writer.rs"],
        Drop,
        4,
        "the copies that this orders have all been made by the copy engine",
    ),
    entry(&["sm90_bwd:"], &["walk: the end of a step", "wgmma.fence"], Drop, 4, FENCED_BEFORE),
    entry(&["sm90_bwd:"], &["walk: the end of the last step", "wgmma.fence"], Drop, 2, FENCED_BEFORE),
    entry(&["sm90_bwd:"], &["walk: the first scores / dP", "wgmma.fence"], Drop, 1, FENCED_BEFORE),
    entry(
        &["sm90_bwd:"],
        &["dK, and the next scores / xor.b32", "ring.rs"],
        NoSwizzle,
        1,
        "the queries whose dK is next have been waited for with their scores",
    ),
    entry(&["sm90_bwd:"], &["the end of the last step", "xor.b32", "ring.rs"], NoSwizzle, 2, NOTHING_AFTER),
    entry(
        &["sm90_bwd:"],
        &["the end of the last step", "xor.b32", "consumer.rs"],
        NoSwizzle,
        1,
        NOTHING_AFTER,
    ),
    entry(&["sm90_bwd:"], &["the end of the last step", "mbarrier.arrive"], Drop, 2, NOTHING_AFTER),
    entry(
        &["sm90_bwd:"],
        &["the end of the last step / dV +=", "wgmma.commit_group"],
        Drop,
        1,
        NOTHING_AFTER,
    ),
    entry(&["sm90_bwd:"], &["the end of the last step / dV /", "wgmma.wait_group"], Drop, 1, NOTHING_AFTER),
    entry(
        &["sm90_bwd:"],
        &["the end of the last step / dV /", "wgmma.wait_group"],
        WaitLess,
        1,
        NOTHING_AFTER,
    ),
    entry(
        &["sm90_bwd:block_m=128"],
        &["whose operands leave registers for dP", "wgmma.wait_group"],
        Drop,
        1,
        FEWER_REGISTERS,
    ),
    entry(
        &["sm90_bwd:block_m=128"],
        &["whose operands leave registers for dP", "wgmma.wait_group"],
        WaitLess,
        1,
        FEWER_REGISTERS,
    ),
    entry(
        &["sm90_bwd_wide"],
        &["or.b32", "descriptor.rs"],
        OtherLeading,
        16,
        "each of these products is within one panel: there is no distance to another",
    ),
    entry(
        &["sm90_bwd_wide"],
        &["griddepcontrol.launch_dependents"],
        Drop,
        1,
        "the next grid only starts later",
    ),
    entry(&["sm90_bwd_wide", "pingpong=0"], &["setmaxnreg.inc"], Drop, 1, FEWER_REGISTERS),
    entry(&["sm90_bwd_wide:stages=2"], &["wgmma.fence", "wide/mod.rs"], Drop, 5, FENCED_BEFORE),
    entry(&["sm90_bwd_wide:stages=3"], &["wgmma.fence", "wide/mod.rs"], Drop, 13, FENCED_BEFORE),
    entry(
        &["sm90_bwd_wide:stages=3"],
        &["walk for dK / dK +=", "mbarrier.try_wait", "#1"],
        Drop,
        1,
        HANDED_AFTER,
    ),
    entry(
        &["sm90_bwd_wide:stages=2"],
        &["walk for dK: the last step / dK +=", "mbarrier.try_wait"],
        Drop,
        1,
        HANDED_AFTER,
    ),
    entry(
        &["sm90_bwd_wide:stages=3"],
        &["walk for dK: the last step / dK +=", "mbarrier.try_wait"],
        Drop,
        2,
        HANDED_AFTER,
    ),
    entry(
        &["sm90_bwd_wide:stages=2"],
        &["walk for dK / delta has been read", "bar.warp.sync"],
        Drop,
        1,
        MET_AGAIN,
    ),
    entry(
        &["sm90_bwd_wide"],
        &["walk for dK: the last step / delta has been read", "bar.warp.sync"],
        Drop,
        1,
        NOTHING_AFTER,
    ),
    entry(
        &["sm90_bwd_wide"],
        &["walk for dK: the last step / delta has been read", "fence.proxy.async"],
        Drop,
        1,
        NOTHING_AFTER,
    ),
    entry(
        &["sm90_bwd_wide"],
        &["walk for dK: the last step / delta has been read", "mbarrier.arrive"],
        Drop,
        2,
        NOTHING_AFTER,
    ),
    entry(
        &["sm90_bwd_wide"],
        &["walk for dK: the last step / delta has been read", "xor.b32"],
        NoSwizzle,
        2,
        NOTHING_AFTER,
    ),
    entry(
        &["sm90_bwd_wide"],
        &["lse has been read", "fence.proxy.async"],
        Drop,
        2,
        "the other warpgroup takes the probabilities after this, has a fence of its own, and gives the queries back after that",
    ),
    entry(
        &["sm90_bwd_wide"],
        &["to the other warpgroup", "mbarrier.try_wait", "#0"],
        Drop,
        1,
        "the first slot is free",
    ),
    entry(
        &["sm90_bwd_wide:stages=2"],
        &["to the other warpgroup", "mbarrier.try_wait", "#1"],
        Drop,
        1,
        "the queries lie where those two steps before lay, which the other warpgroup gave back after it had taken their probabilities",
    ),
    entry(&["sm90_bwd_wide"], &["lse has been read", "xor.b32"], NoSwizzle, 2, NO_TURN),
    entry(
        &["sm90_bwd_wide:stages=3"],
        &["work: which keys these rows see / dP / xor.b32"],
        NoSwizzle,
        1,
        NO_TURN,
    ),
    entry(
        &["sm90_bwd_wide"],
        &["work: which keys these rows see / dQ / xor.b32"],
        NoSwizzle,
        1,
        "the keys whose part of dQ is next have been waited for with their scores",
    ),
    entry(
        &["sm90_bwd_wide"],
        &["/ - / setp.lt.s32", "parts.rs:160"],
        OffByOne,
        3,
        "a tile that is full has no row to clear",
    ),
    entry(
        &["sm90_bwd_wide"],
        &["work: which keys these rows see / - / setp.gt.s32", "parts.rs:120"],
        OffByOne,
        1,
        SEEN_BY_ALL,
    ),
    entry(
        &["sm90_bwd_wide"],
        &["work: which keys these rows see / - / setp.lt.s32", "parts.rs:118"],
        OffByOne,
        1,
        SEEN_BY_ALL,
    ),
    entry(&["sm90_bwd_wide"], &["work: which keys these rows see / S / setp"], OffByOne, 2, SEEN_BY_ALL),
    entry(
        &["sm80_fwd:block_m=64,block_n=96"],
        &["the pages of the tile before", "setp.lt.u32"],
        OffByOne,
        3,
        HAVE_ALL_KEYS,
    ),
    entry(
        &["sm80_fwd:block_m=64,block_n=48"],
        &["packed: which sequence", "setp.lt.u32", "packed.rs"],
        OffByOne,
        1,
        BEHIND_THE_LAST_QUERY,
    ),
    entry(
        &["sm80_decode"],
        &["packed: which sequence", "setp.lt.u32", "packed.rs"],
        OffByOne,
        1,
        BEHIND_THE_LAST_QUERY,
    ),
    entry(
        &["sm80_decode"],
        &["packed: which sequence", "bar.warp.sync"],
        Drop,
        1,
        "the block's warps wait for each other before they merge, and read what was written down after that",
    ),
    entry(
        &["sm80_decode"],
        &["which keys this part has", "setp.lt.s32"],
        OffByOne,
        1,
        "a step of keys that no row sees, which is masked completely",
    ),
    entry(
        &["sm80_decode", "stages=2"],
        &["walk: the first copies", "setp.lt.s32"],
        OffByOne,
        1,
        NOT_COMPUTED,
    ),
    entry(
        &["sm80_decode", "stages=3"],
        &["walk: the first copies", "setp.lt.s32"],
        OffByOne,
        2,
        NOT_COMPUTED,
    ),
    entry(&["sm80_decode"], &["walk: one step of keys / - / setp.lt.s32"], OffByOne, 1, NOT_COMPUTED),
    entry(
        &["sm80_decode", "stages=2"],
        &["walk: the first copies", "setp.lt.u32"],
        OffByOne,
        1,
        NAMED_ELSEWHERE,
    ),
    entry(
        &["sm80_decode", "stages=3"],
        &["walk: the first copies", "setp.lt.u32"],
        OffByOne,
        2,
        NAMED_ELSEWHERE,
    ),
    entry(&["sm80_decode"], &["walk: one step of keys / - / setp.lt.u32"], OffByOne, 1, NAMED_ELSEWHERE),
    entry(&["sm80_decode"], &["S = Q K^T / setp"], OffByOne, 2, SEEN_BY_ALL),
    entry(
        &["sm80_fwd:block_m=64,block_n=48"],
        &["the pages of the tile before", "setp.lt.u32"],
        OffByOne,
        4,
        HAVE_ALL_KEYS,
    ),
    entry(
        &["sm80_fwd:block_m=64,block_n=48"],
        &["ahead / setp.lt.u32", "pages.rs"],
        OffByOne,
        6,
        NAMED_ELSEWHERE,
    ),
    entry(
        &["sm80_fwd:block_m=64,block_n=48"],
        &["the last", "tile / setp.lt.u32", "pages.rs"],
        OffByOne,
        2,
        NAMED_ELSEWHERE,
    ),
    entry(
        &["sm80_fwd:block_m=64,block_n=96"],
        &["the next tile's K", "setp.lt.u32", "pages.rs"],
        OffByOne,
        3,
        NAMED_ELSEWHERE,
    ),
    entry(
        &["sm80_fwd:block_m=64,block_n=96"],
        &["this tile's V", "setp.lt.u32", "pages.rs"],
        OffByOne,
        3,
        NAMED_ELSEWHERE,
    ),
    entry(
        &["sm80_fwd:block_m=64,block_n=96"],
        &["the last K tile", "setp.lt.u32", "pages.rs"],
        OffByOne,
        1,
        NAMED_ELSEWHERE,
    ),
    entry(
        &["sm80_fwd:block_m=64,block_n=48"],
        &["ahead / setp.lt.s32", "pages.rs"],
        OffByOne,
        6,
        HAVE_ALL_KEYS,
    ),
    entry(
        &["sm80_fwd:block_m=64,block_n=96"],
        &["the next tile's K", "setp.lt.s32", "pages.rs"],
        OffByOne,
        3,
        HAVE_ALL_KEYS,
    ),
    entry(
        &["sm80_fwd:block_m=64,block_n=96"],
        &["this tile's V", "setp.lt.s32", "pages.rs"],
        OffByOne,
        2,
        HAVE_ALL_KEYS,
    ),
    entry(
        &["sm80_fwd:block_m=64,block_n=96"],
        &["the last K tile", "setp.lt.s32", "pages.rs"],
        OffByOne,
        1,
        "the score of the key too many is hidden; values have a comparison of their own",
    ),
    entry(
        &["sm80_fwd:block_m=64,block_n=48"],
        &["the last K tile", "setp.lt.s32", "pages.rs"],
        OffByOne,
        1,
        "the score of the key too many is hidden; values have a comparison of their own",
    ),
    entry(
        &["sm80_bwd"],
        &["the walk / S = own", "setp.lt.s32", "sm80/bwd/kernel.rs"],
        OffByOne,
        1,
        SEEN_BY_ALL,
    ),
    entry(
        &["sm80_bwd"],
        &["the walk / S = own", "setp.gt.s32", "sm80/bwd/kernel.rs"],
        OffByOne,
        1,
        SEEN_BY_ALL,
    ),
    entry(
        &["sm80_bwd:of=dq"],
        &["the walk / -", "setp.gt.s32"],
        OffByOne,
        1,
        "one more tile begins after the last key that any row sees, and is masked completely",
    ),
    entry(&["sm80_bwd:of=dkdv"], &["which rows these see", "setp.lt.s32"], OffByOne, 1, ZERO_IN_THE_END),
    entry(
        &["sm80_fwd"],
        &["masked tiles at the window's start", "fragment.rs"],
        OffByOne,
        1,
        BEFORE_THE_LAST_KEY,
    ),
    entry(
        &["sm80_fwd:block_m=64,block_n=32,warps=4,stages=1"],
        &["masked tiles at the window's start / this tile's V", "copy.rs"],
        OffByOne,
        1,
        "these tiles have all their keys, so the comparison with the last one always holds",
    ),
    entry(
        &["sm80_fwd:block_m=64,block_n=32,warps=4,stages=1"],
        &["epilogue: lse", "sm80/fwd.rs"],
        Drop,
        1,
        "with one stage the barrier after the scores already separates the reads of the queries from the output",
    ),
    entry(
        &["sm80_fwd:block_m=64,block_n=32,warps=4,stages=2,q_in_regs=1"],
        &["epilogue: lse", "sm80/fwd.rs"],
        Drop,
        1,
        "the queries were read into registers before the first tile's barrier",
    ),
    entry(&["sm80_fwd:block_m=64"], &["the last K tile", "copy.rs"], OffByOne, 1, FILLED_AFTER),
    entry(&["sm80_fwd:block_m=128,block_n=48"], &["tile ahead", "copy.rs"], OffByOne, 1, FILLED_AFTER),
    entry(
        &["sm80_mma"],
        &["main loop / -", "ladder/mma.rs"],
        OffByOne,
        1,
        "one more tile begins after the last key, and is masked completely",
    ),
    entry(&["sm90_fwd"], &["griddepcontrol.launch_dependents"], Drop, 1, "the next grid only starts later"),
    entry(
        &["sm90_fwd"],
        &["S = Q K^T", "or.b32"],
        OtherLeading,
        8,
        "rows of 128 bytes are one panel wide: without another panel, there is no distance to it",
    ),
    entry(
        &["sm90_fwd"],
        &["walk:", "S = Q K^T", "wgmma.fence"],
        Drop,
        3,
        "its registers are after the fence before the scores; the assembler asks for it, because a loop lies between",
    ),
    entry(
        &["sm90_fwd"],
        &["consumer: one tile of queries / -", "setp"],
        OffByOne,
        1,
        "a tile that is full has no row to clear",
    ),
    entry(
        &["sm90_fwd"],
        &["walk: masked tiles at the window's start", "softmax.rs"],
        OffByOne,
        1,
        BEFORE_THE_LAST_KEY,
    ),
    entry(
        &["sm90_fwd"],
        &["walk: the first key tile", "consumer.rs", "setp"],
        OffByOne,
        1,
        "a tile that every row sees is masked, and nothing in it is hidden",
    ),
    entry(
        &["sm90_fwd"],
        &["a K tile, once its slot is free", "mbarrier.try_wait", "#0"],
        Drop,
        1,
        "the first K tile of a query tile: the wait for the slot of the values before it says that the keys of that tile, and of the one after, had been given back; of the first query tile, all slots are free",
    ),
    entry(
        &["split=1"],
        &["no warp of the warpgroup reads its queries any more", "bar.sync", "#0"],
        Drop,
        1,
        "each warp overwrites the queries of its own products, and has waited for those",
    ),
    entry(
        &["q_stages=1", "persistent=1"],
        &["walk: the first key tile / the output before", "cp.async.bulk.wait_group"],
        Drop,
        1,
        NOTHING_OWED,
    ),
    entry(
        &["q_stages=1", "persistent=1"],
        &["walk: the first key tile / the output before", "cp.async.bulk.wait_group"],
        WaitLess,
        1,
        NOTHING_OWED,
    ),
    entry(
        &["q_stages=1", "persistent=1"],
        &["walk: the first key tile / the output before", "mbarrier.arrive"],
        Drop,
        1,
        NOTHING_OWED,
    ),
    entry(
        &["q_stages=1", "persistent=1"],
        &["walk: the last values / the output before", "cp.async.bulk.wait_group"],
        Drop,
        1,
        NOTHING_OWED,
    ),
    entry(
        &["q_stages=1", "persistent=1"],
        &["walk: the last values / the output before", "cp.async.bulk.wait_group"],
        WaitLess,
        1,
        NOTHING_OWED,
    ),
    entry(
        &["q_stages=1", "persistent=1"],
        &["walk: the last values / the output before", "mbarrier.arrive"],
        Drop,
        1,
        NOTHING_OWED,
    ),
    entry(
        &["q_stages=1", "persistent=1"],
        &["shared memory stays until the last output", "cp.async.bulk.wait_group"],
        Drop,
        1,
        WAITED_ALREADY,
    ),
    entry(
        &["q_stages=1", "persistent=1"],
        &["shared memory stays until the last output", "cp.async.bulk.wait_group"],
        WaitLess,
        1,
        WAITED_ALREADY,
    ),
    entry(&["pingpong=1"], &["setmaxnreg.inc"], Drop, 1, FEWER_REGISTERS),
    entry(&["together=1"], &["setmaxnreg.inc"], Drop, 1, FEWER_REGISTERS),
    entry(
        &["pingpong=1", "pairs=0"],
        &["consumer / the first warpgroup's first turn", "setp"],
        OffByOne,
        1,
        EMPTY_ROUND,
    ),
    entry(&["pingpong=1", "pairs=0"], &["producer / -", "setp"], OffByOne, 1, EMPTY_ROUND),
    entry(
        &["sm90_fwd", "pingpong=1"],
        &["work: which keys these rows see / - / setp"],
        OffByOne,
        1,
        "a warpgroup that begins with the first row that is not there computes rows that are not stored",
    ),
    entry(
        &["sm90_fwd", "pingpong=1"],
        &["work: which keys these rows see / tiles of the other warpgroups", "setp"],
        OffByOne,
        1,
        "the tile that is not skipped is walked over, and masked completely",
    ),
    entry(
        &["warpgroups=2", "ctas=2"],
        &["work: which keys these rows see / tiles of the other warpgroups", "mbarrier.try_wait", "#0"],
        Drop,
        1,
        "the keys are not read, and the wait for the queries says that their slot had been free",
    ),
    entry(
        &["warpgroups=2", "pingpong=1"],
        &["walk: the last values / tiles of the other warpgroups", "mbarrier.try_wait", "#2"],
        Drop,
        1,
        PASSED_KEYS,
    ),
    entry(
        &["warpgroups=2", "ctas=2"],
        &["work: which keys these rows see / tiles of the other warpgroups", "mbarrier.try_wait", "#1"],
        Drop,
        1,
        "the values are not read, and turns keep the warpgroups within a tile of each other, so their slot is given back in its own phase",
    ),
    entry(
        &["warpgroups=4"],
        &["walk: the last values / tiles of the other warpgroups", "mbarrier.try_wait", "#2"],
        Drop,
        1,
        PASSED_KEYS,
    ),
    entry(
        &["persistent=0"],
        &["barriers", "mbarrier.init", "#0"],
        OneArrivalMore,
        1,
        "a block ends with its tile: nobody waits for the slot of its queries to be free",
    ),
    entry(
        &["persistent=0"],
        &["producer: one tile of queries / - / mbarrier.try_wait"],
        Drop,
        1,
        "a block ends with its tile: the slot of its queries is free",
    ),
    entry(&["persistent=0"], &["consumer: lse", "ring.rs"], NoSwizzle, 1, NO_FURTHER_QUERIES),
    entry(
        &["persistent=0"],
        &["nothing to fetch, but the slot counts", "ring.rs"],
        NoSwizzle,
        1,
        NO_FURTHER_QUERIES,
    ),
    entry(&["persistent=0"], &["a K tile, once its slot is free", "ring.rs", "#0"], NoSwizzle, 1, NO_TURN),
    entry(
        &["persistent=0", "warpgroups=1"],
        &["walk: the first key tile", "ring.rs", "#0"],
        NoSwizzle,
        1,
        NO_TURN,
    ),
    entry(&["together=1"], &["walk: the last values / O += P V", "setp"], OffByOne, 1, NO_FURTHER_VALUES),
    entry(
        &["persistent=0"],
        &["a V tile, once its slot is free", "ring.rs", "#1"],
        NoSwizzle,
        1,
        NO_FURTHER_VALUES,
    ),
    entry(
        &["persistent=0"],
        &["walk: the last values / O += P V", "ring.rs"],
        NoSwizzle,
        1,
        NO_FURTHER_VALUES,
    ),
    entry(
        &["persistent=0"],
        &["walk: the last values / O += P V", "mbarrier.arrive"],
        Drop,
        1,
        "a block ends with its tile: nobody fills the slot of the last values again",
    ),
    entry(
        &["persistent=0"],
        &["every thread of a cluster waits", "bar.warp.sync"],
        Drop,
        1,
        "the lanes that diverged meet after the branch; the barrier tells the assembler so",
    ),
    entry(
        &["persistent=0", "warpgroups=1"],
        &["every thread of a cluster waits", "barrier.cluster.wait"],
        Drop,
        1,
        COME_FOR_GOOD,
    ),
    entry(
        &["together=1"],
        &["every thread of a cluster waits", "barrier.cluster.wait"],
        Drop,
        2,
        COME_FOR_GOOD,
    ),
    entry(
        &["persistent=0"],
        &["work: which keys these rows see / -", "setp"],
        OffByOne,
        1,
        "without keys, the block's share of them is empty by the comparison that follows",
    ),
];
