//! The order in which tiles of queries of different lengths are taken up.

use flashcore_kernels::{Section, sm90::fwd::Schedule};

use crate::{Keys, Problem};

/// Keys and values of the heads that are taken up together, in bytes: they should stay in the L2 cache.
const SECTION_BYTES: u64 = 32 << 20;

/// From so many tiles of queries on, how they are ordered is not worth working out.
const MANY_TILES: u64 = 1 << 16;

/// What a tile of queries costs beside its key tiles, in key tiles.
const TILE_OVERHEAD: u64 = 1;

/// Heads whose tiles are taken up together, longest first: such that the blocks finish at about the same time,
/// and if possible few enough that their keys and values stay in the cache.
pub(in crate::plan) fn section(problem: &Problem, schedule: Schedule, blocks: u32) -> Section {
    let (rows, block_n) = (schedule.tile_rows(), schedule.block_n);
    let Problem { batch, heads_q, len_q, len_k, head_dim, head_dim_v, .. } = *problem;
    let heads = (batch * heads_q) as u32;
    let bytes = (len_k * (head_dim + head_dim_v) * problem.dtype.size()) as u64;
    let cached = (SECTION_BYTES * problem.group() as u64 / bytes.max(1)).max(1);
    let costs: Vec<u64> = (0..len_q.div_ceil(rows as usize))
        .rev()
        .map(|block| key_tiles(problem, block, rows as usize, block_n as usize) + TILE_OVERHEAD)
        .collect();
    let tight = |heads: u32| Section { heads, places: heads * costs.len() as u32 };
    let candidates = (1..=heads).filter(|&section| heads.is_multiple_of(section)).map(tight);
    if !schedule.persistent || costs.len() as u64 * u64::from(heads) > MANY_TILES {
        // So many rounds come out even whatever the order, and blocks that end make room for the next in any.
        let cached = candidates.filter(|section| u64::from(section.heads) <= cached);
        return cached.max_by_key(|section| section.heads).unwrap_or(tight(1));
    }
    // Whole rounds: the next section begins with its longest tiles where this one began.
    let whole =
        |section: Section| Section { places: section.places.next_multiple_of(blocks.max(1)), ..section };
    let score = |section: &Section| {
        let longest = longest_share(&costs, heads, *section, blocks);
        // Keys and values that fall out of the cache cost about as much as one block in eight more.
        if u64::from(section.heads) > cached { longest + longest / 8 } else { longest }
    };
    candidates.flat_map(|tight| [tight, whole(tight)]).min_by_key(score).unwrap_or(tight(1))
}

/// Heads of packed sequences whose tiles are taken up together: as many groups as have keys and values that stay in the
/// cache. Which tiles there are is known on the GPU alone.
pub(in crate::plan) fn packed_section(problem: &Problem) -> Section {
    let Problem { batch, heads_kv, len_k, head_dim, head_dim_v, keys, .. } = *problem;
    let keys = match keys {
        Keys::Packed { total } => total,
        Keys::Dense | Keys::Apart { .. } => batch * len_k,
        Keys::Paged { page, pages } => (batch * len_k).min(page * pages),
    };
    let bytes = (keys * (head_dim + head_dim_v) * problem.dtype.size()) as u64;
    let cached = SECTION_BYTES / bytes.max(1);
    let fits = |&groups: &usize| heads_kv.is_multiple_of(groups) && (groups as u64 <= cached || groups == 1);
    let groups = (1..=heads_kv).rev().find(fits).unwrap_or(1);
    Section { heads: (groups * problem.group()) as u32, places: 0 }
}

/// The key tiles that a block of rows sees.
pub(super) fn key_tiles(problem: &Problem, block: usize, rows: usize, block_n: usize) -> u64 {
    let Problem { len_q, len_k, mask, .. } = *problem;
    let last_row = ((block + 1) * rows).min(len_q) - 1;
    let begin = mask.keys(block * rows, len_q, len_k).start;
    let end = mask.keys(last_row, len_q, len_k).end;
    if end <= begin { 0 } else { (end.div_ceil(block_n) - begin / block_n) as u64 }
}

/// The work of the block that has the most of it, when tiles of these costs are taken up section by section, every other
/// round backwards.
fn longest_share(costs: &[u64], heads: u32, section: Section, blocks: u32) -> u64 {
    let mut shares = vec![0_u64; blocks as usize];
    for start in (0..heads / section.heads).map(|index| index as usize * section.places as usize) {
        let tiles = costs.iter().flat_map(|&cost| (0..section.heads).map(move |_| cost));
        for (i, cost) in (start..).zip(tiles) {
            let (round, place) = (i / shares.len(), i % shares.len());
            let at = if round.is_multiple_of(2) { place } else { shares.len() - 1 - place };
            shares[at] += cost;
        }
    }
    shares.into_iter().max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        DType, Mask,
        plan::{Hardware, Plan, Target},
    };
    use flashcore_kernels::Schedule as Any;

    /// The section that a plan for the H200 has.
    fn planned(text: &str) -> (Section, u32) {
        let problem: Problem = text.parse().unwrap();
        let plan = Plan::choose(&problem, &Hardware::typical(Target::Sm90a)).unwrap();
        let Any::Sm90Fwd(schedule) = plan.main().schedule else { panic!("{plan}") };
        (section(&problem, schedule, plan.main().grid[0]), plan.main().grid[0])
    }

    #[test]
    fn long_causal_heads_stay_in_the_cache_and_fill_whole_rounds() {
        let (section, blocks) = planned("1x16x16384x128 f16 causal");
        assert_eq!(section.heads, 4, "32 MB of keys and values");
        assert!(section.places.is_multiple_of(blocks) && section.places >= 4 * 128, "{section:?}");
    }

    #[test]
    fn nothing_to_compute_has_a_section_too() {
        let problem = Problem::new(4, 16, 0, 128, DType::BF16).with_kv(16, 4096).with_mask(Mask::Causal);
        let schedule: Any =
            "sm90_fwd:warpgroups=2,block_n=128,stages=2,q_stages=2,ctas=1,split=1,pingpong=1,lazy=1,poly=0,\
                             persistent=1,pairs=0"
                .parse()
                .unwrap();
        let Any::Sm90Fwd(schedule) = schedule else { panic!("{schedule}") };
        assert_eq!(section(&problem, schedule, 0).places, 0);
    }
}
