//! Quantising as launches of a plan: each pass is a launch of this family.

use flashcore_ptx::{KernelBuilder, Target, TensorMap};

use super::{Pass, Quantize};
use crate::{
    Args, Blocks, Family, Geometry, Map, Packed, ScheduleError, Spec,
    family::{Knob, schedule},
};

schedule! {
    /// The knobs: which pass it is, and what is done to numbers before they are stored.
    pub struct Schedule {
        /// Which of the launches.
        pub pass: Pass,
        /// Whether the mean over the keys is subtracted from them.
        pub smooth: bool = false,
        /// Whether queries and keys are rotated, and the seed of the signs.
        pub rotate: Option<u32> = None,
        /// Rows per block, unless blocks of keys have descales of their own: then it is as many as these have.
        pub rows: u32 = 256,
        /// Whether values are written turned around.
        pub turn: bool = false,
    }
}

impl Knob for Pass {
    fn text(self) -> String {
        match self {
            Pass::Scan => "scan",
            Pass::Mean => "mean",
            Pass::Cast => "cast",
            Pass::Shift => "shift",
        }
        .into()
    }

    fn read(text: &str) -> Result<Self, &'static str> {
        let all = [Pass::Scan, Pass::Mean, Pass::Cast, Pass::Shift];
        all.into_iter().find(|pass| pass.text() == text).ok_or("possible are scan, mean, cast and shift")
    }
}

impl Schedule {
    /// The launch behind attention that gives back to lse what smoothed keys took from it.
    pub fn shift() -> Self {
        Self { pass: Pass::Shift, smooth: true, rotate: None, rows: 256, turn: false }
    }

    /// The launches that quantise q, k and v, in their order.
    pub fn all(smooth: bool, rotate: Option<u32>) -> impl Iterator<Item = Self> {
        let passes = Quantize { smooth, ..Quantize::new(crate::ElementType::F16, 16) }.passes();
        passes.iter().map(move |&pass| Self { pass, smooth, rotate, rows: 256, turn: false })
    }

    /// What is quantised. Rows are aligned, as those of every kernel with tensor cores.
    fn of(self, spec: &Spec) -> Quantize {
        let Self { smooth, rotate, turn, .. } = self;
        let Spec { dtype, head_dim, head_dim_v, key_lengths, descale_keys, .. } = *spec;
        let (rows, by_chunk) = descale_keys.map_or((self.rows, false), |keys| (keys, true));
        Quantize {
            head_dim_v,
            smooth,
            rotate,
            key_lengths,
            rows,
            by_chunk,
            turn,
            ..Quantize::new(dtype, head_dim)
        }
    }

    /// The grid, for q, k and v of these shapes.
    pub fn grid(self, spec: &Spec, args: &Args) -> [u32; 3] {
        self.of(spec).grid(self.pass, args)
    }

    /// Bytes of [`Operand::Space`](crate::Operand::Space) for q, k and v of these shapes.
    pub fn space(self, spec: &Spec, args: &Args) -> u64 {
        self.of(spec).space(args)
    }
}

impl Family for Schedule {
    const PROGRAMMATIC: bool = true;

    fn check(self, spec: &Spec, target: Target) -> Result<(), ScheduleError> {
        if matches!(self.pass, Pass::Mean | Pass::Shift) && !self.smooth {
            let reason = format!("pass={} is for smoothed keys: add smooth=1", self.pass.text());
            return Err(ScheduleError::Malformed { reason });
        }
        self.of(spec).check(target)
    }

    /// How many blocks there are depends on q as much as on k: see [`Schedule::grid`].
    fn geometry(self, spec: &Spec) -> Geometry {
        let of = self.of(spec);
        Geometry {
            rows: of.rows,
            threads: of.threads(self.pass),
            shared_bytes: of.shared_bytes(self.pass),
            blocks: Blocks::KeyRow,
        }
    }

    fn emit(self, spec: &Spec, target: Target) -> KernelBuilder {
        self.of(spec).kernel(self.pass, target)
    }

    fn bind<E>(
        self,
        spec: &Spec,
        args: &Args,
        _: &mut dyn FnMut(&Map) -> Result<TensorMap, E>,
        packed: &mut Packed,
    ) -> Result<(), E> {
        self.of(spec).bind(self.pass, args, packed);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ElementType, Kernel, Schedule as Any};

    #[test]
    fn the_launches_have_texts_that_read_back_and_the_mean_is_made_of_smoothed_keys_alone() {
        let texts = |smooth, rotate| -> Vec<String> {
            Schedule::all(smooth, rotate).map(|it| Any::Quantize(it).to_string()).collect()
        };
        assert_eq!(texts(false, None), ["quantize:pass=scan", "quantize:pass=cast"]);
        let all = texts(true, Some(7));
        assert_eq!(all[1], "quantize:pass=mean,smooth=1,rotate=7");
        assert!(all.iter().all(|text| text.parse::<Any>().unwrap().to_string() == *text));
        let alone: Any = "quantize:pass=mean".parse().unwrap();
        assert_eq!(alone.kernel(), Kernel::Quantize);
        let spec = Spec::new(ElementType::Bf16, 64);
        assert!(alone.check(&spec, Target::Sm90a).unwrap_err().to_string().contains("smooth=1"));
    }
}
