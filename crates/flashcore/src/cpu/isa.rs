//! The instruction sets that the engine has a path for, and which of them this CPU runs.

#[cfg(target_arch = "x86_64")]
use super::simd::{Avx2, Avx512, amx, pairs};
use super::simd::{Portable, Simd};
use crate::{DType, Error, Result};

/// An instruction set that the engine has a path for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[cfg_attr(not(feature = "workbench"), non_exhaustive)]
pub enum Isa {
    /// What the compiler makes of plain arrays on any CPU.
    Portable,
    /// AVX2 with FMA and F16C: x86-64 since 2013.
    Avx2,
    /// AVX-512F.
    Avx512,
    /// AVX-512 with its products of pairs of bf16, and AVX-512F for all else.
    Bf16,
    /// AMX for matrices of bf16, and AVX-512F for all else.
    Amx,
}

impl Isa {
    /// Every instruction set, narrowest first.
    pub const ALL: [Isa; 5] = [Isa::Portable, Isa::Avx2, Isa::Avx512, Isa::Bf16, Isa::Amx];

    /// The name used in `FLASHCORE_CPU`, in JSON and in messages.
    pub const fn name(self) -> &'static str {
        match self {
            Isa::Portable => "portable",
            Isa::Avx2 => "avx2",
            Isa::Avx512 => "avx512",
            Isa::Bf16 => "avx512bf16",
            Isa::Amx => "amx",
        }
    }

    /// f32 elements of one vector.
    pub const fn lanes(self) -> usize {
        match self {
            Isa::Portable => 4,
            Isa::Avx2 => 8,
            Isa::Avx512 | Isa::Bf16 | Isa::Amx => 16,
        }
    }

    /// Rows that the engine works on together: the lanes of a row of the micro-kernel's tile.
    pub(super) const fn panel(self) -> usize {
        match self {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => Avx2::VECS * Avx2::LANES,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 | Isa::Bf16 | Isa::Amx => Avx512::VECS * Avx512::LANES,
            _ => Portable::VECS * Portable::LANES,
        }
    }

    /// Whether it has instructions that multiply bf16.
    pub(super) const fn multiplies_bf16(self) -> bool {
        matches!(self, Isa::Bf16 | Isa::Amx)
    }

    /// Those whose instructions multiply matrices of a dtype: others only where they are for bf16 alone.
    pub const fn of_products(self, dtype: DType) -> Self {
        match (self, dtype) {
            (Isa::Bf16 | Isa::Amx, DType::F32 | DType::F16 | DType::F8E4M3 | DType::I32) => Isa::Avx512,
            _ => self,
        }
    }

    /// Whether this CPU runs it.
    pub fn is_available(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        match self {
            Isa::Portable => true,
            Isa::Avx2 => {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c")
            }
            Isa::Avx512 => is_x86_feature_detected!("avx512f"),
            Isa::Bf16 => pairs::is_available(),
            // Tests have a model of it.
            Isa::Amx => amx::is_available() || cfg!(test) && Isa::Avx512.is_available(),
        }
        #[cfg(not(target_arch = "x86_64"))]
        {
            self == Isa::Portable
        }
    }
}

impl std::fmt::Display for Isa {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

impl std::str::FromStr for Isa {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self> {
        let found = Self::ALL.into_iter().find(|isa| isa.name().eq_ignore_ascii_case(s));
        found.ok_or_else(|| Error::Text {
            what: "CPU instruction set",
            given: s.into(),
            why: format!("possible are {}", names(&Self::ALL)),
        })
    }
}

/// The instruction sets that this CPU runs, narrowest first.
pub fn available() -> Vec<Isa> {
    Isa::ALL.into_iter().filter(|isa| isa.is_available()).collect()
}

/// Names in a row, for messages.
pub(super) fn names(isas: &[Isa]) -> String {
    isas.iter().map(|isa| isa.name()).collect::<Vec<_>>().join(", ")
}

/// The instruction set to use, and why.
pub(super) fn choose(wish: Option<&str>) -> (Isa, String) {
    let available = available();
    let best = available.last().copied().unwrap_or(Isa::Portable);
    let widest = format!("{best} is the widest that this CPU has of {}", names(&Isa::ALL));
    let Some(wish) = wish.map(str::trim).filter(|wish| !wish.is_empty()) else { return (best, widest) };
    match wish.parse::<Isa>() {
        Ok(isa) if isa.is_available() => (isa, format!("FLASHCORE_CPU={wish} asks for it")),
        Ok(isa) => (best, format!("FLASHCORE_CPU asks for {isa}, which this CPU lacks; {widest}")),
        Err(why) => (best, format!("FLASHCORE_CPU is ignored: {why}; {widest}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_widest_is_chosen_unless_another_is_asked_for() {
        let best = *available().last().unwrap();
        assert_eq!(choose(None).0, best);
        assert_eq!(choose(Some("")).0, best);
        assert_eq!(choose(Some("Portable")).0, Isa::Portable);
    }

    #[test]
    fn amx_multiplies_matrices_of_bf16_only() {
        let of = |dtype| Isa::Amx.of_products(dtype);
        assert_eq!([DType::F32, DType::F16, DType::BF16].map(of), [Isa::Avx512, Isa::Avx512, Isa::Amx]);
        assert_eq!(
            [DType::F32, DType::BF16].map(|dtype| Isa::Bf16.of_products(dtype)),
            [Isa::Avx512, Isa::Bf16]
        );
        assert_eq!(Isa::Avx2.of_products(DType::F32), Isa::Avx2);
    }

    #[test]
    fn an_unknown_wish_falls_back_and_says_why() {
        let (isa, why) = choose(Some("sse9"));
        assert_eq!(isa, *available().last().unwrap());
        assert!(why.contains("sse9") && why.contains("portable"), "{why}");
    }
}
