//! What a memory instruction costs: passes through the 32 banks of shared memory, sectors of global memory.
//!
//! Shared memory has 32 banks of 4 bytes. A warp's access is served in passes: all lanes at once up to 4 bytes per
//! lane, half a warp for 8, a quarter for 16. Within a pass each bank delivers one word, to any number of lanes;
//! different words of one bank take further passes.

/// Passes that an access took, and the least that one of its kind takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Wavefronts {
    /// Passes taken.
    pub taken: u32,
    /// Passes if no two lanes of a pass met in a bank.
    pub ideal: u32,
}

/// The passes of an access of `bytes` per lane (1 to 16) at these shared addresses.
pub fn shared_wavefronts(addresses: &[u32; 32], mask: u32, bytes: u32) -> Wavefronts {
    let lanes_in_a_pass = match bytes {
        0..=4 => 32,
        5..=8 => 16,
        _ => 8,
    };
    if mask == u32::MAX && bytes == 4 {
        // Quick answer for words: every lane in a bank of its own.
        let banks = addresses.iter().fold(0u32, |banks, &address| banks | 1 << (address / 4 % 32));
        if banks == u32::MAX {
            return Wavefronts { taken: 1, ideal: 1 };
        }
    }
    let words = bytes.div_ceil(4).max(1);
    let mut wavefronts = Wavefronts::default();
    for first in (0..32).step_by(lanes_in_a_pass) {
        let pass = mask >> first & (((1u64 << lanes_in_a_pass) - 1) as u32);
        if pass != 0 {
            wavefronts.ideal += 1;
            wavefronts.taken += pass_cost(&addresses[first..first + lanes_in_a_pass], pass, words);
        }
    }
    wavefronts
}

/// The passes of `ldmatrix` or `stmatrix` over the eight rows of a matrix.
pub fn row_passes(addresses: &[u32; 8]) -> u32 {
    pass_cost(addresses, 0xFF, 4)
}

/// The most different words that one bank has to deliver.
fn pass_cost(addresses: &[u32], mask: u32, words: u32) -> u32 {
    // Quick answers first: eight aligned rows of four banks each, and every lane in banks of its own.
    if words == 4 && mask == 0xFF && addresses.len() == 8 {
        let (mut slots, mut low) = (0u32, 0);
        for &address in addresses {
            slots |= 1 << (address / 16 % 8);
            low |= address;
        }
        if slots == 0xFF && low % 16 == 0 {
            return 1;
        }
    }
    let mut used = 0u32;
    let mut apart = true;
    for (lane, &address) in addresses.iter().enumerate() {
        if mask >> lane & 1 == 1 {
            let bank = (address / 4) % 32;
            let banks = (((1u64 << words) - 1) as u32).rotate_left(bank);
            apart &= used & banks == 0;
            used |= banks;
        }
    }
    if apart {
        return 1;
    }
    // Different words by bank; a word that several lanes want counts once.
    let mut wanted = [[0u32; 32]; 32];
    let mut load = [0usize; 32];
    for (lane, &address) in addresses.iter().enumerate() {
        if mask >> lane & 1 == 0 {
            continue;
        }
        for word in address / 4..address / 4 + words {
            let bank = (word % 32) as usize;
            if !wanted[bank][..load[bank]].contains(&word) {
                wanted[bank][load[bank]] = word;
                load[bank] += 1;
            }
        }
    }
    load.into_iter().max().unwrap_or(1) as u32
}

/// The number of 32-byte sectors that an aligned access at these global addresses touches.
pub fn sectors(addresses: &[u64; 32], mask: u32) -> u32 {
    let mut list = [0u64; 32];
    let mut count = 0;
    let mut sorted = true;
    for (lane, &address) in addresses.iter().enumerate() {
        if mask >> lane & 1 == 0 {
            continue;
        }
        // A naturally aligned access of at most 32 bytes lies in one sector; others are reported, not counted.
        let sector = address / 32;
        if count == 0 || list[count - 1] != sector {
            sorted &= count == 0 || list[count - 1] < sector;
            list[count] = sector;
            count += 1;
        }
    }
    if sorted {
        return count as u32;
    }
    list[..count].sort_unstable();
    let mut distinct = 1;
    for pair in list[..count].windows(2) {
        distinct += u32::from(pair[0] != pair[1]);
    }
    distinct
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lanes32(f: impl Fn(u32) -> u32) -> [u32; 32] {
        std::array::from_fn(|lane| f(lane as u32))
    }

    #[test]
    fn consecutive_words_and_a_broadcast_take_one_pass() {
        assert_eq!(shared_wavefronts(&lanes32(|l| l * 4), !0, 4), Wavefronts { taken: 1, ideal: 1 });
        assert_eq!(shared_wavefronts(&lanes32(|_| 128), !0, 4), Wavefronts { taken: 1, ideal: 1 });
        assert_eq!(shared_wavefronts(&lanes32(|l| l * 2), !0, 2), Wavefronts { taken: 1, ideal: 1 });
    }

    #[test]
    fn a_stride_of_32_words_takes_32_passes_and_a_stride_of_2_takes_two() {
        assert_eq!(shared_wavefronts(&lanes32(|l| l * 128), !0, 4).taken, 32);
        assert_eq!(shared_wavefronts(&lanes32(|l| l * 8), !0, 4).taken, 2);
        assert_eq!(shared_wavefronts(&lanes32(|l| l * 132), !0, 4).taken, 1);
    }

    #[test]
    fn wide_accesses_are_served_by_halves_and_quarters_of_the_warp() {
        assert_eq!(shared_wavefronts(&lanes32(|l| l * 8), !0, 8), Wavefronts { taken: 2, ideal: 2 });
        assert_eq!(shared_wavefronts(&lanes32(|l| l * 16), !0, 16), Wavefronts { taken: 4, ideal: 4 });
        assert_eq!(shared_wavefronts(&lanes32(|l| l * 128), !0, 16), Wavefronts { taken: 32, ideal: 4 });
        assert_eq!(shared_wavefronts(&lanes32(|l| l * 16), 0xFF, 16), Wavefronts { taken: 1, ideal: 1 });
    }

    #[test]
    fn ldmatrix_is_free_of_conflicts_with_a_xor_swizzle_and_not_without() {
        assert_eq!(row_passes(&std::array::from_fn(|row| 128 * row as u32)), 8);
        assert_eq!(row_passes(&std::array::from_fn(|row| 144 * row as u32)), 1);
    }

    #[test]
    fn sectors_are_counted_once_whatever_the_order_of_the_lanes() {
        let lanes = |f: fn(u64) -> u64| std::array::from_fn(|l| f(l as u64));
        assert_eq!(sectors(&lanes(|l| l * 16), !0), 16);
        assert_eq!(sectors(&lanes(|l| (31 - l) * 16), !0), 16);
        assert_eq!(sectors(&lanes(|l| l * 4), !0), 4);
        assert_eq!(sectors(&lanes(|l| l * 128), !0), 32);
        assert_eq!(sectors(&lanes(|_| 64), !0), 1);
        assert_eq!(sectors(&lanes(|l| (l % 2) * 64), !0), 2);
        assert_eq!(sectors(&lanes(|l| l * 4), 1), 1);
    }
}
