//! All kernel families: one line each.

use std::{fmt, str::FromStr};

use flashcore_ptx::{Module, Target, TensorMap};

use crate::{
    append,
    bind::{Args, BindError, Map, Packed},
    combine,
    family::{Family, Geometry, Knobs, ScheduleError, check_layout, check_tensor_cores, check_types},
    ladder::{mma, scalar},
    quantize, sm80, sm90,
    spec::Spec,
};

macro_rules! families {
    ($($(#[$doc:meta])* $variant:ident($schedule:ty) = $name:literal,)*) => {
        /// A family of generated code.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[cfg_attr(not(feature = "workbench"), non_exhaustive)]
        pub enum Kernel { $($(#[$doc])* $variant,)* }

        impl Kernel {
            /// Every family, whatever it computes.
            pub const ALL: &'static [Kernel] = &[$(Kernel::$variant,)*];

            /// The name used in the command line and in JSON.
            pub const fn name(self) -> &'static str {
                match self { $(Kernel::$variant => $name,)* }
            }
        }

        /// The knobs of a kernel.
        ///
        /// ```
        /// use flashcore_kernels::Schedule;
        /// let text = "sm80_fwd:block_m=64,block_n=64,warps=4,stages=2,q_in_regs=1,order=head";
        /// let schedule: Schedule = text.parse()?;
        /// assert_eq!(schedule.to_string(), text);
        /// # Ok::<(), flashcore_kernels::ScheduleError>(())
        /// ```
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[cfg_attr(not(feature = "workbench"), non_exhaustive)]
        pub enum Schedule { $(#[doc = concat!("Of [`Kernel::", stringify!($variant), "`].")] $variant($schedule),)* }

        /// Does the same for a schedule of any family.
        macro_rules! of_each {
            ($of:expr, $it:ident => $does:expr) => {
                match $of { $(Schedule::$variant($it) => $does,)* }
            };
        }

        impl Schedule {
            /// The kernel whose knobs these are.
            pub fn kernel(&self) -> Kernel {
                match self { $(Schedule::$variant(_) => Kernel::$variant,)* }
            }

            fn read(kernel: Kernel, knobs: &mut Knobs<'_>) -> Result<Self, ScheduleError> {
                match kernel { $(Kernel::$variant => <$schedule>::read(knobs).map(Schedule::$variant),)* }
            }
        }
    };
}

families! {
    /// Forward without tensor cores, for any shape.
    Scalar(scalar::Schedule) = "scalar",
    /// Forward on tensor cores, not pipelined.
    Sm80Mma(mma::Schedule) = "sm80_mma",
    /// Forward on tensor cores, with swizzled, pipelined tiles.
    Sm80Fwd(sm80::fwd::Schedule) = "sm80_fwd",
    /// Forward on Hopper: `wgmma`, TMA, warp specialisation.
    Sm90Fwd(sm90::fwd::Schedule) = "sm90_fwd",
    /// Merges the outputs of parts of the keys.
    Combine(combine::Schedule) = "combine",
    /// Backward: what each query's gradients have in common.
    BwdRows(sm80::bwd_rows::Schedule) = "bwd_rows",
    /// Backward on tensor cores, by two kernels that compute scores again, without atomics.
    Sm80Bwd(sm80::bwd::Schedule) = "sm80_bwd",
    /// Backward on Hopper: dK, dV, and dQ in f32.
    Sm90Bwd(sm90::bwd::Schedule) = "sm90_bwd",
    /// Scales and rounds what [`Kernel::Sm90Bwd`] leaves of dQ.
    Sm90BwdFinish(sm90::bwd::finish::Schedule) = "sm90_bwd_finish",
    /// Backward on Hopper for wide heads, by blocks of queries and blocks of keys that compute scores again.
    Sm90BwdWide(sm90::bwd::wide::Schedule) = "sm90_bwd_wide",
    /// Forward for few 16-bit queries against keys and values of 16 bits or of 8.
    Sm80Decode(sm80::decode::Schedule) = "sm80_decode",
    /// Makes 8-bit floats of 16-bit q, k and v: one of its passes.
    Quantize(quantize::Schedule) = "quantize",
    /// Writes new keys and values into a cache, and turns queries and new keys.
    Append(append::Schedule) = "append",
}

impl Kernel {
    /// The forward kernels, the simplest first: each computes attention as a whole.
    pub const LADDER: [Kernel; 4] = [Kernel::Scalar, Kernel::Sm80Mma, Kernel::Sm80Fwd, Kernel::Sm90Fwd];

    /// The backward kernels, the simplest first: a schedule of each stands for a whole backward pass.
    pub const BACKWARD: [Kernel; 3] = [Kernel::Sm80Bwd, Kernel::Sm90Bwd, Kernel::Sm90BwdWide];

    /// Whether its code runs on a target.
    pub fn runs_on(self, target: Target) -> bool {
        !matches!(self, Kernel::Sm90Fwd | Kernel::Sm90Bwd | Kernel::Sm90BwdFinish | Kernel::Sm90BwdWide)
            || target == Target::Sm90a
    }
}

impl fmt::Display for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Kernel {
    type Err = ScheduleError;

    fn from_str(name: &str) -> Result<Self, ScheduleError> {
        Kernel::ALL.iter().copied().find(|kernel| kernel.name() == name).ok_or_else(|| {
            let names: Vec<&str> = Kernel::ALL.iter().map(|kernel| kernel.name()).collect();
            ScheduleError::malformed(format!("'{name}' is not a kernel; possible are {}", names.join(", ")))
        })
    }
}

impl Schedule {
    /// Whether it fits the spec and the target, judged from the knobs alone.
    pub fn check(&self, spec: &Spec, target: Target) -> Result<(), ScheduleError> {
        let kernel = self.kernel();
        check_types(kernel, spec)?;
        check_layout(kernel, spec)?;
        if kernel != Kernel::Scalar {
            check_tensor_cores(kernel, spec)?;
        }
        if !kernel.runs_on(target) {
            return Err(ScheduleError::malformed(format!("{kernel} is for sm_90a, not for {target}")));
        }
        of_each!(*self, it => it.check(spec, target))
    }

    /// The roles of a block, one track each, where the kernel can be traced; else none.
    pub fn roles(&self) -> Vec<String> {
        of_each!(*self, it => it.roles())
    }

    /// Rows, threads, shared memory and blocks of a launch.
    pub fn geometry(&self, spec: &Spec) -> Geometry {
        of_each!(*self, it => it.geometry(spec))
    }

    /// The kernel as a PTX module with one entry.
    pub fn emit(&self, spec: &Spec, target: Target) -> Result<Module, ScheduleError> {
        self.check(spec, target)?;
        if spec.traced && self.roles().is_empty() {
            let which = "only sm80_fwd and sm90_fwd stamp what they do";
            return Err(ScheduleError::malformed(format!("{} cannot be traced: {which}", self.kernel())));
        }
        let builder = of_each!(*self, it => it.emit(spec, target));
        Ok(Module::new(target).with(builder.finish()?))
    }

    /// Whether its kernels wait for the previous launch themselves.
    pub fn is_programmatic(&self) -> bool {
        fn of<F: Family>(_: &F) -> bool {
            F::PROGRAMMATIC
        }
        of_each!(self, it => of(it))
    }

    /// Whether a launch can be bound to these tensors.
    pub fn check_args(&self, args: &Args) -> Result<(), BindError> {
        of_each!(*self, it => it.check_args(args))
    }

    /// Packs the parameters of a launch. `encode` makes the tensor maps, for kernels that copy by TMA.
    pub fn bind<E>(
        &self,
        spec: &Spec,
        args: &Args,
        encode: &mut dyn FnMut(&Map) -> Result<TensorMap, E>,
        packed: &mut Packed,
    ) -> Result<(), E> {
        of_each!(*self, it => it.bind(spec, args, encode, packed))?;
        if let Some(trace) = args.trace.as_ref().filter(|_| spec.traced) {
            packed.extend(trace);
        }
        Ok(())
    }
}

impl fmt::Display for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:", self.kernel())?;
        of_each!(self, it => it.fmt(f))
    }
}

impl FromStr for Schedule {
    type Err = ScheduleError;

    fn from_str(text: &str) -> Result<Self, ScheduleError> {
        let (kernel, mut knobs) = Knobs::split(text)?;
        let schedule = Self::read(kernel, &mut knobs)?;
        knobs.end()?;
        Ok(schedule)
    }
}
