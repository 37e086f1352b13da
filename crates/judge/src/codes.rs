//! Codes of 8 bits, seen from their numbers: which numbers round to a code, and one of those that a descale makes it of.
//!
//! Who judges an engine that stores codes has the codes, and gives it numbers. They are drawn from all that round to the code, up
//! to the very ties, so that whoever rounds otherwise shows. The rule is written down here from the definition of E4M3, and shares
//! nothing with what the engines round by.

use flashcore::DType;
use half::{bf16, f16};

use crate::rng::Rng;

/// The largest number of E4M3. What lies beyond becomes it.
const LARGEST: f64 = 448.0;

/// How many numbers are tried for a code.
const TRIES: usize = 32;

/// The magnitudes that round to a code.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Magnitudes {
    /// Half way to the code below, and to the one above.
    ends: [f64; 2],
    /// Whether these do, too: ties go to even codes.
    closed: bool,
}

impl Magnitudes {
    fn of(code: f64) -> Self {
        // Three bits behind the first; the smallest numbers are as far apart as those from 2^-6 on.
        let exponent = code.log2().floor().max(-6.0);
        let step = (exponent - 3.0).exp2();
        let is_first = code == exponent.exp2() && exponent > -6.0;
        let below = if is_first { step / 4.0 } else { step / 2.0 };
        let above = if code == LARGEST { f64::INFINITY } else { code + step / 2.0 };
        Self { ends: [(code - below).max(0.0), above], closed: (code / step) % 2.0 == 0.0 }
    }

    fn contains(&self, magnitude: f64) -> bool {
        let [low, high] = self.ends;
        (low < magnitude && magnitude < high) || (self.closed && self.ends.contains(&magnitude))
    }

    /// One of them, or an end.
    fn draw(&self, rng: &mut Rng) -> f64 {
        let [low, high] = self.ends.map(|end| end.min(4.0 * LARGEST));
        match rng.below(4) {
            0 => low,
            1 => high,
            _ => rng.range(low, high),
        }
    }
}

/// A number of a 16-bit type, not 0, that becomes this code once it is divided by the descale in f32; the code itself times the
/// descale, as far as the type has it, where none of those that were tried does.
pub(crate) fn number_of(code: f32, descale: f32, dtype: DType, rng: &mut Rng) -> f32 {
    let rounded = |x: f64| match dtype {
        DType::F16 => f16::from_f64(x).to_f32(),
        _ => bf16::from_f64(x).to_f32(),
    };
    let magnitudes = Magnitudes::of(f64::from(code.abs()));
    let mut tried = (0..TRIES).map(|_| rounded(magnitudes.draw(rng) * f64::from(descale)));
    let found = tried.find(|&x| x > 0.0 && x.is_finite() && magnitudes.contains(f64::from(x / descale)));
    found.unwrap_or_else(|| rounded(f64::from(code.abs()) * f64::from(descale))).copysign(code)
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashcore::F8E4M3;

    #[test]
    fn a_code_has_the_magnitudes_that_round_to_it() {
        for (code, ends, closed) in [
            (0.0, [0.0, 1.0 / 1024.0], true),
            (1.0 / 512.0, [1.0 / 1024.0, 3.0 / 1024.0], false),
            (1.0 / 64.0, [15.0 / 1024.0, 17.0 / 1024.0], true),
            (1.0, [1.0 - 1.0 / 32.0, 1.0 + 1.0 / 16.0], true),
            (1.125, [1.0625, 1.1875], false),
            (416.0, [400.0, 432.0], false),
            (448.0, [432.0, f64::INFINITY], true),
        ] {
            assert_eq!(Magnitudes::of(code), Magnitudes { ends, closed }, "{code}");
        }
    }

    #[test]
    fn numbers_of_all_codes_become_them_and_ties_and_too_large_ones_are_among_them() {
        let (mut ties, mut beyond) = (0, 0);
        for (bits, descale) in (0..=u8::MAX).flat_map(|bits| [3.0, 0.25, 1.0 / 7.0].map(|x| (bits, x))) {
            let code = F8E4M3::from_bits(bits);
            for dtype in [DType::F16, DType::BF16].into_iter().filter(|_| bits & 0x7f != 0x7f) {
                let mut rng = Rng::new(u64::from(bits));
                for _ in 0..20 {
                    let x = number_of(code.to_f32(), descale, dtype, &mut rng);
                    let stored = x / descale;
                    assert_ne!(x, 0.0);
                    assert_eq!(F8E4M3::from_f32(stored).to_bits(), bits, "{x} of {dtype} / {descale}");
                    let ends = Magnitudes::of(f64::from(code.to_f32().abs())).ends;
                    ties += u32::from(ends.contains(&f64::from(stored.abs())));
                    beyond += u32::from(stored.abs() > 464.0);
                }
            }
        }
        assert!(ties > 1000 && beyond > 50, "{ties} ties, {beyond} beyond the largest code");
    }
}
